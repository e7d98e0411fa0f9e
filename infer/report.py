"""Figures as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from infer.check import Comparison
from infer.labels import label, named
from infer.llm import LLM
from infer.machine import Machine
from infer.plan import Figure, Plan
from infer.planner import NUMBERS
from infer.profile import Shares, StrategyOverhead
from infer.strategy import LOSSY


def print_bench(
    rows: Sequence[Mapping[str, Any]],
    llm: LLM,
    machine: Machine,
    share_of_roof: float | None,
    console: Console | None = None,
) -> None:
    """One line per contender; ratios are medians over groups of prompts, quartiles in brackets.

    Columns that would say the same in every line, or nothing, are left out.
    """
    where = f"{machine.num_threads} threads, torch {machine.torch_version}"
    title = f"{llm.manifest.base.name} · {llm.backend} {llm.dtype} · {where}"
    table = Table(title=title, title_justify="left")
    columns = [
        ("strategy", lambda row: named(row["strategy"], row["is_lossy"])),
        ("batch", lambda row: str(row["batch_size"])),
        ("temperature", lambda row: f"{row['temperature']:g}"),
        ("bitwise", lambda row: {True: "yes", False: "no", None: "–"}[row["bitwise"]]),
        ("verification", lambda row: row["verification"] or "–"),
        ("tokens/s", lambda row: f"{row['tokens_per_second']:.1f}"),
        ("ratio to plain", lambda row: f"{row['ratio_median']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"),
        ("ratio to bitwise", lambda row: _ratio(row["ratio_to_bitwise"])),
        ("ratio to batch 1", lambda row: _ratio(row["ratio_to_batch_1"])),
        ("mean acceptance length", _acceptance),
        ("identical", lambda row: f"{row['num_identical']}/{row['num_prompts']}"),
        ("equal tokens", lambda row: f"{row['agreement']:.1%}"),
    ]
    shown = {
        "temperature": any(row["temperature"] > 0 for row in rows),
        "bitwise": any(row["bitwise"] is False for row in rows),
        "verification": any(row["verification"] == "rejection" for row in rows),
        "equal tokens": any(row["is_lossy"] for row in rows),
        "ratio to bitwise": any(row["ratio_to_bitwise"] is not None for row in rows),
        "ratio to batch 1": any(row["ratio_to_batch_1"] is not None and row["batch_size"] > 1 for row in rows),
    }
    columns = [(name, cell) for name, cell in columns if shown.get(name, True)]
    for name, _ in columns:
        table.add_column(
            name, justify="left" if name in ("strategy", "verification", "mean acceptance length") else "right"
        )
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    console = console or Console(width=110)
    console.print(table)
    if share_of_roof is not None:
        console.print(
            f"Plain decoding at batch 1 moves its weights at {share_of_roof:.0%} of the measured copy bandwidth "
            f"({machine.copy_gigabytes_per_second} GB/s)."
        )


def print_workloads(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """The ratios in each workload, where there are several; the 95 % interval of the median in brackets."""
    workloads = list(dict.fromkeys(name for row in rows for name in row["workloads"]))
    if len(workloads) < 2:
        return
    table = Table(title="ratio to plain decoding by workload (95 % interval of the median)", title_justify="left")
    for name in (
        "strategy",
        "batch",
        *workloads,
        "mean",
        "target calls / token",
        "verification / drafting",
        "exact match",
    ):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for row in rows:
        cells = []
        for one in (row["workloads"][name] for name in workloads):
            interval = one["interval"]
            cells.append(f"{one['ratio']:.2f}" + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""))
        match = row.get("exact_match")
        table.add_row(
            label(row, rows), str(row["batch_size"]), *cells, _ratio(row["ratio_mean"]),
            _ratio(row["target_calls_per_token"]), _ratio(row["verification_to_drafting"]),
            "–" if match is None else f"{match:.0%}",
        )  # fmt: skip
    (console or Console(width=150)).print(table)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _acceptance(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{tier} {length:.2f}" for tier, length in row["mean_acceptance_length"].items()) or "–"


def print_profile(
    overheads: Sequence[StrategyOverhead], shares: Sequence[Shares], console: Console | None = None
) -> None:
    """Two tables: the runtime's own time per call, and each part's share of a step."""
    console = console or Console(width=110)
    own = Table(title="the runtime alone: processor time with stub programs", title_justify="left")
    for name in ("strategy", "batch", "µs a step", "calls a step", "µs a call", "µs a call for each row more"):
        own.add_column(name, justify="left" if name == "strategy" else "right")
    for overhead in overheads:
        slope = "–" if overhead.us_per_row is None else f"{overhead.us_per_row:.1f}"
        for number, one in enumerate(overhead.sizes):
            is_last = number == len(overhead.sizes) - 1
            own.add_row(
                named(overhead.strategy, overhead.strategy in LOSSY),
                str(one.batch_size),
                f"{one.us_per_step:.0f}",
                f"{one.calls_per_step:.1f}",
                f"{one.us_per_call:.0f}",
                slope if is_last else "",
                end_section=is_last,
            )
    console.print(own)
    parts = Table(title="with the programs: shares of a step's time", title_justify="left")
    for name in ("strategy", "batch", "ms a step", "tokens a step", "shares"):
        parts.add_column(name, justify="left" if name in ("strategy", "shares") else "right")
    for share in shares:
        largest_first = sorted(share.parts.items(), key=lambda item: -item[1])
        parts.add_row(
            named(share.strategy, share.strategy in LOSSY),
            str(share.batch_size),
            f"{share.ms_per_step:.2f}",
            f"{share.tokens_per_step:.1f}",
            ", ".join(f"{name} {part:.1%}" for name, part in largest_first),
        )
    console.print(parts)


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """One line per batch size: what was chosen, what came next, and their speeds relative to plain decoding."""
    here, sample = plan.conditions, plan.sample
    title = f"plan · {here.backend} {here.dtype} · {here.num_threads} threads, torch {here.torch_version}"
    table = Table(title=title, title_justify="left")
    for name in ("batch", "strategy", "numbers", "ratio to plain", "predicted", "runner-up", "ratio", "predicted"):
        table.add_column(name, justify="left" if name in ("strategy", "runner-up") else "right")
    for entry in plan.entries:
        best, next_ = entry.chosen, entry.runner_up
        others = ("–", "", "") if next_ is None else (f"{next_.strategy} {_numbers(next_)}", *_ratios(next_))
        table.add_row(str(entry.batch_size), best.strategy, _numbers(best), *_ratios(best), *others)
        for name, one in entry.by_workload.items():
            table.add_row(f"{entry.batch_size} {name}", one.strategy, _numbers(one), *_ratios(one))
    console = console or Console(width=120)
    console.print(table)
    console.print(
        f"{sample.num_prompts} prompts, at most {sample.max_tokens} tokens each, temperature {sample.temperature:g}; "
        f"chosen when more than {sample.margin:.0%} faster than plain decoding. In brackets: the lower quarter."
    )


def _ratios(figure: Figure) -> tuple[str, str]:
    told = "–" if figure.predicted is None else f"{figure.predicted:.2f}"
    return f"{figure.ratio:.2f} ({figure.ratio_low:.2f})", told


def _numbers(figure: Figure) -> str:
    return ", ".join(f"{getattr(figure.policy, name):g}" for name in NUMBERS[figure.strategy])


def print_comparison(result: Comparison) -> None:
    """One line, one more for each text that differs, and one that sums these up."""
    num_equal = result.num_prompts - len(result.differences)
    print(f"{result.name:15} batch {result.batch_size}: {num_equal} of {result.num_prompts} texts identical to plain "
          f"decoding at batch 1 ({result.num_tokens} tokens)", flush=True)  # fmt: skip
    for d in result.differences:
        verdict = "" if d.gap is None else f": gap {d.gap:.1e}, top-2 {d.top_two:.1e}, allowed {d.allowed:.1e}"
        print(f"    prompt {d.prompt} differs from its token {d.position} on{verdict}{' (a tie)' if d.is_tie else ''}")
    if result.differences:
        print(f"    {_divergence_line(result)}", flush=True)


def _divergence_line(result: Comparison) -> str:
    summary = result.divergence()
    low, median, high = summary["position"]
    line = f"{summary['rate']:.1%} of texts diverge, first at token {low}, median {median:g}, last {high}"
    if summary["top_two"] is None:
        return line
    low, median, high = summary["top_two"]
    ties = f"{summary['num_ties']} of {len(result.differences)} are ties"
    return f"{line}; top-2 gap there {low:.1e}, median {median:.1e}, at most {high:.1e}; {ties}"
