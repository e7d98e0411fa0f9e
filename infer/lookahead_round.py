"""The round of Lookahead decoding: guesses verified and the window moved on in one pass of the target.

`lookahead` knows the window, `branches` how its columns become rows of a call, `branch_round` how the best guess
becomes the row's text.
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.branch_round import BranchRound
from infer.branches import Branch, Scratch, own_branch
from infer.judging import Rule
from infer.lookahead import Lookahead, Window
from infer.row import Row
from infer.runner import Runner
from infer.stage import Stage


class LookaheadRound(BranchRound):
    """One stage, the target's. Its acts judge the best of several guesses."""

    def __init__(self, runner: Runner, stages: Sequence[Stage], shape: Lookahead, rule: Rule | None = None) -> None:
        super().__init__(runner, stages, rule)
        self._shape = shape
        self._ahead: dict[Row, tuple[int, list[int]]] = {}  # of this round: last token, and every column's next one

    def run(self, rows: Sequence[Row]) -> None:
        self._ahead.clear()
        super().run(rows)
        for row, (last, new) in self._ahead.items():  # at the end, as a round that breaks off is run again
            assert row.window is not None
            row.window.slide(last, new)

    def _judge(self, rows: list[Row], level: int) -> set[Row]:
        guesses, columns = list[Branch](), list[Branch]()
        for row in rows:
            of_row, ahead = self._branches(row)
            guesses += of_row
            columns += ahead
        logits = self._judge_branches(guesses, columns, level)
        largest, tokens = logits.max(dim=-1)  # a guess needs neither noise nor rules
        for branch, token, is_finite in zip(columns, tokens.tolist(), largest.isfinite().tolist(), strict=True):
            self._ahead.setdefault(branch.row, (branch.token_ids[0], []))[1].append(token)
            branch.row.has_nan = branch.row.has_nan or not is_finite
        return set()

    def _branches(self, row: Row) -> tuple[list[Branch], list[Branch]]:
        """The row's guesses, of which the first stands in its own blocks and may be empty, and its window's columns,
        which stay where they are when the row nears its greatest length."""
        if not row.speculates:
            return [own_branch(row, ())], []
        shape, last = self._shape, row.token_ids[-1]
        row.window = row.window or Window(shape, row.token_ids)
        scratch = Scratch(row, len(row) - 1, shape.num_scratch_branches, shape.longest, self.runner.block_size)
        found = row.window.guesses(last, row.max_len - len(row) - 1)  # and room for the target's own token
        guesses = [own_branch(row, found[0] if found else ())]
        guesses += [scratch.branch([last, *guess], len(guess) + 1) for guess in found[1:]]
        if len(row) - 1 + shape.longest > row.max_len:
            return guesses, []
        return guesses, [scratch.branch(token_ids, 1) for token_ids in row.window.columns(last)]
