"""Eager's programs, compiled by torch.compile as they are loaded: for who prefers that to packages of export's.

Each is compiled once, for calls of every size, before the first token. Dynamo's guards are left out: what they would
ask of every call, the runtime has made sure of (`border`). CUDA graphs are the runtime's own (`cuda_graphs`), as with
other backends: those of mode="reduce-overhead" leave out programs that write to their inputs, as ours write pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.utils._pytree as pytree
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental import _config

from infer.artifact import Artifact, ProgramSet
from infer.backends.eager import Call, load_graphs

# As export's packages: weights in the order in which oneDNN reads them, matrices of one input in one product
_CPU_OPTIONS = {"freezing": True, "cpp.enable_concat_linear": True}


def load_programs(artifact: Artifact, program_set: ProgramSet) -> dict[str, Callable[..., Any]]:
    """Program name → the compiled program.

    Raises:
        ValueError: as `eager.load_programs`.
    """
    graphs = load_graphs(artifact, program_set)
    return {name: _compile(graph, program_set.build.device) for name, graph in graphs.items()}


def _compile(graph: ExportedProgram, device: str) -> Call:
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    call = Call(
        torch.compile(
            graph.module(check_guards=False).forward,
            fullgraph=True,
            options=options | (_CPU_OPTIONS if device == "cpu" else {}),
        )
    )
    # else a dimension of 1 would be a program of its own
    with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        call(*_example_inputs(graph))
    return call


def _example_inputs(graph: ExportedProgram) -> Any:
    """Arguments of the shapes that the graph was exported with, in which every dynamic dimension is marked as such."""
    names = set(graph.graph_signature.user_inputs)
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder" and node.name in names]
    args, kwargs = pytree.tree_unflatten([_example(value) for value in values], graph.call_spec.in_spec)
    assert not kwargs, kwargs
    return args


def _example(value: Tensor) -> Tensor:
    sizes = [size if isinstance(size, int) else int(size.node.hint) for size in value.shape]
    tensor = torch.zeros(sizes, dtype=value.dtype, device=value.device)
    for dim, size in enumerate(value.shape):
        if not isinstance(size, int):
            torch._dynamo.mark_dynamic(tensor, dim)
    return tensor
