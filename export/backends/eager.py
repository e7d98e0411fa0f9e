"""The exported graph as JSON, its weights as safetensors: nothing pickled, and each weight in one place."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._export.serde.serialize import serialize
from torch.export import ExportedProgram

from infer.package import PROGRAM_KEY

SUFFIX = ".graph.json"


def build(exported: ExportedProgram, program_file: Path, weights_file: Path, name: str) -> None:
    """Write the graph without its tensors to `program_file`, and the tensors by name to `weights_file`, which also
    holds the program's own `name`."""
    stored = serialize(exported, serialize_state_dict=False, serialize_constants=False, serialize_example_inputs=False)
    program_file.write_bytes(stored.exported_program)
    save_file(_tensors(exported), weights_file, {PROGRAM_KEY: name})


def _tensors(exported: ExportedProgram) -> dict[str, Tensor]:
    """Parameters, buffers and constants by name. Only those that the graph reads; each with a storage of its own."""
    signature = exported.graph_signature
    used = {spec.target for spec in signature.input_specs if spec.target is not None}
    found = {**exported.constants, **exported.state_dict}
    assert used <= found.keys(), used - found.keys()
    assert all(isinstance(found[name], torch.Tensor) for name in used), used
    return {name: found[name].detach().clone().contiguous() for name in sorted(used)}
