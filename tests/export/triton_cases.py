"""What holds of the Triton kernel; `test_triton_attention` runs this file, in Triton's interpreter or on a GPU."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from export.backends import eager
from export.programs import Program, export_program, make_programs
from infer.backends.eager import read_graph
from infer.triton_attention import paged_attention
from tests.export.tiny_exits import make_early_exit
from tests.tiny_engine import DEVICE
from train.heads import ExitConfig

NUM_KV_HEADS, PAST, LENGTH = 2, 51, 40  # T up to LENGTH; keys of two steps, and a border of steps among the queries
QUICK = [(64, 16, 3), (80, 32, 4), (128, 16, 1)]
SHAPES = [
    pytest.param(*shape, marks=[] if shape in QUICK else [pytest.mark.slow])
    for shape in [(head_dim, size, groups) for head_dim in (64, 80, 128) for size in (16, 32) for groups in (1, 3, 4)]
]


class Call:
    """Tensors of a call: rows whose pages interleave and descend, tokens at positions PAST …"""

    def __init__(self, head_dim: int, block_size: int, groups: int, batch: int = 1, dtype: str = "float32") -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(head_dim + groups), getattr(torch, dtype)
        per_row = (PAST + LENGTH - 1) // block_size + 1
        num_blocks = batch * per_row + 2
        self.query = self.draw(batch, LENGTH, NUM_KV_HEADS * groups, head_dim)
        self.pages = [self.draw(num_blocks, block_size, NUM_KV_HEADS, head_dim) for _ in range(2)]
        self.block_table = torch.arange(batch * per_row, 0, -1, device=DEVICE).view(per_row, batch).T.contiguous()
        self.positions = torch.arange(PAST, PAST + LENGTH, device=DEVICE).repeat(batch, 1)
        self.scaling = head_dim**-0.5

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, self.dtype)

    def kernel(self, start: int = 0, stop: int = LENGTH, block_table: Tensor | None = None) -> Tensor:
        """Tokens [start, stop) in a call of their own → [B, T, H, head_dim]."""
        query, positions = self.query[:, start:stop].contiguous(), self.positions[:, start:stop].contiguous()
        table = self.block_table if block_table is None else block_table
        return paged_attention(query, *self.pages, table, positions, self.scaling)

    def sdpa(self) -> Tensor:
        """The same in float64."""
        groups = self.query.shape[2] // NUM_KV_HEADS
        keys, values = (
            pages[self.block_table].flatten(1, 2).transpose(1, 2).repeat_interleave(groups, dim=1).double()
            for pages in self.pages
        )
        seen = torch.arange(keys.shape[2], device=DEVICE) <= self.positions.clamp(min=0).unsqueeze(-1)
        query = self.query.transpose(1, 2).double()
        mask = seen.unsqueeze(1)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scaling).transpose(1, 2)


@pytest.mark.parametrize(("head_dim", "block_size", "groups"), SHAPES)
def test_it_is_sdpa_and_a_token_has_the_same_bits_for_every_t(head_dim: int, block_size: int, groups: int) -> None:
    call = Call(head_dim, block_size, groups)
    whole = call.kernel()
    assert (whole - call.sdpa()).abs().max() < 1e-5
    lengths = (1, 2, 5, 16, 17) if (head_dim, block_size, groups) in QUICK else range(1, LENGTH)
    for length in lengths:
        start = 7 * length % (LENGTH - length + 1)  # so that the border of steps falls everywhere
        assert torch.equal(call.kernel(start, start + length), whole[:, start : start + length]), length


def test_half_precision_has_the_same_bits_too() -> None:
    # the interpreter multiplies the bits of bf16 as integers
    dtype, error = ("bfloat16", 1e-2) if DEVICE.type == "cuda" else ("float16", 1e-3)
    call = Call(64, 16, 3, dtype=dtype)
    whole = call.kernel()
    assert whole.dtype == call.dtype
    assert (whole.double() - call.sdpa()).abs().max() < error  # values are about 1
    for length in (1, 4, 7):
        assert torch.equal(call.kernel(20, 20 + length), whole[:, 20 : 20 + length])


def test_neither_other_rows_nor_a_wider_table_nor_unread_slots_change_a_bit() -> None:
    call = Call(64, 16, 3, batch=2)
    whole = call.kernel(10, 14)
    assert not torch.equal(whole[0], whole[1])
    wider = torch.cat([call.block_table, torch.full_like(call.block_table, call.pages[0].shape[0] - 1)], dim=1)
    for pages in call.pages:
        pages[0] = pages[-1] = torch.nan  # blocks that no row owns
        for row in range(2):  # slots behind the last query
            first = PAST + 14
            pages[call.block_table[row, first // 16], first % 16 :] = torch.nan
            pages[call.block_table[row, first // 16 + 1 :]] = torch.nan
    assert torch.equal(call.kernel(10, 14, wider), whole)
    alone = paged_attention(
        call.query[1:, 10:14].contiguous(), *call.pages, wider[1:].contiguous(), call.positions[1:, 10:14], call.scaling
    )
    assert torch.equal(alone, whole[1:])


def test_padding_is_finite_and_changes_no_other_token() -> None:
    call = Call(64, 16, 3)
    whole = call.kernel(0, 6)
    call.positions[:, 3:] = -1
    padded = call.kernel(0, 6)
    assert torch.equal(padded[:, :3], whole[:, :3])
    first = call.pages[1][call.block_table[0, 0], 0].repeat_interleave(3, dim=0)  # slot 0 is all that padding sees
    assert torch.equal(padded[0, 5], first)


@pytest.mark.parametrize("family", ["llama", "opt", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_trunk_exports_with_the_kernel_and_equals_the_portable_form(family: str, tmp_path: Path) -> None:
    def trunk(attention: str) -> Program:
        exits = [ExitConfig(name="draft", layer=1, head="native")]
        model = make_early_exit(family, exits, num_hidden_layers=2).place(DEVICE)
        return make_programs(model, 16, attention=attention)[0]  # type: ignore[arg-type]

    program, portable = trunk("triton"), trunk("portable").module
    exported = export_program(program)  # all sizes stay dynamic, or it raises
    eager.build(exported, tmp_path / "graph.json", tmp_path / "weights.safetensors")
    tensors = load_file(tmp_path / "weights.safetensors", str(DEVICE))
    run = read_graph(tmp_path / "graph.json", tensors).module(check_guards=False)
    names = [str(node.target) for node in exported.graph.nodes]
    assert names.count("hispec.paged_attention.default") == 1
    assert not [name for name in names if "scaled_dot_product" in name or "aten.le" in name]
    generator = torch.Generator().manual_seed(3)
    _, _, _, _, kv = program.inputs
    for batch, length, num_blocks in ((1, 1, 2), (3, 6, 4)):
        pages = [torch.randn(20, *page.shape[1:], generator=generator).to(DEVICE) for page in kv]
        tables = torch.arange(1, 1 + batch * num_blocks, device=DEVICE).view(batch, num_blocks)
        positions = torch.arange(17, 17 + length, device=DEVICE).repeat(batch, 1)
        slots = tables.gather(1, positions // 16) * 16 + positions % 16
        positions[0, 1:], slots[0, 1:] = -1, 0  # padding
        ids = torch.randint(128, (batch, length), generator=generator).to(DEVICE)
        theirs = [page.clone() for page in pages]
        with torch.no_grad():
            got = run(ids, positions, slots, tables, pages)
            expected = portable(ids, positions, slots, tables, theirs)
        is_real = positions >= 0
        assert (got - expected)[is_real].abs().max() < 1e-5 * expected.abs().max()
        assert all(torch.equal(a[1:], b[1:]) for a, b in zip(pages, theirs, strict=True))
