"""Counts of what judges accepted, in vLLM's terms. Knows nothing of how they came about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from infer.output import TierMetrics


@dataclass(slots=True)
class TierStats:
    """Running counts of one judge: `num_drafts` rounds with proposals, what they proposed and what was accepted.

    `accepted_lengths[k]` counts the rounds in which k tokens were accepted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_draft_tokens, (num_accepted, num_draft_tokens)
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted
        if num_accepted >= len(self.accepted_lengths):
            self.accepted_lengths += [0] * (num_accepted + 1 - len(self.accepted_lengths))
        self.accepted_lengths[num_accepted] += 1

    @classmethod
    def total(cls, parts: Iterable[TierStats]) -> TierStats:
        total = cls()
        for part in parts:
            total.num_drafts += part.num_drafts
            total.num_draft_tokens += part.num_draft_tokens
            total.num_accepted += part.num_accepted
            lengths = zip_longest(total.accepted_lengths, part.accepted_lengths, fillvalue=0)
            total.accepted_lengths = [a + b for a, b in lengths]
        return total

    def snapshot(self, tier: str) -> TierMetrics:
        lengths = tuple(self.accepted_lengths)
        return TierMetrics(tier, self.num_drafts, self.num_draft_tokens, self.num_accepted, lengths)
