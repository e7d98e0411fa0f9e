"""One request in the making: its tokens and how far each tier has come.

    [0, num_committed)            final: what the target alone would have produced; may be shown
    [num_committed, len - 1)      tentative (accepted by a lower judge) or drafted (proposed at the lowest exit)
    [len - 1]                     never computed by any tier: the next query

A tier's cursor is the number of positions that it has processed. Cursors fall with depth, and the target's says what is
committed: it has judged all that it has computed, so num_committed = cursors[-1] + 1. Rejecting is `truncate`: it moves
numbers, nothing else. A row knows nothing of programs or of what its blocks hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.logprobs import ScoreLog
from infer.params import SamplingParams
from infer.processors import Rules
from infer.stats import TierStats


class Row:
    """A running request.

    Args:
        prompt_token_ids: at least one id.
        params: how to sample and when to stop.
        seed: 64-bit key of the row's noise.
        max_len: most tokens, prompt included, that the row may ever hold.
        num_tiers: length of the list of tiers.
        num_stages: length of the list of stages, each of which counts what it accepts.
        blocks: the KV blocks it owns, enough for max_len positions.
        ring: its index in the hand-off rings, ≥ 1 (0 takes the padding).
        rules: what is done to its logits; None leaves them alone.
        scores: where the log probabilities that it asks for are written; None if it asks for none.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_len: int,
        num_tiers: int,
        num_stages: int,
        blocks: list[int],
        ring: int,
        rules: Rules | None = None,
        scores: ScoreLog | None = None,
    ) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.seed = seed
        self.rules = rules
        self.scores = scores
        self.max_len = max_len
        self.block_table = blocks
        self.ring = ring
        self.cursors = [0] * num_tiers
        # A `layer` exit keeps KV of its own and so a cursor of its own, at most its tier's.
        self.exit_cursors = [0] * num_tiers
        self.stats = [TierStats() for _ in range(num_stages)]
        self.failure: str | None = None  # why the target can't go on: this row alone fails
        self.has_nan = False  # some judge's logits did, so its pages may

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_broken(self) -> bool:
        return self.failure is not None

    @property
    def num_committed(self) -> int:
        return self.cursors[-1] + 1

    def append(self, token_id: int) -> None:
        assert len(self.token_ids) < self.max_len, f"row is full at {self.max_len} tokens"
        self.token_ids.append(token_id)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; what was computed beyond them is forgotten. Idempotent."""
        del self.token_ids[num_tokens:]
        self.cursors = [min(cursor, num_tokens) for cursor in self.cursors]
        self.exit_cursors = [min(cursor, num_tokens) for cursor in self.exit_cursors]

    def check_integrity(self) -> None:
        """Between outer rounds: nothing tentative is left, and all tiers stand before the last token."""
        assert set(self.cursors) == {len(self) - 1}, f"cursors {self.cursors} of a row of {len(self)} tokens"
        assert all(e <= c for e, c in zip(self.exit_cursors, self.cursors, strict=True)), "an exit is ahead of its tier"
        assert len(self) <= self.max_len
