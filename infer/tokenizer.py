"""The artifact's tokenizer; the only thing of transformers that the runtime uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class NoTokenizer:
    """Stands in where the base has none: prompts are token ids, and texts stay empty."""

    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        raise ValueError(
            f"this artifact has no tokenizer to read {text!r}: give prompts as token ids, and no bad_words"
        )

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def load_tokenizer(folder: Path) -> Any:
    """The Hugging Face tokenizer in `folder`, or `NoTokenizer`."""
    if not has_tokenizer(folder):
        return NoTokenizer()
    from transformers import AutoTokenizer  # a second of imports, which `--help` should not pay

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, clean_up_tokenization_spaces=False)
