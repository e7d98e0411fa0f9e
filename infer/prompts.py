"""Prompt files: one JSON object a line, with `prompt`, `turns` or `messages`; Parquet with columns of these names; a
.txt file holds one prompt a line.

`-` is standard input: objects if its first line begins with a brace, else texts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a file: a conversation, which a base without chat template takes as its last message's text."""

    id: str
    messages: list[dict[str, str]]
    workload: str = ""  # name of its file
    reference: str | None = None  # a right answer, where the file has one

    @property
    def text(self) -> str:
        return self.messages[-1]["content"]


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file as it stands there; whether it makes a prompt is `prompt_row`'s to say."""

    id: str  # its own, or `<file>-<number>`
    fields: Mapping[str, Any]
    where: str  # file and line, for errors
    workload: str


def read_prompts(path: Path) -> list[PromptRow]:
    """All prompts of a .jsonl, .parquet or .txt file, or of every such file of one kind in a folder.

    Raises:
        ValueError: nothing there, or a row is malformed; names file, line and reason.
    """
    return [prompt_row(record) for record in read_records(path)]


def read_records(path: Path) -> Iterator[Record]:
    """Its rows, of which only some are held in memory.

    Raises:
        ValueError: nothing there, or a line is no JSON object; names file, line and reason.
    """
    if path == Path("-"):
        text = sys.stdin.read()
        rows = _lines(text.split("\n"), "standard input", "stdin", is_json=text.lstrip().startswith("{"))
        yield from _checked(rows, "standard input")
    elif path.is_dir():
        files = sorted(path.glob("*.jsonl")) or sorted(path.glob("*.parquet"))
        if not files:
            raise ValueError(f"{path}: no .jsonl and no .parquet file in this folder")
        for file in files:
            yield from read_records(file)
    elif not path.is_file():
        raise ValueError(
            f"{path}: no such file; give a .jsonl or .parquet file whose rows have a 'prompt', or a .txt file"
        )
    elif path.suffix == ".parquet":
        yield from _checked(_parquet_rows(path), str(path))
    else:
        with path.open(encoding="utf-8-sig") as lines:
            rows = _lines(lines, str(path), path.stem, is_json=path.suffix != ".txt")
            try:
                yield from _checked(rows, str(path))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def prompt_row(record: Record) -> PromptRow:
    """ValueError, with file and line, if the record has no prompt."""
    reference = record.fields.get("reference")
    return PromptRow(
        id=record.id,
        messages=_messages(record.fields, record.where),
        workload=record.workload,
        reference=reference if isinstance(reference, str) else None,
    )


def _checked(records: Iterator[Record], source: str) -> Iterator[Record]:
    """ValueError at the end of a file without any."""
    is_empty = True
    for record in records:
        is_empty = False
        yield record
    if is_empty:
        raise ValueError(f"{source}: no prompts in it")


def _lines(lines: Iterable[str], source: str, stem: str, *, is_json: bool) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{source}:{number}"
            fields = _parse(line, where) if is_json else {"prompt": line.removesuffix("\n")}
            yield Record(_id(fields, stem, number), fields, where, stem)


def _parquet_rows(path: Path) -> Iterator[Record]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(_id(fields, path.stem, number), fields, f"{path}: row {number}", path.stem)
    except (OSError, ArrowException) as error:
        raise ValueError(f"{path} can't be read as Parquet: {error}") from error


def _id(fields: Mapping[str, Any], stem: str, number: int) -> str:
    found = fields.get("id")
    return f"{stem}-{number}" if found is None else str(found)


def _parse(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg})") from None
    except (RecursionError, ValueError) as error:  # thousands of brackets, or of digits
        raise ValueError(f"{where}: JSON that can't be read ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{where}: expected an object with 'prompt', 'turns' or 'messages', got {type(record).__name__}"
        )
    return record


def _messages(record: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    if isinstance(record.get("prompt"), str):
        messages = [{"role": "user", "content": record["prompt"]}]
    elif isinstance(record.get("turns"), list) and record["turns"]:
        messages = [{"role": "user", "content": record["turns"][0]}]  # later turns answer what was not yet said
    elif isinstance(record.get("messages"), list) and record["messages"]:
        messages = record["messages"]
    else:
        raise ValueError(f"{where}: expected 'prompt' (text), 'turns' or 'messages' (lists), got {sorted(record)}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ValueError(f"{where}: each message needs 'role' and a text 'content', got {message!r}")
        if not message["content"].strip():
            raise ValueError(f"{where}: the prompt is empty")
    return messages
