"""ONNX models (opset 23) of the programs, for ONNX Runtime, TensorRT and whatever else reads ONNX.

All models of a set lie in one folder and point by plain names at one data file beside them, in which every distinct
tensor stands once: tied matrices are shared between programs, and the folder can be moved, or loaded by ONNX Runtime
without HiSpec. They don't read the artifact's weights/: those lie outside the models' folder, where ONNX Runtime
refuses to look (and rightly, known-failures C12), and they hold matrices in the other order.

Models hold graphs and numbers of a few bytes, so that no model meets protobuf's limit of 2 GB.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file

from export.backends.backend import BuildJob
from infer.backends.eager import read_graph
from infer.backends.onnx import DATA_FILE
from infer.package import PROGRAM_KEY

MODEL_SUFFIX = ".onnx"
OPSET = 23  # the first with RMSNormalization, RotaryEmbedding and Attention
WRITERS = ("onnx", "onnxscript")  # packages
LEAST_EXTERNAL = 1024  # bytes: smaller tensors may be shapes, which must stand in the model
ALIGNMENT = 64  # bytes in the data file, for the widest vector loads from its mapped pages


def write_models(job: BuildJob) -> None:
    """Write `<name>.onnx` for every program, and one data file for all, to the job's folder."""
    import onnx
    import onnx_ir

    with (job.folder / DATA_FILE).open("wb") as file:
        data = _DataFile(file)
        for name in job.names:
            start = time.perf_counter()
            tensors = load_file(job.graphs.weights_file(name), job.device)
            exported = read_graph(job.graphs.graph_file(name, "functional"), tensors)
            model = _convert(exported)
            _strip(model)
            model.metadata_props[PROGRAM_KEY] = name
            for value in model.graph.initializers.values():
                tensor = value.const_value
                if tensor is not None and tensor.nbytes >= LEAST_EXTERNAL:
                    offset = data.add(tensor.tobytes())
                    value.const_value = onnx_ir.ExternalTensor(
                        DATA_FILE, offset, tensor.nbytes, tensor.dtype,
                        shape=tensor.shape, name=value.name, base_dir=job.folder,
                    )  # fmt: skip
            onnx_ir.save(model, job.folder / f"{name}{MODEL_SUFFIX}")
            job.report(f"converted {name} in {time.perf_counter() - start:.0f} s")
    for name in job.names:
        onnx.checker.check_model(job.folder / f"{name}{MODEL_SUFFIX}")


def _convert(exported: torch.export.ExportedProgram) -> Any:
    """The graph as an `onnx_ir.Model`, its dimensions as dynamic as they were."""
    num_inputs, num_outputs = (len(exported.graph_signature.user_inputs), len(exported.graph_signature.user_outputs))
    with _quiet():
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            input_names=input_names(num_inputs),
            output_names=["states", *_kv_names(num_outputs - 1, "new_")],
        )
    assert program is not None
    return program.model


def input_names(number: int) -> list[str]:
    """Of a model with so many inputs, in order."""
    flat = ["x", "positions", "slots", "block_table"]
    return flat[:number] + _kv_names(number - len(flat), "")


def _kv_names(number: int, prefix: str) -> list[str]:
    return [f"{prefix}{'kv'[i % 2]}{i // 2}" for i in range(number)]


def _strip(model: Any) -> None:
    """Take out what the exporter notes of the Python code: paths of this machine, and most of the file's bytes."""
    import onnx_ir

    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.clear()
        for output in node.outputs:
            output.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells the log which of torchvision's operators it does without, and calls what is deprecated."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


class _DataFile:
    """Tensors one behind the other, equal ones once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offsets: dict[bytes, int] = {}

    def add(self, content: bytes) -> int:
        """Where `content` begins."""
        key = hashlib.sha256(content).digest()
        if key not in self._offsets:
            self._file.write(bytes(-self._file.tell() % ALIGNMENT))
            self._offsets[key] = self._file.tell()
            self._file.write(content)
        return self._offsets[key]
