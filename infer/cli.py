"""`python -m infer COMMAND ARTIFACT …`: the runtime from a terminal.

A user's mistake ends with one line on stderr and exit code 2. Imports wait until a command needs them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from infer.commands import bench, chat, check, generate, inspect, loadtest, plan, serve, size, sprinter


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's last flush fails too
        return 128 + signal.SIGPIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infer", description="Run an exported model, exactly and faster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (generate, chat, serve, loadtest, plan, size, sprinter, bench, check, inspect):
        command.add(commands)
    return parser
