"""plan.json: the strategy to take for so many rows, and what that was measured on.

A plan holds for the conditions under which it was made. Under others it is set aside with a warning that says why:
plain decoding is never wrong, and a plan of another machine may be slower.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Self

import torch

from infer.artifact import PLAN, Artifact, write_unrecorded
from infer.device import host_capability, package_version, processor_name
from infer.manifest import BuildInfo, Manifest
from infer.records import MAX_JSON, load_json, read_record
from infer.strategy import Policy, Setting, stages_of

FORMAT_VERSION = 5  # 4: settings have branches; 5: entries choose by workload
PLAN_AGAIN = "make one with python -m infer plan ARTIFACT (see python -m infer plan --help)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a plan's figures depend on; any other value of any of these, and it does not hold."""

    artifact_sha256: str  # of hispec.json
    backend: str
    device: str
    dtype: str
    bitwise: bool
    cuda_graphs: bool
    verification: str
    torch_version: str
    versions: dict[str, str | None]  # installed packages that run the programs, as build.json names them
    processor: str
    capability: str
    num_cpus: int
    num_threads: int

    @classmethod
    def here(cls, artifact: Artifact, build: BuildInfo, *, bitwise: bool, cuda_graphs: bool, verification: str) -> Self:
        return cls(
            artifact_sha256=artifact.manifest_sha256,
            backend=build.backend,
            device=build.device,
            dtype=build.dtype,
            bitwise=bitwise,
            cuda_graphs=cuda_graphs,
            verification=verification,
            torch_version=str(torch.__version__),
            versions={name: package_version(name) for name in build.versions},
            processor=processor_name(build.device),
            capability=host_capability(build.device),
            num_cpus=os.cpu_count() or 1,
            num_threads=torch.get_num_threads(),
        )

    def misfits(self, here: Conditions) -> Iterator[str]:
        """In what `here` differs, in words."""
        for name in (one.name for one in fields(self)):
            if getattr(self, name) != getattr(here, name):
                yield f"{name} was {getattr(self, name)!r} for it and is {getattr(here, name)!r} here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What was decoded for the figures."""

    num_prompts: int
    max_tokens: int
    temperature: float
    seed: int | None
    margin: float  # by which a strategy had to beat plain decoding


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A strategy's speed relative to plain decoding's at the same batch size."""

    strategy: str
    policy: Policy
    predicted: float | None  # from costs and acceptance, without the prompts' own time; None: measured alone
    ratio: float  # measured, prompts included: mean over the middle half of their groups
    ratio_low: float  # its lower quarter

    @property
    def setting(self) -> Setting:
        return Setting(self.strategy, self.policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanEntry:
    batch_size: int
    chosen: Figure
    runner_up: Figure | None  # the best of the others that were measured
    tuned: list[Figure]  # the best of each strategy that was measured, plain decoding's with it
    by_workload: dict[str, Figure] = field(default_factory=dict)  # chosen for one kind of text: name → figure there

    @property
    def choices(self) -> list[Figure]:
        return [self.chosen, *self.by_workload.values()]

    def figure_for(self, workload: str) -> Figure:
        """What was chosen for texts of this kind; of no kind or one that was not planned, for all."""
        return self.by_workload.get(workload, self.chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    conditions: Conditions
    sample: Sample
    entries: list[PlanEntry]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        sizes = [entry.batch_size for entry in self.entries]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"{PLAN}: batch sizes {sizes} of its entries must ascend from 1 or more; {PLAN_AGAIN}")

    @property
    def settings(self) -> list[Setting]:
        """What its entries choose."""
        return [one.setting for entry in self.entries for one in entry.choices]

    @property
    def workloads(self) -> list[str]:
        """Kinds of text for which it chooses by itself."""
        return sorted({name for entry in self.entries for name in entry.by_workload})

    def check_workload(self, name: str) -> None:
        """ValueError unless it chooses for this one by itself."""
        if name not in self.workloads:
            known = ", ".join(self.workloads) or "none, as it was made without --by-workload"
            raise ValueError(
                f"workload={name!r} is not in {PLAN}, which knows {known}: leave it out, or plan with "
                f"python -m infer plan ARTIFACT --by-workload --prompts DIR, with {name}.jsonl in that folder"
            )

    def entry_for(self, num_rows: int) -> PlanEntry:
        """That of the largest batch size not above `num_rows`; below all, the smallest's."""
        return [self.entries[0], *(entry for entry in self.entries if entry.batch_size <= num_rows)][-1]

    def tuned_for(self, num_rows: int) -> dict[str, Figure]:
        """The best of each strategy for so many rows, or for fewer, where it was far behind and not tried again."""
        last = self.entry_for(num_rows).batch_size
        return {one.strategy: one for entry in self.entries if entry.batch_size <= last for one in entry.tuned}

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, manifest: Manifest) -> Self:
        """ValueError when it is malformed, or chooses what the artifact of this manifest does not have."""
        data = load_json(text, PLAN, PLAN_AGAIN)
        version = data.get("format_version") if isinstance(data, dict) else None
        if version is not None and version != FORMAT_VERSION:
            raise ValueError(f"{PLAN}: format_version={version!r}, this HiSpec reads {FORMAT_VERSION}; {PLAN_AGAIN}")
        plan = read_record(cls, data, PLAN, PLAN_AGAIN)
        for entry in plan.entries:
            try:
                for one in entry.choices:
                    stages_of(one.strategy, one.policy, manifest)
            except ValueError as error:
                raise ValueError(f"{PLAN}: entry of batch size {entry.batch_size}: {error}; {PLAN_AGAIN}") from None
        return plan


def read_plan(artifact: Artifact, here: Conditions) -> Plan | None:
    """The artifact's plan if it has one that holds here. A plan that does not is reported by a warning."""
    path = artifact.path / PLAN
    if not path.exists():
        return None
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ValueError(f"{size} bytes, at most {MAX_JSON} are expected")
        plan = Plan.from_json(path.read_text(encoding="utf-8"), artifact.manifest)
    except (ValueError, OSError) as error:  # not all of them know the remedy
        faults = [str(error).removesuffix(f"; {PLAN_AGAIN}")]
    else:
        faults = list(plan.conditions.misfits(here))
        if not faults:
            return plan
    warnings.warn(f"{path} is ignored, decoding plainly: {'; '.join(faults)}; {PLAN_AGAIN}", stacklevel=3)
    return None


def write_plan(folder: Path, plan: Plan) -> None:
    """It appears complete, or what was there before stays."""
    write_unrecorded(folder, PLAN, plan.to_json())
