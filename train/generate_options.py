"""What `python -m train generate` is to write, from the command line; knows neither models nor files of rows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train.config_file import model_section
from train.option_parser import OptionParser


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What to write, and how.

    Args:
        base: name as `resolve_base` takes it; None is the artifact's.
        output: JSONL file; rows that it holds already are not written again.
        artifact: folder of `python -m export` whose engine writes; None leaves it to Hugging Face.
        strategy: the engine's, as `infer.LLM` takes it.
        device: `cpu` or `cuda`; None takes the GPU where there is one, and with an artifact the CPU.
        dtype: None is the artifact's first, and bfloat16 without one.
        prompts: source of what is to be answered; None lets the base ask itself.
        num_samples: rows to write; with `prompts` the first so many, None all.
        temperatures: of the answers, by the row's index, in turn. Questions are always asked at 1.
        openings: file of texts with which the self-asked questions begin (the texts themselves, without a template).
        max_new_tokens: of an answer.
        max_question_tokens: of a self-asked question; one that is not at its end by then is skipped.
        max_prompt_tokens: longer prompts are skipped.
        batch_size: rows in flight.
        shard: (I, N) writes the rows whose index modulo N is I.
        seed: with a row's index it gives the row's own seed.

    Raises:
        ValueError: a value is out of range, or two exclude each other.
    """

    base: str | None = None
    output: Path
    revision: str | None = None
    artifact: Path | None = None
    strategy: str = "auto"
    device: str | None = None
    dtype: str | None = None
    prompts: str | None = None
    num_samples: int | None = None
    temperatures: tuple[float, ...] = (1.0,)
    openings: Path | None = None
    max_new_tokens: int = 256
    max_question_tokens: int = 128
    max_prompt_tokens: int = 512
    batch_size: int = 16
    shard: tuple[int, int] = (0, 1)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.base is None and self.artifact is None:
            raise ValueError("give --config FILE (with model.base), --base NAME or --artifact DIR")
        if self.base is None and self.revision is not None:
            raise ValueError(f"--revision={self.revision} is the base's: give --base NAME too, or leave it out")
        if self.artifact is None and self.strategy != "auto":
            raise ValueError(f"--strategy={self.strategy} is the engine's: give --artifact DIR too, or leave it out")
        for name in ("max_new_tokens", "max_question_tokens", "max_prompt_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)} must be at least 1")
        if self.prompts is None and (self.num_samples is None or self.num_samples < 1):
            raise ValueError("without --prompts the base asks itself: say how often with --num_samples, at least 1")
        if self.prompts is not None and self.openings is not None:
            raise ValueError("--openings begin what the base asks itself: leave them out, or --prompts")
        bad = [t for t in self.temperatures if not 0 <= t <= 5]
        if bad or not self.temperatures:
            raise ValueError(f"--temperature={bad[0] if bad else ''} must lie between 0 (greedy) and 5")
        number, count = self.shard
        if not 0 <= number < count:
            raise ValueError(f"--shard={number}/{count} must be I/N with 0 <= I < N, e.g. 0/4 to 3/4")

    def temperature(self, number: int) -> float:
        """Of the answer of row `number`."""
        return self.temperatures[number % len(self.temperatures)]

    def holds(self, number: int) -> bool:
        """Whether row `number` belongs to this shard."""
        return number % self.shard[1] == self.shard[0]


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} must be I/N with 0 <= I < N, e.g. 0/4")
    return int(number), int(count)


def parse_options(argv: Sequence[str]) -> GenerateOptions:
    """Options from the command line; `--config` gives the base and its revision, as for `fit`."""
    parser = OptionParser(prog="python -m train generate", description="Make training text with the base model itself.")
    parser.add_argument("--config", type=Path, help="the YAML of `fit`; its model.base and model.revision are used")
    parser.add_argument("--base", help="smollm2-135m, a folder or a hub id; instead of --config")
    parser.add_argument("--revision", help="a hub id's revision")
    parser.add_argument("--artifact", type=Path, help="folder of `python -m export`: our engine writes with it")
    parser.add_argument("--strategy", default="auto", help="with --artifact: autoregressive, layerskip, hispec or auto")
    parser.add_argument("--device", help="cpu or cuda; default: with --artifact cpu, else the GPU where there is one")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file; a second run goes on where it ends")
    parser.add_argument(
        "--prompts",
        help="JSONL, JSON, Parquet or hub dataset with prompt, turns, messages or conversations; else the base asks",
    )
    parser.add_argument("--num_samples", type=int, help="rows to write (with --prompts: the first so many)")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[1.0], help="one, or several taken in turn; 0 is greedy"
    )
    parser.add_argument(
        "--openings",
        type=Path,
        help=r"text file of lines that questions begin with, in turn; \n is a break, - none",
    )
    parser.add_argument("--max_new_tokens", type=int, default=256, help="longest answer, in tokens")
    parser.add_argument("--max_question_tokens", type=int, default=128, help="longer questions of its own are skipped")
    parser.add_argument("--max_prompt_tokens", type=int, default=512, help="longer prompts are skipped")
    parser.add_argument("--batch_size", type=int, default=16, help="rows at a time")
    parser.add_argument(
        "--shard", type=_shard, default=(0, 1), help="I/N: only rows I, I+N, …; each shard needs an --output of its own"
    )
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default bfloat16, or the artifact's first")
    parser.add_argument("--seed", type=int, default=0)
    values = vars(parser.parse_args(argv))
    config = values.pop("config")
    if config is not None:
        model = model_section(config)
        if values["base"] is None:
            values["base"] = model["base"]
            values["revision"] = values["revision"] or model.get("revision")
    return GenerateOptions(temperatures=tuple(values.pop("temperature")), **values)
