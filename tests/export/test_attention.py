"""Attention over pages: a token's bits are the same in any company, on every processor."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from export import attention
from export.attention import Pages, fold_factor, folds_exactly, page_mask, paged_attention
from export.bitwise import ENOUGH
from tests.tiny_engine import DEVICE

NUM_KV_HEADS, HEAD_DIM, BLOCK, PAST, BATCH = 2, 64, 16, 300, 3
CPU = torch.device("cpu")


class Layer:
    """One layer's attention over pages of B rows, which share nothing; queries, keys and values of ENOUGH tokens."""

    def __init__(self, groups: int, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(groups)
        heads = NUM_KV_HEADS * groups
        self.fold = fold_factor(heads, NUM_KV_HEADS, HEAD_DIM, dtype, DEVICE)
        per_row = -(-(PAST + ENOUGH) // BLOCK)
        shapes = [(BATCH, n, ENOUGH, HEAD_DIM) for n in (heads, NUM_KV_HEADS, NUM_KV_HEADS)]
        self.query, *self.new = (torch.randn(shape, generator=draw).to(DEVICE, dtype) for shape in shapes)
        page = (1 + BATCH * per_row, BLOCK, NUM_KV_HEADS, HEAD_DIM)
        self.pages = [torch.randn(page, generator=draw).to(DEVICE, dtype) for _ in "kv"]
        self.table = torch.arange(BATCH * per_row, 0, -1, device=DEVICE).view(BATCH, per_row)

    def entries(self, rows: slice, num_tokens: int) -> list[Tensor]:
        """Pages that hold the first so many new tokens of these rows."""
        pages = [page.clone() for page in self.pages]
        slots = self._slots(rows, self._positions(rows, slice(0, num_tokens)))
        for page, new in zip(pages, self.new, strict=True):
            page.view(-1, NUM_KV_HEADS, HEAD_DIM)[slots] = new[rows, :, :num_tokens].transpose(1, 2)
        return pages

    def _positions(self, rows: slice, tokens: slice) -> Tensor:
        return torch.arange(PAST + tokens.start, PAST + tokens.stop, device=DEVICE).repeat(len(self.table[rows]), 1)

    def _slots(self, rows: slice, positions: Tensor) -> Tensor:
        return self.table[rows].gather(1, positions // BLOCK) * BLOCK + positions % BLOCK

    def attend(self, rows: slice, tokens: slice) -> Tensor:
        """[B, T, H, head_dim] of these rows and tokens, over pages that hold all earlier ones."""
        table, caches, module = self.table[rows], self.entries(rows, tokens.start), nn.Module()
        positions = self._positions(rows, tokens)
        told = Pages(
            slots=self._slots(rows, positions), block_table=table, positions=positions, fold=self.fold,
            mask=page_mask(positions, table.shape[1] * BLOCK, self.fold), caches={id(module): (caches[0], caches[1])},
            places=None, new=[],
        )  # fmt: skip
        query, key, value = (one[rows, :, tokens] for one in (self.query, *self.new))
        return paged_attention(module, query, key, value, None, pages=told)[0]


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_bits_that_it_has_alone(groups: int, dtype: torch.dtype) -> None:
    layer, rows = Layer(groups, dtype), slice(0, BATCH)
    alone = [[layer.attend(slice(b, b + 1), slice(t, t + 1))[0, 0] for t in range(ENOUGH)] for b in range(BATCH)]
    for start, stop in ((0, 2), (3, 8), (0, 11), (0, ENOUGH)):
        got = layer.attend(rows, slice(start, stop))
        for b in range(BATCH):
            for t in range(start, stop):
                assert torch.equal(got[b, t - start], alone[b][t]), (b, t)


@pytest.mark.parametrize("groups", [1, 3, 4])
def test_rows_that_fill_a_fold_up_change_nothing(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "folds_exactly", lambda *_: False)
    layer, rows = Layer(groups, torch.float32), slice(0, BATCH)
    assert layer.fold == 4
    got = layer.attend(rows, slice(0, 5))
    cached = layer.entries(rows, 5)
    for b in range(BATCH):
        keys, values = (page[layer.table[b]].flatten(0, 1)[: PAST + 5].transpose(0, 1) for page in cached)
        for t in range(5):
            query = layer.query[b, :, t].unflatten(0, (NUM_KV_HEADS, groups))
            scores = query @ keys[:, : PAST + t + 1].transpose(1, 2) / math.sqrt(HEAD_DIM)
            expected = (scores.softmax(-1) @ values[:, : PAST + t + 1]).flatten(0, 1)
            torch.testing.assert_close(got[b, t], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("groups", "least", "filled_up"), [(1, 2, 4), (2, 2, 4), (3, 3, 4), (4, 4, 4), (7, 7, 8)])
def test_a_fold_is_filled_up_to_four_rows_where_products_want_it(
    groups: int, least: int, filled_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = F.scaled_dot_product_attention

    def by_fours(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor) -> Tensor:
        """A library whose last rows, where they are no four, come from another kernel. Seen: MKL on an AMD EPYC."""
        out = exact(query.double(), key.double(), value.double(), attn_mask=attn_mask)
        out[:, :, query.shape[2] // 4 * 4 :] += 1e-5
        return out.to(query.dtype)

    def by_single_rows(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor) -> Tensor:
        return exact(query.double(), key.double(), value.double(), attn_mask=attn_mask).to(query.dtype)

    for library, expected in ((by_fours, filled_up), (by_single_rows, least)):
        folds_exactly.cache_clear()
        monkeypatch.setattr(attention.F, "scaled_dot_product_attention", library)
        assert fold_factor(6 * groups, 6, HEAD_DIM, torch.float32, CPU) == expected
    assert fold_factor(6 * groups, 6, HEAD_DIM, torch.float32, torch.device("cuda")) == least, "its products are others"
    folds_exactly.cache_clear()
