"""The round of Lookahead decoding: guesses verified and the window moved on in one pass of the target.

`lookahead` knows the window, `branches` how its columns become rows of a call; here they meet the rows, the runner and
the rule, which judges a guess as it judges any draft.
"""

# Shape legend: N lines of all branches together, V vocabulary

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from infer.branches import Branch, Scratch, num_blocks_of_branch, own_branch
from infer.hispec import Round, Stage
from infer.judging import Lines, Rule
from infer.lookahead import Lookahead, Window
from infer.row import Row
from infer.runner import Runner


def make_round(runner: Runner, stages: Sequence[Stage], rule: Rule | None = None) -> Round:
    """The round that runs these stages."""
    shape = stages[-1].lookahead
    return Round(runner, stages, rule) if shape is None else LookaheadRound(runner, stages, shape, rule)


def num_scratch_blocks(stages: Sequence[Stage], block_size: int) -> int:
    """Blocks that a row needs beside those of its text while these stages run."""
    shape = stages[-1].lookahead
    return 0 if shape is None else shape.num_scratch_branches * num_blocks_of_branch(shape.longest, block_size)


class LookaheadRound(Round):
    """One stage, the target's. Its acts judge the best of several guesses."""

    def __init__(self, runner: Runner, stages: Sequence[Stage], shape: Lookahead, rule: Rule | None = None) -> None:
        super().__init__(runner, stages, rule)
        self._shape = shape
        self._ahead: dict[Row, tuple[int, list[int]]] = {}  # of this round: last token, and every column's next one

    @property
    def num_scratch_blocks(self) -> int:
        return num_scratch_blocks(self.stages, self.runner.block_size)

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
        self._copy_begun_blocks([branch for branch in (*guesses, *columns) if branch.is_scratch])
        logits = self.runner.score_branches([*guesses, *columns])  # [N, V]
        num_lines = sum(branch.num_scored for branch in guesses)
        texts = [branch.row.token_ids[:-1] + list(branch.token_ids) for branch in guesses]
        owners, starts = [branch.row for branch in guesses], [branch.start for branch in guesses]
        tier = self.stages[level].tier
        lines = self._lines(owners, level, tier, logits[:num_lines], starts, texts)
        self._keep_best(guesses, lines, tier, logits[:num_lines])
        largest, tokens = logits[num_lines:].max(dim=-1)  # a guess needs neither noise nor rules
        for branch, token, is_finite in zip(columns, tokens.tolist(), largest.isfinite().tolist(), strict=True):
            self._ahead.setdefault(branch.row, (branch.token_ids[0], []))[1].append(token)
            branch.row.has_nan = branch.row.has_nan or not is_finite
        return set()

    def _branches(self, row: Row) -> tuple[list[Branch], list[Branch]]:
        """The row's guesses, of which the first stands in its own blocks and may be empty, and its window's columns,
        which stay where they are when the row nears its greatest length."""
        if not row.params.speculate:
            return [own_branch(row, ())], []
        shape, last = self._shape, row.token_ids[-1]
        row.window = row.window or Window(shape, row.token_ids)
        scratch = Scratch(row, shape.num_scratch_branches, shape.longest, self.runner.block_size)
        found = row.window.guesses(last, row.max_len - len(row) - 1)  # and room for the target's own token
        guesses = [own_branch(row, found[0] if found else ())]
        guesses += [scratch.branch([last, *guess], len(guess) + 1) for guess in found[1:]]
        if len(row) - 1 + shape.longest > row.max_len:
            return guesses, []
        return guesses, [scratch.branch(token_ids, 1) for token_ids in row.window.columns(last)]

    def _copy_begun_blocks(self, branches: Sequence[Branch]) -> None:
        """Give branches what they read of the row in the block in which they begin."""
        size = self.runner.block_size
        sources, targets = list[int](), list[int]()
        for branch in branches:
            span = range(branch.start // size * size, branch.start)
            sources += [branch.row.block_table[branch.start // size] * size + p % size for p in span]
            targets += branch.slots(span, size)
        self.runner.move(sources, targets)

    def _keep_best(self, branches: Sequence[Branch], lines: Lines, tier: int, logits: Tensor) -> None:
        """Of each row's guesses the one of which most is accepted; logits [N, V] are those before the rows' rules."""
        verdicts, is_broken = self.rule.judge(lines)
        ends = list(itertools.accumulate(lines.counts))
        best: dict[Row, int] = {}
        for number, branch in enumerate(branches):
            here = slice(ends[number] - lines.counts[number], ends[number])
            if is_broken is not None and any(is_broken[here]):  # by NaN, or by the row's own rules
                branch.row.has_nan = branch.row.has_nan or not bool(logits[here].amax(dim=-1).isfinite().all())
            known = best.setdefault(branch.row, number)
            if verdicts[number].num_accepted > verdicts[known].num_accepted:
                best[branch.row] = number
        size = self.runner.block_size
        sources, targets = list[int](), list[int]()
        for row, number in best.items():
            branch, here = branches[number], slice(ends[number] - lines.counts[number], ends[number])
            if branch.is_scratch:
                span = range(branch.start + 1, branch.start + 1 + verdicts[number].num_accepted)
                sources += branch.slots(span, size)
                targets += [row.block_table[p // size] * size + p % size for p in span]
            for token_id in lines.drafted[number]:
                row.append(token_id)
            row.cursors = [len(row)] * len(row.cursors)
            self._write(row, lines, number, tier, verdicts[number], is_broken and is_broken[here], logits[here])
            row.first_state = row.cursors[-1]  # no ring has a state of what is computed here
        self.runner.move(sources, targets)
