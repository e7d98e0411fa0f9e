"""What `program_bench` found, as tables: on the terminal, in Markdown for BENCHMARKS.md, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from infer.artifact import AUTO_ORDER
from infer.program_bench import BASELINE, Cell, Measured, standings


class Rows(NamedTuple):
    """A table of texts. The first `num_names` columns are names, the others figures."""

    columns: list[str]
    rows: list[list[str]]
    num_names: int


def to_record(measured: Measured) -> dict[str, Any]:
    """All figures, ready for JSON."""
    return {
        "sets": [asdict(one) for one in measured.sets],
        "left_out": measured.left_out,
        "rows": [cell.record() for cell in measured.cells],
        "standings": {dtype: [one._asdict() for one in found] for dtype, found in standings(measured.cells).items()},
    }


def print_programs(measured: Measured, title: str, console: Console | None = None) -> None:
    console = console or Console(width=120)
    for name, table in ((title, _calls(measured.cells)), ("sets of programs", _sets(measured))):
        shown = Table(title=name, title_justify="left")
        for number, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if number < table.num_names else "right", overflow="fold")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for line in _left_out(measured):
        console.print(line, highlight=False, markup=False)
    console.print(verdict(measured.cells), highlight=False, markup=False)


def to_markdown(measured: Measured, title: str) -> str:
    parts = [f"{title}.", _markdown(_calls(measured.cells)), _markdown(_sets(measured)), *_left_out(measured)]
    return "\n\n".join([*parts, verdict(measured.cells)]) + "\n"


def verdict(cells: Sequence[Cell]) -> str:
    """One line: which backend is fastest over all cells, dtype by dtype, and whether `auto` takes it."""
    parts = []
    for dtype, found in standings(cells).items():
        if len(found) == 1:
            parts.append(f"{dtype}: {BASELINE} alone")
            continue
        each = ", ".join(f"{one.backend} {one.mean_ratio:.2f} ({one.num_fastest})" for one in found)
        best = found[0].backend
        auto = next((name for name in AUTO_ORDER if name in {one.backend for one in found}), None)
        agrees = "as backend='auto' does" if auto == best else f"but backend='auto' takes {auto}"
        parts.append(f"{dtype}: {each}; take {best}, {agrees}")
    return f"Time ÷ {BASELINE}'s, geometric mean over all calls (in how many fastest): " + ". ".join(parts) + "."


def _calls(cells: Sequence[Cell]) -> Rows:
    """One row for each program × rows × tokens of each dtype."""
    others = list(dict.fromkeys(backend for cell in cells for backend in cell.ratios))
    columns = ["dtype", "program", "rows", "tokens", f"{BASELINE}, µs", *(f"{name} ÷ {BASELINE}" for name in others)]
    rows = []
    for cell in cells:
        record = cell.record()
        sizes = [str(cell.batch_size), str(cell.tokens), f"{record['eager_microseconds']:,.0f}"]
        ratios = [_ratio(record["ratios"].get(backend)) for backend in others]
        rows.append([cell.dtype, cell.program, *sizes, *ratios, *([cell.fastest] if others else [])])
    return Rows([*columns, *(["fastest"] if others else [])], rows, num_names=2)


def _ratio(found: dict[str, float] | None) -> str:
    return "–" if found is None else f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


def _sets(measured: Measured) -> Rows:
    columns = ["programs", "load, s", "own files, MB", "shared weights, MB", "error against the model"]
    rows = []
    for one in measured.sets:
        error = "–" if one.max_error is None else f"{one.max_error:.1e} ({one.max_error_tier})"
        shared = f"{one.shared_bytes / 1e6:.1f}" if one.shared_bytes else "–"
        rows.append(
            [f"{one.backend} {one.dtype}", f"{one.load_seconds:.2f}", f"{one.file_bytes / 1e6:.1f}", shared, error]
        )
    return Rows(columns, rows, num_names=1)


def _left_out(measured: Measured) -> list[str]:
    return [f"Left out: {name}: {reason}." for name, reason in measured.left_out.items()]


def _markdown(table: Rows) -> str:
    rule = ["---" if number < table.num_names else "---:" for number in range(len(table.columns))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [table.columns, rule, *table.rows])
