"""Attention over pages on a CPU: the operator `hispec::paged_attention_cpu` (`attention.cpp`).

Each query is computed by itself and in one order, so a token has the same bits in every call; pages are read where they
lie.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, H query heads, K kv heads

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from export.cpu_kernels.library import library, pointer

SHIM = (
    "AOTITorchError aoti_torch_cpu_paged_attention_cpu(AtenTensorHandle query, AtenTensorHandle k_cache, "
    "AtenTensorHandle v_cache, AtenTensorHandle block_table, AtenTensorHandle positions, double scaling, "
    "AtenTensorHandle* out)"
)


@torch.library.custom_op("hispec::paged_attention_cpu", mutates_args=(), device_types="cpu")
def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, positions: Tensor, scaling: float
) -> Tensor:
    """Attend over each row's pages; a query at position p sees the cached positions ≤ p.

    All tensors are contiguous; pages and query have one dtype, float32 or bfloat16, and sums are in float32.

    Args:
        query: [B, T, H, head_dim].
        k_cache: [num_blocks, S, K, head_dim].
        v_cache: likewise.
        block_table: [B, M] int64, which covers every position.
        positions: [B, T] int64; −1 is padding, whose result is finite and never read.
        scaling: of the scores.

    Returns:
        [B, T, H, head_dim].
    """
    tensors = (query, k_cache, v_cache, block_table, positions)
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]
    assert query.dtype == k_cache.dtype == v_cache.dtype in (torch.float32, torch.bfloat16), query.dtype
    out = torch.empty_like(query)
    batch, length, num_heads, head_dim = query.shape
    sizes = (batch, length, num_heads, k_cache.shape[2], head_dim, k_cache.shape[1], block_table.shape[1])
    library().hispec_paged_attention(
        ctypes.c_bool(query.dtype == torch.float32),
        (ctypes.c_int64 * 7)(*sizes),
        *map(pointer, tensors),
        ctypes.c_double(scaling),
        pointer(out),
    )
    return out


@paged_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query)
