"""Tier programs: names, shapes that stay dynamic, and the same numbers whatever the shape."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from export.attention import PAGED_ATTENTION
from export.graphs import Graphs
from export.programs import check_dynamic, export_program, make_programs, tier_spans
from export.tier import FlatExit, Unembed
from tests.export.tiny_exits import ALL_HEADS, make_early_exit
from tests.tiny_engine import DEVICE
from train.heads import ExitConfig

BLOCK = 16
# More than a minute of compilation; the end-to-end test compiles tiers whose gates compare them at every size
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


def paged_call(model: Any, x: Tensor, past: int, num_blocks: int, num_layers: int) -> tuple[Any, ...]:
    """Arguments for tokens at positions past, past + 1, …, over pages of random content."""
    batch, length = x.shape[:2]
    per_row = (past + length - 1) // BLOCK + 1
    block_table = torch.arange(batch * per_row, 0, -1, device=DEVICE).view(batch, per_row)
    positions = torch.arange(past, past + length, device=DEVICE).repeat(batch, 1)
    slots = block_table.gather(1, positions // BLOCK) * BLOCK + positions % BLOCK
    shape = (num_blocks, BLOCK, model.family.num_kv_heads, model.family.head_dim)
    generator = torch.Generator().manual_seed(2)
    pages = [torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2 * num_layers)]
    return x.to(DEVICE), positions, slots, block_table, pages


def test_programs_have_the_names_and_pages_of_the_contract() -> None:
    model = make_early_exit("llama", ALL_HEADS)
    programs = {p.name: p.kv_layers for p in make_programs(model, BLOCK)}
    assert programs == {
        "first.trunk": (0,),
        "draft.trunk": (1,),
        "intermediate.trunk": (2,),
        "target.trunk": (3,),
        "first.exit": (),
        "draft.exit": (4,),
        "intermediate.exit": (),
        "target.exit": (),
        "unembed": (),
        "draft.unembed": (),
    }
    assert [tuple(span) for span in tier_spans(model)] == [
        ("first", 0, 1),
        ("draft", 1, 2),
        ("intermediate", 2, 3),
        ("target", 3, 4),
    ]


def test_a_dimension_that_export_fixed_is_an_error() -> None:
    program = make_programs(make_early_exit("llama", ALL_HEADS[:1], num_hidden_layers=2), BLOCK)[-1]
    fixed = torch.export.export(program.module, program.inputs)
    with pytest.raises(ValueError, match="fixed dimension 0 of input 0 to 7"):
        check_dynamic(program, fixed)


def test_a_dimension_that_export_bounded_is_an_error() -> None:
    program = make_programs(make_early_exit("llama", ALL_HEADS[:1], num_hidden_layers=2), BLOCK)[-1]
    bounded = replace(program, dynamic_shapes=({0: torch.export.Dim("N", min=4, max=9)},))
    with pytest.raises(ValueError, match="bounded"):
        export_program(bounded)


def test_a_graph_tells_nothing_of_the_machine_that_wrote_it(tmp_path: Path) -> None:
    """Lines of source files would be published with an artifact, and make another checkout's packages others."""
    graphs = Graphs(tmp_path)
    for program in make_programs(make_early_exit("llama", ALL_HEADS[:2], num_hidden_layers=3), BLOCK):
        graphs.write(program.name, "inplace", export_program(program))
        text = graphs.graph_file(program.name, "inplace").read_text()
        assert ".py" not in text and str(Path.cwd()) not in text, program.name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_any_batch_length_and_past_equals_the_module(
    exported: Callable[..., Any], backend: str, batch: int, length: int
) -> None:
    """C01: batch 1 is where export specialises; block borders are at 16."""
    made = exported("llama", backend)
    module = next(p for p in make_programs(made.model, BLOCK) if p.name == "target.trunk")
    generator = torch.Generator().manual_seed(3)
    for past in (0, 1, 15, 16, 17):
        x = torch.randn(batch, length, made.model.family.hidden_size, generator=generator)
        args = paged_call(made.model, x, past, 32, len(module.kv_layers))
        mine = (*args[:4], [page.clone() for page in args[4]])
        with torch.no_grad():
            expected, got = module.module(*args), made.programs["target.trunk"](*mine)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        for written, wanted in zip(mine[4], args[4]):
            torch.testing.assert_close(written, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_call_time_does_not_grow_with_the_pool(exported: Callable[..., Any], backend: str) -> None:
    made = exported("llama", backend)
    num_layers = len(made.infos["target.trunk"].kv_layers)

    def best_time(num_blocks: int) -> float:
        args = paged_call(made.model, torch.randn(1, 1, made.model.family.hidden_size), 20, num_blocks, num_layers)
        times = []
        for _ in range(30):
            start = time.perf_counter()
            made.programs["target.trunk"](*args)
            times.append(time.perf_counter() - start)
        return min(times)

    small, large = best_time(64), best_time(16384)
    # A program that copies the pool moves 50 MB per layer, tens of milliseconds; the call itself takes about one
    assert large < 4 * small + 0.002, (small, large)


def test_padding_changes_no_row_and_writes_to_the_null_block_only(exported: Callable[..., Any]) -> None:
    made = exported("llama", "eager")
    num_layers = len(made.infos["target.trunk"].kv_layers)
    x = torch.randn(2, 3, made.model.family.hidden_size)
    whole = paged_call(made.model, x, 14, 32, num_layers)
    padded = paged_call(made.model, x, 14, 32, num_layers)
    padded[1][1, 1:] = -1
    padded[2][1, 1:] = 0
    before = [page.clone() for page in padded[4]]
    expected, got = made.programs["target.trunk"](*whole), made.programs["target.trunk"](*padded)
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1, :1], expected[1, :1])
    touched = padded[2].flatten().unique()
    for page, old in zip(padded[4], before):
        changed = (page != old).flatten(2).any(-1).flatten().nonzero().flatten()
        assert set(changed.tolist()) <= set(touched.tolist())


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "opt-350m-shape"])
def test_the_last_exit_reproduces_the_models_logits_bit_for_bit(family: str) -> None:
    """A23: an exit at the last layer is the model itself."""
    model = make_early_exit(family, ALL_HEADS)
    fam, ids = model.family, torch.arange(3, 40).unsqueeze(0)
    fam.use_attention("sdpa")
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    with torch.no_grad():
        hidden = fam.run_layers(fam.embed(ids, positions), positions, 0, fam.num_layers)
        logits = Unembed(fam)(FlatExit(fam, None)(hidden))
        expected = model.base(ids, use_cache=False).logits
    assert torch.equal(logits, expected)


def test_a_layer_heads_own_config_follows_the_base() -> None:
    """Heads are deep copies: with a config of their own they would ignore the pages without a word."""
    model = make_early_exit("llama", [ExitConfig(name="draft", layer=1, head="layer")], num_hidden_layers=2)
    make_programs(model, BLOCK)
    assert model.heads["draft"].layer.self_attn.config._attn_implementation == PAGED_ATTENTION
