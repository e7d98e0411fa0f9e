"""Products with weights on a CPU: the operator `hispec::linear_cpu` (`linear.cpp`), and how a graph comes to use it.

Weights are read once for up to eight tokens, so a call of few tokens takes as long as memory needs to bring them.
"""

# Shape legend: N outputs, K inputs, P outputs of a panel, I inputs of a step (two in bfloat16)

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.export import ExportedProgram

from export.cpu_kernels.library import library, pointer

PANEL = 32  # P, as in linear.cpp
SHIM = (
    "AOTITorchError aoti_torch_cpu_linear_cpu(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, "
    "int64_t num_outputs, AtenTensorHandle* out)"
)


@torch.library.custom_op("hispec::linear_cpu", mutates_args=(), device_types="cpu")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    """x [..., K] times packed weights, plus bias [N] → [..., N]: sums in float32, of inputs from first to last.

    Args:
        x: contiguous, float32 or bfloat16.
        weight: what `pack` makes of [N, K].
        bias: [N] or None.
        num_outputs: N.
    """
    assert x.is_contiguous() and weight.is_contiguous(), (x.stride(), weight.stride())
    assert x.dtype == weight.dtype in (torch.float32, torch.bfloat16), (x.dtype, weight.dtype)
    out = x.new_empty(*x.shape[:-1], num_outputs)
    library().hispec_linear(
        ctypes.c_bool(x.dtype == torch.float32),
        (ctypes.c_int64 * 3)(x.numel() // x.shape[-1], num_outputs, x.shape[-1]),
        *map(pointer, (x, weight, bias, out)),
    )
    return out


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


def pack(weight: Tensor) -> Tensor:
    """[N, K] → [N / P, K / I, P, I], both filled up with zeros."""
    inputs = 2 if weight.dtype == torch.bfloat16 else 1
    weight = F.pad(weight, (0, -weight.shape[1] % inputs, 0, -weight.shape[0] % PANEL))
    return weight.view(weight.shape[0] // PANEL, PANEL, -1, inputs).permute(0, 2, 1, 3).contiguous()


def use_linear(exported: ExportedProgram) -> None:
    """Give every product with stored weights to the kernel, those that read one input in one call.

    Weights are packed within the graph, where Inductor folds what hangs on constants alone (`freezing`).
    """
    graph = exported.graph
    stored = {*exported.graph_signature.inputs_to_parameters, *exported.graph_signature.inputs_to_buffers}
    for group in _groups(graph, stored):
        weights = [node.args[1] for node in group]
        biases = [node.args[2] for node in group if len(node.args) > 2 and node.args[2] is not None]
        sizes = [weight.meta["val"].shape[0] for weight in weights]
        with graph.inserting_before(group[0]):
            packed = _packed(graph, weights, sum(sizes))
            bias = _joined(graph, biases) if biases else None
            call = graph.call_function(
                torch.ops.hispec.linear_cpu.default, (group[0].args[0], packed, bias, sum(sizes))
            )
            parts = [call] if len(group) == 1 else list(_split(graph, call, sizes))
        for node, part in zip(group, parts, strict=True):
            part.meta.setdefault("val", node.meta["val"])
            node.replace_all_uses_with(part)
            graph.erase_node(node)
    exported.graph_module.recompile()


def _groups(graph: fx.Graph, stored: set[str]) -> list[list[Any]]:
    """Products with stored weights by their input, and by whether they have a bias."""
    groups: dict[Any, list[Any]] = {}
    node: Any
    for node in graph.nodes:
        if node.target is torch.ops.aten.linear.default and node.args[1].name in stored:
            has_bias = len(node.args) > 2 and node.args[2] is not None
            groups.setdefault((node.args[0], has_bias), []).append(node)
    return list(groups.values())


def _joined(graph: fx.Graph, tensors: list[fx.Node]) -> fx.Node:
    return tensors[0] if len(tensors) == 1 else graph.call_function(torch.ops.aten.cat.default, (tensors,))


def _packed(graph: fx.Graph, weights: list[fx.Node], num_outputs: int) -> fx.Node:
    """`pack` of the weights, one under the other."""
    value, aten = weights[0].meta["val"], torch.ops.aten
    inputs = 2 if value.dtype == torch.bfloat16 else 1
    width, filled = value.shape[1] + -value.shape[1] % inputs, num_outputs + -num_outputs % PANEL
    whole = _joined(graph, weights)
    if (filled, width) != (num_outputs, value.shape[1]):
        whole = graph.call_function(
            aten.constant_pad_nd.default, (whole, [0, width - value.shape[1], 0, filled - num_outputs])
        )
    panels = graph.call_function(aten.view.default, (whole, [filled // PANEL, PANEL, width // inputs, inputs]))
    turned = graph.call_function(aten.permute.default, (panels, [0, 2, 1, 3]))
    return graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})


def _split(graph: fx.Graph, whole: fx.Node, sizes: list[int]) -> Iterator[fx.Node]:
    start = 0
    for size in sizes:
        yield graph.call_function(torch.ops.aten.slice.Tensor, (whole, -1, start, start + size))
        start += size
