"""Branches: several continuations of a row in one call of the programs, which have no mask to tell them apart.

Each is a row of the call. It reads the row's own blocks up to the one in which it begins, writes into scratch blocks,
and begins with the row's last token, which no tier has computed. The block in which it begins is copied first, as the
row's positions before it are read there. Scratch blocks are the last ones of the row's table, behind those of its text:

    row            [ text … | last ][ next ]                          its own branch: writes behind its text
    scratch b                [ copy | last ][ next ]                  branch b: the same places, in blocks of its own
    table          [ text blocks … ][ scratch 1 ][ scratch 2 ] …      owned by the row like all others

When a scratch branch is accepted its entries are moved behind the row's text. Nothing waits in rings: states go from
tier to tier within the call.
"""

# Shape legend: B branches, T query positions, M blocks per branch, S block size

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.batch import Query, cut, split_by_size, to_device
from infer.row import Row
from infer.table_width import Gaps, fit_table, table_width


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A continuation of a row.

    Args:
        start: position of the row's last token.
        token_ids: from that token on.
        block_table: for all positions up to the branch's end; its own from that of `start` on, or the row's.
        num_scored: how many of its last tokens get logits.
    """

    row: Row
    start: int
    token_ids: Sequence[int]
    block_table: list[int]
    num_scored: int

    @property
    def is_scratch(self) -> bool:
        return self.block_table is not self.row.block_table

    def slots(self, span: range, block_size: int) -> list[int]:
        return [self.block_table[p // block_size] * block_size + p % block_size for p in span]


Piece = tuple[int, range]  # a branch's number and positions of it


def num_blocks_of_branch(longest: int, block_size: int) -> int:
    """Most blocks that a branch of so many tokens touches, wherever it begins."""
    return -(-(block_size - 1 + longest) // block_size)


def own_branch(row: Row, guess: Sequence[int]) -> Branch:
    return Branch(row, len(row) - 1, [row.token_ids[-1], *guess], row.block_table, len(guess) + 1)


class Scratch:
    """Gives out a row's scratch blocks for one call, to at most `num_branches` of at most `longest` tokens each, which
    begin at position `start`."""

    def __init__(self, row: Row, start: int, num_branches: int, longest: int, block_size: int) -> None:
        self._row, self._start, self._num_whole = row, start, start // block_size
        self._size = num_blocks_of_branch(longest, block_size)
        self._first = len(row.block_table) - num_branches * self._size

    def branch(self, token_ids: Sequence[int], num_scored: int) -> Branch:
        table, first = self._row.block_table, self._first
        self._first += self._size
        assert self._num_whole < first < self._first <= len(table), "scratch blocks reach into the text's, or run out"
        blocks = table[: self._num_whole] + table[first : self._first]
        return Branch(self._row, self._start, token_ids, blocks, num_scored)


def calls(branches: Sequence[Branch], limit: int | None, max_batch: int) -> list[list[Piece]]:
    """The branches' positions in calls of at most `limit` cells and `max_batch` rows; a branch's pieces in order, and
    no two of them in one call, which functional programs want."""
    pieces = [cut(range(b.start, b.start + len(b.token_ids)), limit) for b in branches]
    found: list[list[Piece]] = []
    for turn in range(max(map(len, pieces))):
        now = [(number, each[turn]) for number, each in enumerate(pieces) if turn < len(each)]
        for run in split_by_size([span for _, span in now], limit):
            found += [now[first : first + max_batch][: run.stop - first] for first in run[::max_batch]]
    return found


def make_branch_query(
    branches: Sequence[Branch],
    pieces: Sequence[Piece],
    block_size: int,
    device: torch.device,
    min_width: int,
    gaps: Gaps = (),
) -> tuple[Query, Tensor]:
    """The call that computes `pieces`, and its token ids [B, T]; padding is position −1 in the null block."""
    lengths = [len(span) for _, span in pieces]
    width = max(min_width, *lengths)
    num_blocks = table_width(max(span.stop for _, span in pieces), block_size, gaps)
    ids, positions, slots, tables = [], [], [], []
    for (number, span), length in zip(pieces, lengths, strict=True):
        branch, padding = branches[number], width - length
        ids.append([*branch.token_ids[span.start - branch.start : span.stop - branch.start], *[0] * padding])
        positions.append([*span, *[-1] * padding])
        slots.append([*branch.slots(span, block_size), *[0] * padding])
        tables.append(fit_table(branch.block_table, num_blocks))
    query = Query(
        positions=to_device(torch.tensor(positions), device),
        slots=to_device(torch.tensor(slots), device),
        block_table=to_device(torch.tensor(tables), device),
        ring=torch.empty(0, dtype=torch.int64, device=device),
        rows=[branches[number].row for number, _ in pieces],
        lengths=lengths,
        width=width,
    )
    return query, to_device(torch.tensor(ids), device)
