"""Attention over pages, registered with transformers under one name for each form.

Both write this call's keys and values into their pages and are causal by positions. The portable form gathers each
row's pages and lets SDPA attend with the query heads of one KV head folded into rows; the Triton form, for GPUs, reads
the pages where they lie (`infer.triton_attention`). This file knows nothing of models or tiers.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, H query heads, K kv heads, G = H / K

from __future__ import annotations

import importlib.util
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

Attention = Literal["portable", "triton"]
PAGED_ATTENTION = "hispec_paged"
TRITON_ATTENTION = "hispec_paged_triton"


class Pages(NamedTuple):
    """What a span of layers needs to attend over pages: handed through the stock layers as one keyword."""

    slots: Tensor  # [B, T] int64: where each query's own key and value go; 0.. S-1 is the null block
    block_table: Tensor  # [B, M] int64, padded with any block of the row's own
    positions: Tensor  # [B, T] int64, −1 is padding
    mask: Tensor | None  # [B, 1, T·max(G, 2), M·S] bool, True where the query may look; None in the Triton form
    caches: dict[int, tuple[Tensor, Tensor]]  # id of the attention module → its (k, v) [num_blocks, S, K, head_dim]


def default_attention(device: str) -> Attention:
    """The Triton form on a GPU where the package is there, else the portable one."""
    return "triton" if device == "cuda" and importlib.util.find_spec("triton") is not None else "portable"


def attention_name(attention: Attention) -> str:
    """The name that transformers knows a form by; ValueError when the form can't be had here."""
    if attention == "portable":
        return PAGED_ATTENTION
    if attention != "triton":
        raise ValueError(f"attention={attention!r} is unknown; expected portable or triton")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("attention=triton needs the package triton: pip install triton, or use attention=portable")
    return TRITON_ATTENTION


def page_mask(positions: Tensor, num_slots: int, fold: int) -> Tensor:
    """positions [B, T] → mask [B, 1, T*fold, num_slots]: a query at position p sees cached positions ≤ p.

    A padded query (position −1) sees slot 0, so that its softmax is finite; its result is never read.
    """
    cached = torch.arange(num_slots, device=positions.device)
    visible = cached <= positions.clamp(min=0).unsqueeze(-1)  # [B, T, M*S]
    batch, length = positions.shape
    return visible.unsqueeze(2).expand(batch, length, fold, num_slots).reshape(batch, 1, length * fold, num_slots)


def fold_factor(num_heads: int, num_kv_heads: int) -> int:
    """Rows of the folded query per token. One query head per KV head is doubled: a single row would take the GEMV
    path of the kernel, whose sums come in another order than the GEMM's (DESIGN §5)."""
    return max(num_heads // num_kv_heads, 2)


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, T, head_dim]
    key: Tensor,  # [B, K, T, head_dim]
    value: Tensor,  # [B, K, T, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    pages: Pages,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write K and V to their slots, attend over the row's pages; returns [B, T, H, head_dim]."""
    k_cache, v_cache = _write(module, key, value, pages)
    batch, num_heads, length, head_dim = query.shape
    num_kv_heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    gathered_k = k_cache[pages.block_table].flatten(1, 2).transpose(1, 2)  # [B, K, M*S, head_dim]
    gathered_v = v_cache[pages.block_table].flatten(1, 2).transpose(1, 2)
    fold = fold_factor(num_heads, num_kv_heads)
    # token-major: the G query heads of one KV head stand as G rows behind each token
    folded = query.transpose(1, 2).unflatten(2, (num_kv_heads, groups)).transpose(1, 2)  # [B, K, T, G, head_dim]
    if groups == 1:
        folded = folded.expand(batch, num_kv_heads, length, fold, head_dim)
    folded = _copy(folded).view(batch, num_kv_heads, length * fold, head_dim)
    out = F.scaled_dot_product_attention(folded, gathered_k, gathered_v, attn_mask=pages.mask, scale=scaling)
    out = out.view(batch, num_kv_heads, length, fold, head_dim)[:, :, :, :groups]
    return _copy(out.transpose(1, 2)).view(batch, length, num_heads, head_dim), None


def triton_paged_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, T, head_dim]
    key: Tensor,  # [B, K, T, head_dim]
    value: Tensor,  # [B, K, T, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    pages: Pages,
    **_: Any,
) -> tuple[Tensor, None]:
    """As `paged_attention`, by the kernel."""
    from infer.triton_attention import paged_attention as attend  # its package is optional

    k_cache, v_cache = _write(module, key, value, pages)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(_copy(query.transpose(1, 2)), k_cache, v_cache, pages.block_table, pages.positions, scaling), None


def _write(module: nn.Module, key: Tensor, value: Tensor, pages: Pages) -> tuple[Tensor, Tensor]:
    """This call's keys and values into their slots; returns the module's pages."""
    for cache, new in zip(pages.caches[id(module)], (key, value), strict=True):
        cache.view(-1, *cache.shape[2:]).index_put_((pages.slots,), new.transpose(1, 2))
    return pages.caches[id(module)]


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy, always: whether `reshape` copies hangs on T = 1, and export would fix that choice."""
    return tensor.clone(memory_format=torch.contiguous_format)


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
AttentionInterface.register(TRITON_ATTENTION, triton_paged_attention)
