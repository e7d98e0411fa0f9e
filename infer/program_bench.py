"""Backends side by side: what one call of each program takes, relative to eager's of the same dtype.

Sets of programs are called in turn (A B A B …) on the same inputs, so that a drift of the machine's speed meets both
alike, and what is quoted is the median of the rounds' ratios. Two sets of one dtype are in memory at a time: eager, and
each other one after it. Calls have just the tokens that are asked for: none is padded or cut for equal bits, as the
runtime would (see `Runner.bind`). It knows programs as callables and no engine; speed is never asserted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from infer import backends
from infer.artifact import AUTO_ORDER, Artifact, ProgramSet
from infer.artifact_report import read_parity
from infer.cuda_graphs import CudaCapture, with_graphs
from infer.program_calls import Arguments, Grid, time_in_turn
from infer.runner import Program

BASELINE = "eager"


@dataclass(frozen=True, kw_only=True, slots=True)
class SetFacts:
    """What one set of programs costs before it runs, and how exact it is."""

    name: str  # its folder
    backend: str
    dtype: str
    num_threads: int  # that it was built with
    load_seconds: float  # its files have been read once, for their hashes; imports that its loader makes count
    file_bytes: int  # of its own folder
    shared_bytes: int  # of the artifact's weights for this dtype, where it reads them: other sets may too
    max_error: float | None  # the worst tier's in parity.json; None where it has none
    max_error_tier: str | None


@dataclass(kw_only=True, slots=True)
class Cell:
    """One program at one size of call. Times are seconds; lists have an entry for every round."""

    dtype: str
    program: str
    batch_size: int
    tokens: int
    baseline_seconds: list[float] = field(default_factory=list)  # in the rounds with every other set, one after another
    seconds: dict[str, list[float]] = field(default_factory=dict)  # backend → its own
    ratios: dict[str, list[float]] = field(default_factory=dict)  # backend → its time ÷ eager's of the round, ascending

    def add(self, backend: str, baseline: Sequence[float], seconds: Sequence[float]) -> None:
        """The rounds of a backend with eager's of the same rounds."""
        self.baseline_seconds += baseline
        self.seconds[backend] = list(seconds)
        self.ratios[backend] = sorted(own / eager for own, eager in zip(seconds, baseline, strict=True))

    @property
    def medians(self) -> dict[str, float]:
        """Backend → median ratio, eager's 1 among them."""
        return {BASELINE: 1.0} | {backend: statistics.median(ratios) for backend, ratios in self.ratios.items()}

    @property
    def fastest(self) -> str:
        medians = self.medians
        return min(medians, key=lambda backend: medians[backend])

    def record(self) -> dict[str, Any]:
        """Ready for JSON, times in microseconds; quartiles as `low` and `high`."""
        return {
            "dtype": self.dtype,
            "program": self.program,
            "batch_size": self.batch_size,
            "tokens": self.tokens,
            "eager_microseconds": 1e6 * statistics.median(self.baseline_seconds),
            "num_eager_rounds": len(self.baseline_seconds),
            "ratios": {
                backend: {
                    "microseconds": 1e6 * statistics.median(self.seconds[backend]),
                    "median": statistics.median(ratios),
                    "low": ratios[len(ratios) // 4],
                    "high": ratios[-1 - len(ratios) // 4],
                    "num_rounds": len(ratios),
                }
                for backend, ratios in self.ratios.items()
            },
            "fastest": self.fastest,
        }


@dataclass(slots=True)
class Measured:
    sets: list[SetFacts] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # folder of a set → why it was not run


class Standing(NamedTuple):
    """A backend over all cells of one dtype."""

    backend: str
    mean_ratio: float  # geometric mean of its median ratios to eager
    num_fastest: int  # cells


def standings(cells: Sequence[Cell]) -> dict[str, list[Standing]]:
    """Dtype → its backends, the fastest first."""
    found = dict[str, list[Standing]]()
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        own = [cell for cell in cells if cell.dtype == dtype]
        each = [
            Standing(
                backend,
                statistics.geometric_mean(cell.medians[backend] for cell in own),
                sum(cell.fastest == backend for cell in own),
            )
            for backend in own[0].medians
        ]
        found[dtype] = sorted(each, key=lambda one: one.mean_ratio)
    return found


def choose_sets(
    artifact: Artifact, backend: str, dtype: str | None, device: str
) -> tuple[list[ProgramSet], dict[str, str]]:
    """The sets to compare, and why others are left out, by their folders' names.

    They come dtype by dtype, eager first in each, since all are compared with it; the others in the order in which
    `backend` names them, `auto` in the one in which the runtime would take them.

    Raises:
        ValueError: a backend that the artifact lacks, or no dtype has eager programs that run here.
    """
    sets = artifact.programs()
    found = [s for s in sets if s.build.device == device and dtype in (None, s.build.dtype)]
    have = ", ".join(dict.fromkeys(f"{s.build.backend}/{s.build.dtype}/{s.build.device}" for s in sets)) or "none"
    asked = [name.strip() for name in backend.split(",")] if backend != "auto" else None
    for name in asked or ():
        if name not in {s.build.backend for s in found}:
            raise ValueError(
                f"artifact {artifact.path}: no programs for backend={name!r} dtype={dtype!r} device={device!r}; it has "
                f"{have}"
            )
    order = list(dict.fromkeys([BASELINE, *(asked or (*AUTO_ORDER, *(s.build.backend for s in found)))]))
    chosen, left_out = dict[tuple[str, str], ProgramSet](), dict[str, str]()
    for one in found:
        key, name = (one.build.dtype, one.build.backend), one.build.folder_name
        if one.build.backend not in order:
            continue
        if misfits := one.build.misfits():
            left_out[name] = "; ".join(misfits)
        elif key in chosen:
            left_out[name] = f"of the same backend as {chosen[key].build.folder_name}, which the runtime takes"
        else:
            chosen[key] = one
    for key, one in list(chosen.items()):
        if (one.build.dtype, BASELINE) not in chosen:
            left_out[one.build.folder_name] = f"no {BASELINE} programs in {one.build.dtype} to compare with"
            del chosen[key]
    if not chosen:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(
            f"artifact {artifact.path}: no {BASELINE} programs for dtype={dtype!r} device={device!r} that run here, "
            f"and all are compared with them; it has {have}{f' ({why})' if why else ''}. "
            f"Export it with --backend inductor,{BASELINE}"
        )
    dtypes = artifact.manifest.dtypes
    ordered = sorted(chosen.values(), key=lambda s: (dtypes.index(s.build.dtype), order.index(s.build.backend)))
    return ordered, left_out


def measure(
    artifact: Artifact,
    sets: Sequence[ProgramSet],
    grid: Grid,
    *,
    enforce_eager: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Time `sets`, as `choose_sets` orders them. One that its loader refuses is left out.

    Args:
        enforce_eager: no CUDA graphs, behind which the runtime calls programs on CUDA.

    Raises:
        ValueError: the artifact allows no such calls, or eager programs are refused by their loader.
    """
    grid.check_fits(artifact.manifest.limits)
    measured = Measured()
    for dtype in dict.fromkeys(s.build.dtype for s in sets):
        own = [s for s in sets if s.build.dtype == dtype]
        assert own[0].build.backend == BASELINE, [s.build.folder_name for s in own]
        _measure_dtype(artifact, own, grid, enforce_eager, measured, on_progress)
    return measured


def _measure_dtype(
    artifact: Artifact,
    sets: Sequence[ProgramSet],
    grid: Grid,
    enforce_eager: bool,
    measured: Measured,
    on_progress: Callable[[str], None],
) -> None:
    build, manifest = sets[0].build, artifact.manifest
    device = torch.device(build.device)
    arguments = Arguments(manifest, getattr(torch, build.dtype), device, grid)
    cells = [
        Cell(dtype=build.dtype, program=program, batch_size=batch_size, tokens=tokens)
        for program in manifest.kv_layers()
        for batch_size in grid.batch_sizes
        for tokens in grid.tokens
    ]
    measured.cells += cells

    def load(one: ProgramSet) -> dict[str, Program]:
        start = time.perf_counter()
        programs = backends.load(artifact, one)
        measured.sets.append(_facts(artifact, one, time.perf_counter() - start))
        if device.type == "cuda" and not enforce_eager and one.build.backend in backends.CAPTURED:
            return with_graphs(programs, one.build.programs, manifest, max(grid.batch_sizes), CudaCapture())
        return programs

    def run(contenders: Mapping[str, dict[str, Program]]) -> None:
        for number, cell in enumerate(cells, 1):
            on_progress(f"{cell.dtype}, {' and '.join(contenders)}: {number} of {len(cells)}, {cell.program}")
            given = arguments.of(cell.program, cell.batch_size, cell.tokens)
            programs = [programs[cell.program] for programs in contenders.values()]
            times = time_in_turn(programs, given, grid, device)
            if len(times) == 1:
                cell.baseline_seconds += times[0]
            for backend, seconds in list(zip(contenders, times, strict=True))[1:]:
                cell.add(backend, times[0], seconds)

    baseline = load(sets[0])
    is_alone = True
    for one in sets[1:]:
        try:
            programs = load(one)
        except ValueError as error:  # a package that is missing, which no record tells
            measured.left_out[one.build.folder_name] = str(error)
            continue
        run({BASELINE: baseline, one.build.backend: programs})
        is_alone = False
        del programs
        gc.collect()
    if is_alone:
        run({BASELINE: baseline})


def _facts(artifact: Artifact, one: ProgramSet, load_seconds: float) -> SetFacts:
    build, files = one.build, artifact.manifest.files

    def size_of(folder: str) -> int:
        return sum(record.size for name, record in files.items() if name.startswith(f"{folder}/"))

    tiers = (read_parity(artifact).get("programs") or {}).get(build.folder_name)
    worst = max(tiers, key=lambda tier: tier["max_error"]) if tiers else None
    return SetFacts(
        name=build.folder_name,
        backend=build.backend,
        dtype=build.dtype,
        num_threads=build.num_threads,
        load_seconds=load_seconds,
        file_bytes=size_of(f"programs/{build.folder_name}"),
        shared_bytes=size_of(f"weights/{build.dtype}") if build.backend == BASELINE else 0,  # others hold their own
        max_error=worst["max_error"] if worst else None,
        max_error_tier=worst["tier"] if worst else None,
    )
