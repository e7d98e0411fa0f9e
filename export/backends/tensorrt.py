"""TensorRT engines: the functional form compiled by torch-tensorrt for the GPU at hand, weights inside.

An engine is the plain plan that TensorRT's own runtime loads: nothing pickled, and serving needs no torch-tensorrt. The
same graphs stand beside the engines as ONNX models, with the commands by which `trtexec` builds them elsewhere.

Written without a GPU at hand: never run on one yet.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.utils._pytree as pytree
from safetensors.torch import load_file
from torch.export import ExportedProgram

from export.attention import Form
from export.backends.backend import BuildJob
from export.onnx_models import MODEL_SUFFIX, WRITERS, input_names, write_models
from export.shape_profile import ShapeRange, shape_ranges
from infer.backends.eager import read_graph
from infer.backends.tensorrt import INSTALL
from infer.device import check_packages

SUFFIX = ".engine"
FORM: Form = "functional"
COMMANDS = "trtexec.txt"
_PACKAGE = "torch_tensorrt"


def check_available(device: str, dtypes: Sequence[str]) -> None:
    """ValueError that names what is missing and how to get it."""
    version = torch.__version__.split("+")[0]
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ValueError(
            f"backend tensorrt needs the package torch-tensorrt of this PyTorch's version, which is not installed: "
            f"pip install torch-tensorrt=={version} (it brings TensorRT itself), on a machine with an NVIDIA GPU"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            "backend tensorrt builds its programs on the GPU that runs them, and PyTorch finds no CUDA device here: "
            "export on that machine, with a PyTorch built for CUDA and NVIDIA's driver"
        )
    try:
        importlib.import_module(_PACKAGE)
    except Exception as error:  # it raises bare ones where libnvinfer is missing
        raise ValueError(
            f"backend tensorrt: torch-tensorrt is installed and can't be imported ({error}): TensorRT's libraries "
            "(libnvinfer) of the version that it names must be installed too, e.g. pip install tensorrt"
        ) from error
    if device != "cuda":
        raise ValueError(f"backend tensorrt builds for GPUs alone, not for --device {device}: add --device cuda")
    check_packages("tensorrt", INSTALL, *WRITERS)


def versions() -> dict[str, str]:
    import tensorrt

    return {"tensorrt": tensorrt.__version__}


def build(job: BuildJob) -> dict[str, dict[str, int]]:
    """Compile every program to an engine, and write its graph as ONNX with the command that builds it elsewhere."""
    write_models(job)
    commands = list[str]()
    with tempfile.TemporaryDirectory(prefix="hispec-tensorrt-") as caches:
        for name in job.names:
            start = time.perf_counter()
            tensors = load_file(job.graphs.weights_file(name), job.device)
            exported = read_graph(job.graphs.graph_file(name, FORM), tensors)
            ranges = shape_ranges(exported, job.limits)
            commands.append(trtexec_command(name, ranges))
            try:
                engine = compile_engine(exported, ranges, Path(caches) / "timing.cache")
            except Exception as error:  # torch-tensorrt and TensorRT share no class of errors
                raise ValueError(
                    f"backend tensorrt can't compile {name}: {error}; no artifact was written. Export with "
                    "--backend inductor, or with --backend onnx, whose models trtexec reads"
                ) from error
            (job.folder / f"{name}{SUFFIX}").write_bytes(engine)
            job.report(f"compiled {name} in {time.perf_counter() - start:.0f} s")
    (job.folder / COMMANDS).write_text("\n".join(commands) + "\n")
    return {name: {} for name in job.names}


def compile_engine(exported: ExportedProgram, ranges: Sequence[ShapeRange], timing_cache: Path) -> bytes:
    """The whole graph as one plan; an error where it holds what TensorRT has no layer for."""
    import torch_tensorrt

    inputs = [
        torch_tensorrt.Input(min_shape=r.least, opt_shape=r.usual, max_shape=r.most, dtype=r.dtype) for r in ranges
    ]
    assert exported.call_spec.in_spec is not None
    args, _ = pytree.tree_unflatten(inputs, exported.call_spec.in_spec)
    engine: bytes = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
        exported,
        arg_inputs=args,
        assume_dynamic_shape_support=True,  # not every converter says of itself that it has it
        attn_bias_is_causal=False,  # by default masks are taken for triangles; ours follow positions
        disable_tf32=True,  # ten bits of mantissa would not pass float32's gate
        timing_cache_path=str(timing_cache),
    )
    return engine


def trtexec_command(name: str, ranges: Sequence[ShapeRange]) -> str:
    """The command, to be run in the models' folder, that builds `name` from its ONNX model."""

    def shapes(of: Sequence[tuple[int, ...]]) -> str:
        named = zip(input_names(len(ranges)), of, strict=True)
        return ",".join(f"{one}:{'x'.join(map(str, shape))}" for one, shape in named)

    parts = [
        "trtexec",
        f"--onnx={name}{MODEL_SUFFIX}",
        f"--minShapes={shapes([r.least for r in ranges])}",
        f"--optShapes={shapes([r.usual for r in ranges])}",
        f"--maxShapes={shapes([r.most for r in ranges])}",
        "--stronglyTyped",  # the dtypes of the graph, and no others where they are faster
        "--noTF32",
        "--skipInference",
        f"--saveEngine={name}{SUFFIX}",
    ]
    return " ".join(parts)
