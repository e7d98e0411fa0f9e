"""The routes: OpenAI's endpoints, the probes and the metrics, over one `AsyncLLM`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from infer.async_llm import AsyncLLM, EngineDeadError
from infer.server.answers import usage
from infer.server.errors import ApiError, bad_body, bad_value, engine_is_dead
from infer.server.gate import Gate
from infer.server.guard import CLIENT_GONE, Guard, error_response
from infer.server.job import Job
from infer.server.metrics import Metrics
from infer.server.page import add_page
from infer.server.protocol import ChatRequest, CompletionRequest, TextRequest
from infer.server.settings import Settings
from infer.server.shapes import ChatShape, CompletionShape, Shape
from infer.server.streaming import EventStream, events
from infer.server.tiers import TierReport

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked", ChatRequest, CompletionRequest)

_SMALL_BODY = 1 << 16  # bytes that are parsed in less than a millisecond


def make_app(engine: AsyncLLM, settings: Settings) -> FastAPI:
    """An ASGI application. `app.state.gate` is where a server that stops says so; the engine stays the caller's."""
    gate = Gate(engine, settings)
    metrics = Metrics(gate)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(gate.watch())
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    # /docs would load scripts from elsewhere. Redirects to the same path with another slash would tell what exists
    app = FastAPI(title="HiSpec", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.gate, app.state.metrics = gate, metrics
    app.add_middleware(Guard, settings=settings, metrics=metrics)
    _add_error_handlers(app)
    _add_probes(app, gate, metrics)
    _add_endpoints(app, gate, metrics)
    add_page(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_endpoints(app: FastAPI, gate: Gate, metrics: Metrics) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        limits = gate.engine.llm.manifest.limits
        return JSONResponse({"object": "list", "data": [_model(gate.settings.model, created, limits.max_model_len)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        _check_model(name, gate.settings)
        return JSONResponse(_model(name, created, gate.engine.llm.manifest.limits.max_model_len))

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatRequest))
    async def chat(request: Request) -> Response:
        asked = await _read(request, ChatRequest, gate.settings)
        return await _answer(request, asked, ChatShape(asked), gate, metrics)

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        asked = await _read(request, CompletionRequest, gate.settings)
        return await _answer(request, asked, CompletionShape(asked), gate, metrics)


def _add_probes(app: FastAPI, gate: Gate, metrics: Metrics) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether the process is worth keeping: 503 once its engine is dead or stuck."""
        gate.check_engine()
        return JSONResponse({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether to send requests here: not while it shuts down."""
        if gate.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        gate.check_engine()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # Starlette's, of which FastAPI's is one
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        answer = ApiError(error.status_code, str(error.detail), code=code)
        answer.headers |= error.headers or {}
        return error_response(answer)

    async def fault(_: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "internal error: the server's log says more", code="internal_error"))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, fault)


# ---- a request's way ----


async def _read(request: Request, model: type[Asked], settings: Settings) -> Asked:
    """The checked body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # the others are what a foreign page may send without asking
        raise ApiError(415, f"Content-Type is {kind[:80]!r}: send application/json", code="unsupported_media_type")
    try:
        async with asyncio.timeout(settings.body_timeout):
            body = await request.body()
    except TimeoutError:
        raise ApiError(408, f"no whole body within {settings.body_timeout:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise _client_gone() from None
    try:
        if len(body) <= _SMALL_BODY:
            return model.model_validate_json(body)
        return await asyncio.to_thread(model.model_validate_json, body)
    except ValidationError as error:
        raise bad_body(error) from None


async def _answer(
    request: Request, asked: ChatRequest | CompletionRequest, shape: Shape, gate: Gate, metrics: Metrics
) -> Response:
    _check_model(asked.model, gate.settings)
    fields, renamed = set(type(asked).model_fields), _renamed(asked)
    try:
        params = asked.sampling_params()
    except ValueError as error:
        raise bad_value(error, fields, renamed) from error
    job = Job(gate.engine, gate.admit(asked.num_prompts * params.n), metrics)
    is_handed_on = False
    leaving = asyncio.create_task(_watch_client(request, job))
    facts = request.scope["hispec"]
    facts["request_id"] = job.id
    try:
        if gate.settings.log_prompts:
            facts["prompt"] = asked.as_sent()
        envelope = {
            "id": shape.id_prefix + job.id,
            "object": shape.chunk_name if asked.stream else shape.name,
            "created": int(time.time()),
            "model": gate.settings.model,
        }
        try:
            await job.prepare(asked, params)
        except ValueError as error:  # of what comes later, none is the client's
            raise bad_value(error, fields, renamed) from error
        if asked.stream:
            tiers = TierReport(gate.engine.llm)
            response = _stream(job, shape, asked, envelope, params.n, gate.settings, facts, tiers)
            is_handed_on = True
            return response
        outputs = await job.finish()
        facts |= _facts(job)
        choices = [
            shape.whole(number * params.n + text.index, text, output, job.echoes[number])
            for number, output in enumerate(outputs)
            for text in output.outputs
        ]
        return JSONResponse(envelope | {"choices": choices, "usage": usage(outputs)})
    except EngineDeadError as error:
        raise engine_is_dead(error) from error
    except ApiError as error:
        facts["error"] = error.code
        raise
    finally:
        leaving.cancel()
        if not is_handed_on:
            job.close()


def _stream(
    job: Job,
    shape: Shape,
    asked: TextRequest,
    envelope: dict[str, Any],
    num_choices: int,
    settings: Settings,
    facts: dict[str, Any],
    tiers: TierReport,
) -> Response:
    def end() -> None:
        facts.update(_facts(job))
        job.close()

    chunks: AsyncGenerator[str, None] = events(job, shape, asked, envelope, num_choices, tiers)
    return EventStream(chunks, end, send_timeout=settings.send_timeout, drain_timeout=settings.drain_timeout)


async def _watch_client(request: Request, job: Job) -> None:
    """A client that goes away takes its request along, wherever that stands."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    request.scope["hispec"]["status"] = CLIENT_GONE
    job.ticket.end(_client_gone())


def _client_gone() -> ApiError:
    return ApiError(CLIENT_GONE, "the client went away", code="client_gone")


def _facts(job: Job) -> dict[str, Any]:
    counts = usage(job.last.values())
    del counts["total_tokens"]
    reasons = [text.finish_reason for output in job.last.values() for text in output.outputs]
    return {**counts, "finish_reasons": reasons, **({"error": job.error_code} if job.error_code else {})}


def _check_model(name: str | None, settings: Settings) -> None:
    if name not in (None, settings.model):
        raise ApiError(
            404,
            f"the model {str(name)[:100]!r} does not exist here: ask for {settings.model!r}",
            param="model",
            code="model_not_found",
        )


def _renamed(asked: TextRequest) -> dict[str, str]:
    """Field of SamplingParams → what this request calls it, where they differ."""
    renamed = {"prompt_logprobs": "logprobs", "context": "messages" if isinstance(asked, ChatRequest) else "prompt"}
    if isinstance(asked, ChatRequest):
        renamed |= {"logprobs": "top_logprobs", "prompt": "messages"}
        if asked.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
    if asked.response_format is not None:
        renamed["structured_outputs"] = "response_format"
    return renamed


# ---- descriptions ----


def _model(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "hispec",
        "max_model_len": max_model_len,
    }


def _takes(model: type[TextRequest]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's, with the bodies that are parsed here."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        pairs = [(ChatRequest, "validation"), (CompletionRequest, "validation")]
        _, defined = models_json_schema(pairs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        made.setdefault("components", {}).setdefault("schemas", {}).update(defined["$defs"])
        app.openapi_schema = json.loads(json.dumps(made))
    return app.openapi_schema
