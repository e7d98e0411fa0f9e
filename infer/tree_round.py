"""The round that verifies a tree of drafts: the drafted chain, and beside it what the exit thought next best.

A chain is lost from its first wrong token on, though the right one often stands second or third at the exit: SmolLM2's
draft has the target's token first in 40 % of the places, among its first four in 63 %. Each such candidate makes a
branch that leaves the chain at its place, so a branch that the target takes gives the token behind it too (SpecInfer,
arXiv 2305.09781; which candidates are worth a branch is told by the exit's own probabilities, EAGLE-2, arXiv
2406.16858). A token more costs a call of the target next to nothing, as its weights are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.branch_round import BranchRound
from infer.branches import Branch, Scratch
from infer.judging import Rule
from infer.lines import Lines
from infer.row import Row
from infer.runner import Runner
from infer.stage import Stage
from infer.verify import Verdict


class Candidate(NamedTuple):
    chance: float  # that chain and exit are right so far, as the exits see it
    place: int  # index in the row's tokens
    token_id: int


class TreeRound(BranchRound):
    """A drafting stage with `num_branches`, and the target."""

    def __init__(self, runner: Runner, stages: Sequence[Stage], rule: Rule | None = None) -> None:
        super().__init__(runner, stages, rule)
        self.proposer = stages[0].tier
        self._candidates: dict[Row, list[Candidate]] = {}  # of this round
        self._chances: dict[Row, float] = {}  # that all of a row's chain is right

    def run(self, rows: Sequence[Row]) -> None:
        self._candidates.clear()
        self._chances.clear()
        super().run(rows)

    def _rule(self, lines: Lines, tier: int, logits: Tensor) -> list[Verdict]:
        verdicts = super()._rule(lines, tier, logits)
        if not lines.is_target:
            self._note_candidates(lines)
        return verdicts

    def _note_candidates(self, lines: Lines) -> None:
        """What the drafting exit would have drafted instead of the token that it has just appended to each row."""
        number = min(self.stages[0].num_branches + 1, lines.logits.shape[-1])
        logits = lines.logits.float()  # a line for each row, as nothing is proposed to this exit
        values, places = logits.topk(number)
        chances = (values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        ids = places if lines.ids is None else lines.ids[places]
        both = torch.stack([chances.double(), ids.double()]).tolist()  # at once, as each is a host synchronisation
        for row, chances_of_row, numbers in zip(lines.rows, *both, strict=True):
            of_row = [int(number) for number in numbers]
            drafted, place = row.token_ids[-1], len(row) - 1
            before = self._chances.get(row, 1.0)
            own = dict(zip(of_row, chances_of_row, strict=True))
            # a token drawn by noise may be none of the likeliest
            self._chances[row] = before * own.pop(drafted, chances_of_row[-1])
            self._candidates.setdefault(row, []).extend(
                Candidate(before * chance, place, token_id) for token_id, chance in own.items()
            )

    def _judge(self, rows: list[Row], level: int) -> set[Row]:
        if level < len(self.stages) - 1:
            return super()._judge(rows, level)
        branches = [self._branches(row) for row in rows]
        if all(len(own) == 1 for own in branches):
            return super()._judge(rows, level)
        self._judge_branches([branch for own in branches for branch in own], (), level)
        return set()

    def _branches(self, row: Row) -> list[Branch]:
        """The row's chain in its own blocks, and the best of its candidates in scratch blocks."""
        stage, start = self.stages[0], row.cursors[-1]
        chain = row.token_ids[start:]
        branches = [Branch(row, start, chain, row.block_table, len(chain))]
        likely = [one for one in self._candidates.get(row, ()) if one.chance >= stage.branch_threshold]
        if not likely:
            return branches
        scratch = Scratch(row, start, stage.num_branches, stage.repeats + 1, self.runner.block_size)
        for _, place, token_id in sorted(likely, reverse=True)[: stage.num_branches]:
            tokens = [*row.token_ids[start:place], token_id]
            branches.append(scratch.branch(tokens, len(tokens)))
        return branches

    def _note_states(self, branch: Branch, num_kept: int, states: Sequence[Sequence[Tensor]]) -> None:
        """The drafting exit reads the states of what the row keeps, as after any other round."""
        self.runner.rings.keep(branch.row, branch.start, num_kept, states)
