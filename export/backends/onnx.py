"""ONNX models (opset 23) of the programs, for ONNX Runtime and for whatever else reads ONNX.

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
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file

from export.attention import Form
from export.backends.backend import BuildJob
from infer.backends.eager import read_graph
from infer.backends.onnx import DATA_FILE, check_device, check_packages
from infer.package import PROGRAM_KEY

SUFFIX = ".onnx"
FORM: Form = "functional"
OPSET = 23  # the first with RMSNormalization, RotaryEmbedding and Attention
LEAST_EXTERNAL = 1024  # bytes: smaller tensors may be shapes, which must stand in the model
ALIGNMENT = 64  # bytes in the data file, for the widest vector loads from its mapped pages


def check_available(device: str, dtypes: Sequence[str]) -> None:
    """ValueError when packages are missing, or ONNX Runtime has no kernels for what is asked."""
    if device == "cpu" and "bfloat16" in dtypes:
        raise ValueError(
            "--dtype bfloat16 with --backend onnx on --device cpu: ONNX Runtime multiplies no bfloat16 matrices there; "
            "export onnx with --dtype float32, and bfloat16 with --backend inductor,eager"
        )
    check_packages("onnx", "onnxscript", "onnxruntime")
    check_device(device)


def versions() -> dict[str, str]:
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__}


def build(job: BuildJob) -> dict[str, dict[str, int]]:
    """Convert every program; one data file for all."""
    import onnx
    import onnx_ir

    with (job.folder / DATA_FILE).open("wb") as file:
        data = _DataFile(file)
        for name in job.names:
            start = time.perf_counter()
            tensors = load_file(job.graphs.weights_file(name), job.device)
            exported = read_graph(job.graphs.graph_file(name, FORM), tensors)
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
            onnx_ir.save(model, job.folder / f"{name}{SUFFIX}")
            job.report(f"converted {name} in {time.perf_counter() - start:.0f} s")
    for name in job.names:
        onnx.checker.check_model(job.folder / f"{name}{SUFFIX}")
    return {name: {} for name in job.names}


def _convert(exported: torch.export.ExportedProgram) -> Any:
    """The graph as an `onnx_ir.Model`, its dimensions as dynamic as they were."""
    num_inputs, num_outputs = (len(exported.graph_signature.user_inputs), len(exported.graph_signature.user_outputs))
    with _quiet():
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            input_names=_input_names(num_inputs),
            output_names=["states", *_kv_names(num_outputs - 1, "new_")],
        )
    assert program is not None
    return program.model


def _input_names(number: int) -> list[str]:
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
