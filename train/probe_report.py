"""What `probe` has found, as a table, a verdict, JSON and a drawing; it decides nothing."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infer.commands.options import check_output, write_whole
from train.probe import Probe, TrainedExit
from train.probe_options import ProbeOptions

_DRAWINGS = (".png", ".svg")
_FEW = 8  # labels per hidden dimension, below which a fit learns its tokens by heart


def check_files(options: ProbeOptions) -> None:
    """Raise ValueError for what could not be written, before any work is done."""
    check_output(options.json, "--json")
    if options.plot is None:
        return
    check_output(options.plot, "--plot")
    if options.plot.suffix not in _DRAWINGS:
        raise ValueError(f"--plot {options.plot}: name a file that ends in {' or '.join(_DRAWINGS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--plot needs matplotlib ({error}): pip install 'hispec[plot]', or leave --plot out"
        ) from error


# ---- in the terminal ----


def show(console: Console, probe: Probe) -> None:
    """The table and what to make of it."""
    console.print(_table(probe))
    for line in verdict(probe):
        console.print(Text(line))


def _table(probe: Probe) -> Table:
    table = Table(title=f"exits of {probe.base['name']}, {probe.num_layers} layers", title_justify="left")
    for name in ("depth", "cost", "native\nagreement", "native\nacceptance"):
        table.add_column(name, justify="right")
    for name in ("linear\nagreement", "linear\nacceptance", "linear\nspeed-up"):
        table.add_column(name, justify="right")
    best = probe.best_exit()
    for native, linear in zip(probe.exits["native"], probe.exits["linear"], strict=True):
        shares = (native.agreement, native.acceptance, linear.agreement, linear.acceptance)
        cells = [f"{linear.depth}", f"{linear.cost:.3f}", *(f"{s:.1%}" for s in shares), f"{linear.speedup:.2f}"]
        table.add_row(*cells, style="bold green" if linear is best else "")
    return table


def _trained_line(exit_: TrainedExit) -> str:
    return (
        f"Trained {exit_.name} ({exit_.head} at depth {exit_.depth}, cost {exit_.cost:.3f}): agreement "
        f"{exit_.agreement:.1%}, acceptance length {exit_.acceptance_length:.2f}, predicted {exit_.speedup:.2f}."
    )


def verdict(probe: Probe) -> list[str]:
    """Where the figures come from, and which exits to train."""
    labels, single, pair = probe.num_labels, probe.best_exit(), probe.best_pair
    native = probe.best_exit("native")
    lines = [
        f"Linear heads fitted on {labels['fit'] + labels['tuning']} labels, all scored on {labels['scored']} held-out "
        f"ones; exits propose {probe.vocab_size} ids. Cost: one call as a share of a plain step (target "
        f"{probe.target_cost:g}). Speed-up: greedy, of layerskip with up to {probe.num_draft_tokens} drafts.",
        f"One exit: depth {single.depth}, predicted {single.speedup:.2f} times plain decoding "
        f"(untrained native: depth {native.depth}, {native.speedup:.2f}).",
    ]
    if pair is not None:
        lines.append(
            f"Two exits: draft at {pair.draft}, intermediate at {pair.intermediate}, predicted {pair.speedup:.2f} "
            f"(hispec, γ = {probe.policy.num_draft_tokens}, N_i = {probe.policy.window})."
        )
    lines += [_trained_line(exit_) for exit_ in probe.trained]
    speedups = [single.speedup, native.speedup, *(e.speedup for e in probe.trained)]
    if max(*speedups, 0.0 if pair is None else pair.speedup) <= 1:
        lines.append("At these costs none of them is faster than plain decoding as it stands.")
    lines.append(
        "A guide, not a forecast: a trained `layer` head agrees more than a linear one, and costs a layer more."
    )
    num_fitted = labels["fit"] + labels["tuning"]
    if num_fitted < _FEW * probe.hidden_size:
        lines.append(
            f"note: {num_fitted} labels are few for heads of {probe.hidden_size} × {probe.hidden_size} numbers; with "
            f"--num_tokens {_FEW * probe.hidden_size} or more they agree better"
        )
    return lines


# ---- in files ----


def record(probe: Probe) -> dict[str, Any]:
    """All figures, in plain types."""
    pair = probe.best_pair
    fits = [{"ridge": fit.ridge, "unexplained": fit.unexplained} for fit in probe.fits]
    return {
        "base": dict(probe.base),
        "num_layers": probe.num_layers,
        "hidden_size": probe.hidden_size,
        "num_labels": dict(probe.num_labels),
        "vocab_size": probe.vocab_size,
        "target_cost": probe.target_cost,
        "num_draft_tokens": probe.num_draft_tokens,
        "policy": asdict(probe.policy),
        "native": [exit_._asdict() for exit_ in probe.exits["native"]],
        "linear": [exit_._asdict() | fit for exit_, fit in zip(probe.exits["linear"], fits, strict=True)],
        "pairs": [own._asdict() for own in probe.pairs],
        "trained": [own._asdict() for own in probe.trained],
        "best": {
            "native": probe.best_exit("native")._asdict(),
            "linear": probe.best_exit()._asdict(),
            "pair": None if pair is None else pair._asdict(),
        },
    }


def write(probe: Probe, options: ProbeOptions) -> None:
    if options.json is not None:
        write_whole(options.json, json.dumps(record(probe), indent=2) + "\n")
    if options.plot is not None:
        _draw(probe, options.plot)


def _draw(probe: Probe, path: Path) -> None:
    """Agreement over depth, and over the cost that buys it."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, x, label in zip(panels, ("depth", "cost"), ("layers below the exit", "cost of a call / plain step")):
        for (kind, exits), style in zip(probe.exits.items(), ("--", "-"), strict=True):
            places = [getattr(exit_, x) for exit_ in exits]
            axes.plot(places, [e.agreement for e in exits], f"C0{style}", label=f"{kind}: agreement")
            axes.plot(places, [e.acceptance for e in exits], f"C1{style}", label=f"{kind}: acceptance")
        for exit_ in probe.trained:
            place = (getattr(exit_, x), exit_.agreement)
            axes.plot(*place, "C2*", markersize=11)
            axes.annotate(f"{exit_.name} (trained)", place, xytext=(6, 4), textcoords="offset points", fontsize="small")
        axes.axvline(getattr(probe.best_exit(), x), color="0.7", zorder=0, label="best single linear exit")
        axes.set(xlabel=label, ylim=(0, 1))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of held-out labels")
    panels[0].legend(fontsize="small")
    figure.suptitle(f"exits of {probe.base['name']}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format=path.suffix[1:])
    temporary.replace(path)
