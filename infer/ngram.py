"""What a text itself says comes next: the continuation after the last earlier place that reads like its end.

Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; vLLM's method `ngram`): texts repeat
what they quote, summarise or edit, and a guess costs nothing. Knows token ids only, not rows, tiers or what becomes of
a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """How a stage looks up.

    Args:
        num_tokens: k, most tokens that it proposes.
        max_ngram, min_ngram: length of the longest and of the shortest end of the text that is looked for, in tokens.
    """

    num_tokens: int
    max_ngram: int
    min_ngram: int


class NgramIndex:
    """Where the n-grams of one growing text last occurred, for n from `min_ngram` to `max_ngram`.

    [0, num_indexed)      its n-grams are known
    [num_indexed, len)    the text's last token at least: an end of the text must not find itself
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram, (min_ngram, max_ngram)
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}  # n-gram → the position after its last occurrence
        self._num_indexed = 0

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that followed the longest n-gram on which the text ends, where it last occurred before.

        An occurrence that reaches into the end of the text is a loop, which goes on.

        token_ids: the text; what was given before is its beginning, so none of it may be taken back later.
        """
        self._extend(token_ids)
        end = len(token_ids)
        for size in self._sizes:
            start = self._next.get(tuple(token_ids[end - size :])) if size < end else None
            if start is not None:
                period = end - start
                return [token_ids[start + i % period] for i in range(limit)]
        return []

    def _extend(self, token_ids: Sequence[int]) -> None:
        assert self._num_indexed <= len(token_ids), "the text has become shorter"
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)
