"""What every call of a program must be, whatever backend runs it: compiled packages check none of it themselves.

Two halves, since looking at numbers that lie on a GPU would make the host wait for it:

    numbers    positions, blocks and token ids, where they are plain numbers still (`check_spans`, `check_blocks`,
               `check_ids`); slots follow from positions and blocks
    tensors    dtype, device, rank, sizes and strides, before the call (`check_query` once for all calls over the same
               positions, `check_input` for each): no number is read

A program that got them wrong would read or write beyond its pages, or give numbers without meaning. Only we can do
that: prompts and options were checked where they came in.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, D hidden, E exit size, N tokens

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from infer.batch import Query
from infer.blocks import NULL_BLOCK
from infer.manifest import Manifest


class BorderError(RuntimeError):
    """A call that no program may see; says which argument, what it is and what it must be."""


class HasBlocks(Protocol):
    """A row of a call, or a branch of one."""

    @property
    def block_table(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Takes:
    """The first argument of a program: token ids [B, T], or states [B, T, width] over pages, [N, width] without."""

    name: str  # what errors call it
    dtype: torch.dtype
    width: int | None  # None: token ids


@dataclass(frozen=True, slots=True)
class Border:
    """The numbers that hold for all programs of one runner."""

    block_size: int
    num_blocks: int  # of the pool, the null block included
    max_positions: int
    vocab_size: int
    device: torch.device

    # ---- numbers ----

    def check_spans(self, rows: Sequence[HasBlocks], spans: Sequence[range]) -> None:
        """Positions that the model has, in blocks that the row has."""
        for row, span in zip(rows, spans, strict=True):
            if not 0 <= span.start < span.stop <= self.max_positions:
                raise BorderError(f"positions {span} must lie within 0..{self.max_positions - 1}, and be at least one")
            if span.stop > len(row.block_table) * self.block_size:
                raise BorderError(f"positions {span} lie beyond the row's {len(row.block_table)} blocks")

    def check_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        """Blocks of the pool, without the null block, which is nobody's."""
        for table in tables:
            if not NULL_BLOCK < min(table) <= max(table) < self.num_blocks:
                wrong = [block for block in table if not NULL_BLOCK < block < self.num_blocks]
                raise BorderError(f"block {wrong[0]} of a row must lie within 1..{self.num_blocks - 1}")

    def check_ids(self, token_ids: Sequence[int]) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            wrong = [i for i in token_ids if not 0 <= i < self.vocab_size]
            raise BorderError(f"token id {wrong[0]} must lie within 0..{self.vocab_size - 1}")

    # ---- tensors ----

    def check_query(self, query: Query) -> None:
        """What all calls over these positions share. Pages are made once and never change."""
        shape = query.positions.shape
        self._check("positions", query.positions, torch.int64, (len(query.rows), query.width))
        self._check("slots", query.slots, torch.int64, shape)
        self._check("block_table", query.block_table, torch.int64, (shape[0], query.block_table.shape[-1]))

    def check_input(self, takes: Takes, x: Tensor, query: Query | None = None) -> None:
        """The first argument: over pages with the query's positions, else of tokens [N, width]."""
        shape = (len(x),) if query is None else query.positions.shape
        self._check(takes.name, x, takes.dtype, shape if takes.width is None else (*shape, takes.width))

    def _check(self, name: str, got: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
        if (
            got.dtype is not dtype
            or got.shape != shape
            or 0 in shape
            or not got.is_contiguous()
            or got.device != self.device
        ):
            raise BorderError(
                f"{name} is {got.dtype} {list(got.shape)} with strides {list(got.stride())} on {got.device}, "
                f"expected a contiguous {dtype} {list(shape)} on {self.device}, none of it 0"
            )


def takes_of(manifest: Manifest, dtype: torch.dtype) -> dict[str, Takes]:
    """Program name → what it takes first."""
    base, lowest = manifest.base, f"{manifest.tiers[0].name}.trunk"

    def takes(program: str, width: int | None) -> Takes:
        return Takes(f"{program}: x", torch.int64 if width is None else dtype, width)

    found = {f"{tier.name}.trunk": base.hidden_size for tier in manifest.tiers}
    for e in manifest.exits:
        found[f"{e.name}.exit"] = base.hidden_size * (2 if e.context else 1)
        found[f"{e.name}.unembed" if e.vocab_size else "unembed"] = base.exit_size
    return {name: takes(name, None if name == lowest else width) for name, width in found.items()}
