"""The graphs of one dtype's programs on disk, in the eager form: what every backend builds from.

A graph is JSON, its weights are safetensors: nothing pickled, and while one backend compiles no other weights are held.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch._export.serde.serialize import serialize
from torch.export import ExportedProgram

from export.attention import Form
from infer.package import PROGRAM_KEY

GRAPH_SUFFIX = ".graph.json"


class Graphs:
    """A folder of graphs, one for each program and form. The weights of a program are the same in both forms."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def graph_file(self, name: str, form: Form) -> Path:
        return self._folder / form / f"{name}{GRAPH_SUFFIX}"

    def weights_file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def write(self, name: str, form: Form, exported: ExportedProgram) -> None:
        """Write the graph without its tensors, and these by name (with the program's own) unless another form has."""
        stored = serialize(
            exported, serialize_state_dict=False, serialize_constants=False, serialize_example_inputs=False
        )
        graph, weights = self.graph_file(name, form), self.weights_file(name)
        graph.parent.mkdir(parents=True, exist_ok=True)
        graph.write_bytes(stored.exported_program)
        tensors = _tensors(exported)
        if not weights.exists():
            save_file(tensors, weights, {PROGRAM_KEY: name})
            return
        with safe_open(weights, "pt") as file:
            assert set(file.keys()) == tensors.keys(), (name, form, set(file.keys()) ^ tensors.keys())


def _tensors(exported: ExportedProgram) -> dict[str, Tensor]:
    """Parameters, buffers and constants by name. Only those that the graph reads; each with a storage of its own."""
    signature = exported.graph_signature
    used = {spec.target for spec in signature.input_specs if spec.target is not None}
    found = {**exported.constants, **exported.state_dict}
    assert used <= found.keys(), used - found.keys()
    assert all(isinstance(found[name], torch.Tensor) for name in used), used
    return {name: found[name].detach().clone().contiguous() for name in sorted(used)}
