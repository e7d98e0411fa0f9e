"""`python -m infer chat`: a conversation in the terminal, or line by line through pipes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from infer.commands import options
from infer.commands.sampling import add_sampling_options, sampling_params


def add(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk with the model in the terminal, or line by line through pipes")
    options.add_engine_options(parser)
    add_sampling_options(parser)
    options.add_strategy_options(parser)
    parser.add_argument("--system", help="the system's message, before the first question")
    parser.add_argument("--colors", action="store_true", help="colour each token by the tier that picked it first")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    params, policy = sampling_params(args), options.policy_of(args)
    llm = options.load_llm(args, args.strategy, args.verification)
    llm.chat_prompt([{"role": "user", "content": "Hello"}])  # a base that can't chat is refused before anybody types
    from infer.chat import Chat

    notes = Console(stderr=True, highlight=False)
    out = Console(highlight=False)
    chat = Chat(llm, params, policy, out, notes, system=args.system, shows_tiers=args.colors)
    if sys.stdin.isatty():
        name = Path(args.artifact).resolve().name
        notes.print(f"{name} · {llm.strategy} · /help lists the commands", style="dim", markup=False)
        chat.run(_typed(notes))
        return 0
    chat.run(sys.stdin)
    return 1 if chat.num_failed else 0


def _typed(notes: Any) -> Iterator[str]:
    """Lines as somebody types them, with the terminal's own editing and history; Ctrl-C empties one, Ctrl-D ends."""
    with suppress(ImportError):  # Windows: input() does without
        import readline  # noqa: F401  # input() uses it once it is imported
    while True:
        try:
            yield input("» ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            notes.print("\n/quit or Ctrl-D leaves", style="dim")
