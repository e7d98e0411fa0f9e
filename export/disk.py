"""Whether the disks have room for what an export writes, asked before the work. Knows sizes, no models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

# Bytes for each byte of a dtype's weights. Graphs and code are small beside them.
_SCRATCH = 1  # the graphs' own weights, kept until all is built
_COMPILING = 3  # per program set of inductor: objects, library and package while they are made
_KEPT = {"tensorrt": 2}  # per backend, 1 for the others: weights, or packages with weights inside; engines and models


def check_space(output: Path, scratch: Path, weights: Sequence[int], backends: Sequence[str]) -> None:
    """ValueError unless the disks of `output` and `scratch` have room; it names both numbers.

    Args:
        output, scratch: folders; where one does not exist yet, its nearest parent counts.
        weights: bytes of all programs' weights, one for each dtype.
        backends: what is built of each dtype.
    """
    compiling = _COMPILING * max(weights) if "inductor" in backends else 0  # a dtype's after the other's
    needs = [
        (output, "--output", sum(_KEPT.get(backend, 1) for backend in backends) * sum(weights)),
        (scratch, "the folder for temporary files (TMPDIR)", _SCRATCH * sum(weights) + compiling),
    ]
    totals: dict[int, int] = {}  # device → bytes: the two may lie on one disk
    for folder, what, size in needs:
        folder = _existing(folder)
        device = os.stat(folder).st_dev
        totals[device] = totals.get(device, 0) + size
        free = shutil.disk_usage(folder).free
        if free < totals[device]:
            raise ValueError(
                f"{what} {folder}: about {_gigabytes(totals[device])} are needed there, {_gigabytes(free)} are free: "
                "make room, or choose another disk"
            )


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
