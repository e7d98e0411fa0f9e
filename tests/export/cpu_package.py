"""A package of AOTInductor with our kernels for CPUs linked into it, compiled in this process."""

from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram

from export.backends import inductor
from export.cpu_kernels import library


def compile_package(exported: ExportedProgram, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIBRARY_PATH", "")  # which it changes
    library.build_archive(folder)
    library.link_from(folder)
    configs = inductor.options("cpu", autotune=False) | inductor.kernels("cpu")
    with torch.no_grad():
        return Path(
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(folder / "program.pt2"), inductor_configs=configs
            )
        )
