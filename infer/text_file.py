"""The file that `generate` writes: one JSON object a text, in the prompts' order, and what a broken-off run left of it.

    FILE            complete, or what was there before
    FILE.partial    whole lines of a run that is under way or was interrupted; a torn last line is cut off

Knows neither models nor options: that a run goes on with those that it began with is its caller's promise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Key = tuple[str, int]  # a prompt's id and which of its texts


class TextFile:
    """
    Args:
        path: becomes complete at the end.
        keys: of all lines that shall be in it, in their order.
        resume: go on where an interrupted run stopped.

    Raises:
        ValueError: there is such a run and it is not to be resumed, or it was of other prompts.
    """

    def __init__(self, path: Path, keys: Sequence[Key], *, resume: bool) -> None:
        self.path, self.partial = path, partial_of(path)
        self.num_kept = 0  # lines that are there already
        if self.partial.exists() and not resume:
            raise ValueError(
                f"--output: {self.partial} is what an interrupted run left: go on with --resume, or delete it"
            )
        kept = b""
        if self.partial.exists():
            kept = _whole_lines(
                self.partial, keys, "resume with the prompts and --n of the interrupted run, or delete it"
            )
            self.num_kept = kept.count(b"\n")
        try:
            self._file = open(self.partial, "r+b" if kept else "wb")  # noqa: SIM115  # closed by __exit__
            self._file.truncate(len(kept))
            self._file.seek(len(kept))
        except OSError as error:
            raise self._failed(error) from error

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """ValueError if the disk does not take them: what was written before stays."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        try:
            self._file.write(lines.encode())
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        try:
            os.fsync(self._file.fileno())
            self.partial.replace(self.path)
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError:  # of bytes that `write` could not flush, which has said so
            if kind is None:
                raise

    def _failed(self, error: OSError) -> ValueError:
        return ValueError(
            f"--output {self.path}: {error.strerror or error}; {self.partial} has what was complete: make room and go "
            "on with --resume"
        )


def partial_of(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def check_complete(path: Path, keys: Sequence[Key]) -> None:
    """ValueError unless the file, which no interrupted run stands beside, has the lines of these keys and no others."""
    remedy = "resume with its own prompts and --n, name another --output, or leave --resume out to write over it"
    whole = _whole_lines(path, keys, remedy)
    num_lines = whole.count(b"\n")
    if num_lines < len(keys):
        raise ValueError(f"--resume: {path} has {num_lines} texts, these prompts give {len(keys)}: {remedy}")


def _whole_lines(path: Path, keys: Sequence[Key], remedy: str) -> bytes:
    """The bytes of those that are complete, after a comparison with `keys`."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.decode(errors="replace").split("\n")[:-1]):
        found = _key(line)
        want = keys[number] if number < len(keys) else None
        if found is None or found != want:
            raise ValueError(
                f"--resume: line {number + 1} of {path} belongs to {found}, these prompts give {want} there: {remedy}"
            )
    return whole


def _key(line: str) -> Key | None:
    try:
        record = json.loads(line)
        return str(record["id"]), int(record.get("index", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
