"""The records of an artifact and their JSON: what `hispec.json` and every `build.json` say. Knows no folder.

They are read strictly (`records`), and what is wrong with one says how to export again.
"""

import json
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import torch

from infer.device import RUNTIME_PACKAGES, gpu_name, host_capability, missing_compiler, package_version, processor_name
from infer.records import load_json, read_record
from infer.table_width import PERIOD

# 2: exits may read the target's state (`context`); 3: builds name their packages and weights; 4: and the processor;
# 5: and the widths that block tables do not have
FORMAT_VERSION = 5
MANIFEST = "hispec.json"
HARDWARE_BOUND = frozenset({"inductor", "tensorrt"})  # backends whose programs hold machine code
EXPORT_AGAIN = "export it again with python -m export --output DIR (see python -m export --help)"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseInfo:
    name: str
    revision: str | None
    config_sha256: str
    family: str
    num_layers: int
    hidden_size: int
    exit_size: int  # width of the hidden states that the unembedding takes
    vocab_size: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitInfo:
    name: str
    layer: int
    head: Literal["native", "linear", "layer", "linear_layer"]
    vocab_size: int | None  # None: the full vocabulary
    has_kv: bool
    context: int = 0  # its program also reads the target's state of a token verified at most so many positions before


@dataclass(frozen=True, kw_only=True, slots=True)
class TierInfo:
    name: str
    start: int  # layers [start, stop)
    stop: int
    exit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    max_model_len: int
    prefill_chunk: int
    max_query_len: int
    max_batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    base: BaseInfo
    tiers: list[TierInfo]
    exits: list[ExitInfo]  # every tier's, the target's own included
    dtypes: list[str]
    block_size: int
    limits: Limits
    eos_token_ids: list[int]
    provenance: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise ValueError(f"{MANIFEST}: {fault}; {EXPORT_AGAIN}")

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values: the base's, then one for each `layer` exit."""
        return self.base.num_layers + sum(e.has_kv for e in self.exits)

    def kv_layers(self) -> dict[str, list[int]]:
        """Every program that a set of them has, and the layers whose keys and values it takes.

        The base's layers come first, then one for each `layer` exit in order.
        """
        found = {f"{tier.name}.trunk": list(range(tier.start, tier.stop)) for tier in self.tiers}
        next_layer = self.base.num_layers
        for e in self.exits:
            found[f"{e.name}.exit"] = [next_layer] if e.has_kv else []
            next_layer += e.has_kv
            found[f"{e.name}.unembed" if e.vocab_size else "unembed"] = []
        return found

    def program_faults(self, programs: dict[str, "ProgramInfo"]) -> Iterator[str]:
        """In what a set of programs is not the one that runs these tiers, in words."""
        expected = self.kv_layers()
        if missing := sorted(expected.keys() - programs.keys()):
            yield f"program {missing[0]!r} is missing"
        if unknown := sorted(programs.keys() - expected.keys()):
            yield f"program {unknown[0]!r} belongs to no tier of {MANIFEST}"
        for name, info in programs.items():
            if info.kv_layers != expected.get(name):
                yield f"{name} takes kv_layers={info.kv_layers}, expected {expected.get(name)}"
            if info.bitwise_range is not None and not 1 <= info.bitwise_range[0] <= info.bitwise_range[1]:
                yield f"{name} has bitwise_range={info.bitwise_range}, expected 1 ≤ least ≤ most"
        files = [info.file for info in programs.values()]
        if twice := sorted({file for file in files if files.count(file) > 1}):
            yield f"{twice[0]} stands for several programs"

    def _faults(self) -> Iterator[str]:
        exits = {e.name: e for e in self.exits}
        if len(exits) < len(self.exits) or len({t.name for t in self.tiers}) < len(self.tiers):
            yield f"names of exits {[e.name for e in self.exits]} and tiers {[t.name for t in self.tiers]} must differ"
        borders = [0, *(tier.stop for tier in self.tiers)]
        if not self.tiers or [tier.start for tier in self.tiers] != borders[:-1] or borders != sorted(set(borders)):
            spans = [(tier.start, tier.stop) for tier in self.tiers]
            yield f"tiers={spans} must follow each other from layer 0 without gap"
        if borders[-1] != self.base.num_layers:
            yield f"tiers end at layer {borders[-1]}, expected num_layers={self.base.num_layers}"
        for tier in self.tiers:
            if tier.exit not in exits:
                yield f"tiers.{tier.name}.exit={tier.exit!r} must be one of {list(exits)}"
            elif exits[tier.exit].layer != tier.stop:
                yield f"exits.{tier.exit}.layer={exits[tier.exit].layer}, expected tiers.{tier.name}.stop={tier.stop}"
        for e in self.exits:
            if e.vocab_size is not None and not 0 < e.vocab_size <= self.base.vocab_size:
                yield f"exits.{e.name}.vocab_size={e.vocab_size} must lie in [1, {self.base.vocab_size}]"
        if self.tiers and exits[self.tiers[-1].exit].vocab_size is not None:
            yield f"exits.{self.tiers[-1].exit}.vocab_size must be null: the target needs the full vocabulary"
        for name, number in {"block_size": self.block_size, **asdict(self.limits)}.items():
            if number < 1:
                yield f"{name}={number} must be at least 1"
        if not self.dtypes:
            yield "dtypes is empty, expected at least one"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = load_json(text, MANIFEST, EXPORT_AGAIN)
        version = data.get("format_version") if isinstance(data, dict) else None
        if version is not None and version != FORMAT_VERSION:
            raise ValueError(
                f"{MANIFEST}: format_version={version!r}, this HiSpec reads {FORMAT_VERSION}: "
                f"use the HiSpec that wrote it, or {EXPORT_AGAIN}"
            )
        return read_record(cls, data, MANIFEST, EXPORT_AGAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramInfo:
    file: str  # relative to the folder of build.json
    kv_layers: list[int]  # whose KV it takes, in the order of its arguments
    bitwise_range: tuple[int, int] | None  # of T·B within which a token has the same bits; None: not found
    num_kernels: dict[str, int]  # by kind, e.g. how many GEMMs use AMX: shows an autotuning that went wrong
    weight_bytes: int = 0  # size of its weights, an embedding table counted whole


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildInfo:
    backend: str
    device: str
    dtype: str
    torch_version: str
    versions: dict[str, str] = field(default_factory=dict)  # packages beside PyTorch that run the programs
    machine: str  # platform.machine()
    cpu_capability: str  # `host_capability(device)`: "AVX512+BF16+AMX", or "sm_90" on CUDA
    num_threads: int
    programs: dict[str, ProgramInfo]
    gpu_name: str | None = None  # None: built for the CPU
    processor: str | None = None  # its maker's name for the one that ranges were measured on; None: not known
    slot_gaps: list[tuple[int, int]] = field(default_factory=list)  # widths that tables do not have (`table_width`)

    @property
    def folder_name(self) -> str:
        return f"{self.backend}-{self.device}-{self.dtype}-torch{self.torch_version}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "build.json") -> Self:
        build: Self = read_record(cls, load_json(text, where, EXPORT_AGAIN), where, EXPORT_AGAIN)
        if wrong := [gap for gap in build.slot_gaps if not 0 <= gap[0] < gap[1] <= PERIOD]:
            raise ValueError(f"{where}: slot_gaps has {wrong[0]}, expected 0 ≤ low < high ≤ {PERIOD}; {EXPORT_AGAIN}")
        known = RUNTIME_PACKAGES.get(build.backend, ())
        if unknown := sorted(build.versions.keys() - set(known)):
            raise ValueError(
                f"{where}: versions.{unknown[0]} is no package of backend {build.backend!r}, expected some of "
                f"{list(known)}; {EXPORT_AGAIN}"
            )
        return build

    def misfits(self) -> list[str]:
        """What keeps these programs from running here, in words.

        Eager programs are as portable as PyTorch. ONNX models name an opset instead, which any later ONNX Runtime runs
        on any machine. A TensorRT engine is a plan for one model of GPU and one TensorRT, newer ones included.
        """
        pairs = [] if self.backend == "onnx" else [("torch_version", self.torch_version, str(torch.__version__))]
        if self.backend in HARDWARE_BOUND:
            pairs += self._hardware()
        if self.backend == "tensorrt":
            pairs += [("gpu_name", str(self.gpu_name), str(gpu_name(self.device))), *self._packages()]
        wrong = [f"{name} is {built} in the artifact, {here} here" for name, built, here in pairs if built != here]
        if missing := [name for name in RUNTIME_PACKAGES.get(self.backend, ()) if package_version(name) is None]:
            wrong.append(f"{' and '.join(missing)}, not installed here: pip install 'hispec[{self.backend}]'")
        if self.backend == "compile" and (missing_here := missing_compiler(self.device)):
            wrong.append(missing_here)
        if self.backend == "tensorrt":
            return wrong
        return wrong + [
            f"{name} is {built} in the artifact, {here} here, which may be too old for it"
            for name, built, here in self._packages()
            if _numbers(here) < _numbers(built)
        ]

    def unproved(self) -> list[str]:
        """What lets these programs run here but may give other last bits than where their ranges were measured."""
        if self.backend == "compile":  # what was measured of eager's programs is not relied on
            return []
        pairs = [] if self.backend in HARDWARE_BOUND else self._hardware()  # those run nowhere else
        if self.backend == "onnx":
            pairs += self._packages()
        if self.device == "cpu" and self.processor is not None:  # libraries choose kernels by maker and model too
            pairs.append(("processor", self.processor, processor_name()))
        return [f"{name} was {built}, is {here}" for name, built, here in pairs if built != here]

    def _hardware(self) -> list[tuple[str, str, str]]:
        return [
            ("machine", self.machine, platform.machine()),
            ("cpu_capability", self.cpu_capability, host_capability(self.device)),
        ]

    def _packages(self) -> list[tuple[str, str, str]]:
        """Those of `versions` that are installed here."""
        here = {name: package_version(name) for name in self.versions}
        return [(name, built, found) for name, built in self.versions.items() if (found := here[name]) is not None]


def _numbers(version: str) -> list[int]:
    """The release's numbers of a version: 1.32.0 before 2.0 and 1.100."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
