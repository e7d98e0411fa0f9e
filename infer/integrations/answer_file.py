"""The file that a batch job writes: JSON lines or Parquet, a row for each one asked, in the input's order.

Either is written as JSON lines first, to `FILE.partial` (see `text_file`), so that an interrupted job can go on; the
file itself appears complete, or what was there before stays. Knows neither models nor Ray.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from infer.text_file import TextFile, check_complete, partial_of

SUFFIXES = (".jsonl", ".parquet")
_ROWS_AT_ONCE = 1024  # of Parquet, in memory


class Counts(NamedTuple):
    num_written: int  # rows with their text
    num_failed: int  # rows with a reason in `error` instead


class AnswerFile:
    """
    Args:
        path: ends in .jsonl or .parquet; becomes complete at the end.
        ids: of all rows that shall be in it, in their order.
        resume: go on where an interrupted job stopped.

    Raises:
        ValueError: there is such a job and it is not to be resumed, or it was of other rows.
    """

    def __init__(self, path: Path, ids: Sequence[str], *, resume: bool) -> None:
        check_suffix(path)
        self._path, self._num_asked = path, len(ids)
        self._lines = TextFile(path, [(name, 0) for name in ids], resume=resume)

    @property
    def num_kept(self) -> int:
        """Rows that an interrupted job left."""
        return self._lines.num_kept

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._lines.write(rows)

    def finish(self) -> Counts:
        """Make the file complete; counts what is in it, and not what was given to `write`."""
        partial = self._lines.partial
        counts = _count(_rows(partial))
        if sum(counts) != self._num_asked:
            raise RuntimeError(f"{partial} has {sum(counts)} rows, {self._num_asked} were asked: the job has lost some")
        if self._path.suffix == ".jsonl":
            self._lines.finish()
        else:
            _write_parquet(self._path, _rows(partial))
            partial.unlink()
        return counts

    def __enter__(self) -> Self:
        self._lines.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.__exit__(kind, value, trace)
        partial = self._lines.partial
        if partial.exists() and partial.stat().st_size == 0:  # nothing to go on with, as if the job had never begun
            partial.unlink()


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"output={path} must end in {' or '.join(SUFFIXES)}, which says what is written")


def finished_before(path: Path, ids: Sequence[str]) -> Counts | None:
    """Counts of a file that is complete, so that nothing is to be resumed; None if there is none.

    Raises:
        ValueError: it has other rows.
    """
    if not path.exists() or partial_of(path).exists():
        return None
    if path.suffix == ".jsonl":
        check_complete(path, [(name, 0) for name in ids])
        return _count(_rows(path))
    from pyarrow.parquet import read_schema, read_table

    has_answers = {"id", "error"} <= set(read_schema(path).names)
    table = read_table(path, columns=["id", "error"] if has_answers else [])
    if not has_answers or table.column("id").to_pylist() != list(ids):
        raise ValueError(
            f"--resume: {path} has the answers to other rows: resume with its own input, name another output, or leave "
            "--resume out to write over it"
        )
    return _count(table.to_pylist())


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        yield from map(json.loads, lines)


def _count(rows: Iterable[Mapping[str, Any]]) -> Counts:
    num_rows = num_failed = 0
    for row in rows:
        num_rows += 1
        num_failed += row["error"] is not None
    return Counts(num_rows - num_failed, num_failed)


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    from infer.integrations.generator import ANSWERED

    schema = ANSWERED.remove(ANSWERED.get_field_index("number"))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with ParquetWriter(temporary, schema) as file:
            while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
                file.write_table(pa.Table.from_pylist(some, schema))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
