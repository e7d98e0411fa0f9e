"""`python -m infer inspect`: what an artifact holds, and what export's gates found."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="what an artifact holds, where it runs, and what export's gates found")
    parser.add_argument("artifact")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from infer.artifact import Artifact
    from infer.artifact_report import print_artifact

    print_artifact(Artifact.open(args.artifact))
    return 0
