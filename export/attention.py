"""Attention over pages, registered with transformers under one name for each form.

All forms are causal by positions and know nothing of models or tiers. The portable ones bring this call's keys and
values among each row's cached ones, and let SDPA attend with the query heads of one KV head folded into rows; they see
the same keys and values and so give the same bits:

    inplace     writes the new entries into their pages, then gathers the row's pages
    functional  only reads pages: gathers them, then puts the new entries into that copy at their logical positions, and
                leaves them to its caller, who writes the pages. For backends whose outputs can't alias their inputs.

The `kernel` form writes the new entries too and reads the pages where they lie: on a GPU by Triton
(`infer.triton_attention`), on a CPU by C++ (`export.cpu_kernels`).
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, H query heads, K kv heads, G = H / K,
# F folded queries of a token (`fold_factor`)

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from export.bitwise import ENOUGH
from export.cpu_kernels import attention as cpu_kernel

Attention = Literal["portable", "triton", "cpp"]
PAGED_ATTENTION = "hispec_paged"
Form = Literal["inplace", "kernel", "functional"]
TRITON_ATTENTION = "hispec_paged_triton"
CPP_ATTENTION = "hispec_paged_cpp"
KERNELS = (TRITON_ATTENTION, CPP_ATTENTION)


class Places(NamedTuple):
    """Where the functional form puts this call's entries in the gathered copy of their row's pages.

    Padding has no place there. It repeats another entry of its row: as many writes as there are tokens, and two to one
    place say the same. Flat, since TensorRT's converter of `index_put` has no other indices of dynamic shape.
    """

    rows: Tensor  # [B·T] int64
    tokens: Tensor  # [B·T] int64: which of the row's tokens is put there
    positions: Tensor  # [B·T] int64

    @classmethod
    def of(cls, positions: Tensor) -> Places:
        """positions [B, T], −1 for padding. A row that is all padding gets its first token at 0, which only it sees."""
        batch, length = positions.shape
        rows = torch.arange(batch, device=positions.device).unsqueeze(1).expand(batch, length)
        tokens = torch.arange(length, device=positions.device).expand(batch, length)
        tokens = torch.where(positions < 0, positions.argmax(dim=1, keepdim=True), tokens)
        places = (rows, tokens, positions.gather(1, tokens).clamp(min=0))
        return cls(*(_copy(indices).view(batch * length) for indices in places))


class Pages(NamedTuple):
    """What a span of layers needs to attend over pages: handed through the stock layers as one keyword."""

    slots: Tensor  # [B, T] int64: where each query's own key and value go; 0.. S-1 is the null block
    block_table: Tensor  # [B, M] int64, padded with any block of the row's own
    positions: Tensor  # [B, T] int64, −1 is padding
    mask: Tensor | None  # [B, 1, T·F, M·S] bool, True where the query may look; None: a kernel attends
    fold: int  # F
    caches: dict[int, tuple[Tensor, Tensor]]  # id of the attention module → its (k, v) [num_blocks, S, K, head_dim]
    places: Places | None  # of the functional form; None: inplace
    new: list[Tensor]  # functional: gets each layer's new k and v in turn, each [B, T, K, head_dim]


def default_attention(form: Form, device: str) -> Attention:
    """How programs of `form` attend. On a GPU every form that writes pages has the kernel, if its package is there."""
    if form == "functional":
        return "portable"
    if device == "cuda":
        return "portable" if importlib.util.find_spec("triton") is None else "triton"
    return "cpp" if form == "kernel" else "portable"


def attention_name(attention: Attention) -> str:
    """The name that transformers knows a form by; ValueError when the form can't be had here."""
    if attention == "portable":
        return PAGED_ATTENTION
    if attention == "cpp":
        return CPP_ATTENTION
    if attention != "triton":
        raise ValueError(f"attention={attention!r} is unknown; expected portable, triton or cpp")
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


def fold_factor(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """F, at least G: the least number of rows of the folded query per token that is exact here.

    A single row takes the GEMV path of the kernel, whose sums come in another order than the GEMM's (DESIGN §5). On
    AMD's processors the order depends on the number of rows where that is no multiple of four, in both dtypes.
    """
    groups = num_heads // num_kv_heads
    least, fours = max(groups, 2), -(-groups // 4) * 4
    return least if device.type != "cpu" or folds_exactly(least, head_dim, dtype) else fours


@functools.cache
@torch.no_grad()
def folds_exactly(fold: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether SDPA gives F queries of one token the same bits beside those of other tokens, on this processor.

    Tried in the calls that decoding makes of a row, and with many heads: in bfloat16 most sums of another order are
    rounded to the same number.
    """
    draw, num_heads = torch.Generator().manual_seed(0), 16

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    for num_slots in (80, 256, 704):
        query = torch.randn(1, num_heads, ENOUGH * fold, head_dim, generator=draw).to(dtype)
        cached = torch.randn(2, 1, num_heads, num_slots, head_dim, generator=draw).to(dtype).unbind()
        alone = torch.cat([attend(one, *cached) for one in query.split(fold, 2)], 2)
        for end in range(2 * fold, ENOUGH * fold + 1, fold):
            if not torch.equal(attend(query[:, :, :end], *cached), alone[:, :, :end]):
                return False
    return True


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
    """Attend over the row's pages and this call's own K and V; returns [B, T, H, head_dim]."""
    batch, num_heads, length, head_dim = query.shape
    num_kv_heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    caches = pages.caches[id(module)]
    entries = [_entries(cache, new.transpose(1, 2), pages) for cache, new in zip(caches, (key, value))]
    cached_k, cached_v = (one.transpose(1, 2) for one in entries)  # [B, K, M*S, head_dim]
    # token-major: the G query heads of one KV head stand as rows behind each token, then F - G zeros
    folded = query.transpose(1, 2).unflatten(2, (num_kv_heads, groups)).transpose(1, 2)  # [B, K, T, G, head_dim]
    if pages.fold > groups:
        folded = F.pad(folded, (0, 0, 0, pages.fold - groups))
    folded = _copy(folded).view(batch, num_kv_heads, length * pages.fold, head_dim)
    out = F.scaled_dot_product_attention(folded, cached_k, cached_v, attn_mask=pages.mask, scale=scaling)
    out = out.view(batch, num_kv_heads, length, pages.fold, head_dim)[:, :, :, :groups]
    return _copy(out.transpose(1, 2)).view(batch, length, num_heads, head_dim), None


def _entries(cache: Tensor, new: Tensor, pages: Pages) -> Tensor:
    """The entries of each row's pages by position [B, M*S, K, head_dim], `new` [B, T, K, head_dim] among them."""
    if pages.places is None:
        _write(cache, new, pages)
        return cache[pages.block_table].flatten(1, 2)
    rows, tokens, positions = pages.places
    pages.new.append(new)
    return cache[pages.block_table].flatten(1, 2).index_put((rows, positions), new[rows, tokens])


def kernel_attention(
    attend: Callable[..., Tensor],
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
    """As `paged_attention`, inplace, by the kernel `attend`."""
    caches = pages.caches[id(module)]
    for cache, new in zip(caches, (key, value), strict=True):
        _write(cache, new.transpose(1, 2), pages)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(_copy(query.transpose(1, 2)), *caches, pages.block_table, pages.positions, scaling), None


def _triton(*arguments: Any) -> Tensor:
    from infer.triton_attention import paged_attention as attend  # its package is optional

    return attend(*arguments)


def _write(cache: Tensor, new: Tensor, pages: Pages) -> None:
    """new [B, T, K, head_dim] into its slots."""
    cache.view(-1, *cache.shape[2:]).index_put_((pages.slots,), new)


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy, always: whether `reshape` copies hangs on T = 1, and export would fix that choice."""
    return tensor.clone(memory_format=torch.contiguous_format)


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
AttentionInterface.register(TRITON_ATTENTION, functools.partial(kernel_attention, _triton))
AttentionInterface.register(CPP_ATTENTION, functools.partial(kernel_attention, cpu_kernel.paged_attention))
