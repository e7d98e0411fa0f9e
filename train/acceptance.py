"""Agreement and acceptance of exits on held-out text, counted by `infer`'s own rule.

An approximation of what serving will show: the picks are greedy ones, made after the held-out text's own tokens and not
after the drafted ones. Inside an accepted run the two are the same whenever the text is the judge's greedy choice.
Rounds are walked as the engine does it: after `a` accepted drafts the next round starts `a + 1` tokens later.
"""

# Shape legend: N label positions of a batch, K drafts of one round

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from infer.verify import accepted_prefix_lengths, mean_acceptance_length

NUM_DRAFTS = 4  # γ of the rounds that are walked


@dataclass
class Acceptance:
    """What a proposer's picks are worth to a judge, summed over batches."""

    num_matches: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    num_rounds: int = 0

    def update(self, drafted: Tensor, judged: Tensor, breaks: Tensor) -> None:
        """drafted, judged [N] int64 picks at the same positions; breaks [N] bool: the position begins a new span."""
        matches = drafted == judged
        self.num_matches += int(matches.sum())
        self.num_tokens += len(matches)
        lengths = run_lengths(matches, breaks).tolist()
        ends = [*breaks.nonzero().flatten().tolist(), len(matches)]
        for start, stop in pairwise(ends):
            while start < stop:
                self.num_accepted += lengths[start]
                self.num_rounds += 1
                start += lengths[start] + 1

    def counts(self) -> list[int]:
        return [self.num_matches, self.num_tokens, self.num_accepted, self.num_rounds]

    @property
    def agreement(self) -> float:
        return self.num_matches / self.num_tokens if self.num_tokens else 0.0

    @property
    def length(self) -> float:
        return mean_acceptance_length(self.num_accepted, self.num_rounds)


def run_lengths(matches: Tensor, breaks: Tensor) -> Tensor:
    """Accepted drafts of a round that starts at each position: [N] int64, at most NUM_DRAFTS, never across a break."""
    span = breaks.long().cumsum(0)
    padded = torch.nn.functional.pad(matches, (0, NUM_DRAFTS - 1))  # False beyond the end
    spans = torch.nn.functional.pad(span, (0, NUM_DRAFTS - 1), value=-1)
    windows = padded.unfold(0, NUM_DRAFTS, 1) & (spans.unfold(0, NUM_DRAFTS, 1) == span.unsqueeze(1))  # [N, K]
    return accepted_prefix_lengths(windows)
