"""`SamplingParams` from the command line: the options that `generate`, `bench` and `check` share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infer.params import SamplingParams
    from infer.structured_outputs import StructuredOutputsParams


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens per prompt (default 128)")
    parser.add_argument("--min-tokens", type=int, default=0, help="tokens before the text may end")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0, help="least share of the largest probability")
    parser.add_argument("--presence-penalty", type=float, default=0.0, help="on tokens that were generated")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="for every time one was generated")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="on tokens of the prompt and the text")
    parser.add_argument("--bad-word", action="append", help="never generate this; may be given several times")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    parser.add_argument("--stop", action="append", help="end at this text; may be given several times")
    parser.add_argument("--ignore-eos", action="store_true")
    form = parser.add_mutually_exclusive_group()  # these need the extra `structured`
    form.add_argument("--json-schema", type=Path, metavar="FILE", help="the text is JSON that this schema describes")
    form.add_argument("--json-object", action="store_true", help="the text is a JSON object")
    form.add_argument("--regex", help="the whole text matches this regular expression")
    form.add_argument("--choice", action="append", help="the text is one of these; given several times")
    form.add_argument("--grammar", type=Path, metavar="FILE", help="the text belongs to this GBNF or Lark grammar")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the parsed options say.

    Raises:
        ValueError: a value is out of its range, or a file can't be read.
    """
    from infer.params import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        min_p=args.min_p,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        bad_words=args.bad_word,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        structured_outputs=_structured_outputs(args),
    )


def _structured_outputs(args: argparse.Namespace) -> StructuredOutputsParams | None:
    from infer.structured_outputs import StructuredOutputsParams

    if args.json_object:
        return StructuredOutputsParams(json_object=True)
    if args.choice is not None:
        return StructuredOutputsParams(choice=args.choice)
    if args.regex is not None:
        return StructuredOutputsParams(regex=args.regex)
    if args.json_schema is not None:
        return StructuredOutputsParams(json=_text(args.json_schema, "--json-schema"))
    if args.grammar is not None:
        return StructuredOutputsParams(grammar=_text(args.grammar, "--grammar"))
    return None


def _text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path} can't be read as text: {error}") from None
