"""AOTInductor packages: machine code with its weights inside. A package checks none of its inputs; the runtime does."""

import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch._inductor

from infer import mapped_pages
from infer.artifact import Artifact, ProgramSet
from infer.package import check_package


def load_programs(artifact: Artifact, program_set: ProgramSet) -> dict[str, Callable[..., Any]]:
    """Program name → the loaded package.

    Raises:
        ValueError: a package is not what `check_package` allows; none has been loaded then.
    """
    files = {name: program_set.path / program.file for name, program in program_set.build.programs.items()}
    for name, file in files.items():
        check_package(file, name)
    # A package's locks between threads query CUDA events, which a capture forbids; one thread steps the engine anyway.
    is_single_threaded = program_set.build.device == "cuda"
    # While one loads, its weights stand in memory twice: the largest first, when little else does
    largest_first = sorted(files, key=lambda name: -files[name].stat().st_size)
    loaded = {name: _load(files[name], is_single_threaded) for name in largest_first}
    return {name: loaded[name] for name in files}


def _load(package: Path, is_single_threaded: bool) -> Callable[..., Any]:
    """The package alone: it copies its weights out of its library, whose pages are never looked at again."""
    program = torch._inductor.aoti_load_package(str(package), run_single_threaded=is_single_threaded)
    with zipfile.ZipFile(package) as archive:
        mapped_pages.release({PurePosixPath(name).name for name in archive.namelist() if name.endswith(".so")})
    return program
