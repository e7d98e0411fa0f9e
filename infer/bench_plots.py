"""A bench's figures as plots and as a Markdown table, for a page or a README. Drawing needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.labels import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TABLE = "bench.md"
Rows = Sequence[Mapping[str, Any]]
_NUM_COLORS = 10  # of matplotlib's cycle


def check_folder(folder: Path) -> None:
    """Refuse what would fail after the measurements.

    Raises:
        ValueError: matplotlib is missing, or this is no folder and can't be made one.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--plots needs matplotlib ({error}): pip install 'hispec[plot]', or leave it out") from None
    if folder.is_file() or not folder.absolute().parent.is_dir():
        raise ValueError(f"--plots {folder}: name a folder, or one to be made in a folder that exists")


def write(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """`bench.md`, and a plot for each question that the rows answer."""
    folder.mkdir(exist_ok=True)
    rows: Rows = [row for row in figures["rows"] if row["bitwise"] is not False]
    drawings = {
        "speed-up-by-benchmark": _by_workload,
        "speed-up-by-batch-size": _by_batch_size,
        "acceptance-by-tier": _acceptance,
        "time-by-tier": _time,
    }
    written = [_write_whole(folder / TABLE, lambda path: path.write_text(markdown(figures["rows"]), encoding="utf-8"))]
    for name, draw in drawings.items():
        figure = draw(rows)
        if figure is not None:
            written.append(_write_whole(folder / f"{name}.png", partial(figure.savefig, format="png", dpi=110)))
    return written


def markdown(rows: Rows) -> str:
    """A line per contender: the ratio to plain decoding in each workload, 95 % interval of the median in brackets."""
    workloads = list(dict.fromkeys(name for row in rows for name in row["workloads"]))
    head = ["strategy", "batch", *workloads, "mean", "tokens / s", "target calls / token", "verification / drafting"]
    tail = ["identical texts", "equal tokens", "GSM8K exact match"]
    lines = ["| " + " | ".join(head + tail) + " |", "|" + "---|" * len(head + tail)]
    for row in rows:
        cells = [label(row, rows), str(row["batch_size"]), *(_cell(row["workloads"].get(one)) for one in workloads)]
        cells += [_number(row["ratio_mean"], ".2f"), f"{row['tokens_per_second']:.1f}"]
        cells += [_number(row["target_calls_per_token"], ".2f"), _number(row["verification_to_drafting"], ".2f")]
        cells += [
            f"{row['num_identical']} of {row['num_prompts']}",
            f"{row['agreement']:.1%}",
            _number(row.get("exact_match"), ".0%"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(workload: Mapping[str, Any] | None) -> str:
    if workload is None:
        return "–"
    interval = workload["interval"]
    spread = "" if interval is None else f" ({interval[0]:.2f}–{interval[1]:.2f})"
    return f"{workload['ratio']:.2f}{spread}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


# ---- plots ----


def _by_workload(rows: Rows) -> Figure | None:
    """Bars at the smallest batch size: every contender in every workload."""
    size = min(row["batch_size"] for row in rows)
    shown = [row for row in rows if row["batch_size"] == size and row["strategy"] != "autoregressive"]
    if not shown:
        return None
    figure, axes = _new(f"speed relative to plain decoding, batch {size}")
    workloads = [*shown[0]["workloads"], "mean"]
    _draw_bars(
        axes,
        {
            label(row, rows): [row["workloads"][name]["ratio"] for name in workloads[:-1]] + [row["ratio_mean"]]
            for row in shown
        },
    )
    axes.set_xticks(range(len(workloads)), workloads)
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set_ylabel("ratio to plain decoding")
    axes.legend(fontsize="small", ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.08))  # below: bars fill the rest
    return figure


def _by_batch_size(rows: Rows) -> Figure | None:
    sizes = sorted({row["batch_size"] for row in rows})
    if len(sizes) < 2:
        return None
    figure, axes = _new("speed relative to plain decoding, mean of the benchmarks")
    names = [label(row, rows) for row in rows]
    for name in dict.fromkeys(names):
        own = [(row["batch_size"], row["ratio_mean"]) for row, its in zip(rows, names, strict=True) if its == name]
        axes.plot(*zip(*own, strict=True), "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="batch size", ylabel="ratio to plain decoding")
    axes.legend(fontsize="small")
    return figure


def _acceptance(rows: Rows) -> Figure | None:
    size = min(row["batch_size"] for row in rows)
    shown = [row for row in rows if row["batch_size"] == size and row["mean_acceptance_length"]]
    if not shown:
        return None
    figure, axes = _new(f"tokens gained per draft that a tier judged, batch {size}")
    judges = list(dict.fromkeys(tier for row in shown for tier in row["mean_acceptance_length"]))
    _draw_bars(
        axes,
        {f"judged by {judge}": [row["mean_acceptance_length"].get(judge, 0.0) for row in shown] for judge in judges},
    )
    axes.set_xticks(range(len(shown)), [label(row, rows) for row in shown], rotation=15)
    axes.set_ylabel("mean acceptance length")
    axes.legend(fontsize="small")
    return figure


def _time(rows: Rows) -> Figure | None:
    """Stacked shares of all time: each stage's judgements, and what is left (prefill, host)."""
    size = min(row["batch_size"] for row in rows)
    shown = [row for row in rows if row["batch_size"] == size and row["stage_shares"]]
    if not shown:
        return None
    figure, axes = _new(f"where the time goes, batch {size}")
    places, bottoms = range(len(shown)), [0.0] * len(shown)
    for number in range(max(len(row["stage_shares"]) for row in shown)):
        shares = [row["stage_shares"][number] if number < len(row["stage_shares"]) else 0.0 for row in shown]
        axes.bar(places, shares, bottom=bottoms, label=f"stage {number + 1}")
        bottoms = [low + share for low, share in zip(bottoms, shares, strict=True)]
    axes.bar(places, [1 - low for low in bottoms], bottom=bottoms, color="0.8", label="prefill, host")
    axes.set_xticks(places, [label(row, rows) for row in shown], rotation=15)
    axes.set_ylabel("share of the time")
    axes.legend(fontsize="small")
    return figure


def _draw_bars(axes: Axes, heights: Mapping[str, Sequence[float]]) -> None:
    """Groups of bars around 0, 1, …: of each name its own heights, side by side with the others'."""
    width = 0.8 / len(heights)
    for number, (name, own) in enumerate(heights.items()):
        offset = (number - (len(heights) - 1) / 2) * width
        hatch = "//" if number >= _NUM_COLORS else None  # colors come again
        axes.bar([place + offset for place in range(len(own))], own, width, label=name, hatch=hatch)


def _new(title: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3, axis="y")
    return figure, axes


def _write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    temporary = path.with_name(f".{path.name}")
    write(temporary)
    temporary.replace(path)
    return path
