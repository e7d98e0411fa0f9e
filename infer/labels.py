"""What a strategy is called in tables and plots: a lossy one says so everywhere, and contenders of one bench differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def named(strategy: str, is_lossy: bool, notes: Sequence[str] = ()) -> str:
    """The strategy, with what must be known of it in brackets."""
    notes = ["lossy"] * is_lossy + list(notes)
    return f"{strategy} ({', '.join(notes)})" if notes else strategy


def label(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The name of a bench's row where no columns tell in which conditions it ran.

    Args:
        row: of `bench_summary.summary`.
        rows: all that are shown: the temperature is told if they have several.
    """
    notes = ["not bitwise"] * (row["bitwise"] is False)
    if len({one["temperature"] for one in rows}) > 1:
        notes.append(f"temperature {row['temperature']:g}")
    if row["verification"] not in (None, "identity"):
        notes.append(row["verification"])
    return named(row["strategy"], row["is_lossy"], notes)
