"""Lookahead decoding: a window of guesses ahead of a text, and the n-grams that come out of it.

Fu, Bailis, Stoica, Zhang, arXiv 2402.02057. W columns of N − 1 guessed tokens each run ahead of the text; a step
computes one more token for every column (Jacobi iteration with N − 1 steps of memory), which completes an n-gram, and
the window slides on by one place. The n-grams are kept by their first token: those that begin with the text's last
token are verified in the same pass. Knows token ids only.

    level 0              a chain behind the last token: a_1 … a_{W−1}, which all columns share
    level 1 … N − 2      column i: b_i at the place behind a_i (a_0 is the last token), c_i behind b_i, …

In the paper one masked pass computes window and guesses. Here every column and guess is a row of the call, which
computes again the places that it shares with others (`branches`): each token sees what it sees there, for more work.
"""

# Shape legend: W columns, N tokens of an n-gram, its first included

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookahead:
    """The method's numbers.

    Args:
        window: W, columns of the window.
        ngram: N, at least 2; up to N − 1 guesses and one token more are gained by a step.
        num_guesses: G, most n-grams that are verified at once, and that are kept for a token.
    """

    window: int
    ngram: int
    num_guesses: int

    @property
    def num_scratch_branches(self) -> int:
        """Branches beside the row's own, which holds the first guess."""
        return self.window + self.num_guesses - 1

    @property
    def longest(self) -> int:
        """Most tokens of a branch, the text's last one included."""
        return max(self.window + self.ngram - 2, self.ngram)

    @property
    def num_scored(self) -> int:
        """Most lines of logits that a step makes of one row."""
        return self.num_guesses * self.ngram + self.window


class Window:
    """The window and the n-grams of one text.

    Args:
        token_ids: the prompt, whose tokens are the first guesses.
    """

    def __init__(self, shape: Lookahead, token_ids: Sequence[int]) -> None:
        self._shape = shape
        sizes = [shape.window - 1] + [shape.window] * (shape.ngram - 2)
        tokens = itertools.cycle(token_ids)
        self._levels = [list(itertools.islice(tokens, size)) for size in sizes]
        self._ngrams: dict[int, list[tuple[int, ...]]] = {}  # first token → the other N − 1, the latest first

    def guesses(self, last: int, limit: int) -> list[tuple[int, ...]]:
        """What may follow the token `last`, the latest first; at most `limit` tokens each."""
        found = [ngram[:limit] for ngram in self._ngrams.get(last, ())] if limit > 0 else []
        return list(dict.fromkeys(found))

    def columns(self, last: int) -> list[list[int]]:
        """For every column the tokens, from `last` on, behind which its next one stands."""
        chain, *deeper = self._levels
        return [[last, *chain[:i], *(level[i] for level in deeper)] for i in range(self._shape.window)]

    def slide(self, last: int, new: Sequence[int]) -> None:
        """Take every column's next token: keep the n-grams that they end, and move on by one place."""
        chain, *deeper = self._levels
        for i, token in enumerate(new):
            known = self._ngrams.setdefault(chain[i - 1] if i else last, [])
            ngram = (*(level[i] for level in deeper), token)
            if ngram in known:
                known.remove(ngram)
            known.insert(0, ngram)
            del known[self._shape.num_guesses :]
        first, *others = [*deeper, list(new)]
        self._levels = [first[1:], *others]
