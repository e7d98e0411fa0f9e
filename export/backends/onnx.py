"""The ONNX backend: the models of `export.onnx_models`, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

from export.attention import Form
from export.backends.backend import BuildJob
from export.onnx_models import MODEL_SUFFIX, WRITERS, write_models
from infer.backends.onnx import INSTALL, check_device
from infer.device import check_packages

SUFFIX = MODEL_SUFFIX
FORM: Form = "functional"


def check_available(device: str, dtypes: Sequence[str]) -> None:
    """ValueError when packages are missing, or ONNX Runtime has no kernels for what is asked."""
    if device == "cpu" and "bfloat16" in dtypes:
        raise ValueError(
            "--dtype bfloat16 with --backend onnx on --device cpu: ONNX Runtime multiplies no bfloat16 matrices there; "
            "export onnx with --dtype float32, and bfloat16 with --backend inductor,eager"
        )
    check_packages("onnx", INSTALL, *WRITERS, "onnxruntime")
    check_device(device)


def versions() -> dict[str, str]:
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__}


def build(job: BuildJob) -> dict[str, dict[str, int]]:
    """Convert every program; one data file for all."""
    write_models(job)
    return {name: {} for name in job.names}
