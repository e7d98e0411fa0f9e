"""Parts of answers in OpenAI's shapes, made from the runtime's outputs. Knows neither HTTP nor who asked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infer.failures import NOTHING_ALLOWED, NOTHING_IN_GRAMMAR
from infer.output import CompletionOutput, Logprob, RequestOutput
from infer.server.errors import ApiError

_LOWEST = -9999.0  # stands for what JSON has no number for, as with OpenAI

Entries = Sequence[Mapping[int, Logprob] | None]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def usage(outputs: Iterable[RequestOutput]) -> dict[str, int]:
    listed = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in listed)
    num_generated = sum(len(text.token_ids) for output in listed for text in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def check_finish(text: CompletionOutput) -> None:
    """ApiError if the text was cut short by a fault or from outside."""
    if text.finish_reason == "error":
        if text.stop_reason in (NOTHING_ALLOWED, NOTHING_IN_GRAMMAR):
            raise ApiError(400, str(text.stop_reason), code="no_token_allowed")
        raise ApiError(500, f"the text could not be completed: {text.stop_reason}", code="generation_failed")
    if text.finish_reason == "abort":
        raise ApiError(503, f"the text was ended before it was complete: {text.stop_reason}", code="aborted")


# ---- log probabilities ----


def chat_logprobs(token_ids: Sequence[int], entries: Entries, num_top: int) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat's answer. `entries` belong to `token_ids`."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        assert entry is not None
        top = sorted((one.rank, i) for i, one in entry.items() if one.rank <= num_top)[:num_top]
        content.append(
            _chat_token(token_id, entry[token_id]) | {"top_logprobs": [_chat_token(i, entry[i]) for _, i in top]}
        )
    return content


def _chat_token(token_id: int, one: Logprob) -> dict[str, Any]:
    text = _text(token_id, one)
    # Half a character has no bytes of its own that could be told from its text
    octets = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": finite(one.logprob), "bytes": octets}


def completion_logprobs(
    token_ids: Sequence[int], entries: Entries, offset: int, first_token: str = ""
) -> dict[str, list[Any]]:
    """`logprobs` of a completion.

    Args:
        offset: of the first token's text.
        first_token: text of a prompt's first token, whose entry is None as nothing predicts it.
    """
    tokens: list[str] = []
    top: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        tokens.append(first_token if entry is None else _text(token_id, entry[token_id]))
        top.append(None if entry is None else _by_text(entry))
    values = [None if e is None else finite(e[i].logprob) for i, e in zip(token_ids, entries, strict=True)]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _by_text(entry: Mapping[int, Logprob]) -> dict[str, float]:
    """The token itself first. Ids of one text, such as halves of characters, share the most probable one's place."""
    found: dict[str, float] = {}
    for token_id, one in entry.items():
        text = _text(token_id, one)
        found[text] = max(finite(one.logprob), found.get(text, _LOWEST))
    return found


def _text(token_id: int, one: Logprob) -> str:
    return f"token_id:{token_id}" if one.decoded_token is None else one.decoded_token


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST) if math.isfinite(logprob) else _LOWEST
