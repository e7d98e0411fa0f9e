"""Exported graphs run by PyTorch. Graphs are JSON and weights safetensors: loading them unpickles nothing."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._export.serde.serialize import SerializedArtifact, deserialize
from torch.export import ExportedProgram

from infer.artifact import Artifact, ProgramSet
from infer.manifest import EXPORT_AGAIN
from infer.package import PROGRAM_KEY, check_owner

_NUM_QUERY_INPUTS = 4  # x, positions, slots, block_table: before the pages


def load_programs(artifact: Artifact, program_set: ProgramSet) -> dict[str, Callable[..., Any]]:
    """Program name → a call without gradients. On CPU the weights are those of the mapped files.

    Raises:
        ValueError: a file is another program's, before any tensor is read.
    """
    graphs = load_graphs(artifact, program_set)
    return {name: Call(graph.module(check_guards=False).forward) for name, graph in graphs.items()}


def load_graphs(artifact: Artifact, program_set: ProgramSet) -> dict[str, ExportedProgram]:
    """Program name → its graph over its weights.

    Raises:
        ValueError: a file is another program's, before any tensor is read.
    """
    folder, build = artifact.path / "weights" / program_set.build.dtype, program_set.build
    weights = {name: folder / f"{name}.safetensors" for name in build.programs}
    for name, path in weights.items():
        _check_owner(path, name)
    return {
        name: _load(program_set.path / program.file, weights[name], build.device, 2 * len(program.kv_layers))
        for name, program in build.programs.items()
    }


def read_graph(graph_file: Path, tensors: Mapping[str, Tensor]) -> ExportedProgram:
    """The graph in `graph_file` over `tensors` (parameters, buffers and constants by name)."""
    text = graph_file.read_bytes()
    if b"torch.ops.hispec.paged_attention." in text:
        _register_kernels(graph_file)
    specs = json.loads(text)["graph_module"]["signature"]["input_specs"]
    parameters = {spec["parameter"]["parameter_name"] for spec in specs if "parameter" in spec}
    state = {name: nn.Parameter(tensors[name], requires_grad=False) for name in parameters}
    constants = {name: tensor for name, tensor in tensors.items() if name not in parameters}
    # bytes are JSON; dicts are taken as they are, whereas bytes in their place would be unpickled
    return deserialize(SerializedArtifact(text, state, constants, {}))  # type: ignore[arg-type]


def _check_owner(weights_file: Path, program: str) -> None:
    """By its header alone."""
    try:
        with safe_open(weights_file, "pt") as file:
            check_owner(weights_file, (file.metadata() or {}).get(PROGRAM_KEY), program)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights_file}: no safetensors file ({error}); {EXPORT_AGAIN}") from error


def _register_kernels(graph_file: Path) -> None:
    """Our own operators, by which a graph for GPUs attends; ValueError where their package is missing."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"{graph_file}: attends by a Triton kernel and the package is missing: pip install triton")
    importlib.import_module("infer.triton_attention")


def _load(graph_file: Path, weights_file: Path, device: str, num_pages: int) -> ExportedProgram:
    tensors = load_file(weights_file, device)
    try:
        graph = read_graph(graph_file, tensors)
    except KeyError as error:
        raise ValueError(f"{graph_file}: {weights_file} has no {error}: not its weights; {EXPORT_AGAIN}") from error
    inputs = len(graph.graph_signature.user_inputs)
    expected = _NUM_QUERY_INPUTS + num_pages if num_pages else 1
    if inputs != expected:
        raise ValueError(f"{graph_file}: takes {inputs} tensors, expected {expected}: another program; {EXPORT_AGAIN}")
    return graph


class Call:
    """Calls a module's `forward` without autograd and without its hooks (they check what the runtime has checked)."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            return self._forward(*args)
