"""Load on a server: clients that stream chats one after another for a while. Knows HTTP and nothing of the engine.

Latencies are the clients' own, so they hold this process's waiting too: 200 clients in one Python take some of it.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import httpx

PROMPTS = ("Hello", "Name a river.", "What is snow?", "Count to five.")
_BETWEEN_SAMPLES = 1.0  # seconds, of memory
_WARM = 0.25  # share of the time whose memory is left out: caches fill up in the beginning


@dataclass(frozen=True)
class Load:
    _: KW_ONLY
    url: str
    num_clients: int
    seconds: float
    max_tokens: int
    api_key: str | None = None
    pid: int | None = None


@dataclass(slots=True)
class Report:
    statuses: Counter[str] = field(default_factory=Counter)  # of answers; what went wrong on the way by its name
    firsts: list[float] = field(default_factory=list)  # seconds to the first text, of whole answers
    totals: list[float] = field(default_factory=list)  # seconds to the end, of whole answers
    memory: list[tuple[float, float]] = field(default_factory=list)  # (seconds since the start, MiB)
    pid_ended: float | None = None  # seconds since the start at which the watched process was gone
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return set(self.statuses) == {"200"}

    @property
    def growth(self) -> float | None:
        """MiB per minute, fitted after the warm-up; None without enough samples."""
        late = [(at, size) for at, size in self.memory if at >= _WARM * self.seconds]
        if len(late) < 3:
            return None
        return 60 * statistics.linear_regression(*zip(*late, strict=True)).slope

    def figures(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "statuses": dict(self.statuses),
            "answers_per_second": len(self.totals) / self.seconds,
            "first_text_seconds": percentiles(self.firsts),
            "answer_seconds": percentiles(self.totals),
            "memory_mib": [self.memory[0][1], self.memory[-1][1]] if self.memory else None,
            "memory_growth_mib_per_minute": self.growth,
            "pid_ended_seconds": self.pid_ended,
        }

    def to_json(self) -> str:
        return json.dumps(self.figures(), indent=2) + "\n"

    def text(self) -> str:
        figures = self.figures()
        statuses = ", ".join(f"{count} × {status}" for status, count in sorted(self.statuses.items()))
        lines = [f"{statuses or 'no answer'} in {self.seconds:.0f} s, {figures['answers_per_second']:.1f} a second"]
        for name, values in (("first text", self.firsts), ("whole answer", self.totals)):
            if values:
                of = percentiles(values)
                lines.append(f"{name}: p50 {of['p50']:.3f} s, p99 {of['p99']:.3f} s, longest {of['max']:.3f} s")
        if self.memory:
            growth = "too few samples for its growth" if self.growth is None else f"{self.growth:+.2f} MiB a minute"
            end = "" if self.pid_ended is None else f"; its process was gone after {self.pid_ended:.0f} s"
            lines.append(f"memory: {self.memory[0][1]:.0f} → {self.memory[-1][1]:.0f} MiB, {growth}{end}")
        return "\n".join(lines)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest rank; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: ordered[math.ceil(q * len(ordered)) - 1] for name, q in ranks.items()}


async def run(load: Load) -> Report:
    """ValueError if the server can't be reached at all, or the process isn't there at the start."""
    report = Report()
    if load.pid is not None:
        report.memory.append((0.0, _resident_mib(load.pid)))
    headers = {} if load.api_key is None else {"Authorization": f"Bearer {load.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.num_clients)
    async with httpx.AsyncClient(
        base_url=load.url, headers=headers, limits=limits, timeout=None, trust_env=False
    ) as client:
        try:
            await client.get("/ready", timeout=10)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{load.url} can't be reached: {error!r}") from error
        began = time.monotonic()
        watching = None if load.pid is None else asyncio.create_task(_watch(load.pid, report, began))
        try:
            clients = (
                _client(client, load, number, report, began + load.seconds) for number in range(load.num_clients)
            )
            await asyncio.gather(*clients)
            report.seconds = time.monotonic() - began
            if watching is not None and watching.done():
                await watching  # raises what broke it
        finally:
            if watching is not None:
                watching.cancel()
    return report


async def _client(client: httpx.AsyncClient, load: Load, number: int, report: Report, until: float) -> None:
    while time.monotonic() < until:
        message = {"role": "user", "content": PROMPTS[number % len(PROMPTS)]}
        body = {"messages": [message], "max_tokens": load.max_tokens, "stream": True, "temperature": 0}
        began, first = time.monotonic(), None
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                status, last = str(response.status_code), ""
                async for line in response.aiter_lines():
                    if first is None and '"content":"' in line and '"content":""' not in line:  # that opens a stream
                        first = time.monotonic() - began
                    if line.startswith("data: "):
                        last = line
                        if line.startswith('data: {"error"'):
                            status = "error in a stream"
            if status == "200" and last != "data: [DONE]":
                status = "a stream without end"
        except httpx.HTTPError as error:
            status = type(error).__name__
        report.statuses[status] += 1
        if status != "200":
            await asyncio.sleep(0.2)  # as a client that was refused would
            continue
        report.totals.append(time.monotonic() - began)
        if first is not None:
            report.firsts.append(first)


async def _watch(pid: int, report: Report, began: float) -> None:
    while report.pid_ended is None:
        await asyncio.sleep(_BETWEEN_SAMPLES)
        at = time.monotonic() - began
        try:
            report.memory.append((at, _resident_mib(pid)))
        except ValueError:  # it was there at the start; what the clients have seen by now is worth keeping
            report.pid_ended = at


def _resident_mib(pid: int) -> float:
    """ValueError if there is no such process, or only what is left of one."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError as error:
        raise ValueError(f"--pid {pid}: no such process on this machine ({error}); give the server's") from error
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in fields:  # a process that has ended and waits for its parent, or one of the kernel's
        raise ValueError(f"--pid {pid}: this process has no memory of its own; give the server's")
    return int(fields["VmRSS"].split()[0]) / 1024
