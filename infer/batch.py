"""Rows as rectangles: the tensors that one program call needs, made from plain numbers.

Rows of one call may start and stop at different positions; shorter ones are padded on the right with position −1, whose
keys go to the null block and whose states go to ring 0, so padding needs no branch anywhere. Knows no programs.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, N = sum of the rows' lengths

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.row import Row
from infer.table_width import Gaps, fit_table, table_width

RING_SIZE = 64  # positions of hidden states kept per row between two tiers

_MAX_TABLES = 16  # batches whose block tables are kept


@dataclass(frozen=True, slots=True)
class Query:
    """Which positions of which rows a call computes."""

    positions: Tensor  # [B, T] int64, −1 is padding
    slots: Tensor  # [B, T] int64, where K and V go; in the null block for padding
    block_table: Tensor  # [B, M] int64
    ring: Tensor  # [B·T] int64, where the states wait between tiers; in ring 0 for padding
    rows: Sequence[Row]  # B
    lengths: list[int]  # of each row, without padding
    width: int  # T

    @property
    def is_full(self) -> bool:
        return min(self.lengths) == self.width

    def flat_index(self, device: torch.device) -> Tensor:
        """[N] int64: the cells of the flattened [B·T] rectangle that are not padding, row after row."""
        cells = [b * self.width + t for b, length in enumerate(self.lengths) for t in range(length)]
        return to_device(torch.tensor(cells), device)


class BlockTables:
    """The block tables of rows that are computed together. They change far less often than calls come, so the last ones
    are kept; a row's own list only ever grows, or is replaced as a whole."""

    def __init__(
        self, device: torch.device, check: Callable[[Sequence[list[int]]], None] = lambda tables: None
    ) -> None:
        """check: raises where a row's blocks are none of the pool's; asked once for tables that are kept."""
        self._device, self._check = device, check
        self._kept: dict[tuple[int, ...], tuple[list[list[int]], Tensor]] = {}

    def of(self, rows: Sequence[Row], num_blocks: int) -> Tensor:
        """[B, num_blocks] int64."""
        tables = [row.block_table for row in rows]
        key = (num_blocks, *map(id, tables), *map(len, tables))
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) == _MAX_TABLES:
                self._kept.clear()
            self._check(tables)
            filled = [fit_table(table, num_blocks) for table in tables]
            # The lists are held, so that no others can come to have their ids
            kept = self._kept[key] = tables, to_device(torch.tensor(filled), self._device)
        return kept[1]


def make_query(
    rows: Sequence[Row],
    spans: Sequence[range],
    block_size: int,
    device: torch.device,
    min_width: int = 1,
    tables: BlockTables | None = None,
    gaps: Gaps = (),
) -> Query:
    """The call that computes positions `spans[b]` of `rows[b]`, in a rectangle at least `min_width` wide.

    gaps: widths that block tables do not have (`table_width`).
    """
    lengths = [len(span) for span in spans]
    width = max(min_width, *lengths)
    num_blocks = table_width(max([span.stop for span in spans]), block_size, gaps)
    if width == 1:  # most calls: worth a path of their own
        positions = [span.start for span in spans]
        slots = [r.block_table[p // block_size] * block_size + p % block_size for r, p in zip(rows, positions)]
        ring = [r.ring * RING_SIZE + p % RING_SIZE for r, p in zip(rows, positions)]
    else:
        positions, slots, ring = [], [], []
        for row, span, length in zip(rows, spans, lengths, strict=True):
            table, first_state, padding = row.block_table, row.ring * RING_SIZE, width - length
            positions += span
            slots += [table[p // block_size] * block_size + p % block_size for p in span]
            ring += [first_state + p % RING_SIZE for p in span]
            if padding:
                positions += [-1] * padding
                slots += [0] * padding
                ring += [0] * padding
    batch, size = len(rows), len(rows) * width
    # One conversion and one transfer for all three. Each begins at an even place: kernels may count on 16 bytes.
    packed = array("q", positions)
    for numbers in (slots, ring):
        packed.extend([0] * (len(packed) % 2) + numbers)
    flat = to_device(torch.frombuffer(packed, dtype=torch.int64), device)
    step = size + size % 2
    return Query(
        positions=flat[:size].view(batch, width),
        slots=flat[step : step + size].view(batch, width),
        block_table=(tables or BlockTables(device)).of(rows, num_blocks),
        ring=flat[2 * step : 2 * step + size],
        rows=rows,
        lengths=lengths,
        width=width,
    )


def token_rectangle(
    rows: Sequence[Row],
    spans: Sequence[range],
    width: int,
    device: torch.device,
    check: Callable[[list[int]], None] = lambda ids: None,
) -> Tensor:
    """[B, T] int64: the rows' tokens at `spans`, padded with id 0. `check` raises where one of them is no token."""
    ids = list[int]()
    for row, span in zip(rows, spans, strict=True):
        ids += row.token_ids[span.start : span.stop]
        if len(span) < width:
            ids += [0] * (width - len(span))
    check(ids)
    return to_device(torch.frombuffer(array("q", ids), dtype=torch.int64).view(len(rows), width), device)


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A tensor made on the CPU, where the programs run. On CUDA it goes by pinned memory, else the host would wait
    until the device has done all that was asked of it before."""
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def cut(span: range, limit: int | None) -> list[range]:
    """`span` in pieces of at most `limit` positions; an empty one has no pieces."""
    if limit is None or len(span) <= limit:
        return [span] if span else []
    return [span[start : start + limit] for start in range(0, len(span), limit)]


def split_by_size(spans: Sequence[range], limit: int | None) -> list[range]:
    """Cut the rows of a call into runs [start, stop) whose rectangles hold at most `limit` cells; None is no limit.

    No span may be longer than the limit (`cut`).
    """
    if limit is None:
        return [range(len(spans))]
    runs, start, width = [], 0, 0
    for index, span in enumerate(spans):
        wider = max(width, len(span))
        if index > start and wider * (index - start + 1) > limit:
            runs.append(range(start, index))
            start, wider = index, len(span)
        width = wider
    return [*runs, range(start, len(spans))]


def in_parts(rows: Sequence[Row], starts: Sequence[int], limit: int | None) -> list[tuple[list[Row], list[range]]]:
    """The rows' positions from `starts` to their ends, in calls of at most `limit` cells; rows without any stay out.

    A span longer than the limit is cut into pieces, each of which stands as a row of its own. Two pieces of a row must
    not meet in one call: programs of the functional form read the pages as they were before it, and the later piece
    would miss the earlier one's keys. They never do, as a piece of full length fills a call.
    """
    todo, spans = list(rows), [range(start, len(row.token_ids)) for row, start in zip(rows, starts, strict=True)]
    lengths = [len(span) for span in spans]
    if min(lengths) == 0 or (limit is not None and max(lengths) > limit):
        pieces = [(row, piece) for row, span in zip(rows, spans, strict=True) for piece in cut(span, limit)]
        todo, spans = [row for row, _ in pieces], [piece for _, piece in pieces]
    runs = split_by_size(spans, limit)
    assert len(todo) == len(rows) or all(len({id(todo[i]) for i in run}) == len(run) for run in runs), (spans, runs)
    if len(runs) == 1:
        return [(todo, spans)]
    return [([todo[i] for i in run], [spans[i] for i in run]) for run in runs]


def runs_of(counts: Sequence[int], limit: int | None) -> list[range]:
    """Cut numbers into runs [start, stop) whose sums are at most `limit`, a larger number alone; None: no limit."""
    if limit is None:
        return [range(len(counts))]
    runs, start, total = [], 0, 0
    for index, count in enumerate(counts):
        if index > start and total + count > limit:
            runs.append(range(start, index))
            start, total = index, 0
        total += count
    return [*runs, range(start, len(counts))]
