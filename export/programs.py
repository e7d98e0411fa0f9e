"""The programs of an artifact: which there are, on what inputs they are exported, and that nothing was fixed silently.

Names are `<tier>.trunk`, `<exit>.exit`, `unembed` and `<exit>.unembed`. This file knows no backend and no folder.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, K kv heads, D hidden, E exit size, N tokens

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config

from export.attention import Attention, Form, attention_name
from export.tier import FlatExit, LayerExit, Trunk, Unembed
from train.heads import ExitHead
from train.model import EarlyExitModel

TARGET = "target"
EXAMPLE_BATCH, EXAMPLE_LENGTH = 2, 5  # not 1, and not each other's factor: export would fix or merge them
EXAMPLE_BLOCKS_PER_ROW, EXAMPLE_NUM_BLOCKS, EXAMPLE_TOKENS = 3, 64, 7


class Span(NamedTuple):
    """A tier: base layers [start, stop), named after its exit."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """One function to export."""

    name: str
    module: nn.Module
    kind: Literal["trunk", "exit", "flat"]  # flat: [N, .] → [N, .]
    inputs: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    kv_layers: tuple[int, ...] = ()


def tier_spans(model: EarlyExitModel) -> list[Span]:
    """One tier for each exit by depth, and the target's."""
    stops = [(e.name, e.layer) for e in model.exits] + [(TARGET, model.family.num_layers)]
    starts = [0] + [stop for _, stop in stops[:-1]]
    return [Span(name, start, stop) for start, (name, stop) in zip(starts, stops)]


def make_programs(
    model: EarlyExitModel, block_size: int, form: Form = "inplace", attention: Attention = "portable"
) -> list[Program]:
    """All programs of `model`, whose base and heads already have the artifact's dtype.

    KV layers are numbered: the base's, then one for each `layer` exit in order. Programs of both forms have the same
    names, arguments and weights; those without pages are the same programs.
    """
    assert form != "functional" or attention == "portable", "the kernel reads pages that hold all entries"
    model.family.use_attention(attention_name(attention))
    return list(_programs(model, block_size, form))


def _programs(model: EarlyExitModel, block_size: int, form: Form) -> Iterator[Program]:
    family = model.family
    heads = cast(dict[str, ExitHead], model.heads)
    for span in tier_spans(model):
        layers = tuple(range(span.start, span.stop))
        trunk = Trunk(family, span.start, span.stop, form)
        yield _paged(f"{span.name}.trunk", "trunk", trunk, layers, model, block_size)
    next_layer = family.num_layers
    for exit_ in model.exits:
        head, name = heads[exit_.name], f"{exit_.name}.exit"
        if exit_.has_layer:
            width = family.hidden_size * (2 if exit_.context else 1)
            yield _paged(name, "exit", LayerExit(family, head, form), (next_layer,), model, block_size, width)
            next_layer += 1
        else:
            yield _flat(name, FlatExit(family, head), family.hidden_size, model)
    yield _flat(f"{TARGET}.exit", FlatExit(family, None), family.hidden_size, model)
    yield _flat("unembed", Unembed(family), family.exit_size, model)
    for name, ids in model.draft_vocabs.items():
        yield _flat(f"{name}.unembed", Unembed(family, ids), family.exit_size, model)


def export_program(program: Program) -> ExportedProgram:
    """The program as a graph with every declared dimension dynamic; an error if export fixed one of them."""
    with _config.patch(backed_size_oblivious=True), torch.no_grad():  # type: ignore[attr-defined]
        exported = torch.export.export(program.module.eval(), program.inputs, dynamic_shapes=program.dynamic_shapes)
    check_dynamic(program, exported)
    exported.example_inputs = None  # they hold pages, and an archive would carry them pickled
    for node in exported.graph.nodes:  # lines of this machine's files: nobody else's, and no part of the program
        node.meta.pop("stack_trace", None)
    return exported


def check_dynamic(program: Program, exported: ExportedProgram) -> None:
    """Every dimension that `program` declares must be symbolic and unbounded; ValueError names one that is not."""
    declared, _ = torch.utils._pytree.tree_flatten(program.dynamic_shapes, is_leaf=lambda leaf: isinstance(leaf, dict))
    user_inputs = set(exported.graph_signature.user_inputs)
    shapes = [node.meta["val"].shape for node in exported.graph.nodes if node.name in user_inputs]
    assert len(shapes) == len(declared), (program.name, len(shapes), len(declared))
    for number, (shape, dims) in enumerate(zip(shapes, declared)):
        for dim in dims:
            if not isinstance(shape[dim], torch.SymInt):
                raise ValueError(f"{program.name}: export fixed dimension {dim} of input {number} to {shape[dim]}")
    for symbol, bounds in exported.range_constraints.items():
        if bounds.lower > 2 or not str(bounds.upper).startswith("int_oo"):
            raise ValueError(f"{program.name}: export bounded {symbol} to [{bounds.lower}, {bounds.upper}]")


def paged_inputs(
    x: Tensor, block_size: int, num_kv_heads: int, head_dim: int, num_layers: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Example arguments of a trunk or a `layer` exit. All are independent tensors, never views of one storage:
    functionalisation would copy the whole pool back (DESIGN §5)."""
    batch, length = x.shape[:2]
    num_blocks = batch * EXAMPLE_BLOCKS_PER_ROW
    positions = torch.arange(length, device=x.device).repeat(batch, 1) + block_size + 2
    block_table = torch.arange(1, 1 + num_blocks, device=x.device).view(batch, EXAMPLE_BLOCKS_PER_ROW)
    slots = torch.gather(block_table, 1, positions // block_size) * block_size + positions % block_size
    page_shape = (EXAMPLE_NUM_BLOCKS, block_size, num_kv_heads, head_dim)
    kv = [torch.zeros(page_shape, dtype=dtype, device=x.device) for _ in range(2 * num_layers)]
    return x, positions, slots, block_table.clone(), kv


def _paged(
    name: str,
    kind: Literal["trunk", "exit"],
    module: nn.Module,
    kv_layers: tuple[int, ...],
    model: EarlyExitModel,
    block_size: int,
    width: int | None = None,
) -> Program:
    """width: of x where it holds more than hidden states."""
    family, dtype, device = model.family, model.family.unembedding.dtype, model.family.unembedding.device
    shape = (EXAMPLE_BATCH, EXAMPLE_LENGTH)
    takes_ids = kind == "trunk" and kv_layers[0] == 0
    ids = torch.zeros(shape, dtype=torch.long, device=device)
    x = ids if takes_ids else torch.zeros(*shape, width or family.hidden_size, dtype=dtype, device=device)
    rows, tokens, blocks, pool = Dim("B"), Dim("T"), Dim("M"), Dim("num_blocks")
    per_token = {0: rows, 1: tokens}
    kv_shapes = [{0: pool} for _ in range(2 * len(kv_layers))]
    return Program(
        name=name,
        module=module,
        kind=kind,
        inputs=paged_inputs(x, block_size, family.num_kv_heads, family.head_dim, len(kv_layers), dtype),
        dynamic_shapes=(per_token, per_token, per_token, {0: rows, 1: blocks}, kv_shapes),
        kv_layers=kv_layers,
    )


def _flat(name: str, module: nn.Module, width: int, model: EarlyExitModel) -> Program:
    unembedding = model.family.unembedding
    example = torch.zeros(EXAMPLE_TOKENS, width, dtype=unembedding.dtype, device=unembedding.device)
    return Program(name=name, module=module, kind="flat", inputs=(example,), dynamic_shapes=({0: Dim("N")},))
