"""The kernels compiled: for calls from Python, and for the linker of Inductor's packages."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

FOLDER = Path(__file__).parent
ARCHIVE = "hispec_kernels"
_SOURCES = tuple(sorted(FOLDER.glob("*.cpp")))
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-Wno-psabi")


def sources() -> list[Path]:
    """All files that the compiled kernels hang on."""
    return sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h", ".py"))


def build_archive(folder: Path) -> None:
    """Compile the kernels into `folder`, for the linker."""
    folder.mkdir(parents=True, exist_ok=True)
    objects = [folder / f"{source.stem}.o" for source in _SOURCES]
    for source, compiled in zip(_SOURCES, objects):
        _compile([source], "-c", "-o", str(compiled))
    _run("ar", "rcs", str(folder / f"lib{ARCHIVE}.a"), *map(str, objects))


def link_from(folder: Path) -> None:
    """Have compilers that this process starts find the archive in `folder` as `-l` + ARCHIVE."""
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("LIBRARY_PATH")]))


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels for calls from Python, compiled at the first."""
    with tempfile.TemporaryDirectory(prefix="hispec-kernels-") as folder:
        path = Path(folder) / f"{ARCHIVE}.so"
        _compile(_SOURCES, "-shared", "-o", str(path), *(f"-L{path}" for path in library_paths()), "-ltorch_cpu")
        return ctypes.CDLL(str(path))


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _compile(files: Sequence[Path], *arguments: str) -> None:
    includes = [f"-I{path}" for path in include_paths()]
    _run(os.environ.get("CXX", "g++"), *_FLAGS, *includes, *map(str, files), *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed at the kernels for CPUs in {FOLDER}:\n{done.stderr[-2000:]}")
