"""ONNX models run by ONNX Runtime, called as the other backends' programs are.

A model is the functional form of a program. Tensors are bound by address, so that neither weights nor pages nor results
are copied; a call holds what it has bound.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.artifact import Artifact, ProgramSet
from infer.backends.functional import FlatCall, PagedCall
from infer.device import check_packages
from infer.manifest import EXPORT_AGAIN
from infer.package import PROGRAM_KEY, check_owner

DATA_FILE = "weights.bin"  # the weights of all models beside it
INSTALL = "pip install 'hispec[onnx]'"
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
ELEMENT_TYPES = {torch.float32: 1, torch.int64: 7, torch.bfloat16: 16}  # onnx.TensorProto.DataType


def check_device(device: str) -> None:
    """ValueError unless the ONNX Runtime that is installed runs on `device`."""
    import onnxruntime

    if PROVIDERS[device] not in onnxruntime.get_available_providers():
        raise ValueError(
            f"backend='onnx' on device={device!r}: the installed onnxruntime has no {PROVIDERS[device]}; "
            "put onnxruntime-gpu in its place, or use another backend"
        )


def load_programs(artifact: Artifact, program_set: ProgramSet) -> dict[str, Callable[..., Any]]:
    """Program name → a call over a session of its own."""
    check_packages("onnx", INSTALL, "onnx", "onnxruntime")
    device = program_set.build.device
    check_device(device)
    calls = dict[str, Callable[..., Any]]()
    for name, program in program_set.build.programs.items():
        model_file = program_set.path / program.file
        check_model(model_file, name)
        session = _Session(model_file, device)
        calls[name] = PagedCall(session) if program.kv_layers else FlatCall(session)
    return calls


def check_model(model_file: Path, program: str) -> None:
    """ValueError unless the model is `program`'s, and all its data lie whole in plain files beside it, checked before.

    ONNX Runtime would map what a model names, and it has not always looked where that leads.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(model_file, load_external_data=False)
    except DecodeError as error:
        raise ValueError(f"{model_file}: not an ONNX model ({error}); {EXPORT_AGAIN}") from error
    check_owner(model_file, {prop.key: prop.value for prop in model.metadata_props}.get(PROGRAM_KEY), program)
    for tensor in _tensors(model.graph, model.functions):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        told = {entry.key: entry.value for entry in tensor.external_data}
        where = f"{model_file}: {tensor.name!r} lies in {told.get('location')!r}"
        location = told.get("location", "")
        file = model_file.parent / location
        if location in ("", ".", "..") or set(location) & set("/\\:") or not location.isprintable():
            raise ValueError(f"{where}, expected a plain file name beside the model; {EXPORT_AGAIN}")
        if file.is_symlink() or not file.is_file():
            raise ValueError(f"{where}, which is no plain file beside the model; {EXPORT_AGAIN}")
        numbers = [told.get(key, "") for key in ("offset", "length")]
        if not all(number.isdecimal() for number in numbers):
            raise ValueError(f"{where} at offset, length={numbers}, expected two numbers; {EXPORT_AGAIN}")
        end, size = sum(map(int, numbers)), file.stat().st_size
        if end > size:
            raise ValueError(f"{where} up to byte {end}, but that file has {size}; {EXPORT_AGAIN}")


def _tensors(graph: Any, functions: Sequence[Any] = ()) -> Iterator[Any]:
    """Every TensorProto that a graph holds, also within its nodes and the graphs within those."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in (*graph.node, *(node for function in functions for node in function.node)):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


class _Session:
    """An InferenceSession that reads and writes PyTorch's memory."""

    def __init__(self, model_file: Path, device: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = False  # plans memory for shapes that repeat; ours grow with the text
        options.log_severity_level = 3  # errors
        # Threads of one session must not spin while another's work, nor where the user has asked for none to
        is_passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        options.add_session_config_entry("session.intra_op.allow_spinning", "0" if is_passive else "1")
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session = onnxruntime.InferenceSession(str(model_file), options, providers=[PROVIDERS[device]])
        except Exception as error:  # ONNX Runtime has a class for each of its codes, and no common one but this
            raise ValueError(
                f"{model_file}: ONNX Runtime {onnxruntime.__version__} can't load it: {error}; {EXPORT_AGAIN}"
            ) from error
        if self._session.get_providers()[0] != PROVIDERS[device]:  # it falls back to the CPU with a line in the log
            raise ValueError(f"device={device!r}: ONNX Runtime could not start its {PROVIDERS[device]}")
        self._device = device
        self._inputs = [node.name for node in self._session.get_inputs()]
        self._outputs = [node.name for node in self._session.get_outputs()]
        self.width: int = self._session.get_outputs()[0].shape[-1]  # of the first output: D, E or V

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Read `inputs` and fill `outputs`, all contiguous and of the model's dtypes and shapes, in its order."""
        binding = self._session.io_binding()
        for bind, names, tensors in (
            (binding.bind_input, self._inputs, inputs),
            (binding.bind_output, self._outputs, outputs),
        ):
            for name, tensor in zip(names, tensors, strict=True):
                assert tensor.is_contiguous(), (name, tensor.shape, tensor.stride())
                bind(name, self._device, 0, ELEMENT_TYPES[tensor.dtype], tensor.shape, tensor.data_ptr())
        if self._device == "cuda":  # ONNX Runtime has a stream of its own
            torch.cuda.current_stream().synchronize()
        self._session.run_with_iobinding(binding)
        if self._device == "cuda":
            binding.synchronize_outputs()
