"""Compiled packages kept between exports, so that a second export of the same thing compiles nothing.

Inductor's own caches don't serve here: PyTorch leaves ahead-of-time compilation and frozen graphs out of them. What is
kept is the whole package under a hash of all that it was made of. A package is code: a folder that others may write to
is not used, what is taken is compared with its hash, and export's gates check it as they check a new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config

MAX_BYTES = 8 << 30  # of all packages; the least recently used go first
_READ_BY_COMPILERS = ("TORCH", "AOT", "ATEN_", "CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")
_STALE = 24 * 3600  # seconds after which an unfinished file is nobody's


class PackageCache:
    """A folder of packages, each under its key and the hash of its content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fault(self) -> str:
        """Why the folder is not to be used; empty if it is. It is made where it is missing."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.folder.stat()
        except OSError as error:
            return str(error)
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            return f"{self.folder} belongs to, or may be written by, somebody else"
        return ""

    def take(self, key: str, package: Path) -> bool:
        """Copy what is kept under `key` to `package`; False where there is none, or it is not what was kept.

        Raises:
            OSError: the copy could not be made, as on a full disk; `package` is not there then.
        """
        for kept in self.folder.glob(f"{key}-*"):
            try:
                shutil.copyfile(kept, package)
                if file_sha256(package) == kept.name.removeprefix(f"{key}-"):
                    os.utime(kept)
                    return True
            except FileNotFoundError:  # another export has made room meanwhile
                package.unlink(missing_ok=True)
                continue
            except OSError:
                package.unlink(missing_ok=True)
                raise
            package.unlink()
            kept.unlink(missing_ok=True)
        return False

    def keep(self, key: str, package: Path) -> None:
        """A copy of `package`, where there is room for it: less is kept rather than a disk filled.

        Raises:
            OSError: the copy could not be made; nothing is kept then.
        """
        size = package.stat().st_size
        if size > MAX_BYTES:
            return
        self._make_room(size)
        if shutil.disk_usage(self.folder).free < 4 * size:
            return
        unfinished = self.folder / f".{key}-{os.getpid()}"
        try:
            shutil.copyfile(package, unfinished)
            os.replace(unfinished, self.folder / f"{key}-{file_sha256(unfinished)}")
        finally:
            unfinished.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """So that `size` bytes more stay within MAX_BYTES. Other exports add and remove files meanwhile."""
        files = list[tuple[Path, os.stat_result]]()
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                found = path.stat()
                if stat.S_ISREG(found.st_mode):
                    files.append((path, found))
        total = sum(found.st_size for _, found in files)
        for path, found in sorted(files, key=lambda file: file[1].st_mtime):
            is_stale = path.name.startswith(".") and found.st_mtime < time.time() - _STALE
            if is_stale or (total + size > MAX_BYTES and not path.name.startswith(".")):
                path.unlink(missing_ok=True)
                total -= found.st_size


def conditions() -> dict[str, Any]:
    """What makes the same graph compile to another package: versions, compiler, processor, settings."""
    return {
        "torch": [torch.__version__, torch.version.git_version],
        "compiler": _compiler(),
        "processor": [platform.machine(), *_processor()],
        "inductor": inductor_config.get_hash().hex(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_READ_BY_COMPILERS) and name != "TORCHINDUCTOR_CACHE_DIR"
        },
    }


def key_of(facts: Mapping[str, Any], files: Sequence[Path]) -> str:
    """A hash of facts (plain types) and of the content of files."""
    everything = [facts, [file_sha256(file) for file in files]]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compiler() -> list[str]:
    command = os.environ.get("CXX", "g++")
    told = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return [command, str(shutil.which(command)), told.stdout]


def _processor() -> list[str]:
    """Model and instructions: the compiler is told to make code for this very processor."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return [platform.processor()]
    first = path.read_text().split("\n\n")[0].splitlines()
    return sorted(line for line in first if line.split("\t")[0].strip() in ("model name", "flags", "Features"))
