"""What a backend's module offers, and what it is given to build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from export.attention import Form
from export.graphs import Graphs
from infer.manifest import Limits


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """The programs of one backend and dtype."""

    names: Sequence[str]
    graphs: Graphs
    folder: Path  # gets `<name><SUFFIX>` for every program
    weights: Path  # the artifact's own weights/<dtype>, for what reads them there
    device: str
    dtype: str
    limits: Limits  # of the calls, for what must know their shapes before
    autotune: bool
    num_threads: int
    num_workers: int  # programs that may compile at once
    cache: Path | None  # of compiled programs, kept between exports; None: compile everything
    report: Callable[[str], None]  # gets a line for each step


class Backend(Protocol):
    """A module of `export.backends`."""

    @property
    def SUFFIX(self) -> str:  # of a program's file
        ...

    @property
    def FORM(self) -> Form:  # in which it takes programs over pages
        ...

    def check_available(self, device: str, dtypes: Sequence[str]) -> None:
        """ValueError, at once and with its remedy, when such programs can't be built here."""
        ...

    def versions(self) -> dict[str, str]:
        """Packages beside PyTorch that run the programs, and their versions here."""
        ...

    def build(self, job: BuildJob) -> dict[str, dict[str, int]]:
        """Write every program; program → how many kernels of a kind it holds, as far as that can be told."""
        ...
