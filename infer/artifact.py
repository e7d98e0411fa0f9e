"""The artifact's folder: what `export` writes and `infer` reads. Its records are `manifest`'s.

Nothing here loads weights or programs. `Artifact.open` has checked every name, size and hash before any loader or
native code sees a byte; `Artifact.select` then refuses programs that were built for other hardware or software, or that
are not those of the manifest's tiers.

What that is worth. Hashes tell what was damaged, cut, mixed up or added by mistake. They say nothing against somebody
who can rewrite hispec.json: he writes new hashes too, and a program is code, whether machine code or a graph. So take
artifacts only from whom you would take a program. What is noticed even with right hashes: another tier's program (its
name stands in its package, model or weights, but in no TensorRT engine; its KV layers in build.json), a package that
holds more than code (`package`), records that contradict each other. A hard link counts as the file that it is, a
symbolic one is refused.

    artifact/hispec.json                        the Manifest, with one FileRecord for every other file but these two
    artifact/plan.json                          written later by `infer plan`, so it has no record
    artifact/sprinter.json                      written later by `infer calibrate-sprinter`, the same
    artifact/programs/<folder_name>/build.json  the BuildInfo of the programs beside it
"""

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Self

import torch

from infer.hub import find_folder, is_fetched
from infer.manifest import EXPORT_AGAIN, MANIFEST, BuildInfo, FileRecord, Manifest
from infer.records import MAX_JSON

PLAN = "plan.json"
PLAN_TEMPORARY = f"{PLAN}.tmp"  # a planner that was killed may leave it
SPRINTER = "sprinter.json"
SPRINTER_TEMPORARY = f"{SPRINTER}.tmp"
UNRECORDED = frozenset({MANIFEST, PLAN, PLAN_TEMPORARY, SPRINTER, SPRINTER_TEMPORARY})
# Best first; SmolLM2-135M, fp32, one thread: onnx 18 tokens/s, eager 9. Nobody has measured tensorrt yet.
AUTO_ORDER = ("inductor", "tensorrt", "onnx", "eager")

JUST_IN_TIME = "compile"  # a backend that no artifact holds: eager's programs, compiled as they are loaded


@dataclass(frozen=True, slots=True)
class ProgramSet:
    path: Path
    build: BuildInfo

    def to_compile(self) -> Self:
        """Eager's programs as backend `compile` will run them: nothing that was measured of them holds then."""
        assert self.build.backend == "eager", self.build.folder_name
        programs = {name: replace(one, bitwise_range=None) for name, one in self.build.programs.items()}
        threads = torch.get_num_threads()
        return replace(self, build=replace(self.build, backend=JUST_IN_TIME, programs=programs, num_threads=threads))


def write_unrecorded(folder: Path, name: str, text: str) -> None:
    """Write a file of `UNRECORDED` into an artifact: it appears complete, or what was there before stays."""
    temporary = folder / f"{name}.tmp"
    temporary.unlink(missing_ok=True)  # what lies there may be a second name of a file elsewhere
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / name)


@dataclass(frozen=True, slots=True)
class Artifact:
    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check the whole folder, or what an id on the hub stands for (`hub`); raises ValueError naming the
        first file that is not as recorded."""
        path = find_folder(path)
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

    @property
    def manifest_sha256(self) -> str:
        """Names this artifact: the manifest has the hashes of all else."""
        return hashlib.sha256((self.path / MANIFEST).read_bytes()).hexdigest()

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
            if build.folder_name != folder.name:
                raise ValueError(f"{name}: describes {build.folder_name}, not {folder.name}; {EXPORT_AGAIN}")
            for fault in self.manifest.program_faults(build.programs):
                raise ValueError(f"{name}: {fault}; {EXPORT_AGAIN}")
            for program in build.programs.values():
                if str(folder / program.file) not in self.manifest.files:
                    raise ValueError(f"{name}: {program.file} has no record in {MANIFEST}; {EXPORT_AGAIN}")
            sets.append(ProgramSet(self.path / folder, build))
        return sets

    def select(self, backend: str = "auto", dtype: str | None = None, device: str = "cpu") -> ProgramSet:
        """The programs to run. No dtype: the first one exported; `auto`: the fastest backend exported for that dtype.

        A set that was built for another machine or PyTorch is an error, never a reason to take a slower one silently.
        Whoever wants that names several backends, as `inductor,eager`: the first that runs here is taken, and a warning
        says why none before it was.
        """
        sets, faults = self.programs(), list[str]()
        for name in [part.strip() for part in backend.split(",")]:
            try:
                chosen = self._select(sets, name, dtype, device)
            except ValueError as error:
                faults.append(str(error))
                continue
            if faults:
                taken = f"{chosen.build.backend} {chosen.build.dtype}"
                warnings.warn(f"running {taken} instead: {' '.join(faults)}", stacklevel=3)
            return chosen
        raise ValueError(" ".join(faults))

    def _select(self, sets: Sequence[ProgramSet], backend: str, dtype: str | None, device: str) -> ProgramSet:
        if backend == JUST_IN_TIME:
            sets = [*sets, *(s.to_compile() for s in sets if s.build.backend == "eager")]
        found = [
            s
            for s in sets
            if s.build.device == device
            and s.build.backend in (AUTO_ORDER if backend == "auto" else (backend,))
            and dtype in (None, s.build.dtype)
        ]
        if not found:
            have = ", ".join(f"{s.build.backend}/{s.build.dtype}/{s.build.device}" for s in sets) or "none"
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
        fitting = [s.build for s in sets if s.build.device == device and not s.build.misfits()]
        hint, rebuild = "", self._rebuild(best.backend, best.dtype, device)
        if any((s.build.backend, s.build.dtype) == ("eager", best.dtype) for s in sets if s.build in fitting):
            rebuild = "" if best.backend == JUST_IN_TIME else rebuild  # what is missing stands outside of the artifact
        if fitting:
            other = fitting[0].backend
            hint = f" backend={other!r}, dtype={fitting[0].dtype!r} works here"
            hint += f", and backend='{best.backend},{other}' falls back to it." if other != best.backend else "."
        raise ValueError(f"{same_kind[-1].path}: {'; '.join(same_kind[-1].build.misfits())}. {rebuild}{hint}")

    def _rebuild(self, backend: str, dtype: str | None, device: str) -> str:
        backend = {"auto": AUTO_ORDER[0], JUST_IN_TIME: "eager"}.get(backend, backend)
        output = "DIR" if is_fetched(self.path) else self.path  # what is under an id stays as it was pushed
        return (
            f"Build them here with python -m export --checkpoint HEADS --output {output} "
            f"--backend {backend} --dtype {dtype or self.manifest.dtypes[0]} --device {device}."
        )


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest, within: str = "") -> Manifest:
    """Record every file of `folder` and write hispec.json, last and at once: a folder without it is no artifact.

    within: record those below this folder alone, while others are still being built; `Artifact.open` refuses that.
    """
    folder = Path(folder)
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.unlink(missing_ok=True)
    names = sorted(n for n in _file_names(folder) if n not in UNRECORDED and PurePosixPath(n).is_relative_to(within))
    for name in names:
        _check_name(name)
    manifest = replace(manifest, files={name: _record(folder / name) for name in names})
    temporary.write_text(manifest.to_json(), encoding="utf-8")
    os.replace(temporary, folder / MANIFEST)
    return manifest


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


def _read_text(folder: Path, name: str) -> str:
    size = (folder / name).stat().st_size
    if size > MAX_JSON:
        raise ValueError(f"{folder / name}: {size} bytes, at most {MAX_JSON} are expected; {EXPORT_AGAIN}")
    try:
        return (folder / name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder / name}: not UTF-8 text ({error}); {EXPORT_AGAIN}") from error
