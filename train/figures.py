"""The figures of a validation run: losses, agreement, acceptance and predicted speed of every exit.

Kept as sums over tokens and rounds, so that batches and ranks add up. This file knows nothing of Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from infer.strategy import Policy
from train.acceptance import Acceptance, Walk
from train.costs import single_exit_speedup, walk_speedup
from train.linear_loss import LossSum

TARGET = "target"


class Figures:
    """Sums over a validation run.

    Args:
        names: the exits, ordered by depth.
        costs: exit name and `target` → cost of one call relative to a plain step.
        num_draft_tokens: γ, the longest window whose positions are reported.
    """

    def __init__(self, names: Sequence[str], costs: Mapping[str, float], num_draft_tokens: int) -> None:
        self.names, self.costs = tuple(names), dict(costs)
        self.losses: dict[str, float] = {}  # "exit/term" → sum over tokens
        pairs = [(name, TARGET) for name in names] + list(pairwise(names))
        self.acceptance = {pair: Acceptance(num_draft_tokens) for pair in pairs}
        self.walk = Walk(Policy(), [0] * (len(names) + 1))

    def update(self, losses: Mapping[str, LossSum], picks: Mapping[str, Tensor], breaks: Tensor) -> None:
        """One batch: exit name → its loss; exit name and `target` → picks [K, N] int64, as `Acceptance` takes them;
        breaks [N] bool."""
        for name, loss in losses.items():
            for key, value in {"loss": loss.total, **loss.terms}.items():
                self.losses[f"{name}/{key}"] = self.losses.get(f"{name}/{key}", 0.0) + float(value)
        for (drafter, judge), acceptance in self.acceptance.items():
            acceptance.update(picks[drafter], picks[judge], breaks)
        self.walk.update([picks[name] for name in (*self.names, TARGET)], breaks)

    def sums(self) -> list[float]:
        """All that adds up over ranks; every rank must have seen a batch."""
        counts = [n for acceptance in self.acceptance.values() for n in acceptance.counts()]
        return [*self.losses.values(), *counts, *self.walk.counts()]

    def set_sums(self, sums: Sequence[float]) -> None:
        """Take the place of `sums`, as added up over ranks."""
        rest = iter(sums)
        self.losses = {key: next(rest) for key in self.losses}
        for pair, acceptance in self.acceptance.items():
            self.acceptance[pair] = Acceptance.of([round(next(rest)) for _ in acceptance.counts()])
        self.walk.num_tokens, *self.walk.calls = [round(value) for value in rest]

    def named(self) -> dict[str, float]:
        """Name → figure. `acceptance_length` (the mean over exits) and `speedup` (the best way) sum up the rest."""
        num_tokens = self.acceptance[self.names[0], TARGET].num_tokens
        figures = {key: total / max(1, num_tokens) for key, total in self.losses.items()}
        speedups = {}
        for (drafter, judge), counted in self.acceptance.items():
            suffix = "" if judge == TARGET else f"_{judge}"
            figures[f"{drafter}/agreement{suffix}"] = counted.agreement
            figures[f"{drafter}/acceptance_length{suffix}"] = counted.length
            for j, rate in enumerate(counted.rates, 1):
                figures[f"{drafter}/acceptance_rate_{j}{suffix}"] = rate
            if judge == TARGET:
                costs = self.costs[drafter], self.costs[TARGET]
                speedups[f"{drafter}/speedup"] = single_exit_speedup(counted, *costs)
        if len(self.names) > 1:
            costs_in_order = [self.costs[name] for name in (*self.names, TARGET)]
            speedups["hispec_speedup"] = walk_speedup(self.walk, costs_in_order)
        lengths = [counted.length for (_, judge), counted in self.acceptance.items() if judge == TARGET]
        summary = {"acceptance_length": sum(lengths) / len(lengths), "speedup": max(speedups.values())}
        return figures | speedups | summary
