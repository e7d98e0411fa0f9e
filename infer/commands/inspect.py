"""`python -m infer inspect`: what an artifact holds, and what its parity checks found."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="what an artifact holds, and what its parity checks found")
    parser.add_argument("artifact")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from infer.artifact import Artifact
    from infer.report import print_artifact

    print_artifact(Artifact.open(args.artifact))
    return 0
