"""What holds of every kernel that attends over pages: shared by the tests of the Triton and of the C++ one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from export.attention import Attention
from export.graphs import Graphs
from export.programs import Program, export_program, make_programs
from infer.backends.eager import read_graph
from tests.export.tiny_exits import make_early_exit
from tests.tiny_engine import DEVICE
from train.heads import ExitConfig

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]

NUM_KV_HEADS, PAST, LENGTH = 2, 51, 40  # T up to LENGTH; keys of two steps, and a border of steps among the queries


class Call:
    """Tensors of a call: rows whose pages interleave and descend, tokens at positions PAST …"""

    def __init__(
        self, attend: Kernel, head_dim: int, block_size: int, groups: int, batch: int = 1, dtype: str = "float32"
    ) -> None:
        self.attend, self.generator = attend, torch.Generator().manual_seed(head_dim + groups)
        self.dtype = getattr(torch, dtype)
        per_row = (PAST + LENGTH - 1) // block_size + 1
        num_blocks = batch * per_row + 2
        self.query = self.draw(batch, LENGTH, NUM_KV_HEADS * groups, head_dim)
        self.pages = [self.draw(num_blocks, block_size, NUM_KV_HEADS, head_dim) for _ in range(2)]
        self.block_table = torch.arange(batch * per_row, 0, -1, device=DEVICE).view(per_row, batch).T.contiguous()
        self.positions = torch.arange(PAST, PAST + LENGTH, device=DEVICE).repeat(batch, 1)
        self.scaling = head_dim**-0.5

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, self.dtype)

    def kernel(
        self, start: int = 0, stop: int = LENGTH, block_table: Tensor | None = None, rows: slice = slice(None)
    ) -> Tensor:
        """Tokens [start, stop) in a call of their own → [B, T, H, head_dim]."""
        table = self.block_table if block_table is None else block_table
        query, positions = (one[rows, start:stop].contiguous() for one in (self.query, self.positions))
        return self.attend(query, *self.pages, table[rows].contiguous(), positions, self.scaling)

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


def it_is_sdpa_and_a_token_has_the_same_bits_for_every_t(call: Call, error: float, lengths: Iterable[int]) -> None:
    whole = call.kernel()
    assert whole.dtype == call.dtype
    assert (whole.double() - call.sdpa()).abs().max() < error  # values are about 1
    for length in lengths:
        start = 7 * length % (LENGTH - length + 1)  # so that the border of steps falls everywhere
        assert torch.equal(call.kernel(start, start + length), whole[:, start : start + length]), length


def neither_other_rows_nor_a_wider_table_nor_unread_slots_change_a_bit(attend: Kernel) -> None:
    call = Call(attend, 64, 16, 3, batch=2)
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
    assert torch.equal(call.kernel(10, 14, wider, rows=slice(1, 2)), whole[1:])


def padding_is_finite_and_changes_no_other_token(attend: Kernel) -> None:
    call = Call(attend, 64, 16, 3)
    whole = call.kernel(0, 6)
    call.positions[:, 3:] = -1
    padded = call.kernel(0, 6)
    assert torch.equal(padded[:, :3], whole[:, :3])
    first = call.pages[1][call.block_table[0, 0], 0].repeat_interleave(3, dim=0)  # slot 0 is all that padding sees
    assert torch.equal(padded[0, 5], first)


def a_trunk_exports_with_the_kernel_and_equals_the_portable_form(
    family: str, attention: Attention, operator: str, folder: Path
) -> None:
    def trunk(attention: Attention) -> Program:
        exits = [ExitConfig(name="draft", layer=1, head="native")]
        model = make_early_exit(family, exits, num_hidden_layers=2).place(DEVICE)
        return make_programs(model, 16, "kernel", attention)[0]

    program, portable = trunk(attention), trunk("portable").module
    exported = export_program(program)  # all sizes stay dynamic, or it raises
    graphs = Graphs(folder)
    graphs.write(program.name, "kernel", exported)
    tensors = load_file(graphs.weights_file(program.name), str(DEVICE))
    run = read_graph(graphs.graph_file(program.name, "kernel"), tensors).module(check_guards=False)
    names = [str(node.target) for node in exported.graph.nodes]
    assert names.count(operator) == 1
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
