"""Servers over the tiny artifact: in this process's event loop, or on a port in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from infer.async_llm import AsyncLLM
from infer.llm import LLM
from infer.server.app import make_app
from infer.server.run import DrainingServer
from infer.server.settings import Settings

MODEL = "tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello, river!"}], "max_tokens": 12, "temperature": 0}
TEXT = {"model": MODEL, "prompt": "Hello, world! A small", "max_tokens": 12, "temperature": 0}


def settings(**changes: Any) -> Settings:
    return Settings(**({"model": MODEL} | changes))


class Served:
    """An app and what it stands on."""

    def __init__(self, app: FastAPI, llm: LLM, engine: AsyncLLM) -> None:
        self.app, self.llm, self.engine = app, llm, engine
        self.gate = app.state.gate

    def slow_down(self, seconds: float) -> None:
        """Every step of the engine takes so much longer, until `restore`."""
        step = type(self.llm.engine).step

        def slow_step() -> Any:
            time.sleep(seconds)
            return step(self.llm.engine)

        self.llm.engine.step = slow_step  # type: ignore[method-assign]

    def restore(self) -> None:
        self.llm.engine.__dict__.pop("step", None)

    def is_idle(self) -> bool:
        """Nothing runs or waits, all blocks are back, all tickets closed."""
        pool = self.llm.engine.pool
        return not (
            self.llm.engine.has_unfinished or self.gate.tickets or self.gate.num_texts or self.engine.num_unfinished
        ) and (pool.num_free == pool.num_blocks - 1)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.contextmanager
def served(llm: LLM, **changes: Any) -> Iterator[Served]:
    """The app over an engine of its own, which is ended, and must be idle, afterwards."""
    engine = AsyncLLM(llm)
    try:
        one = Served(make_app(engine, settings(**changes)), llm, engine)
        yield one
        one.restore()
        asyncio.run(until(one.is_idle))
    finally:
        llm.engine.__dict__.pop("step", None)
        engine.shutdown()


@contextlib.asynccontextmanager
async def in_process(one: Served, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(one.app, raise_app_exceptions=False)
    async with (
        one.app.router.lifespan_context(one.app),
        httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers, timeout=60) as client,
    ):
        yield client


def ask(one: Served, path: str, body: Any, **options: Any) -> httpx.Response:
    """One POST; of a stream, all of it."""

    async def post() -> httpx.Response:
        async with in_process(one) as client:
            how = {"json": body} if isinstance(body, dict) else {"content": body}
            headers = {"Content-Type": "application/json"}
            return await client.post(path, headers=headers, **how, **options)

    return asyncio.run(post())


def strict_json(text: str) -> Any:
    """As a parser that knows no NaN reads it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def sse(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a whole stream, which must end as OpenAI's do."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    return [strict_json(line) for line in lines[:-1]]


@contextlib.contextmanager
def on_port(one: Served, **options: Any) -> Iterator[str]:
    """A real server in a thread; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    as_served = {"loop": "asyncio", "http": "h11", "ws": "none", "log_level": "warning"}
    config = uvicorn.Config(one.app, host="127.0.0.1", port=port, **(as_served | options))
    server = DrainingServer(config, one.gate)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield f"{'https' if config.is_ssl else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def official(address: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", **({"api_key": "none", "max_retries": 0} | options))
