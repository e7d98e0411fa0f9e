"""The round: draft, verify early, verify fully (arXiv 2510.01336, §3), written as one recursion.

Drafting, verifying early and verifying fully are the same act: bring a tier to the row's end, let its exit pick its own
token at every position it had not seen, keep the proposed tokens that equal the picks, and append the pick after them
(`verify.judge`). With nothing proposed that act drafts one token. So a strategy is a list of stages, plain decoding a
list of one; nothing here knows which strategy it serves.
"""

# Shape legend: N tokens of all rows together, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infer.row import Row
from infer.runner import Runner
from infer.sampler import PickParams, pick
from infer.stats import TierStats
from infer.verify import judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One judge of a round; what the stage below it proposes, it verifies.

    Args:
        tier: whose exit judges.
        repeats: how often the stage acts while the stage above waits: γ for the drafting stage, R for the next.
        window: the stage stops repeating for a row once this many of its tokens wait for the target.
    """

    tier: int
    repeats: int
    window: int


class Round:
    """Runs outer rounds over a fixed list of stages, the target's last.

    After `run`, every row's tokens are the target's own: committed, with all tiers standing before the last one.
    """

    def __init__(self, runner: Runner, stages: Sequence[Stage]) -> None:
        assert stages[-1].tier == runner.num_tiers - 1, "the last stage is the target"
        self.runner = runner
        self.stages = tuple(stages)
        self.stats = [TierStats() for _ in stages]
        self._cached: tuple[list[Row], PickParams] | None = None

    @property
    def judging_tiers(self) -> list[int]:
        return [stage.tier for stage in self.stages]

    @property
    def reach(self) -> int:
        """Most positions that a round computes in a row, that of its last token included."""
        return max(1, self.stages[0].window)

    def run(self, rows: Sequence[Row]) -> None:
        self._run_stage(list(rows), len(self.stages) - 1)

    def _run_stage(self, rows: list[Row], level: int) -> None:
        for _ in range(self.stages[level].repeats):
            rows = [row for row in rows if self._has_room(row, level)]
            if not rows:
                return
            if level > 0:
                self._run_stage(rows, level - 1)
            self._judge(rows, level)

    def _has_room(self, row: Row, level: int) -> bool:
        """Whether the stage may append a token: every stage above it must still be able to append its own."""
        if level == len(self.stages) - 1:
            return True
        num_above = len(self.stages) - 1 - level
        num_waiting = len(row) - row.num_committed
        return num_waiting < self.stages[level].window and len(row) + 1 + num_above <= row.max_len

    def _judge(self, rows: list[Row], level: int) -> None:
        """Score what is new to the stage's tier, accept what it would have picked itself, append its own token."""
        stage = self.stages[level]
        starts = [row.cursors[stage.tier] for row in rows]  # each row's proposals begin one position further
        logits = self.runner.score(rows, stage.tier)  # [N, V]
        counts = [len(row) - start for row, start in zip(rows, starts, strict=True)]
        picked = pick(logits, self._pick_params(rows, starts, counts), self.runner.vocabs[stage.tier])  # [N]
        picks = picked.tolist()  # the stage's host synchronisation
        drafted = [row.token_ids[start + 1 :] for row, start in zip(rows, starts, strict=True)]
        is_target = level == len(self.stages) - 1
        stop = 0
        for row, start, proposed, count in zip(rows, starts, drafted, counts, strict=True):
            own_picks = picks[stop : (stop := stop + count)]
            accepted, own = judge(proposed, own_picks)
            row.truncate(start + 1 + accepted)
            if min(own_picks) < 0:  # at a rejected position, too: its K and V stay in the blocks
                row.has_nan = True
                row.is_broken = row.is_broken or (is_target and own < 0)
            row.append(max(own, 0))  # a lower exit's broken pick is just a bad guess
            if proposed:
                self.stats[level].add(len(proposed), accepted)
                row.stats[level].add(len(proposed), accepted)

    def _pick_params(self, rows: list[Row], starts: list[int], counts: list[int]) -> PickParams:
        """The rows' sampling parameters, repeated for every position to be picked."""
        if self._cached is None or self._cached[0] != rows:
            columns = [r.params for r in rows], [r.seed for r in rows], [0] * len(rows)
            params = PickParams.of(*columns, self.runner.device, [r.choice for r in rows])
            self._cached = (list(rows), params)
        params = self._cached[1]
        if params.all_greedy:
            return params
        index = [b for b, count in enumerate(counts) for _ in range(count)]
        positions = [start + 1 + t for start, count in zip(starts, counts, strict=True) for t in range(count)]
        device = self.runner.device
        return params.at(torch.tensor(index, device=device), torch.tensor(positions, device=device))
