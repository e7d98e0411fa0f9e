"""Attention token by token: what the folded form computes, and the same bits in any company, on every processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from export import attention
from export.attention import (
    MOST_BY_TOKEN,
    Pages,
    default_attention,
    fold_factor,
    folds_exactly,
    page_mask,
    paged_attention,
    paged_attention_by_token,
)
from export.backends import inductor
from export.graphs import Graphs
from export.programs import export_program, make_programs
from infer.backends.eager import read_graph
from tests.export.test_programs import BLOCK, paged_call
from tests.export.tiny_exits import ALL_HEADS, make_early_exit

NUM_KV_HEADS, HEAD_DIM, PAST, NUM_BLOCKS = 2, 16, 40, 64
LONGEST = MOST_BY_TOKEN + 3


class Layer:
    """One layer's attention over pages of B rows, which share nothing; queries, keys and values of LONGEST tokens."""

    def __init__(self, groups: int, dtype: torch.dtype, batch: int = 3) -> None:
        draw = torch.Generator().manual_seed(groups)
        self.groups = groups
        num_heads = NUM_KV_HEADS * groups
        self.queries = torch.randn(batch, num_heads, LONGEST, HEAD_DIM, generator=draw).to(dtype)
        self.new = [torch.randn(batch, NUM_KV_HEADS, LONGEST, HEAD_DIM, generator=draw).to(dtype) for _ in range(2)]
        self.pages = [torch.randn(NUM_BLOCKS, BLOCK, NUM_KV_HEADS, HEAD_DIM, generator=draw).to(dtype) for _ in "kv"]
        per_row = (PAST + LONGEST - 1) // BLOCK + 1
        self.table = torch.arange(batch * per_row, 0, -1).view(batch, per_row)

    def attend(self, form: Callable[..., Any], rows: slice, tokens: slice) -> Tensor:
        """[B, T, H, head_dim] of these rows and tokens, over pages that hold all earlier ones."""
        pages = [page.clone() for page in self.pages]
        table = self.table[rows]
        for start, stop in ((0, tokens.start), (tokens.start, tokens.stop)):
            positions = torch.arange(PAST + start, PAST + stop).repeat(len(table), 1)
            slots = table.gather(1, positions // BLOCK) * BLOCK + positions % BLOCK
            if stop == tokens.start:
                for page, new in zip(pages, self.new, strict=True):
                    page.view(-1, *page.shape[2:])[slots] = new[rows, :, start:stop].transpose(1, 2)
        module = torch.nn.Module()
        told = Pages(
            slots=slots, block_table=table, positions=positions, caches={id(module): (pages[0], pages[1])}, places=None,
            mask=page_mask(positions, table.shape[1] * BLOCK, fold_factor(self.groups, 1)), new=[],
        )  # fmt: skip
        query, key, value = (one[rows, :, tokens] for one in (self.queries, *self.new))
        return form(module, query, key, value, None, pages=told)[0]


@pytest.mark.filterwarnings("ignore:Pred is a Python constant")  # here, unlike in an exported program
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_folded_form_and_a_token_has_the_same_bits_in_any_company(groups: int, dtype: torch.dtype) -> None:
    layer, rows = Layer(groups, dtype), slice(0, 3)
    for start, stop in ((0, 1), (0, 2), (3, 8), (0, MOST_BY_TOKEN), (0, LONGEST)):
        span = slice(start, stop)
        got, folded = layer.attend(paged_attention_by_token, rows, span), layer.attend(paged_attention, rows, span)
        torch.testing.assert_close(got, folded, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)
        if stop - start <= MOST_BY_TOKEN:
            for row in range(3):
                for token in range(start, stop):
                    one = slice(row, row + 1), slice(token, token + 1)
                    alone = layer.attend(paged_attention_by_token, *one)
                    assert torch.equal(got[row, token - start], alone[0, 0]), (row, token)


def test_the_form_is_chosen_by_what_products_do_here(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = "portable" if folds_exactly(3, 64, torch.float32) else "by_token"
    assert default_attention("cpu", 3, 64, torch.float32) == chosen
    exact = F.scaled_dot_product_attention

    def in_another_order(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor) -> Tensor:
        """A library that adds up otherwise from eight rows on."""
        out = exact(query.double(), key.double(), value.double(), attn_mask=attn_mask)
        return (out + (1e-6 if query.shape[2] >= 8 else 0)).to(query.dtype)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", in_another_order)
    assert default_attention("cpu", 3, 64, torch.float32) == "by_token"
    assert default_attention("cuda", 3, 64, torch.float32) != "by_token", "its products are others"


def loaded(graphs: Graphs, name: str, folder: Path, backend: str) -> Callable[..., Any]:
    file, weights = graphs.graph_file(name, "inplace"), graphs.weights_file(name)
    if backend == "eager":
        return read_graph(file, load_file(weights)).module(check_guards=False).forward
    job = inductor._Job(
        name=name, graph_file=file, weights_file=weights, package=folder / f"{name}.pt2", device="cpu", autotune=False,
        num_threads=torch.get_num_threads(),
    )  # fmt: skip
    inductor._write_package(job, autotune=False)
    package = torch._inductor.aoti_load_package(str(job.package))
    return lambda x, positions, slots, table, kv: package(x, positions, slots, table, kv)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_programs_take_both_branches_and_compute_what_the_folded_form_does(backend: str, tmp_path: Path) -> None:
    """Inductor must hand a branch its operands in the layout that it was lowered for."""
    model = make_early_exit("llama", ALL_HEADS)
    (program,) = (p for p in make_programs(model, BLOCK, attention="by_token") if p.name == "target.trunk")
    graphs = Graphs(tmp_path)
    graphs.write(program.name, "inplace", export_program(program))
    run = loaded(graphs, program.name, tmp_path, backend)
    (folded,) = (p for p in make_programs(model, BLOCK) if p.name == "target.trunk")
    generator = torch.Generator().manual_seed(3)
    for batch, length in ((1, 1), (2, 5), (3, MOST_BY_TOKEN), (1, MOST_BY_TOKEN + 1), (2, 40)):
        x = torch.randn(batch, length, model.family.hidden_size, generator=generator)
        args = paged_call(model, x, 17, NUM_BLOCKS, len(program.kv_layers))
        mine = (*args[:4], [page.clone() for page in args[4]])
        with torch.no_grad():
            expected, got = folded.module(*args), run(*mine)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        for written, wanted in zip(mine[4], args[4], strict=True):
            torch.testing.assert_close(written, wanted, rtol=1e-4, atol=1e-4)
