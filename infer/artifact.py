"""The artifact's contract: what `export` writes and `infer` reads. Reading, checking and writing of records only.

Nothing here loads weights or programs. `Artifact.open` has checked every name, size and hash before any loader or
native code sees a byte; `Artifact.select` then refuses programs that were built for other hardware or software.

    artifact/hispec.json                        the Manifest, with one FileRecord for every other file but plan.json
    artifact/plan.json                          written later by `infer plan`, so it is the one file without a record
    artifact/programs/<folder_name>/build.json  the BuildInfo of the programs beside it
"""

import hashlib
import json
import os
import platform
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import torch

FORMAT_VERSION = 1
MANIFEST = "hispec.json"
UNRECORDED = frozenset({MANIFEST, "plan.json"})
AUTO_ORDER = ("inductor", "eager")  # best first
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
    head: Literal["native", "linear", "layer"]
    vocab_size: int | None  # None: the full vocabulary
    has_kv: bool


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
        data = _load_json(text, MANIFEST)
        version = data.get("format_version") if isinstance(data, dict) else None
        if version is not None and version != FORMAT_VERSION:
            raise ValueError(
                f"{MANIFEST}: format_version={version!r}, this HiSpec reads {FORMAT_VERSION}: "
                f"use the HiSpec that wrote it, or {EXPORT_AGAIN}"
            )
        return _read(cls, data, MANIFEST)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramInfo:
    file: str  # relative to the folder of build.json
    kv_layers: list[int]  # whose KV it takes, in the order of its arguments
    bitwise_range: tuple[int, int] | None  # of T·B within which a token has the same bits; None: not found
    num_kernels: dict[str, int]  # by kind, e.g. how many GEMMs use AMX: shows an autotuning that went wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildInfo:
    backend: str
    device: str
    dtype: str
    torch_version: str
    machine: str  # platform.machine()
    cpu_capability: str  # `host_capability(device)`: "AVX512+AMX", or "sm_90" on CUDA
    num_threads: int
    programs: dict[str, ProgramInfo]

    @property
    def folder_name(self) -> str:
        return f"{self.backend}-{self.device}-{self.dtype}-torch{self.torch_version}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "build.json") -> Self:
        return _read(cls, _load_json(text, where), where)

    def misfits(self) -> list[str]:
        """What keeps these programs from running here, in words. Eager programs are as portable as PyTorch."""
        pairs = [("torch_version", self.torch_version, str(torch.__version__))]
        if self.backend in HARDWARE_BOUND:
            pairs.append(("machine", self.machine, platform.machine()))
            pairs.append(("cpu_capability", self.cpu_capability, host_capability(self.device)))
        return [f"{name} is {built} in the artifact, {here} here" for name, built, here in pairs if built != here]


@dataclass(frozen=True, slots=True)
class ProgramSet:
    path: Path
    build: BuildInfo


@dataclass(frozen=True, slots=True)
class Artifact:
    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check the whole folder; raises ValueError naming the first file that is not as recorded."""
        path = Path(path)
        if not path.is_dir():
            raise ValueError(f"artifact {path}: no such folder; {EXPORT_AGAIN}")
        names = set(_file_names(path))
        if MANIFEST not in names:
            raise ValueError(f"artifact {path}: {MANIFEST} is missing; {EXPORT_AGAIN}")
        manifest = Manifest.from_json(_read_text(path, MANIFEST))
        for name in manifest.files:
            _check_name(name)
        if missing := sorted(manifest.files.keys() - names):
            raise ValueError(f"artifact {path}: {missing[0]} is missing; {EXPORT_AGAIN}")
        if unknown := sorted(names - manifest.files.keys() - UNRECORDED):
            raise ValueError(f"artifact {path}: {unknown[0]} has no record in {MANIFEST}; remove it, or {EXPORT_AGAIN}")
        for name, expected in manifest.files.items():
            _check_file(path, name, expected)
        return cls(path, manifest)

    def programs(self) -> list[ProgramSet]:
        """All sets of programs, as their build.json describe them."""
        sets = []
        for name in sorted(self.manifest.files):
            folder = PurePosixPath(name).parent
            if name != f"programs/{folder.name}/build.json":
                continue
            build = BuildInfo.from_json(_read_text(self.path, name), name)
            if build.dtype not in self.manifest.dtypes:
                raise ValueError(f"{name}: dtype={build.dtype!r} must be one of {self.manifest.dtypes}; {EXPORT_AGAIN}")
            for program in build.programs.values():
                if str(folder / program.file) not in self.manifest.files:
                    raise ValueError(f"{name}: {program.file} has no record in {MANIFEST}; {EXPORT_AGAIN}")
            sets.append(ProgramSet(self.path / folder, build))
        return sets

    def select(self, backend: str = "auto", dtype: str | None = None, device: str = "cpu") -> ProgramSet:
        """The programs to run. No dtype: the first one exported; `auto`: the fastest backend exported for that dtype.

        A set that was built for another machine or PyTorch is an error, never a reason to take a slower one silently.
        """
        found = [
            s
            for s in self.programs()
            if s.build.device == device
            and s.build.backend in (AUTO_ORDER if backend == "auto" else (backend,))
            and dtype in (None, s.build.dtype)
        ]
        if not found:
            have = ", ".join(f"{s.build.backend}/{s.build.dtype}/{s.build.device}" for s in self.programs()) or "none"
            raise ValueError(
                f"artifact {self.path}: no programs for backend={backend!r} dtype={dtype!r} device={device!r}; "
                f"it has {have}. {self._rebuild(backend, dtype, device)}"
            )
        dtypes, backends = self.manifest.dtypes, (*AUTO_ORDER, backend)
        found.sort(key=lambda s: (dtypes.index(s.build.dtype), backends.index(s.build.backend)))
        best = found[0].build
        same_kind = [s for s in found if (s.build.backend, s.build.dtype) == (best.backend, best.dtype)]
        for candidate in same_kind:  # one for each PyTorch it was built with
            if not candidate.build.misfits():
                return candidate
        fitting = [s.build for s in self.programs() if s.build.device == device and not s.build.misfits()]
        hint = f" backend={fitting[0].backend!r}, dtype={fitting[0].dtype!r} works here." if fitting else ""
        raise ValueError(
            f"{same_kind[-1].path}: {'; '.join(same_kind[-1].build.misfits())}. "
            f"{self._rebuild(best.backend, best.dtype, device)}{hint}"
        )

    def _rebuild(self, backend: str, dtype: str | None, device: str) -> str:
        backend = AUTO_ORDER[0] if backend == "auto" else backend
        return (
            f"Build them here with python -m export --checkpoint DIR --output {self.path} "
            f"--backend {backend} --dtype {dtype or self.manifest.dtypes[0]} --device {device}."
        )


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest) -> Manifest:
    """Record every file of `folder` and write hispec.json, last and at once: a folder without it is no artifact."""
    folder = Path(folder)
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.unlink(missing_ok=True)
    names = sorted(name for name in _file_names(folder) if name not in UNRECORDED)
    for name in names:
        _check_name(name)
    manifest = replace(manifest, files={name: _record(folder / name) for name in names})
    temporary.write_text(manifest.to_json(), encoding="utf-8")
    os.replace(temporary, folder / MANIFEST)
    return manifest


def host_capability(device: str = "cpu") -> str:
    """The instruction set that machine code for `device` may use here."""
    if device == "cpu":
        # AMX has no level of its own there, but code that uses it dies where it is missing
        return torch.backends.cpu.get_cpu_capability() + ("+AMX" if torch.cpu._is_amx_tile_supported() else "")
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _file_names(folder: Path) -> Iterator[str]:
    """All files below `folder`, relative, with forward slashes. A link of any kind is refused, followed never."""
    for parent, folders, files in os.walk(folder, followlinks=False):
        for entry in (Path(parent, name) for name in (*folders, *files)):
            name = entry.relative_to(folder).as_posix()
            if entry.is_symlink():
                raise ValueError(f"artifact {folder}: {name} is a link, expected a plain file; {EXPORT_AGAIN}")
            if entry.is_file():
                yield name
            elif not entry.is_dir():
                raise ValueError(f"artifact {folder}: {name} is not a plain file; {EXPORT_AGAIN}")


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    is_plain = name == path.as_posix() and name.isprintable() and not set(name) & set("\\:")
    if not is_plain or path.is_absolute() or ".." in path.parts or name == ".":
        raise ValueError(f"{MANIFEST}: file name {name!r} must be a plain path inside the artifact; {EXPORT_AGAIN}")
    if name in UNRECORDED:
        raise ValueError(f"{MANIFEST}: {name} cannot be recorded; {EXPORT_AGAIN}")


def _check_file(folder: Path, name: str, expected: FileRecord) -> None:
    size = (folder / name).stat().st_size
    if size != expected.size:
        raise ValueError(f"artifact {folder}: {name} has {size} bytes, expected {expected.size}; {EXPORT_AGAIN}")
    sha256 = _record(folder / name).sha256
    if sha256 != expected.sha256:
        raise ValueError(f"artifact {folder}: {name} has sha256 {sha256}, expected {expected.sha256}; {EXPORT_AGAIN}")


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return FileRecord(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=path.stat().st_size)


def _check_unique(where: str, names: list[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{where}: {twice[0]!r} stands twice; {EXPORT_AGAIN}")


def _read_text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder / name}: not UTF-8 text ({error}); {EXPORT_AGAIN}") from error


def _load_json(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_unique(where, [key for key, _ in pairs])
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error}); {EXPORT_AGAIN}") from error


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gave it, as the annotated type `kind`; ValueError names the field that is missing or wrong."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)  # defaults are for writers: in JSON every field stands
        if missing := sorted(hints.keys() - value.keys()):
            raise ValueError(f"{where}: field {missing[0]!r} is missing; {EXPORT_AGAIN}")
        if unknown := sorted(value.keys() - hints.keys()):
            raise ValueError(f"{where}: field {unknown[0]!r} is unknown; {EXPORT_AGAIN}")
        return kind(**{name: _read(hints[name], item, f"{where}: {name}") for name, item in value.items()})
    if origin in (Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        return None if value is None else _read(rest[0], value, where)
    if origin is list and isinstance(value, list):
        return [_read(args[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is tuple and isinstance(value, list) and len(value) == len(args):
        return tuple(_read(arg, item, where) for arg, item in zip(args, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {key: _read(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if type(value) is kind or (origin is Literal and value in args):
        return value
    raise ValueError(f"{where}: got {value!r}, expected {getattr(kind, '__name__', kind)}; {EXPORT_AGAIN}")
