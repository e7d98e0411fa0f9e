"""`python -m infer loadtest`: many streaming clients against a running server, and what became of them."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from infer.commands import options


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "loadtest", help="stream to many clients of a running server; latencies, statuses, memory"
    )
    parser.add_argument("url", help="of the server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=200, help="at once; each asks again when answered (default 200)")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of asking; begun answers are waited for (default 10)"
    )
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer (default 16)")
    parser.add_argument("--api-key", help="if the server wants one")
    parser.add_argument("--pid", type=int, help="the server's process on this machine: how its memory grows")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures to this JSON file")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    for name, value in (("--clients", args.clients), ("--minutes", args.minutes), ("--max-tokens", args.max_tokens)):
        if not value > 0:
            raise ValueError(f"{name}={value} must be more than 0")
    options.check_output(args.output)
    if importlib.util.find_spec("httpx") is None:
        raise ValueError("loadtest needs the package httpx: pip install httpx")
    import asyncio

    from infer.load import Load, run

    load = Load(
        url=args.url.rstrip("/"),
        num_clients=args.clients,
        seconds=60 * args.minutes,
        max_tokens=args.max_tokens,
        api_key=args.api_key,
        pid=args.pid,
    )
    report = asyncio.run(run(load))
    print(report.text())
    if args.output is not None:
        options.write_whole(args.output, report.to_json())
    return 0 if report.is_good else 1
