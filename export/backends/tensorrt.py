"""TensorRT: what its programs would need here. They are not built yet."""

from __future__ import annotations

import importlib.util

import torch

PACKAGE = "torch_tensorrt"


def check_runs_here() -> None:
    """ValueError that names what is missing and how to get it."""
    version = torch.__version__.split("+")[0]
    if importlib.util.find_spec(PACKAGE) is None:
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
        importlib.import_module(PACKAGE)
    except Exception as error:  # it raises bare ones where libnvinfer is missing
        raise ValueError(
            f"backend tensorrt: torch-tensorrt is installed and can't be imported ({error}): TensorRT's libraries "
            "(libnvinfer) of the version that it names must be installed too, e.g. pip install tensorrt"
        ) from error
    raise ValueError("backend tensorrt is not built yet in this release; --backend inductor --device cuda is")
