"""Rows as they stand in files and in datasets of the hub, each with its place; knows nothing of shapes or tokens.

Files are read here, row by row, and only the hub through `datasets`: that takes a file's name for a pattern, and its
JSON reader infers one type per column, so that `null` before an object or a late key stops it, in words that name no
line.
"""

from __future__ import annotations

import codecs
import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SUFFIXES = (".jsonl", ".json", ".parquet")

_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.\[\]:%+-]+))?")
_BETWEEN = re.compile(r"[\s,]*")  # two rows of a JSON list that is known to be valid
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class NotJSON(ValueError):
    """A text that is no JSON, or nested too deeply for Python to tell."""


class Row(NamedTuple):
    """One row; what can't be read comes as its ValueError, so that the others still count."""

    source: str
    place: str  # "line 3" of text, "row 3" of tables; counted from 1
    content: Any

    @property
    def where(self) -> str:
        return f"{self.source}, {self.place}"


def expand_sources(source: str) -> list[str]:
    """The files that a pattern (`runs/text-*.jsonl`, `**` for folders at any depth) stands for, sorted; else itself.

    Raises:
        ValueError: a pattern that matches no file.
    """
    path = Path(source).expanduser()
    if not set("*?[") & set(source) or path.exists() or _HUB_ID.fullmatch(source):  # a hub's split may have brackets
        return [source]
    if not (found := sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())):
        raise ValueError(f"{source}: no file matches this pattern (seen from {Path.cwd()})")
    return found


def read_rows(source: str) -> list[Row]:
    """All rows of a file, or of a hub dataset `owner/name[/config][:split]` (split `train` where none is named).

    Raises:
        ValueError: there is no such source, it can't be read at all, or it holds no row.
    """
    path = Path(source).expanduser()
    hub = _HUB_ID.fullmatch(source)
    if path.suffix in SUFFIXES or path.exists() or hub is None:
        rows = list(_read_file(path))
    else:
        rows = _read_hub(source, hub["name"], hub["config"], hub["split"] or "train")
    if not rows:
        raise ValueError(f"{source}: holds no row; give a source that does, or leave it out")
    return rows


def _read_file(path: Path) -> Iterator[Row]:
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{path}: expected a file that ends in {', '.join(SUFFIXES)}, or a hub dataset owner/name[/config][:split]"
        )
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if path.suffix == ".json":
        whole = _decode(content)
        if isinstance(whole, str) and whole.lstrip().startswith("["):
            yield from _list_rows(path, whole)
            return
        # what follows is one object, or rows line by line under the name .json, as many sets have it
        if isinstance(whole, str) and not isinstance(parsed := _parse(whole), NotJSON):
            yield Row(str(path), "line 1", parsed)
            return
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            text = _decode(line)
            yield Row(str(path), f"line {number}", text if isinstance(text, ValueError) else _parse(text))


def _list_rows(path: Path, text: str) -> Iterator[Row]:
    """The elements of one JSON list, each with the line on which it begins."""
    decoder = json.JSONDecoder()
    try:
        decoder.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}; mend the list") from error
    except RecursionError as error:
        raise ValueError(f"{path}: the list holds a row that is nested too deeply to be read; take it out") from error
    at, counted, line = _skip(text, text.index("[") + 1), 0, 1
    while text[at] != "]":
        line, counted = line + text.count("\n", counted, at), at
        end = decoder.raw_decode(text, at)[1]
        yield Row(str(path), f"line {line}", _parse(text[at:end]))
        at = _skip(text, end)


def _skip(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    assert found is not None  # it matches nothing, too
    return found.end()


def _decode(content: bytes) -> str | ValueError:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        return ValueError(
            f"not UTF-8 (byte 0x{content[error.start]:02x} at column {error.start + 1}); convert the file"
        )


def _parse(text: str) -> Any:
    """Python's JSON, but refusing what would go wrong silently or later."""
    try:
        content = json.loads(text, object_pairs_hook=_object)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return NotJSON(f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return NotJSON("is nested too deeply to be read")
    except UnicodeEncodeError:
        return ValueError(r"holds half of a surrogate pair (\ud800–\udfff), which is no character")
    except ValueError as error:
        return error
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _read_parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            contents = (content for batch in file.iter_batches() for content in batch.to_pylist())
            for number, content in enumerate(contents, 1):
                yield Row(str(path), f"row {number}", content)
    except (OSError, ArrowException) as error:
        raise ValueError(f"{path}: not a Parquet file that can be read: {error}") from error


def _read_hub(source: str, name: str, config: str | None, split: str) -> list[Row]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        table = load_dataset(name, config, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(
            f"{source}: neither a file here, nor could the hub give the split {split!r} of {name}"
            f"{f' ({config})' if config else ''}; write owner/name[/config][:split], and check the network and "
            f"HF_TOKEN. The hub said: {error}"
        ) from error
    return [Row(source, f"row {number}", content) for number, content in enumerate(table, 1)]
