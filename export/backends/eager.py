"""The exported graph itself, beside weights that stand in the artifact's own folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from export.attention import Form
from export.backends.backend import BuildJob
from export.graphs import GRAPH_SUFFIX

SUFFIX = GRAPH_SUFFIX
FORM: Form = "inplace"


def check_available(device: str, dtypes: Sequence[str]) -> None:
    """PyTorch runs them wherever it runs."""


def versions() -> dict[str, str]:
    return {}


def build(job: BuildJob) -> dict[str, dict[str, int]]:
    """Copy graphs and weights to their places."""
    job.weights.mkdir(parents=True)
    for name in job.names:
        shutil.copy(job.graphs.graph_file(name, FORM), job.folder / f"{name}{SUFFIX}")
        shutil.copy(job.graphs.weights_file(name), job.weights)
    return {name: {} for name in job.names}
