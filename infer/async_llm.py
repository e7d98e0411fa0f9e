"""`AsyncLLM`: an `LLM` for many callers at once, on asyncio event loops. Their requests share one continuous batch.

    event loops     generate(): tokenize (in a thread of its own), submit, wait for news, yield; abort when closed
    inbox           orders to the engine: add this, abort that, stop
    engine thread   takes orders between steps, steps while there is work, posts outputs to the loops

The engine is touched by its thread alone. Whatever ends that thread is told to every caller, present and future. Knows
neither programs nor HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeVar

from infer.inputs import Prompt
from infer.llm import LLM
from infer.output import RequestOutput
from infer.params import SamplingParams
from infer.request import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineDeadError(RuntimeError):
    """The engine thread has ended, by `shutdown` or by a fault of ours (see `__cause__`), or `shutdown` has left it
    behind at a step that hangs: nothing more can run."""


@dataclass(slots=True, eq=False)
class _Stream:
    """What one caller waits for. Written by its event loop alone."""

    request: Request
    loop: asyncio.AbstractEventLoop
    news: asyncio.Event = field(default_factory=asyncio.Event)
    output: RequestOutput | None = None  # outputs are cumulative, so the last one is enough for a slow caller
    error: Exception | None = None

    def put(self, output: RequestOutput | None, error: Exception | None) -> None:
        self.output, self.error = output or self.output, error or self.error
        self.news.set()


class AsyncLLM:
    """Generates for concurrent callers. End it with `shutdown()`, or use it as an `async with` context.

    Args:
        llm: ready to generate; from now on it belongs to this object.
    """

    def __init__(self, llm: LLM) -> None:
        llm.follow_plan(llm.max_num_seqs)
        self.llm = llm
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # over the two below
        self._streams: dict[str, _Stream] = {}
        self._end: EngineDeadError | None = None
        self._busy_since: float | None = None  # seconds of the monotonic clock; None while the engine waits for orders
        # One thread: tokenizers are not made for several, and a long prompt must not hold up the event loop.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="hispec-tokenizer")
        self._last_tokenizing: Future[None] | None = None  # done when the thread has nothing more to do
        self._thread = threading.Thread(target=self._work, name="hispec-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, giving the output so far whenever there is more; the last one is finished.

        Cancelling the caller or closing the iterator aborts the request. A request that a fault has ended gives an
        output with finish_reason "error" and the cause as its stop_reason.

        Raises:
            ValueError: the prompt is empty or too long, or a request of this id is running.
            EngineDeadError: the engine has ended.
        """
        params, name = sampling_params or SamplingParams(), request_id or uuid.uuid4().hex
        request = await self.with_tokenizer(self.llm.make_request, prompt, params, name)
        async with aclosing(self.run(request)) as outputs:
            async for output in outputs:
                yield output

    async def with_tokenizer(self, function: Callable[..., T], *args: object) -> T:
        """`function(*args)` on the thread that the tokenizer belongs to, off the event loop."""
        self.check_health()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)
        except RuntimeError:  # the executor was shut down a moment ago
            self.check_health()
            raise
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and not caller.cancelling():  # it was `shutdown` that cancelled what waited there
                self.check_health()
            raise

    async def run(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for a request that `LLM.make_request` has made, so that whoever asks learns of its own mistakes
        before anything is answered."""
        name = request.request_id
        stream = _Stream(request, asyncio.get_running_loop())
        self._submit(stream)
        try:
            while True:
                await stream.news.wait()
                stream.news.clear()
                output, error = stream.output, stream.error
                if error is not None:
                    raise error
                assert output is not None
                yield output
                if output.finished:
                    return
        finally:
            if self._forget(stream):
                self._inbox.put(partial(self.llm.engine.abort, name))

    async def abort(self, request_id: str) -> None:
        """End a request from outside: its caller gets what there is, with finish_reason "abort"."""
        self._inbox.put(partial(self._abort, request_id))

    def check_health(self) -> None:
        """EngineDeadError if nothing can be generated any more."""
        if self._end is not None:
            raise EngineDeadError(*self._end.args) from self._end.__cause__

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    @property
    def seconds_in_step(self) -> float:
        """How long the engine has been at its current step; 0 while it waits. A step that hangs shows here alone."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def shutdown(self, timeout: float | None = None) -> bool:
        """End the engine thread after its current step, and all requests with it. May be called again.

        Args:
            timeout: seconds that the step, and then the tokenizer, may still take; None: as long as they want.

        Returns:
            Whether both have ended. If not, every caller is told so, but the threads stay; as Python joins the
            tokenizer's at its exit, only `os._exit` is sure to end the process then.
        """
        self._inbox.put(None)
        self._thread.join(timeout)
        if is_stuck := self._thread.is_alive():
            logger.critical("the engine has been at one step for %.0f s: it is left behind", self.seconds_in_step)
            self._tell_all(EngineDeadError("the engine hangs and was left behind by its shutdown"))
        if self._last_tokenizing is None:
            self._last_tokenizing = self._tokenizing.submit(lambda: None)
            # What waits there is not cancelled yet: its callers get their EngineDeadError from what comes after it
            self._tokenizing.shutdown(wait=False)
        wait([self._last_tokenizing], timeout)
        if not self._last_tokenizing.done():
            logger.critical("the tokenizer has not ended after %g s: it is left behind", timeout)
            self._tokenizing.shutdown(wait=False, cancel_futures=True)
        return not is_stuck and not self._last_tokenizing.cancelled()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # ---- any thread ----

    def _submit(self, stream: _Stream) -> None:
        name = stream.request.request_id
        with self._lock:
            self.check_health()
            if name in self._streams:
                raise ValueError(f"request_id={name!r} is running already: give every request one of its own")
            self._streams[name] = stream
            self._inbox.put(partial(self._add, stream))

    def _forget(self, stream: _Stream) -> bool:
        """Whether the engine may still work on it."""
        with self._lock:
            if self._streams.get(stream.request.request_id) is not stream:
                return False
            del self._streams[stream.request.request_id]
            return True

    def _post(self, stream: _Stream, output: RequestOutput | None, error: Exception | None = None) -> None:
        try:
            stream.loop.call_soon_threadsafe(stream.put, output, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            if self._forget(stream):
                self._inbox.put(partial(self.llm.engine.abort, stream.request.request_id))

    def _tell_all(self, end: EngineDeadError) -> None:
        with self._lock:
            self._end = self._end or end
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            self._post(stream, None, end)

    # ---- the engine thread ----

    def _work(self) -> None:
        try:
            while self._take_orders():
                self._deliver(self.llm.engine.step())
            end = EngineDeadError("the engine was shut down")
        except BaseException as cause:
            logger.critical("the engine has ended", exc_info=cause)
            end = EngineDeadError(f"the engine has ended: {type(cause).__name__}: {cause}")
            end.__cause__ = cause
        self._tell_all(end)
        if end.__cause__ is None:
            for request in [*self.llm.engine.waiting, *self.llm.engine.running]:
                self.llm.engine.abort(request.request_id)

    def _take_orders(self) -> bool:
        """Carry out what has come, waiting for orders while there is no other work. False: stop."""
        while True:
            is_idle = not self.llm.engine.has_unfinished
            self._busy_since = None if is_idle else time.monotonic()
            try:
                order = self._inbox.get(block=is_idle)
            except queue.Empty:
                return True
            self._busy_since = time.monotonic()
            if order is None:
                return False
            order()

    def _add(self, stream: _Stream) -> None:
        try:
            self.llm.engine.add(stream.request)
        except ValueError as error:
            self._forget(stream)
            self._post(stream, None, error)

    def _abort(self, request_id: str) -> None:
        self.llm.engine.abort(request_id)
        if (stream := self._streams.get(request_id)) is not None:
            self._deliver([stream.request])

    def _deliver(self, touched: Iterable[Request]) -> None:
        for leader in dict.fromkeys(request.leader or request for request in touched):
            stream = self._streams.get(leader.request_id)
            if stream is None or stream.request is not leader:
                continue
            output = leader.output()
            if output.finished:
                self._forget(stream)
            self._post(stream, output)
