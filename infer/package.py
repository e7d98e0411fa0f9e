"""What an AOTInductor package (.pt2) may hold, looked at before PyTorch unpacks it.

A package is a zip whose members PyTorch writes into a temporary folder under their own names, whatever these are, and
parts of which it would unpickle: stored weights, constants and example inputs. Ours hold machine code alone, as it is:

    <stem>/archive_version, byteorder, .data/… the format's own marks
    <stem>/data/aotinductor/model/<file>       the library with its weights, its sources and their *_metadata.json

Knows zips and names; it runs nothing.
"""

from __future__ import annotations

import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from infer.manifest import EXPORT_AGAIN
from infer.records import load_json

PROGRAM_KEY = "hispec_program"  # in the metadata of packages and of weights files: whose they are

_CODE_FOLDER = "data/aotinductor/model"
_MARKS = frozenset({"archive_format", "archive_version", "version", "byteorder", ".data/version",
                    ".data/serialization_id"})  # fmt: skip
_PICKLED = frozenset({".pt", ".pth", ".pkl", ".pickle"})
# What Python's zipfile raises at damaged archives, besides its own error
_UNREADABLE = (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, OSError, EOFError, RuntimeError, zlib.error)
_MAX_METADATA = 1 << 16  # bytes; they are some hundred


def check_package(path: Path, program: str) -> None:
    """ValueError unless `path` is a package of `program` that can be unpacked: see the module."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(path, archive.infolist())
            told = [_owner(path, n, archive.read(n)) for n in archive.namelist() if n.endswith("_metadata.json")]
            names = set(told) - {None}  # not every member has it
            for name in names or {None}:
                check_owner(path, name, program)
    except _UNREADABLE as error:
        raise ValueError(f"{path}: no package that PyTorch could have written ({error}); {EXPORT_AGAIN}") from error


def check_owner(path: Path, name: str | None, program: str) -> None:
    """ValueError unless the program that a file names is the one that it stands for; None: it names none."""
    if name != program:
        whose = "names no program" if name is None else f"belongs to program {name!r}"
        raise ValueError(f"{path}: {whose}, but stands for {program!r}; {EXPORT_AGAIN}")


def _check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    size = path.stat().st_size
    seen = set[str]()
    for member in members:
        if fault := _fault(member):
            raise ValueError(f"{path}: member {member.filename!r} {fault}; {EXPORT_AGAIN}")
        if member.filename in seen:
            raise ValueError(f"{path}: member {member.filename!r} stands twice; {EXPORT_AGAIN}")
        seen.add(member.filename)
    # Members that overlap in the file would be small on disk and large when unpacked
    unpacked = sum(member.file_size for member in members)
    if unpacked > size:
        raise ValueError(f"{path}: {size} bytes that would unpack to {unpacked}; {EXPORT_AGAIN}")
    if len({name.split("/")[0] for name in seen}) != 1:
        raise ValueError(f"{path}: members {sorted(seen)[:3]}… do not lie in one folder; {EXPORT_AGAIN}")


def _fault(member: zipfile.ZipInfo) -> str:
    """What is wrong with a member; empty if nothing is."""
    name = member.filename
    parts = PurePosixPath(name).parts
    if name != "/".join(parts) or name.startswith("/") or ".." in parts or set(name) & set("\\:"):
        return "does not name a plain path below one folder"
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
        return "is a link or no plain file"
    if member.flag_bits & 1 or member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        return "is packed or encrypted, where PyTorch stores members as they are"
    inner = PurePosixPath(*parts[1:])
    if inner.suffix in _PICKLED:
        return "would be unpickled"
    if str(inner) not in _MARKS and str(inner.parent) != _CODE_FOLDER:
        return f"is neither one of the format's marks nor a file of {_CODE_FOLDER}: PyTorch might unpickle it"
    if name.endswith("_metadata.json") and member.file_size > _MAX_METADATA:
        return f"has {member.file_size} bytes, at most {_MAX_METADATA} are expected"
    return ""


def _owner(path: Path, member: str, content: bytes) -> str | None:
    """The program that a metadata member names."""
    data = load_json(content.decode("utf-8"), f"{path}: {member}", EXPORT_AGAIN)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: {member} is no JSON object; {EXPORT_AGAIN}")
    name = data.get(PROGRAM_KEY)
    return name if name is None else str(name)
