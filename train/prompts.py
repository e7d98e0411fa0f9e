"""What the base is to answer: rows of a file or a hub dataset, as conversations that wait, or as heads of texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from train.rows import read_rows


class Prompt(NamedTuple):
    """What one row starts from: a conversation that waits for its answer, or the head of a text.

    With a template the head is that of the user's turn, which the base is to write itself first.
    """

    number: int
    messages: tuple[Mapping[str, str], ...] = ()
    text: str = ""


def read_prompts(source: str, has_template: bool, num_prompts: int | None = None) -> list[Prompt]:
    """The first `num_prompts` of a source, or all.

    Raises:
        ValueError: the source can't be read, or one of these rows holds nothing to answer; told with its place.
    """
    prompts = []
    for number, row in enumerate(read_rows(source)[:num_prompts]):
        try:
            prompts.append(_prompt(number, row.content, has_template))
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from error
    return prompts


def _prompt(number: int, content: Any, has_template: bool) -> Prompt:
    from train.formats import conversation, present  # with torch, which --help should not pay

    expected = "prompt, turns" + (", messages or conversations" if has_template else "")
    row = present(content, expected)
    if has_template and ("messages" in row or "conversations" in row):
        messages = conversation(row)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]  # the base writes its own answer
        if not messages:
            raise ValueError("messages hold nothing to answer")
        return Prompt(number, messages=tuple(messages))
    turns = row.get("turns")
    text = row.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"expected {expected}, of which prompt and turns hold texts")
    return Prompt(number, messages=({"role": "user", "content": text},)) if has_template else Prompt(number, text=text)


def read_openings(path: Path) -> list[str]:
    r"""One opening a line: blank lines are left out, `\n` is a line break, `-` is none at all.

    Raises:
        ValueError: the file can't be read, or holds no opening.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--openings {path}: can't be read as UTF-8 text: {error}") from error
    openings = ["" if line.strip() == "-" else line.replace("\\n", "\n") for line in lines if line.strip()]
    if not openings:
        raise ValueError(f"--openings {path}: holds no opening; write one a line, or leave the option out")
    return openings
