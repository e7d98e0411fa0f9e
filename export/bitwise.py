"""Within which sizes of call a token's results have the same bits: what makes lossless verification exact.

Export measures it for every program and the runtime keeps its calls inside. A range may begin at two: libraries have a
kernel of its own for a single token, whose sums come in another order, and a token of padding avoids it. Knows programs
as callables.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, N tokens

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.table_width import PERIOD, Gaps, table_width

MAX_TOKENS = 64
CONTEXT = 40  # cached positions below the tokens that are tried
SHAPES = sorted(
    [(1, 2), (2, 1), (1, 3), (3, 1), (1, 5), (5, 1), (2, 3), (1, 8), (2, 4), (8, 1), (2, 5), (3, 5), (1, 16), (4, 4)]
    + [(16, 1), (3, 8), (8, 3), (1, 32), (8, 4), (4, 8), (32, 1), (6, 8), (8, 6), (48, 1), (1, 64), (8, 8), (64, 1)],
    key=lambda shape: (shape[0] * shape[1], shape),
)
EXTRA_BLOCKS = (1, 4, 13, 40, 200)
# Tried in turn; MKL on AMD has the second
GAPS: Sequence[list[tuple[int, int]]] = ([], [(192, 384)], [(0, PERIOD)])
LENGTHS = (100, 190, 201, 250, 330, 383, 500, 600, 710, 760, 850, 1010, 1300)  # of texts whose tables are widened
WIDER = (1, 20, 70, 130, 200, 330)  # slots
LOWS = (1, 2)  # least numbers of tokens in a call that are tried
ENOUGH = 16  # tokens in a call of one row that decodes

Results = Iterator[tuple[int, bool]]  # number of tokens in a call, whether every one had its own bits


class WidestCall(NamedTuple):
    """What `paged_range` asks of a program that must know its shapes before."""

    rows: int
    length: int
    blocks_per_row: int
    num_blocks: int


def widest_call(block_size: int) -> WidestCall:
    """The largest of each size, not of one call."""
    shared, own = _blocks(block_size)
    per_row = max(shared + own, CONTEXT // block_size + 1 + max(EXTRA_BLOCKS))
    return WidestCall(MAX_TOKENS, MAX_TOKENS, per_row, 1 + shared + MAX_TOKENS * own)


def _blocks(block_size: int) -> tuple[int, int]:
    """How many blocks of cached positions all rows share, and how many each has of its own."""
    return CONTEXT // block_size, -(-(CONTEXT % block_size + MAX_TOKENS) // block_size)


@torch.no_grad()
def flat_range(program: Callable[[Tensor], Tensor], tokens: Tensor) -> tuple[int, int] | None:
    """The range of N for a program [N, ..] → [N, ..], tried on `tokens` [MAX_TOKENS, ..]."""
    sizes = sorted({batch * length for batch, length in SHAPES})

    def results(low: int) -> Results:
        alone = torch.cat([program(tokens[i : i + 1].repeat(low, 1))[:1] for i in range(MAX_TOKENS)])
        return ((n, torch.equal(program(tokens[:n].clone()), alone[:n])) for n in sizes if n >= low)

    return _range(results)


@torch.no_grad()
def paged_range(
    program: Callable[..., Any], tokens: Tensor, page_shape: tuple[int, int, int], num_layers: int, dtype: torch.dtype
) -> tuple[int, int] | None:
    """The range of B·T for a trunk or a `layer` exit.

    Args:
        program: called as (x, positions, slots, block_table, kv).
        tokens: [MAX_TOKENS, MAX_TOKENS] token ids or [MAX_TOKENS, MAX_TOKENS, D] hidden states, rows by positions.
        page_shape: S, KV heads, head_dim.
        num_layers: whose pages it takes.
    """
    size, device = page_shape[0], tokens.device
    num_shared, num_own = _blocks(size)
    shape = (1 + num_shared + MAX_TOKENS * num_own, *page_shape)
    kv = _random_pages(shape, num_layers, dtype, device)
    shared = torch.arange(1, 1 + num_shared).expand(MAX_TOKENS, num_shared)
    own = torch.arange(1 + num_shared, shape[0]).view(MAX_TOKENS, num_own)
    tables = torch.cat([shared, own], 1).to(device)

    def call(rows: slice, span: slice, *, pad: int = 0, extra_blocks: int = 0) -> Tensor:
        x = tokens[rows, span].clone()
        positions = torch.arange(CONTEXT + span.start, CONTEXT + span.stop, device=device).repeat(x.shape[0], 1)
        num_blocks = (CONTEXT + span.stop - 1) // size + 1
        table = tables[rows, :num_blocks]
        slots = table.gather(1, positions // size) * size + positions % size
        x = torch.cat([x, x.new_zeros(x.shape[0], pad, *x.shape[2:])], 1)
        positions = torch.cat([positions, positions.new_full((len(positions), pad), -1)], 1)
        slots = torch.cat([slots, slots.new_zeros(len(slots), pad)], 1)
        unused = table.new_zeros(x.shape[0], extra_blocks)
        return program(x, positions, slots, torch.cat([table, unused], 1), kv)

    def results(low: int) -> Results:
        pad = low - 1
        alone: dict[tuple[int, int], Tensor] = {}

        def matches(batch: int, length: int) -> bool:
            for t in range(length):  # position after position: each reads the keys of those before it
                for b in range(batch):
                    if (b, t) not in alone:
                        alone[b, t] = call(slice(b, b + 1), slice(t, t + 1), pad=pad)[0, 0]
            got = call(slice(0, batch), slice(0, length))
            return all(torch.equal(got[b, t], alone[b, t]) for b in range(batch) for t in range(length))

        one = slice(0, 1)
        first = call(one, one, pad=pad)[0, 0]
        wide = [torch.equal(call(one, one, pad=pad, extra_blocks=extra)[0, 0], first) for extra in EXTRA_BLOCKS]
        yield low, all(wide)
        yield from ((b * t, matches(b, t)) for b, t in SHAPES if b * t >= low)

    return _range(results)


@torch.no_grad()
def slot_gaps(
    program: Callable[..., Any],
    tokens: Tensor,
    page_shape: tuple[int, int, int],
    num_layers: int,
    dtype: torch.dtype,
    max_model_len: int,
) -> list[tuple[int, int]] | None:
    """Widths that tables must not have, so that a token has the same bits in a table that reaches further.

    Of a trunk of several layers, as rounding hides most sums of another order. Its arguments are those of
    `paged_range`. None: nothing that is tried is exact.
    """
    size, device = page_shape[0], tokens.device
    lengths = [length for length in LENGTHS if length <= max_model_len]
    shape = (1 + table_width(max(lengths, default=1), size, ()), *page_shape)
    kv = _random_pages(shape, num_layers, dtype, device)
    own = torch.arange(1, shape[0], device=device)

    def call(length: int, num_blocks: int) -> Tensor:
        positions = torch.arange(length - 2, length, device=device).unsqueeze(0)
        slots = own[positions // size] * size + positions % size
        table = torch.cat([own[:num_blocks], own[:1].expand(max(0, num_blocks - len(own)))]).unsqueeze(0)
        result: Tensor = program(tokens[:1, :2].clone(), positions, slots, table, kv)
        return result

    def is_exact(gaps: Gaps) -> bool:
        for length in lengths:
            first = call(length, table_width(length, size, gaps))
            widths = {table_width(length + more, size, gaps) for more in WIDER}
            if not all(torch.equal(call(length, width), first) for width in widths):
                return False
        return True

    return next((gaps for gaps in GAPS if is_exact(gaps)), None)


def _random_pages(shape: tuple[int, ...], num_layers: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2 * num_layers)]


def _range(results: Callable[[int], Results]) -> tuple[int, int] | None:
    """[low, n], n the largest number up to which every call matches; None where no call but the least does.

    The first `low` whose n is enough, else that with the largest: a call more costs more than a token of padding.
    """
    found = list[tuple[int, int]]()
    for low in LOWS:
        limit = 0
        for n, group in groupby(results(low), key=lambda result: result[0]):
            if not all(matched for _, matched in group):
                break
            limit = n
        if limit > low:
            found.append((low, limit))
        if limit >= ENOUGH:
            break
    return max(found, key=lambda limits: limits[1], default=None)
