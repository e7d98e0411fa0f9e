"""Stands in for a program's compilation, in a worker that imports no PyTorch: a process of its own that takes long."""

import os
import subprocess
from pathlib import Path
from typing import NamedTuple


class SlowJob(NamedTuple):
    weights_file: Path
    device: str = "none"  # for which no kernels of ours are compiled


def compile_slowly(job: SlowJob, cache: str) -> None:
    """Writes the worker's process id and the compiler's beside the weights, and waits for the compiler."""
    with subprocess.Popen(["sleep", "60"]) as compiler:
        written = job.weights_file.with_suffix(".tmp")
        written.write_text(f"{os.getpid()} {compiler.pid}")
        written.rename(job.weights_file.with_suffix(".pids"))
