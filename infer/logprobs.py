"""Log probabilities of tokens under the target's own logits, before any processor: vLLM's `raw_logprobs`.

They are those of the committed tokens and no others, so they do not depend on what was drafted. Knows neither rows nor
strategies.
"""

# Shape legend: N tokens, V vocabulary, K most probable ids

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from infer.output import Logprob

WHOLE_VOCABULARY = -1


class Score(NamedTuple):
    """One token and the most probable ids in its place."""

    ids: list[int]  # the token itself, then K ids from the most probable one down
    logprobs: list[float]  # of `ids`
    rank: int  # of the token itself: how many ids are at least as probable


@dataclass(slots=True)
class ScoreLog:
    """The scores of one request's tokens, as far as they were asked for.

    Args:
        num_generated: K for the generated tokens, WHOLE_VOCABULARY for all; None: not asked for.
        num_prompt: the same for the prompt's.
    """

    num_generated: int | None
    num_prompt: int | None
    generated: list[Score] = field(default_factory=list)  # one for each committed token
    prompt: list[Score] = field(default_factory=list)  # one for each token of the prompt but the first

    @classmethod
    def of(cls, logprobs: int | None, prompt_logprobs: int | None) -> ScoreLog | None:
        return None if logprobs is None and prompt_logprobs is None else cls(logprobs, prompt_logprobs)


def score(logits: Tensor, token_ids: Tensor, num: int) -> list[Score]:
    """Of each token in `token_ids` [N] int64 under its line of `logits` [N, V], with `num` most probable ids."""
    logprobs = logits.double().log_softmax(dim=-1)  # [N, V]
    own = logprobs.gather(1, token_ids.unsqueeze(1))  # [N, 1]
    ranks = (logprobs >= own).sum(dim=1)  # [N]
    top = logprobs.topk(logits.shape[1] if num == WHOLE_VOCABULARY else num, dim=-1)  # [N, K]
    lines = zip(
        token_ids.tolist(), own[:, 0].tolist(), top.indices.tolist(), top.values.tolist(), ranks.tolist(), strict=True
    )
    return [Score([i, *ids], [p, *values], rank) for i, p, ids, values, rank in lines]


def as_logprobs(one: Score, decode: Callable[[int], str | None]) -> dict[int, Logprob]:
    """vLLM's record: the token first, then the most probable ids; the token's own rank counts ties before it."""
    ranks: Sequence[int] = [one.rank, *range(1, len(one.ids))]
    return {
        token_id: Logprob(logprob, rank, decode(token_id))
        for token_id, logprob, rank in zip(one.ids, one.logprobs, ranks, strict=True)
    }
