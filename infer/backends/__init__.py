"""Loading of programs: one file for each backend, under the names that `export.backends` builds them with."""

from collections.abc import Callable
from typing import Any

from infer.artifact import JUST_IN_TIME, Artifact, ProgramSet
from infer.backends import compiled, eager, inductor, onnx, tensorrt

CAPTURED = frozenset({"eager", "inductor", JUST_IN_TIME})  # by CUDA graphs; others have streams of their own

_LOADERS = {
    "eager": eager.load_programs,
    "inductor": inductor.load_programs,
    "onnx": onnx.load_programs,
    "tensorrt": tensorrt.load_programs,
    JUST_IN_TIME: compiled.load_programs,
}


def load(artifact: Artifact, program_set: ProgramSet) -> dict[str, Callable[..., Any]]:
    """Program name → callable. The artifact has been opened, so every file is as recorded; none is checked again."""
    backend = program_set.build.backend
    if backend not in _LOADERS:
        raise ValueError(f"{program_set.path}: backend={backend!r}, this HiSpec runs {', '.join(_LOADERS)}")
    return _LOADERS[backend](artifact, program_set)
