"""Attention over pages on a GPU: one Triton kernel, as the operator `hispec::paged_attention`.

The query heads of one KV head stand as rows behind each token (token-major), tiles have a fixed number of rows, and one
program takes all keys in fixed steps. So a token's result has the same bits for every T, B and M: a step none of whose
keys a query may see adds exactly nothing to it. Pages are read, never written. Exported graphs name the operator, so it
stands in `infer`, which runs them; importing this file registers it and needs the package triton.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, H query heads, K kv heads, G = H / K

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

ROWS = 16  # of a tile: the least that tensor cores take. Another tile for another T could sum in another order
KEYS = 64  # of a step
LOG2_E = 1.4426950408889634


# One kernel for all sizes: a size of 1, or a multiple of 16, would otherwise be compiled into another one
@triton.jit(do_not_specialize=["length", "max_blocks"])
def _kernel(  # type: ignore[no-untyped-def]
    query,
    k_cache,
    v_cache,
    block_table,
    positions,
    out,
    scale,  # of the scores, times log2(e)
    length,  # T
    max_blocks,  # M
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM up to a power of two
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of folded rows, of one row of the batch and one KV head."""
    batch, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    is_row, dim = token < length, tl.arange(0, WIDTH)
    # padding (position −1) sees slot 0, so that its softmax is finite
    position = tl.maximum(tl.load(positions + batch * length + token, mask=is_row, other=0), 0)
    last = tl.max(position)
    at = ((batch * length + token).to(tl.int64) * (NUM_KV_HEADS * GROUPS) + head)[:, None] * HEAD_DIM + dim[None, :]
    is_value = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + at, mask=is_value, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)  # the largest score so far
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(0, last + 1, KEYS, num_stages=STAGES):
        slot = start + tl.arange(0, KEYS)
        is_slot = slot <= last  # never-read slots stay unread: they may hold NaN, and 0 × NaN would spread it
        block = tl.load(block_table + batch * max_blocks + slot // BLOCK_SIZE, mask=is_slot, other=0).to(tl.int64)
        cached = ((block * BLOCK_SIZE + slot % BLOCK_SIZE) * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
        is_cached = is_slot[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_cache + cached, mask=is_cached, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(slot[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # finite: every row sees slot 0, which is in the first step
        weight = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        v = tl.load(v_cache + cached, mask=is_cached, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        top = new_top
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_value)


def constants_of(head_dim: int, element_size: int) -> dict[str, int]:
    """The kernel's constants beside the shapes: they hang on neither T nor B."""
    width = max(triton.next_power_of_2(head_dim), 16)
    return {"WIDTH": width, "ROWS": ROWS, "KEYS": KEYS, "STAGES": 2 if width * element_size <= 512 else 1}  # ≤ 99 KiB


@triton_op("hispec::paged_attention", mutates_args={})
def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, positions: Tensor, scaling: float
) -> Tensor:
    """Attend over each row's pages; a query at position p sees the cached positions ≤ p.

    All tensors are contiguous; pages and query have one dtype, and sums are in float32.

    Args:
        query: [B, T, H, head_dim].
        k_cache: [num_blocks, S, K, head_dim].
        v_cache: likewise.
        block_table: [B, M] integers, which cover every position.
        positions: [B, T] integers; −1 is padding, whose result is finite and never read.
        scaling: of the scores.

    Returns:
        [B, T, H, head_dim].
    """
    batch, length, num_heads, head_dim = query.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    groups = num_heads // num_kv_heads
    out = torch.empty_like(query)
    wrap_triton(_kernel)[(batch * num_kv_heads, triton.cdiv(length * groups, ROWS))](
        query,
        k_cache,
        v_cache,
        block_table,
        positions,
        out,
        scaling * LOG2_E,
        length,
        block_table.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        GROUPS=groups,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        **constants_of(head_dim, query.element_size()),
    )
    return out


@paged_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query)
