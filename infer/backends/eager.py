"""Exported graphs run by PyTorch. Graphs are JSON and weights safetensors: loading them unpickles nothing."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._export.serde.serialize import SerializedArtifact, deserialize
from torch.export import ExportedProgram

from infer.artifact import Artifact, ProgramSet


def load_programs(artifact: Artifact, program_set: ProgramSet) -> dict[str, Callable[..., Any]]:
    """Program name → a call without gradients. On CPU the weights are those of the mapped files."""
    weights = artifact.path / "weights" / program_set.build.dtype
    return {
        name: _load(program_set.path / program.file, weights / f"{name}.safetensors", program_set.build.device)
        for name, program in program_set.build.programs.items()
    }


def read_graph(graph_file: Path, tensors: Mapping[str, Tensor]) -> ExportedProgram:
    """The graph in `graph_file` over `tensors` (parameters, buffers and constants by name)."""
    text = graph_file.read_bytes()
    if b"torch.ops.hispec." in text:
        _register_kernels(graph_file)
    specs = json.loads(text)["graph_module"]["signature"]["input_specs"]
    parameters = {spec["parameter"]["parameter_name"] for spec in specs if "parameter" in spec}
    state = {name: nn.Parameter(tensors[name], requires_grad=False) for name in parameters}
    constants = {name: tensor for name, tensor in tensors.items() if name not in parameters}
    # bytes are JSON; dicts are taken as they are, whereas bytes in their place would be unpickled
    return deserialize(SerializedArtifact(text, state, constants, {}))  # type: ignore[arg-type]


def _register_kernels(graph_file: Path) -> None:
    """Our own operators, by which a graph for GPUs attends; ValueError where their package is missing."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"{graph_file}: attends by a Triton kernel and the package is missing: pip install triton")
    importlib.import_module("infer.triton_attention")


def _load(graph_file: Path, weights_file: Path, device: str) -> Callable[..., Any]:
    tensors = load_file(weights_file, device)
    return _Call(read_graph(graph_file, tensors).module(check_guards=False))


class _Call:
    """Calls a module without autograd and without the module's hooks (they check what the runtime has checked)."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self._module = module

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            return self._forward(*args)
