"""Attention over pages, registered with transformers under one name for each form.

All forms are causal by positions and know nothing of models or tiers. The portable ones bring this call's keys and
values among each row's cached ones, and let SDPA attend with the query heads of one KV head folded into rows; they see
the same keys and values and so give the same bits:

    inplace     writes the new entries into their pages, then gathers the row's pages
    functional  only reads pages: gathers them, then puts the new entries into that copy at their logical positions, and
                leaves them to its caller, who writes the pages. For backends whose outputs can't alias their inputs.

SDPA's products are the libraries', and not on every processor does a row of a product have the same bits however many
rows stand beside it: MKL's on AMD's do not. There the inplace form attends token by token (`by_token`), in products of
one shape.

The Triton form, for GPUs, writes the new entries too and reads the pages where they lie (`infer.triton_attention`).
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, H query heads, K kv heads, G = H / K,
# F folded queries of a token (`fold_factor`)

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

Attention = Literal["portable", "by_token", "triton"]
PAGED_ATTENTION = "hispec_paged"
BY_TOKEN_ATTENTION = "hispec_paged_by_token"
Form = Literal["inplace", "functional"]
TRITON_ATTENTION = "hispec_paged_triton"
NAMES: dict[Attention, str] = {
    "portable": PAGED_ATTENTION, "by_token": BY_TOKEN_ATTENTION, "triton": TRITON_ATTENTION,
}  # fmt: skip
MOST_BY_TOKEN = 32  # tokens of a row that are attended one by one; prompts' chunks are longer, and alike for all


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
    mask: Tensor | None  # [B, 1, T·max(G, 2), M·S] bool, True where the query may look; None in the Triton form
    caches: dict[int, tuple[Tensor, Tensor]]  # id of the attention module → its (k, v) [num_blocks, S, K, head_dim]
    places: Places | None  # of the functional form; None: inplace
    new: list[Tensor]  # functional: gets each layer's new k and v in turn, each [B, T, K, head_dim]


def default_attention(device: str, fold: int, head_dim: int, dtype: torch.dtype) -> Attention:
    """The Triton form on a GPU where the package is there; else the portable one where it is exact here."""
    if device == "cuda" and importlib.util.find_spec("triton") is not None:
        return "triton"
    return "portable" if device != "cpu" or folds_exactly(fold, head_dim, dtype) else "by_token"


@torch.no_grad()
def folds_exactly(fold: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether SDPA gives F queries of one token the same bits beside those of other tokens, on this processor."""
    draw = torch.Generator().manual_seed(0)
    for num_slots in (64, 80, 256, 704):
        shapes = ((MOST_BY_TOKEN * fold, head_dim), (num_slots, head_dim), (num_slots, head_dim))
        query, key, value = (torch.randn(1, 2, *shape, generator=draw).to(dtype) for shape in shapes)
        mask = torch.ones(1, 1, MOST_BY_TOKEN * fold, num_slots, dtype=torch.bool)
        parts = zip(query.split(fold, 2), mask.split(fold, 2))
        alone = torch.cat([F.scaled_dot_product_attention(q, key, value, attn_mask=m) for q, m in parts], 2)
        for length in range(2, MOST_BY_TOKEN + 1):
            end = length * fold
            beside = F.scaled_dot_product_attention(query[:, :, :end], key, value, attn_mask=mask[:, :, :end])
            if not torch.equal(beside, alone[:, :, :end]):
                return False
    return True


def attention_name(attention: Attention) -> str:
    """The name that transformers knows a form by; ValueError when the form can't be had here."""
    if attention not in NAMES:
        raise ValueError(f"attention={attention!r} is unknown; expected {', '.join(NAMES)}")
    if attention == "triton" and importlib.util.find_spec("triton") is None:
        raise ValueError("attention=triton needs the package triton: pip install triton, or use attention=portable")
    return NAMES[attention]


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
    """Attend over the row's pages and this call's own K and V; returns [B, T, H, head_dim]."""
    cached = _entries_of(module, key, value, pages)
    queries = _folded(query, key.shape[1])
    return _unfolded(_attend_folded(queries, *cached, pages.mask, scaling), query), None


def paged_attention_by_token(
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
    """As `paged_attention`, inplace; but in calls of few tokens a product has the queries of one token alone."""
    assert pages.mask is not None, "it has one"
    keys, values = _entries_of(module, key, value, pages)
    queries = _folded(query, key.shape[1])
    num_kv_heads, (fold, head_dim) = key.shape[1], queries.shape[3:]
    block_size = pages.caches[id(module)][0].shape[1]

    def of(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, slots: Tensor, table: Tensor) -> Tensor:
            (batch, length), num_slots = slots.shape, table.shape[1] * block_size
            cached = (one.view(batch, num_kv_heads, num_slots, head_dim) for one in (key, value))
            query = query.view(batch, num_kv_heads, length, fold, head_dim)
            return _copy(attend(query, *cached, mask.view(batch, 1, length * fold, num_slots), scaling))

        return attended

    # Inductor lowers a branch for the strides that export saw and hands it what it has chosen since (torch 2.13): of
    # tensors with one dimension there is but one layout, and inputs of the program keep theirs
    operands = *(_copy(one).view(-1) for one in (queries, keys, values, pages.mask)), pages.slots, pages.block_table
    is_long = query.shape[2] > MOST_BY_TOKEN
    return _unfolded(torch.cond(is_long, of(_attend_folded), of(_attend_by_token), operands), query), None


def _folded(query: Tensor, num_kv_heads: int) -> Tensor:
    """query [B, H, T, head_dim] → [B, K, T, F, head_dim]: the query heads of one KV head stand behind each token."""
    batch, num_heads, length, head_dim = query.shape
    groups, fold = num_heads // num_kv_heads, fold_factor(num_heads, num_kv_heads)
    folded = query.transpose(1, 2).unflatten(2, (num_kv_heads, groups)).transpose(1, 2)
    if groups == 1:
        folded = folded.expand(batch, num_kv_heads, length, fold, head_dim)
    return _copy(folded)


def _unfolded(out: Tensor, query: Tensor) -> Tensor:
    """out [B, K, T, F, head_dim] → [B, T, H, head_dim], as many heads as `query` [B, H, T, head_dim] has."""
    batch, num_heads, length, head_dim = query.shape
    groups = num_heads // out.shape[1]
    return _copy(out[:, :, :, :groups].transpose(1, 2)).view(batch, length, num_heads, head_dim)


def _attend_folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """All tokens' queries in one product. query [B, K, T, F, head_dim], key and value [B, K, M·S, head_dim], mask
    [B, 1, T·F, M·S] → [B, K, T, F, head_dim]."""
    batch, num_kv_heads, length, fold, head_dim = query.shape
    rows = query.view(batch, num_kv_heads, length * fold, head_dim)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.view(batch, num_kv_heads, length, fold, head_dim)


def _attend_by_token(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """The same with a product for each token, whose shape no other token changes: SDPA's batch is B·K, its heads T."""
    batch, num_kv_heads, length, fold, head_dim = query.shape
    num_slots = key.shape[2]
    key, value = (
        one.reshape(batch * num_kv_heads, 1, num_slots, head_dim).expand(-1, length, -1, -1) for one in (key, value)
    )
    seen = mask.view(batch, 1, length, fold, num_slots)[:, :, :, :1].expand(-1, num_kv_heads, -1, -1, -1)
    seen = _copy(seen).view(batch * num_kv_heads, length, 1, num_slots)
    rows = query.view(batch * num_kv_heads, length, fold, head_dim)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=seen, scale=scaling)
    return out.view(batch, num_kv_heads, length, fold, head_dim)


def _entries_of(module: nn.Module, key: Tensor, value: Tensor, pages: Pages) -> tuple[Tensor, Tensor]:
    """The keys and the values that the queries look among, each [B, K, M·S, head_dim]."""
    caches = pages.caches[id(module)]
    keys, values = (_entries(cache, new.transpose(1, 2), pages) for cache, new in zip(caches, (key, value)))
    return keys.transpose(1, 2), values.transpose(1, 2)


def _entries(cache: Tensor, new: Tensor, pages: Pages) -> Tensor:
    """The entries of each row's pages by position [B, M*S, K, head_dim], `new` [B, T, K, head_dim] among them."""
    if pages.places is None:
        _write(cache, new, pages)
        return cache[pages.block_table].flatten(1, 2)
    rows, tokens, positions = pages.places
    pages.new.append(new)
    return cache[pages.block_table].flatten(1, 2).index_put((rows, positions), new[rows, tokens])


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
    """As `paged_attention`, inplace, by the kernel."""
    from infer.triton_attention import paged_attention as attend  # its package is optional

    caches = pages.caches[id(module)]
    for cache, new in zip(caches, (key, value), strict=True):
        _write(cache, new.transpose(1, 2), pages)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(_copy(query.transpose(1, 2)), *caches, pages.block_table, pages.positions, scaling), None


def _write(cache: Tensor, new: Tensor, pages: Pages) -> None:
    """new [B, T, K, head_dim] into its slots."""
    cache.view(-1, *cache.shape[2:]).index_put_((pages.slots,), new)


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy, always: whether `reshape` copies hangs on T = 1, and export would fix that choice."""
    return tensor.clone(memory_format=torch.contiguous_format)


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
AttentionInterface.register(BY_TOKEN_ATTENTION, paged_attention_by_token)
AttentionInterface.register(TRITON_ATTENTION, triton_paged_attention)
