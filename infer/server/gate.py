"""Who may come in, and what ends a request from outside: its deadline, its client's leaving, a shutdown, a dead engine.

A `Ticket` stands for one HTTP request from its admission to the last byte of its answer. Everything that it waits for
goes through `Ticket.wait`, so whatever ends it does so there, as one `ApiError`. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from infer.async_llm import AsyncLLM, EngineDeadError
from infer.server.errors import ApiError, engine_is_dead
from infer.server.settings import Settings

T = TypeVar("T")

_LINGER = 2.0  # seconds that ended requests have to say so, before the server stops
_RECENT = 0.1  # share of the last request in the running mean of durations


class Ticket:
    def __init__(self, num_texts: int, timeout: float | None, on_close: Callable[[Ticket], None]) -> None:
        self.num_texts = num_texts
        self.started = asyncio.get_running_loop().time()  # monotonic: clocks may jump
        self._seconds = timeout
        self._deadline = None if timeout is None else self.started + timeout
        self._failure: ApiError | None = None
        self._waiting: asyncio.Timeout | None = None
        self._on_close: Callable[[Ticket], None] | None = on_close

    @property
    def age(self) -> float:
        return asyncio.get_running_loop().time() - self.started

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Its result.

        Raises:
            ApiError: the ticket ended first; the awaitable was cancelled.
        """
        self._check()
        try:
            async with asyncio.timeout_at(self._deadline) as self._waiting:
                return await awaitable
        except TimeoutError:
            self._check()
            raise ApiError(
                504, f"the request took longer than {self._seconds:g} s: ask for fewer tokens", code="request_timeout"
            ) from None
        finally:
            self._waiting = None

    def end(self, failure: ApiError) -> None:
        """Whatever it waits for now or later fails with this; the first one counts."""
        self._failure = self._failure or failure
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Its answer is complete, or nobody wants it any more. May be called again."""
        if self._on_close is not None:
            self._on_close(self)
            self._on_close = None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class Gate:
    """Admits requests while there is room, and knows whether the server is well."""

    def __init__(self, engine: AsyncLLM, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.tickets: set[Ticket] = set()
        self.num_texts = 0  # of all tickets
        self._drain_until: float | None = None
        self._open_until = 0.0
        self._mean_seconds = 1.0

    # ---- coming and going ----

    @property
    def capacity(self) -> int:
        """Most texts at once: those that run and those that wait."""
        return self.engine.llm.max_num_seqs + self.settings.max_queue

    def admit(self, num_texts: int) -> Ticket:
        """
        Raises:
            ApiError: 503 while draining or when the engine is dead or stuck; 429 while there is no room; 400 if there
                never is.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)
        self.check_engine()
        if num_texts > self.capacity:
            raise ApiError(
                400,
                f"prompts × n = {num_texts} texts: at most {self.capacity} fit at once, split the request",
                param="n",
            )
        if self.num_texts + num_texts > self.capacity:
            raise ApiError(
                429,
                f"the queue is full: {self.num_texts} texts run or wait, at most {self.capacity} may; try again later",
                code="queue_full",
                retry_after=min(60, max(1, math.ceil(self._mean_seconds))),
            )
        ticket = Ticket(num_texts, self.settings.request_timeout, self._leave)
        self.tickets.add(ticket)
        self.num_texts += num_texts
        return ticket

    def _leave(self, ticket: Ticket) -> None:
        self.tickets.remove(ticket)
        self.num_texts -= ticket.num_texts
        self._mean_seconds += _RECENT * (ticket.age - self._mean_seconds)

    # ---- health ----

    def check_engine(self) -> None:
        """ApiError 503 if nothing can be generated: the engine thread has ended, or hangs."""
        try:
            self.engine.check_health()
        except EngineDeadError as error:
            raise engine_is_dead(error) from error
        if (seconds := self.engine.seconds_in_step) > self.settings.stuck_timeout:
            raise ApiError(503, f"the engine has been at one step for {seconds:.0f} s", code="engine_stuck")

    async def watch(self) -> None:
        """End all requests when the engine hangs, as nobody else would; a dead one tells them itself."""
        while True:
            await asyncio.sleep(min(1.0, self.settings.stuck_timeout / 4))
            try:
                self.check_engine()
            except ApiError as failure:
                self._end_all(failure)

    # ---- the end ----

    @property
    def is_draining(self) -> bool:
        return self._drain_until is not None

    def drain(self, stay_open: float = 0.0) -> None:
        """Let nobody in any more; those who are in have `drain_timeout` seconds. Safe in a signal handler.

        Args:
            stay_open: seconds of these for which newcomers are told, even if nobody is in.
        """
        if self._drain_until is None:
            now = time.monotonic()
            self._drain_until = now + self.settings.drain_timeout
            self._open_until = now + min(stay_open, self.settings.drain_timeout)

    def is_drained(self) -> bool:
        """Whether the server may stop now. Those whose time is up are ended here."""
        if self._drain_until is None:
            return False
        now = time.monotonic()
        late = now - self._drain_until
        if late >= 0:
            self._end_all(ApiError(503, "the server was shut down before the text was complete", code="shutting_down"))
        return (not self.tickets and now >= self._open_until) or late > _LINGER

    def _end_all(self, failure: ApiError) -> None:
        for ticket in list(self.tickets):
            ticket.end(failure)
