"""Ray's worker processes as the operating system sees them."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def workers(name: str) -> set[int]:
    """Process ids of this Ray's workers whose title holds `name`."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            continue
        if title.startswith("ray::") and name in title:
            found.add(process.pid)
    return found


def until(condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
