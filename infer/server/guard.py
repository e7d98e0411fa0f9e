"""What stands before every route: who may come in, how much they may send, and one line of log for each request.

Pure ASGI, so that a client's leaving reaches the handlers unchanged.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.server.errors import ApiError
from infer.server.metrics import Metrics
from infer.server.settings import Settings

logger = logging.getLogger("infer.server.access")

OPEN_PATHS = ("/health", "/ready")  # exactly these: probes bring no key
CLIENT_GONE = 499  # nginx's status for it; nobody gets to see it


class Guard:
    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._hosts = {host.lower() for host in settings.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, facts = time.monotonic(), 0, dict[str, Any]()
        scope["hispec"] = facts  # handlers add what the log shall say

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if (refusal := self._refusal(scope)) is not None:
                await error_response(refusal)(scope, receive, noting_send)
            else:
                await self._app(scope, self._limited(receive), noting_send)
        except Exception:  # answered further out, by Starlette's ServerErrorMiddleware
            facts["status"] = 500
            raise
        finally:
            status = facts.pop("status", status) or CLIENT_GONE
            route = getattr(scope.get("route"), "path", "")  # not the path: clients would choose the label
            self._metrics.note_http(route, status)
            seconds = round(time.monotonic() - began, 4)
            event = {"method": scope["method"], "path": scope["path"][:200], "status": status, "seconds": seconds}
            logger.info("request", extra={"facts": event | facts})

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._keys and scope["path"] not in OPEN_PATHS and not self._is_known(headers.get(b"authorization", b"")):
            return ApiError(401, "missing or wrong API key: send Authorization: Bearer KEY", code="invalid_api_key")
        if self._hosts and scope["path"] not in OPEN_PATHS:
            name = _host_name(headers.get(b"host", b""))
            if name not in self._hosts:
                message = (
                    f"this server is not known as {name[:100]!r}: use another name, or start it with --allowed-hosts"
                )
                return ApiError(403, message, code="host_not_allowed")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._settings.max_body_bytes:
            return self._too_large()
        return None

    def _is_known(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        digest, is_known = _digest(key.strip()), False
        for known in self._keys:  # all of them, whichever fits: the time taken tells nothing
            is_known |= hmac.compare_digest(known, digest)
        return is_known and scheme.lower() == b"bearer"

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that ends a body without honest Content-Length where it becomes too large."""
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._settings.max_body_bytes:
                    raise self._too_large()
            return message

        return limited_receive

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._settings.max_body_bytes} bytes: send less", code="body_too_large"
        )


def error_response(error: ApiError) -> JSONResponse:
    # The rest of a body that nobody reads must not be taken for the next request
    headers = error.headers | ({"Connection": "close"} if error.status in (401, 403, 413) else {})
    return JSONResponse(error.body, error.status, headers)


def _host_name(host: bytes) -> str:
    """Of a Host header, without its port and IPv6's brackets; empty if it has none."""
    try:
        return (urlsplit("//" + host.decode("latin-1")).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _digest(key: bytes) -> bytes:
    """Of one length whatever the key's: comparing takes the same time."""
    return hashlib.sha256(key).digest()
