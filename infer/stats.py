"""Counts of what judges accepted, in vLLM's terms. Knows nothing of how they came about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infer.output import TierMetrics


@dataclass(slots=True)
class TierStats:
    """Running counts of one judge: `num_drafts` rounds with proposals, what they proposed and what was accepted."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_draft_tokens, (num_accepted, num_draft_tokens)
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted

    @classmethod
    def total(cls, parts: Iterable[TierStats]) -> TierStats:
        total = cls()
        for part in parts:
            total.num_drafts += part.num_drafts
            total.num_draft_tokens += part.num_draft_tokens
            total.num_accepted += part.num_accepted
        return total

    def snapshot(self, tier: str) -> TierMetrics:
        return TierMetrics(tier, self.num_drafts, self.num_draft_tokens, self.num_accepted)
