"""The shapes that a row may have, made one: conversations of any convention, pairs, texts and token ids → `Encoded`.

| keys | meaning |
|---|---|
| `token_ids`, `loss_mask` | as `train generate` writes what its messages can't stand for |
| `messages` or `conversations` | turns of `role`/`content` or `from`/`value` (ShareGPT), also mixed; `system` beside |
| `prompt`, `response` | a chat of two turns, or plain text where the base has no template |
| `text` | all of it carries loss |

This file knows nothing of files, batches or training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from train.base_model import ending_ids, load_tokenizer, resolve_base
from train.chat import Encoded, Message, encode_messages, encode_text

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}
_TURN_KEYS = ("role", "from", "content", "value", "tool_calls", "weight")  # which `_turn` reads itself
_EXPECTED = "messages, conversations, prompt and response, text, or token_ids and loss_mask"


class Encoder:
    """Rows → token ids with a loss mask; ValueError with the reason for a row that can't be used."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        max_positions: int | None = None,  # that the base was made for; None: any
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.max_positions = max_positions

    def __call__(self, content: Any) -> Encoded:
        row = present(content)
        if "token_ids" in row:
            return self._ids(row["token_ids"], row.get("loss_mask"))
        messages, is_complete = self.messages(row), row.get("complete") is not False
        if messages is not None:
            return encode_messages(self.tokenizer, messages, self.eos_token_ids, is_complete)
        if "prompt" in row or "response" in row:
            prompt, response = _text(row, "prompt"), _text(row, "response")
            return encode_text(self.tokenizer, response, prompt=prompt, end=is_complete)
        if "text" in row:
            return encode_text(self.tokenizer, _text(row, "text"))
        raise ValueError(f"has only {', '.join(sorted(row))}; expected {_EXPECTED}")

    def messages(self, content: Any) -> list[Message] | None:
        """The conversation that a row stands for, in the names that templates know; None for texts and token ids."""
        row = present(content)
        if "token_ids" in row:
            return None
        if "messages" in row or "conversations" in row:
            return conversation(row)
        if ("prompt" in row or "response" in row) and self.tokenizer.chat_template is not None:
            prompt, response = _text(row, "prompt"), _text(row, "response")
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return None

    def _ids(self, token_ids: Any, loss_mask: Any) -> Encoded:
        if not isinstance(token_ids, list) or not isinstance(loss_mask, list) or len(token_ids) != len(loss_mask):
            raise ValueError("token_ids and loss_mask must be lists of the same length")
        for n, token in enumerate(token_ids):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ValueError(f"token_ids[{n}]={token!r} must be an id in 0..{self.vocab_size - 1}")
        bad = [m for m in loss_mask if m not in (0, 1)]
        if bad:
            raise ValueError(f"loss_mask must hold 0 and 1, got {bad[0]!r}")
        bos = self.tokenizer.bos_token_id
        # where BOS is also what opens a turn (ChatML), two in a row are as wrong
        if bos is not None and token_ids[:2] == [bos, bos]:
            raise ValueError(
                f"token_ids begin with BOS ({bos}) twice: the template and the tokenizer have each put one"
            )
        return Encoded(token_ids, [bool(m) for m in loss_mask])


def make_encoder(base: str, revision: str | None = None) -> Encoder:
    """The encoder of a base, from its tokenizer and configs; no weights are read."""
    tokenizer = load_tokenizer(base, revision)  # first: it explains a base that can't be found
    source, revision = resolve_base(base), revision or "main"
    config = AutoConfig.from_pretrained(source, revision=revision)
    generation_config = None
    with suppress(OSError):  # a base without generation_config.json
        generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    max_positions = getattr(config, "max_position_embeddings", None)
    return Encoder(tokenizer, ending_ids(config, generation_config), config.vocab_size, max_positions)


def present(content: Any, expected: str = _EXPECTED) -> dict[str, Any]:
    """The keys that have a value: a table gives every row all columns, with None where the row had none.

    Raises:
        ValueError: the row couldn't be read, holds none of what is `expected`, or has `tools`.
    """
    if isinstance(content, ValueError):
        raise content
    if not isinstance(content, dict) or not content:
        raise ValueError(f"expected an object with {expected}")
    found = {key: value for key, value in content.items() if value is not None}
    if not found:
        raise ValueError(f"every value is null ({', '.join(sorted(content))}); expected {expected}")
    if found.get("tools") and found["tools"] != "[]":  # some sets keep the list as a text
        raise ValueError("tools: descriptions of tools reach no template here; leave the row out, or its tools")
    return found


def conversation(row: Mapping[str, Any]) -> list[Message]:
    """The turns under `messages` or `conversations` in the names that templates know, a `system` beside them first."""
    key = "messages" if "messages" in row else "conversations"
    turns = row[key]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{key} must be a non-empty list of turns with role and content, or from and value")
    messages = [_turn(turn, f"{key}[{n}]") for n, turn in enumerate(turns)]
    system = row.get("system")
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise ValueError(f"system must be a text, got {type(system).__name__}")
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise ValueError(f"system and {key}[0] are two different system prompts; keep one")
    return messages


def _turn(turn: Any, where: str) -> Message:
    """One turn as role and content; what else it holds (Qwen3's `reasoning_content`) stays for the template."""
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is no object with role and content, or from and value")
    name = _either(turn, "role", "from", where)
    if name not in ROLES:
        raise ValueError(f"{where}: the role {name!r} is none of {', '.join(ROLES)}; leave such turns out")
    if turn.get("tool_calls"):
        raise ValueError(f"{where}.tool_calls: calls of tools can't be trained on; leave the row out")
    if ROLES[name] == "assistant" and turn.get("weight") not in (None, 1):
        raise ValueError(f"{where}.weight={turn['weight']!r}: a turn can't be left out of the loss; leave the row out")
    content = _either(turn, "content", "value", where)
    extra = {k: v for k, v in turn.items() if v is not None and k not in _TURN_KEYS}
    return {**extra, "role": ROLES[name], "content": content}


def _either(turn: Mapping[str, Any], name: str, other: str, where: str) -> str:
    """The text under one of two keys; None counts as absent."""
    found = {key: turn[key] for key in (name, other) if turn.get(key) is not None}
    if not found:
        state = "is null" if name in turn or other in turn else "is missing"
        raise ValueError(f"{where}.{name} (or {other}) {state}; it must be a text")
    for key, value in found.items():
        if not isinstance(value, str):
            remedy = "; join its text parts" if isinstance(value, list) else ""
            raise ValueError(f"{where}.{key} must be a text, got {type(value).__name__}{remedy}")
    if len({ROLES.get(value, value) if name == "role" else value for value in found.values()}) > 1:
        raise ValueError(f"{where}: {name}={turn[name]!r} and {other}={turn[other]!r} differ; keep one")
    return next(iter(found.values()))


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be a text that is not empty, got {value!r}")
    return value
