"""How a stage rules on what the stage below it proposed.

The identity rule, which is the default, stands here, the other one in `rejection`. `Round` runs the stages and writes
their rulings into the rows.
"""

# Shape legend: N lines (one per position, all rows together)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from infer.lines import Lines
from infer.row import Row
from infer.sampler import pick
from infer.verify import Verdict, verify


class Ruling(NamedTuple):
    verdicts: list[Verdict]  # per row; the own token is -1 where the judge has none
    is_broken: list[bool] | None  # per line, whether nothing can be picked there; None: nowhere


class Rule(Protocol):
    """Rulings must leave what the target commits exact: the very tokens of plain decoding, or their law. The one that
    does not stands in `sprinter`, and says so."""

    doubted: set[Row]  # rows in which the stage above is to judge at once

    def begin(self, rows: Sequence[Row]) -> None:
        """A round begins: whatever was drafted in these rows before is forgotten."""

    def note_proposal(self, row: Row, level: int, token_ids: Sequence[int]) -> None:
        """The stage has appended these tokens without a draw, as the row's committed tokens alone decide them."""

    def judge(self, lines: Lines) -> Ruling:
        """Accept what can be accepted of `lines.drafted`, and give the judge's own token after it."""


class IdentityRule:
    """A drafted token is accepted iff it is the token that the judge picks itself (`verify`)."""

    def __init__(self) -> None:
        self.pick: Callable[..., Tensor] = pick  # `profile` puts a timed one in its place
        self.doubted: set[Row] = set()

    def begin(self, rows: Sequence[Row]) -> None:
        """Nothing is kept between calls."""

    def note_proposal(self, row: Row, level: int, token_ids: Sequence[int]) -> None:
        """It does not matter where a token comes from."""

    def judge(self, lines: Lines) -> Ruling:
        return self.ruling(lines, self.picks(lines))

    def picks(self, lines: Lines) -> list[int]:
        """The judge's own token for every line, -1 where it has none. N"""
        params = lines.row_params if lines.row_params.all_greedy else lines.params()
        picks: list[int] = self.pick(lines.logits, params, lines.ids).tolist()  # the stage's host synchronisation
        return picks

    @staticmethod
    def ruling(lines: Lines, picks: list[int]) -> Ruling:
        verdicts, first = [], 0
        for drafted, count in zip(lines.drafted, lines.counts, strict=True):
            verdicts.append(verify(drafted, picks[first : first + count]))
            first += count
        return Ruling(verdicts, [token < 0 for token in picks] if min(picks) < 0 else None)
