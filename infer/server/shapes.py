"""How the two endpoints' answers differ: whole ones, and the chunks of streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from infer.output import CompletionOutput, Logprob, RequestOutput
from infer.server.answers import chat_logprobs, completion_logprobs
from infer.server.protocol import ChatRequest, CompletionRequest


@dataclass(frozen=True, slots=True)
class Echo:
    """What stands before a completion that repeats its prompt."""

    text: str = ""
    first_token: str = ""


@dataclass(slots=True)
class Sent:
    """How much of one text a stream has given already; nothing, for an answer that is given whole."""

    num_characters: int = 0
    num_tokens: int = 0
    offset: int = 0  # of the next token's text in logprobs


class Shape(Protocol):
    name: str  # of whole answers, `object`
    chunk_name: str
    id_prefix: str

    def whole(self, index: int, text: CompletionOutput, output: RequestOutput, echo: Echo) -> dict[str, Any]:
        """An entry of `choices` of an answer that is given whole."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a text before its first token."""

    def part(self, index: int, text: CompletionOutput, output: RequestOutput, echo: Echo, sent: Sent) -> dict[str, Any]:
        """What is new of a text, which is noted in `sent`."""


def _rest(text: CompletionOutput, sent: Sent) -> str:
    rest = text.text[sent.num_characters :]
    sent.num_characters = len(text.text)
    return rest


def _new_logprobs(text: CompletionOutput, sent: Sent) -> tuple[tuple[int, ...], list[dict[int, Logprob]]]:
    assert text.logprobs is not None
    return text.token_ids[sent.num_tokens :], text.logprobs[sent.num_tokens : len(text.token_ids)]


class ChatShape:
    name, chunk_name, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, asked: ChatRequest) -> None:
        self._num_top = (asked.top_logprobs or 0) if asked.logprobs else None

    def whole(self, index: int, text: CompletionOutput, output: RequestOutput, echo: Echo) -> dict[str, Any]:
        logprobs = self._logprobs(text, Sent())
        message = {"role": "assistant", "content": text.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": text.finish_reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def part(self, index: int, text: CompletionOutput, output: RequestOutput, echo: Echo, sent: Sent) -> dict[str, Any]:
        rest = _rest(text, sent)
        logprobs = self._logprobs(text, sent)
        sent.num_tokens = len(text.token_ids)
        delta = {"content": rest} if rest or text.finish_reason is None else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": text.finish_reason}

    def _logprobs(self, text: CompletionOutput, sent: Sent) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        return {"content": chat_logprobs(*_new_logprobs(text, sent), self._num_top), "refusal": None}


class CompletionShape:
    name, chunk_name, id_prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, asked: CompletionRequest) -> None:
        self._has_logprobs, self._echo = asked.logprobs is not None, bool(asked.echo)

    def whole(self, index: int, text: CompletionOutput, output: RequestOutput, echo: Echo) -> dict[str, Any]:
        return self.part(index, text, output, echo, Sent())

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def part(self, index: int, text: CompletionOutput, output: RequestOutput, echo: Echo, sent: Sent) -> dict[str, Any]:
        is_first = sent.num_tokens == 0
        rest = (echo.text if is_first else "") + _rest(text, sent)
        logprobs = self._logprobs(text, output, echo, sent) if self._has_logprobs else None
        sent.num_tokens = len(text.token_ids)
        return {"index": index, "text": rest, "logprobs": logprobs, "finish_reason": text.finish_reason}

    def _logprobs(self, text: CompletionOutput, output: RequestOutput, echo: Echo, sent: Sent) -> dict[str, Any]:
        token_ids, entries = _new_logprobs(text, sent)
        before: list[dict[int, Logprob] | None] = []
        if self._echo and sent.num_tokens == 0:
            assert output.prompt_logprobs is not None
            token_ids, before = (*output.prompt_token_ids, *token_ids), output.prompt_logprobs
        made = completion_logprobs(token_ids, [*before, *entries], sent.offset, echo.first_token)
        if made["tokens"]:
            sent.offset = made["text_offset"][-1] + len(made["tokens"][-1])
        return made
