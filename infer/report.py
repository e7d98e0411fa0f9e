"""Figures as tables on the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from infer.artifact import Artifact
from infer.bench import Machine
from infer.check import Comparison
from infer.llm import LLM


def print_bench(
    rows: Sequence[Mapping[str, Any]],
    llm: LLM,
    machine: Machine,
    roofs: Mapping[int, float],
    console: Console | None = None,
) -> None:
    """One line per strategy and batch size; ratios are medians over groups of prompts, quartiles in brackets."""
    where = f"{machine.num_threads} threads, torch {machine.torch_version}"
    title = f"{llm.manifest.base.name} · {llm.backend} {llm.dtype} · {where}"
    table = Table(title=title, title_justify="left")
    for column, justify in (
        ("strategy", "left"),
        ("batch", "right"),
        ("tokens/s", "right"),
        ("ratio to plain", "right"),
        ("mean acceptance length", "left"),
        ("identical", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        lengths = ", ".join(f"{tier} {length:.2f}" for tier, length in row["mean_acceptance_length"].items())
        table.add_row(
            row["strategy"],
            str(row["batch_size"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio_median']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})",
            lengths or "–",
            f"{row['num_identical']}/{row['num_prompts']}",
        )
    console = console or Console(width=110)
    console.print(table)
    for share in roofs.values():
        console.print(
            f"Plain decoding at batch 1 moves its weights at {share:.0%} of the measured copy bandwidth "
            f"({machine.copy_gigabytes_per_second} GB/s)."
        )


def print_comparison(result: Comparison) -> None:
    """One line, and one more for each text that differs."""
    num_equal = result.num_prompts - len(result.differences)
    print(f"{result.name:15} batch {result.batch_size}: {num_equal} of {result.num_prompts} texts identical to plain "
          f"decoding at batch 1 ({result.num_tokens} tokens)", flush=True)  # fmt: skip
    for d in result.differences:
        verdict = "" if d.gap is None else f": top-2 gap {d.gap:.1e}, allowed {d.allowed:.1e}"
        print(f"    prompt {d.prompt} differs from its token {d.position} on{verdict}{' (a tie)' if d.is_tie else ''}")


def print_artifact(artifact: Artifact) -> None:
    """Base, tiers, programs and the parity report."""
    console, manifest = Console(width=110), artifact.manifest
    base = manifest.base
    console.print(f"{base.name} (revision {base.revision}, {base.family}, {base.num_layers} layers), at most "
                  f"{manifest.limits.max_model_len} tokens, blocks of {manifest.block_size}")  # fmt: skip
    exits = {e.name: e for e in manifest.exits}
    tiers = Table("tier", "layers", "head", "vocabulary")
    for tier in manifest.tiers:
        exit_ = exits[tier.exit]
        size = exit_.vocab_size or base.vocab_size
        tiers.add_row(tier.name, f"{tier.start}–{tier.stop}", exit_.head, str(size))
    console.print(tiers)
    programs = Table("programs", "torch", "processor", "threads", "bitwise ranges")
    for program_set in artifact.programs():
        build = program_set.build
        ranges = {str(info.bitwise_range) for info in build.programs.values()}
        programs.add_row(
            build.folder_name,
            build.torch_version,
            build.cpu_capability,
            str(build.num_threads),
            ", ".join(sorted(ranges)),
        )
    console.print(programs)
    parity = artifact.path / "parity.json"
    if parity.exists():
        console.print_json(json.dumps(json.loads(parity.read_text())))
