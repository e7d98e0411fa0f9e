"""Which shapes a program is called with: what a compiler that needs to know them before is told.

The sizes follow from the artifact's limits, and from the gates of export, whose calls are longer than short limits
allow. It knows no compiler.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, N tokens

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch.export import ExportedProgram

from export import bitwise
from infer.manifest import Limits

MAX_ELEMENTS = (1 << 31) - 1  # of a tensor, in TensorRT
_QUERY = (("B", "T"), ("B", "T"), ("B", "T"), ("B", "M"))  # dynamic sizes of x, positions, slots, block_table


class Extent(NamedTuple):
    """Of one dimension."""

    least: int
    usual: int  # what the compiler should be fast at
    most: int


class ShapeRange(NamedTuple):
    """Of one input."""

    dtype: torch.dtype
    least: tuple[int, ...]
    usual: tuple[int, ...]
    most: tuple[int, ...]


def shape_ranges(exported: ExportedProgram, limits: Limits) -> list[ShapeRange]:
    """Of every input of a program, in order."""
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if "val" in node.meta}
    signature = exported.graph_signature
    inputs = [values[name] for name in signature.user_inputs]
    if len(inputs) == 1:
        width = max(inputs[0].shape[-1], values[signature.user_outputs[0]].shape[-1])
        return [_range(inputs[0], ("N",), {"N": tokens_extent(limits, width)})]
    extents = paged_extents(limits, tuple(inputs[len(_QUERY)].shape[1:]))
    dims = [*_QUERY, *[("num_blocks",)] * (len(inputs) - len(_QUERY))]
    return [_range(value, names, extents) for value, names in zip(inputs, dims, strict=True)]


def paged_extents(limits: Limits, page_shape: tuple[int, ...]) -> dict[str, Extent]:
    """B, T, M and num_blocks of a program over pages [num_blocks, *page_shape].

    One row that checks a few tokens in the middle of its length is the usual call. The pool may hold all rows at full
    length and the null block, as far as a tensor of pages can be so large.
    """
    size = page_shape[0]
    gate = bitwise.widest_call(size)
    per_row = -(-limits.max_model_len // size)
    num_blocks = max(1 + limits.max_batch * per_row, gate.num_blocks)
    return {
        "B": Extent(1, 1, max(limits.max_batch, gate.rows)),
        "T": Extent(1, min(4, limits.max_query_len), max(limits.max_query_len, limits.prefill_chunk, gate.length)),
        "M": Extent(1, -(-per_row // 2), max(per_row, gate.blocks_per_row)),
        "num_blocks": Extent(1, 1 + per_row, min(num_blocks, MAX_ELEMENTS // prod(page_shape))),
    }


def tokens_extent(limits: Limits, width: int) -> Extent:
    """N of a program over single tokens: all rows' longest queries together, as far as a tensor [N, width] goes."""
    most = max(limits.max_batch * limits.max_query_len, limits.prefill_chunk, bitwise.MAX_TOKENS)
    return Extent(1, min(4, limits.max_query_len), min(most, MAX_ELEMENTS // width))


def _range(value: torch.Tensor, names: tuple[str, ...], extents: dict[str, Extent]) -> ShapeRange:
    """names: of the leading dimensions, which are dynamic; the others are as in the example `value`."""
    fixed = value.shape[len(names) :]
    assert all(isinstance(size, int) for size in fixed), (names, value.shape)
    least, usual, most = ((*(extents[name][i] for name in names), *fixed) for i in range(3))
    return ShapeRange(value.dtype, least, usual, most)
