"""Agreement and acceptance of exits on held-out text, counted by `infer`'s own rule.

An approximation of what serving will show: the picks are greedy ones, made after the held-out text's own tokens and not
after the drafted ones. Inside an accepted run the two are the same whenever the text is the judge's greedy choice.
Rounds are walked as the engine does it: after `a` accepted drafts the next round starts `a + 1` tokens later.

An exit with a context picks differently at each place of a window, as its context lies further and further back. So
picks are [K, N]: row o − 1 holds those of the o-th place after the last verified token, the last row those of all
places behind it. Where the place does not matter they are [1, N] or [N].
"""

# Shape legend: N label positions of a batch, K places of a window that are told apart

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infer.batch import RING_SIZE
from infer.strategy import Policy
from infer.verify import accepted_prefix_lengths, mean_acceptance_length

MAX_DRAFT_TOKENS = RING_SIZE - 1  # of a round of the engine, which judges γ drafts and the token before them at once


@dataclass
class Acceptance:
    """What a proposer's picks are worth to a judge, summed over batches.

    Args:
        num_draft_tokens: γ of the rounds that are walked.
    """

    num_draft_tokens: int
    num_matches: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    accepted: list[int] = field(default_factory=list)  # [γ], rounds in which the first j + 1 drafts were accepted

    def __post_init__(self) -> None:
        self.accepted = self.accepted or [0] * self.num_draft_tokens

    def update(self, drafted: Tensor, judged: Tensor, breaks: Tensor) -> None:
        """drafted, judged [K, N] int64 picks at the same positions; breaks [N] bool: the position begins a new span."""
        matches = torch.atleast_2d(drafted == judged)  # [K, N], K the larger of the two
        self.num_matches += int(matches[0].sum())
        self.num_tokens += len(breaks)
        lengths = run_lengths(matches, breaks, self.num_draft_tokens).tolist()
        for start, stop in spans(breaks):
            while start < stop:
                for j in range(lengths[start]):
                    self.accepted[j] += 1
                self.num_rounds += 1
                start += lengths[start] + 1

    def counts(self) -> list[int]:
        return [self.num_matches, self.num_tokens, self.num_rounds, *self.accepted]

    @classmethod
    def of(cls, counts: Sequence[int]) -> Acceptance:
        """The inverse of `counts`, which may be sums of several."""
        num_matches, num_tokens, num_rounds, *accepted = counts
        return cls(len(accepted), num_matches, num_tokens, num_rounds, accepted)

    @property
    def agreement(self) -> float:
        """At the first place of a window."""
        return self.num_matches / self.num_tokens if self.num_tokens else 0.0

    @property
    def length(self) -> float:
        """Mean acceptance length, as vLLM defines it: 1 + the sum of `rates`."""
        return mean_acceptance_length(sum(self.accepted), self.num_rounds)

    @property
    def rates(self) -> list[float]:
        """[γ] the chance that the first j + 1 drafts of a round are accepted."""
        return [n / self.num_rounds if self.num_rounds else 0.0 for n in self.accepted]


@dataclass
class Walk:
    """Rounds of hierarchical speculation over all exits, as `infer.round.Round` runs them, summed over batches.

    Args:
        policy: γ, N_i and R.
        calls: of each tier, the target's last.
    """

    policy: Policy
    calls: list[int]
    num_tokens: int = 0

    def update(self, picks: Sequence[Tensor], breaks: Tensor) -> None:
        """picks: [K, N] int64 of each tier at the same positions, the target's last; breaks as above."""
        ids = [torch.atleast_2d(tier).tolist() for tier in picks]
        for start, stop in spans(breaks):
            self.num_tokens += stop - start
            while start < stop:
                start = self._act(ids, len(ids) - 1, start, start, stop)

    def _act(self, ids: list[list[list[int]]], tier: int, committed: int, begin: int, stop: int) -> int:
        """One act of a tier at position `begin`: let the tier below propose, judge, add one's own token → the end."""
        end = begin
        if tier > 0:
            repeats = self.policy.num_draft_tokens if tier == 1 else self.policy.inner_rounds
            for _ in range(repeats):
                if end >= stop or (tier > 1 and end - committed >= self.policy.window):
                    break
                end = self._act(ids, tier - 1, committed, end, stop)
        self.calls[tier] += 1
        own = begin
        while own < min(end, stop) and _pick(ids[tier - 1], committed, own) == _pick(ids[tier], committed, own):
            own += 1
        return own + 1

    def counts(self) -> list[int]:
        return [self.num_tokens, *self.calls]


def _pick(picks: list[list[int]], committed: int, position: int) -> int:
    """Of a tier at `position`, when what lies before `committed` is verified."""
    return picks[min(position - committed, len(picks) - 1)][position]


def spans(breaks: Tensor) -> list[tuple[int, int]]:
    """[start, stop) of each stretch of labels; breaks [N] bool is True where one begins."""
    starts = breaks.nonzero().flatten().tolist()
    return list(zip(starts, [*starts[1:], len(breaks)]))


def run_lengths(matches: Tensor, breaks: Tensor, num_draft_tokens: int) -> Tensor:
    """Accepted drafts of a round that starts at each position: [N] int64, at most γ, never across a break.

    matches [K, N] bool: whether the draft for a position is accepted, by its place in the round.
    """
    matches = torch.atleast_2d(matches)
    span, behind = breaks.long().cumsum(0), num_draft_tokens - 1
    padded = torch.nn.functional.pad(matches, (0, behind))  # False beyond the end
    padded_span = torch.nn.functional.pad(span, (0, behind), value=-1)
    same = padded_span.unfold(0, num_draft_tokens, 1) == span.unsqueeze(1)
    places = [padded[min(j, len(matches) - 1), j : j + len(span)] for j in range(num_draft_tokens)]
    return accepted_prefix_lengths(torch.stack(places, dim=1) & same)  # of [N, γ]
