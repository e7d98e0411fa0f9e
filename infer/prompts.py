"""Prompt files: one JSON object a line, with `prompt`, `turns` or `messages`; a .txt file holds one prompt a line.

`-` is standard input: objects if its first line begins with a brace, else texts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
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


def read_prompts(path: Path) -> list[PromptRow]:
    """All prompts of a .jsonl or .txt file, or of every .jsonl file of a folder.

    Raises:
        ValueError: nothing there, or a row is malformed; names file, line and reason.
    """
    if path == Path("-"):
        text = sys.stdin.read()
        return _rows(text, "standard input", "stdin", is_json=text.lstrip().startswith("{"))
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise ValueError(f"{path}: no .jsonl file in this folder")
        return [row for file in files for row in read_prompts(file)]
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a .jsonl file with a 'prompt' in each line, or a .txt file")
    return _rows(path.read_text(encoding="utf-8-sig"), str(path), path.stem, is_json=path.suffix != ".txt")


def _rows(text: str, source: str, stem: str, *, is_json: bool) -> list[PromptRow]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{source}:{number}"
            record = _parse(line, where) if is_json else {"prompt": line}
            reference = record.get("reference")
            rows.append(
                PromptRow(
                    id=str(record.get("id", f"{stem}-{number}")),
                    messages=_messages(record, where),
                    workload=stem,
                    reference=reference if isinstance(reference, str) else None,
                )
            )
    if not rows:
        raise ValueError(f"{source}: no prompts in it")
    return rows


def _parse(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg})") from None
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
