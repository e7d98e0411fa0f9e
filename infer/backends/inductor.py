"""AOTInductor packages: machine code with its weights inside. A package checks none of its inputs; the runtime does."""

from collections.abc import Callable
from typing import Any

import torch._inductor

from infer.artifact import Artifact, ProgramSet
from infer.package import check_package


def load_programs(artifact: Artifact, program_set: ProgramSet) -> dict[str, Callable[..., Any]]:
    """Program name → the loaded package.

    Raises:
        ValueError: a package is not what `check_package` allows; none has been loaded then.
    """
    for name, program in program_set.build.programs.items():
        check_package(program_set.path / program.file, name)
    # A package's locks between threads query CUDA events, which a capture forbids; one thread steps the engine anyway.
    is_single_threaded = program_set.build.device == "cuda"
    return {
        name: torch._inductor.aoti_load_package(
            str(program_set.path / program.file), run_single_threaded=is_single_threaded
        )
        for name, program in program_set.build.programs.items()
    }
