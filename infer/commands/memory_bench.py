"""`python -m infer bench --memory`: what loading each set of programs adds to a process's memory."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from infer.commands import options
from infer.commands.program_bench import given

_OWN = ("artifact", "backend", "dtype", "output", "memory", "run")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        action="store_true",
        help="instead: what loading each set of programs (those of --backend and --dtype, if given) adds to memory",
    )


def check_options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """ValueError names options that have no meaning with --memory."""
    if foreign := sorted(given(args, parser) - {*_OWN}):
        flags = ", ".join("--" + name.replace("_", "-") for name in foreign)
        raise ValueError(f"--memory loads programs on the CPU and little more: leave out {flags}")


def run(args: argparse.Namespace) -> int:
    from infer import memory
    from infer.artifact import Artifact

    memory.check_system()
    artifact = Artifact.open(args.artifact)
    backends = None if args.backend == "auto" else [name.strip() for name in args.backend.split(",")]
    fitting = [s for s in artifact.programs() if s.build.device == "cpu" and not s.build.misfits()]
    sets = [s for s in fitting if backends is None or s.build.backend in backends]
    sets = [s for s in sets if args.dtype in (None, s.build.dtype)]
    if not sets:
        have = ", ".join(f"{s.build.backend}/{s.build.dtype}" for s in fitting) or "none"
        raise ValueError(
            f"artifact {args.artifact}: no programs for backend={args.backend!r} dtype={args.dtype!r} that run on this "
            f"CPU; it has {have}"
        )
    found = list(memory.measure(artifact, sets))
    print("what loading adds, in models (programs loaded · ready · after the first tokens · peak)")
    for one in found:
        shares = " · ".join(f"{size / one.model:.2f}" for size in (one.programs, one.ready, one.used, one.peak))
        print(f"{one.name}: {shares} of {one.model / 1e6:.0f} MB")
    if args.output:
        options.write_whole(args.output, json.dumps([asdict(one) for one in found], indent=2) + "\n")
    return 0
