"""`python -m infer bench --programs`: every set of programs of an artifact, call by call, relative to eager."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from infer.commands import options

# What of `bench`'s options makes sense here; the others are about texts.
OWN = ("tokens", "context", "rounds", "seconds_per_cell", "markdown")
SHARED = ("artifact", "backend", "dtype", "device", "enforce_eager", "batch_sizes", "output", "programs", "run")


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--programs")
    group.add_argument(
        "--programs",
        action="store_true",
        help="instead: time every backend's programs (those of --backend and --dtype, if given) call by call, as "
        "ratios to eager (batch sizes 1,8)",
    )
    group.add_argument("--tokens", default="1,4,8", help="of each row in a call, comma-separated (default 1,4,8)")
    group.add_argument("--context", type=int, default=256, help="cached tokens of each row (default 256)")
    group.add_argument("--rounds", type=int, default=20, help="least times that a call is timed (default 20)")
    group.add_argument("--seconds-per-cell", type=float, default=10.0, help="when fewer rounds must do (default 10)")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this Markdown file")


def given(args: argparse.Namespace, parser: argparse.ArgumentParser) -> set[str]:
    """Names of the options that say something else than their defaults."""
    return {name for name, value in vars(args).items() if value != parser.get_default(name)}


def check_options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """ValueError names options that have no meaning with --programs, or without it."""
    names = given(args, parser)
    if args.programs:
        if foreign := sorted(names - {*OWN, *SHARED}):
            raise ValueError(f"--programs times programs without texts: leave out {_flags(foreign)}")
    elif own := [name for name in OWN if name in names]:
        raise ValueError(f"{_flags(own)} belongs to --programs: add it, or leave {_flags(own)} out")


def run(args: argparse.Namespace) -> int:
    from infer import program_bench
    from infer.artifact import Artifact
    from infer.device import check_device, processor_name
    from infer.machine import describe_machine, note_if_busy
    from infer.program_calls import Grid
    from infer.program_report import print_programs, to_markdown, to_record

    grid = Grid(
        batch_sizes=tuple(options.batch_sizes(args)),
        tokens=tuple(_numbers("--tokens", args.tokens)),
        context=args.context,
        rounds=args.rounds,
        seconds_per_cell=args.seconds_per_cell,
    )
    options.check_output(args.markdown, "--markdown")
    check_device(args.device)
    artifact = Artifact.open(args.artifact)
    grid.check_fits(artifact.manifest.limits)
    sets, left_out = program_bench.choose_sets(artifact, args.backend, args.dtype, args.device)
    here = describe_machine(args.device)
    note_if_busy(here.load_average)
    for one in sets:
        if args.device == "cpu" and one.build.num_threads != here.num_threads:
            print(
                f"notice: {one.build.folder_name} was built with {one.build.num_threads} threads and runs with "
                f"{here.num_threads}",
                file=sys.stderr,
            )
    measured = program_bench.measure(
        artifact, sets, grid, enforce_eager=args.enforce_eager, on_progress=options.show_progress
    )
    print(file=sys.stderr)
    measured.left_out |= left_out
    processor = processor_name(args.device)
    title = (
        f"{artifact.manifest.base.name} · {processor}, {here.capability}, {here.num_threads} threads, torch "
        f"{here.torch_version} · {grid.context} cached tokens a row; medians, quartiles in brackets"
    )
    print_programs(measured, title)
    if args.markdown:
        options.write_whole(args.markdown, to_markdown(measured, title))
    if args.output:
        where = {"machine": asdict(here) | {"processor": processor}, "device": args.device, "grid": asdict(grid)}
        options.write_whole(args.output, json.dumps(where | to_record(measured), indent=2) + "\n")
    return 0


def _numbers(flag: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag}={text!r} must be whole numbers, e.g. 1,4,8") from None


def _flags(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)
