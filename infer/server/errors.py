"""Errors in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from infer.async_llm import EngineDeadError

_LONGEST_MESSAGE = 1000  # characters; a bad request may hold megabytes, its answer must not
_LONGEST_NAME = 100
_MOST_FAULTS = 3  # of one body that are named

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        param: the field at fault.
        code: for programs to tell errors apart.
        retry_after: seconds after which it is worth trying again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        message = str(self)
        if len(message) > _LONGEST_MESSAGE:
            message = message[:_LONGEST_MESSAGE] + "…"
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def bad_value(error: ValueError, fields: set[str], renamed: dict[str, str] | None = None) -> ApiError:
    """400 for what the runtime refuses. Its messages begin with the field's name; `renamed` has those that the request
    gave under another name."""
    message = str(error)
    name = match[0] if (match := re.match(r"[a-z_]+", message)) else ""
    is_too_long = name == "prompt" and "max_model_len" in message
    if renamed and name in renamed:
        message, name = renamed[name] + message[len(name) :], renamed[name]
    code = "context_length_exceeded" if is_too_long else "invalid_value"
    return ApiError(400, message, param=name if name in fields else None, code=code)


def bad_body(error: ValidationError) -> ApiError:
    """400 for a body that is no JSON, or not of the shape that is asked for."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    first = faults[0]
    param = str(first["loc"][0])[:_LONGEST_NAME] if first["loc"] else None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"{_path(first['loc'])} is unknown or not supported here: leave it out",
            param=param,
            code="unsupported_parameter",
        )
    texts = [f"{_path(f['loc'])}: {f['msg'].removeprefix('Value error, ')}" for f in faults[:_MOST_FAULTS]]
    more = f" (and {len(faults) - _MOST_FAULTS} more)" if len(faults) > _MOST_FAULTS else ""
    return ApiError(400, "; ".join(texts) + more, param=param, code="invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc))[:_LONGEST_NAME] or "the body"


def engine_is_dead(error: EngineDeadError) -> ApiError:
    return ApiError(503, str(error), code="engine_dead")
