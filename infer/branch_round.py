"""A round whose target judges several continuations of a row at once and keeps the best: what such rounds share.

`branches` makes rows of a call out of continuations; the rule judges each as it judges any draft. As a rule's picks
depend on a row's text and the target's logits alone, the best branch's tokens are those that plain decoding would give.
"""

# Shape legend: N lines of all branches together, V vocabulary

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from infer.branches import Branch
from infer.lines import Lines
from infer.round import Round
from infer.row import LOOKED_UP, Row
from infer.runner import BranchScores


class BranchRound(Round):
    """A round with a way to judge branches; where they come from is a subclass's matter."""

    proposer = LOOKED_UP  # whose tokens stand in branches, and not in the row that they branch off

    def _judge_branches(self, guesses: Sequence[Branch], others: Sequence[Branch], level: int) -> Tensor:
        """Keep the best of each row's guesses, of which one stands in the row's own blocks, and append the target's own
        token after it; logits [N, V] of the others' scored tokens, which are computed in the same calls."""
        self._copy_begun_blocks([branch for branch in (*guesses, *others) if branch.is_scratch])
        scores = self.runner.score_branches([*guesses, *others])
        num_lines = sum(branch.num_scored for branch in guesses)
        texts = [branch.row.token_ids[: branch.start] + list(branch.token_ids) for branch in guesses]
        owners, starts = [branch.row for branch in guesses], [branch.start for branch in guesses]
        tier, logits = self.stages[level].tier, scores.logits[:num_lines]
        self._keep_best(guesses, self._lines.make(owners, level, tier, logits, starts, texts), tier, logits, scores)
        return scores.logits[num_lines:]

    def _note_states(self, branch: Branch, num_kept: int, states: Sequence[Sequence[Tensor]]) -> None:
        """Of its row's best branch so many tokens are kept, the row's cursors stand behind them, and `states` are the
        branch's (`BranchScores.states`). By default no ring gets them, so that no exit can read them."""
        branch.row.first_state = branch.row.cursors[-1]

    def _copy_begun_blocks(self, branches: Sequence[Branch]) -> None:
        """Give branches what they read of the row in the block in which they begin."""
        size = self.runner.block_size
        sources, targets = list[int](), list[int]()
        for branch in branches:
            span = range(branch.start // size * size, branch.start)
            sources += [branch.row.block_table[branch.start // size] * size + p % size for p in span]
            targets += branch.slots(span, size)
        self.runner.move(sources, targets)

    def _keep_best(
        self, branches: Sequence[Branch], lines: Lines, tier: int, logits: Tensor, scores: BranchScores
    ) -> None:
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
            guess, num_accepted = lines.drafted[number], verdicts[number].num_accepted
            first = branch.start + 1
            num_shared = _num_alike(row.token_ids[first:], guess)  # the row's own branch has computed these in place
            if branch.is_scratch:
                span = range(first + num_shared, first + num_accepted)
                sources += branch.slots(span, size)
                targets += [row.block_table[p // size] * size + p % size for p in span]
            row.truncate(first + num_shared)
            for token_id in guess[num_shared:]:
                row.append(token_id, self.proposer)
            row.cursors = [len(row)] * len(row.cursors)
            self._write(row, lines, number, tier, verdicts[number], is_broken and is_broken[here], logits[here])
            self._note_states(branch, 1 + num_accepted, scores.states[number])
        self.runner.move(sources, targets)


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the beginning that two sequences share."""
    pairs = enumerate(zip(one, other))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))
