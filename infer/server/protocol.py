"""What clients may ask for: OpenAI's fields and vLLM's sampling fields, checked without a tokenizer.

A field that is not listed is refused by name; so is a value of a listed one that HiSpec does not do. null is the same
as leaving a field out. Types are strict: "5", true and 1.5 are no whole numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from infer.params import SamplingParams
from infer.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20  # as with OpenAI: an answer of the whole vocabulary would take megabytes

JsonObject = dict[str, Any]

# One bad item is enough to know: a large body may hold a million
Strings = Annotated[list[str], Field(fail_fast=True)]
Ints = Annotated[list[int], Field(fail_fast=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


# ---- what both endpoints take ----


class StreamOptions(_Strict):
    include_usage: bool | None = None


class JsonSchemaFormat(_Strict):
    name: str
    description: str | None = None
    strict: bool | None = None  # the text keeps to the schema in either case
    schema_: JsonObject = Field(alias="schema")


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def structured_outputs(self) -> StructuredOutputsParams | None:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError(f"response_format.json_schema belongs to the type 'json_schema', got type={self.type!r}")
        if self.json_schema is not None:
            return StructuredOutputsParams(json=self.json_schema.schema_)
        return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None


class TextRequest(_Strict):
    """Fields of both endpoints."""

    model: str | None = None
    """null: the one that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: JsonObject | None = None
    """vLLM's: one of json, regex, choice, grammar, json_object."""
    logit_bias: dict[str, float] | None = None
    hispec_tiers: bool | None = None
    """Say in every chunk of a stream which tier picked its tokens first, and what was accepted so far."""
    hispec_plain: bool | None = None
    """Decode this request plainly, without speculation, to compare speed and text."""

    # Given to SamplingParams as they are
    n: int | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Ints | None = None
    allowed_token_ids: Ints | None = None
    bad_words: Strings | None = None

    # Labels for the provider's own books, which no answer depends on
    user: str | None = None

    PASSED: ClassVar[tuple[str, ...]] = (
        "n", "seed", "stop", "temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p",
        "repetition_penalty", "min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
        "stop_token_ids", "allowed_token_ids", "bad_words",
    )  # fmt: skip

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self) -> SamplingParams:
        """ValueError, beginning with a field's name, if a value is out of its range."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams alone: leave it out, or set stream to true")
        if self.hispec_tiers and not self.stream:
            raise ValueError("hispec_tiers is for streams alone: leave it out, or set stream to true")
        values = {name: value for name in self.PASSED if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **values,
            **self._lengths(),
            speculate=not self.hispec_plain,
            logit_bias=None if self.logit_bias is None else _by_id(self.logit_bias),
            structured_outputs=self._form(),
        )

    def _lengths(self) -> dict[str, Any]:
        """The endpoints differ in how they say what is given back, and how much of it."""
        raise NotImplementedError

    def _form(self) -> StructuredOutputsParams | None:
        form = None if self.response_format is None else self.response_format.structured_outputs()
        if self.structured_outputs is None:
            return form
        if form is not None:
            raise ValueError("structured_outputs and response_format both give a form: leave one out")
        known = StructuredOutputsParams.__dataclass_fields__
        if unknown := [name for name in self.structured_outputs if name not in known]:
            raise ValueError(f"structured_outputs.{unknown[0]} is unknown: give one of {', '.join(known)}")
        return StructuredOutputsParams(**self.structured_outputs)


def _by_id(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not re.fullmatch(r"[0-9]{1,18}", key):
            raise ValueError(f"logit_bias: {key[:40]!r} is no token id; ids are whole numbers from 0 on")
    if len(by_id := {int(key): bias for key, bias in biases.items()}) < len(biases):
        raise ValueError("logit_bias names a token id twice")
    return by_id


# ---- /v1/completions ----


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or a list of them; whether ids are the model's own is for the tokenizer's thread to say."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of these lists")
    if not value:
        raise ValueError("is an empty list: give at least one prompt")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if isinstance(value[0], list):
        for number, item in enumerate(value):
            if not isinstance(item, list):
                raise ValueError(f"item {number} is no list of token ids, as those before it are")
            _check_ids(item, f"prompt {number}")
        return list(value)
    _check_ids(value, "the prompt")
    return [value]


def _check_ids(ids: list[Any], where: str) -> None:
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValueError(f"{where} holds a {_json_type(token_id)} where a token id, a whole number, must stand")


def _json_type(value: object) -> str:
    names = {str: "string", float: "number with a fraction", bool: "boolean", list: "list", dict: "object"}
    return names.get(type(value), "null")


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}, "minItems": 1},
    ]
}


class CompletionRequest(TextRequest):
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = None
    """null: 16, as with OpenAI. 0, with echo: the prompt alone."""
    echo: bool | None = None
    """Put the prompt before the text, and its tokens before the text's in logprobs."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def is_echo_alone(self) -> bool:
        """The prompt comes back, with its logprobs, and no text after it."""
        return bool(self.echo) and self.max_tokens == 0

    def as_sent(self) -> list[str | list[int]]:
        """The prompts as they came, for the log."""
        return self.prompt

    def _lengths(self) -> dict[str, Any]:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of={self.best_of} is not supported: leave it out, or give the value of n")
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        return {
            "max_tokens": 1 if self.is_echo_alone else max_tokens,  # scores of a prompt come with a token, not shown
            "logprobs": self.logprobs,
            "prompt_logprobs": self.logprobs if self.echo else None,
        }


# ---- /v1/chat/completions ----


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    name: str
    arguments: str


class ToolCall(_Strict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None

    # A client that sends our own message back may send these as well
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing: only an assistant's message with tool_calls may be without")
        return self

    def as_template(self) -> dict[str, Any]:
        """As templates expect it: text as one string, arguments parsed, the developer's word as the system's."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        message |= {k: v for k in ("name", "tool_call_id") if (v := getattr(self, k)) is not None}
        if self.tool_calls:
            message["tool_calls"] = [
                call.model_dump() | {"function": {"name": call.function.name, "arguments": _arguments(call)}}
                for call in self.tool_calls
            ]
        return message


def _arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.function.arguments or "{}")
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"messages: the arguments of tool call {call.id[:40]!r} are no JSON") from None


class Function(_Strict):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: Literal[False] | None = None  # the model's calls are not constrained


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class ChatRequest(TextRequest):
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = None
    """null: as far as the model's length goes."""
    max_completion_tokens: int | None = None
    """OpenAI's newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(None, fail_fast=True)
    """Described to the model by its chat template. Its calls stay in the text, as the model writes them."""
    tool_choice: Literal["none", "auto"] | None = None
    """none: the tools are not shown."""

    def _lengths(self) -> dict[str, Any]:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens are the same: leave one out")
        return {
            "max_tokens": self.max_completion_tokens if self.max_tokens is None else self.max_tokens,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }

    @property
    def num_prompts(self) -> int:
        return 1

    def shown_tools(self) -> list[dict[str, Any]] | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def as_sent(self) -> list[dict[str, Any]]:
        """The messages as they came, for the log: they need not be such as a template can take."""
        return [message.model_dump(exclude_unset=True) for message in self.messages]

    def conversation(self) -> list[dict[str, Any]]:
        return [message.as_template() for message in self.messages]
