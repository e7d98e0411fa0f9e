"""Self-distillation data: the base model answers prompts, or asks the questions itself first.

Rows are appended batch by batch, each with its index, so that a second run goes on where the first one stopped. A row
is written as readable `messages` when encoding them gives the model's very tokens again, else as `token_ids` with a
`loss_mask`. This file knows nothing of exits or training.
"""

# Shape legend: B rows of one batch

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from train.chat import Encoded, encode_messages, open_user_turn, render
from train.config_file import model_section
from train.prompts import Prompt, read_prompts


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What to write, and how."""

    base: str
    output: Path
    revision: str | None = None
    prompts: str | None = None
    num_samples: int | None = None
    temperatures: tuple[float, ...] = (1.0,)
    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    batch_size: int = 16
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)} must be at least 1")
        if self.prompts is None and (self.num_samples is None or self.num_samples < 1):
            raise ValueError("without --prompts the base asks itself: say how often with --num_samples, at least 1")
        bad = [t for t in self.temperatures if not 0 <= t <= 5]
        if bad or not self.temperatures:
            raise ValueError(f"--temperature={bad[0] if bad else ''} must lie between 0 (greedy) and 5")


@dataclass
class Counts:
    """written + failed + skipped = asked; `before` of the written ones stood in the file already."""

    asked: int = 0
    before: int = 0
    written: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return (
            f"asked {self.asked}: written {self.written} ({self.before} of them before), failed {self.failed}, "
            f"skipped {self.skipped}; {self.tokens} new tokens"
        )


class Author:
    """The base model as a writer of token ids."""

    def __init__(self, options: GenerateOptions, tokenizer: Any) -> None:
        import torch
        from transformers.utils import logging

        from train.base_model import ending_ids, load_base

        self.torch = torch
        self.options = options
        self.tokenizer = tokenizer
        self.model = load_base(options.base, options.revision, options.dtype)
        if torch.cuda.is_available():
            self.model.to("cuda")
        # After the prompt, HF unembeds a strided slice: on CPU that copies the matrix for each row (5 s at B = 32)
        self.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0].contiguous(),))
        logging.set_verbosity_error()  # generate repeats its advice at every call
        self.eos_token_ids = ending_ids(self.model.config, self.model.generation_config)
        self.has_template = self.tokenizer.chat_template is not None

    def continue_ids(
        self, prompts: Sequence[Sequence[int]], temperature: float, max_new_tokens: int
    ) -> list[list[int]]:
        """The model's tokens after each of B prompts, up to and with EOS."""
        torch = self.torch
        longest = max(map(len, prompts))
        pad = self.eos_token_ids[0] if self.eos_token_ids else 0
        token_ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            out = self.model.generate(
                token_ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=max_new_tokens,
                eos_token_id=self.eos_token_ids or None,
                pad_token_id=pad,
                **(sampling if temperature > 0 else {"do_sample": False}),
            )
        return [self._until_eos(row) for row in out[:, longest:].tolist()]

    def _until_eos(self, token_ids: list[int]) -> list[int]:
        ends = [n for n, token in enumerate(token_ids) if token in self.eos_token_ids]
        return token_ids[: ends[0] + 1] if ends else token_ids

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def ask(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Let the model write the user's turn of rows that have none."""
        opening = self.encode(open_user_turn(self.tokenizer))
        asked = self.continue_ids([opening] * len(prompts), 1.0, min(self.options.max_new_tokens, 128))
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in asked]
        # a question cut short is none; one that ended carries EOS as its last token
        ended = [bool(ids) and ids[-1] in self.eos_token_ids for ids in asked]
        return [
            p._replace(messages=({"role": "user", "content": t},) if t and e else ())
            for p, t, e in zip(prompts, texts, ended)
        ]

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        if self.has_template:
            return self.encode(render(self.tokenizer, prompt.messages, open_answer=True))
        served = list(self.tokenizer(prompt.text)["input_ids"])  # as `infer` does it, with BOS where that puts one
        bos = self.tokenizer.bos_token_id
        return served or ([] if bos is None else [bos])

    def row(self, prompt: Prompt, head: Sequence[int], tail: Sequence[int]) -> dict[str, Any]:
        """The row to write: `messages` if they stand for exactly these tokens, else the tokens."""
        if self.has_template:
            ended = tail[-1] in self.eos_token_ids
            answer = self.tokenizer.decode(tail[:-1] if ended else tail)
            messages = [*prompt.messages, {"role": "assistant", "content": answer}]
            if self._stands_for(messages, ended, head, tail):
                return {"index": prompt.number, "messages": messages} | ({} if ended else {"complete": False})
        mask = [0] * len(head) + [1] * len(tail)
        return {"index": prompt.number, "token_ids": [*head, *tail], "loss_mask": mask}

    def _stands_for(self, messages: list[Any], ended: bool, head: Sequence[int], tail: Sequence[int]) -> bool:
        try:
            encoded = encode_messages(self.tokenizer, messages, self.eos_token_ids, complete=ended)
        except ValueError:
            return False
        n = len(head) + len(tail)  # the template may write a line break after the last EOS
        wanted = Encoded([*head, *tail], [False] * len(head) + [True] * len(tail))
        return encoded.clipped(n) == wanted and not any(encoded.loss_mask[n:])


def generate(options: GenerateOptions) -> Counts:
    """Write options.output and say how many rows came of it."""
    from train.base_model import load_tokenizer

    done = read_done(options.output)
    tokenizer = load_tokenizer(options.base, options.revision)
    prompts = _prompts(options, tokenizer.chat_template is not None)
    author = Author(options, tokenizer)
    counts = Counts(asked=len(prompts))
    counts.before = counts.written = sum(p.number in done for p in prompts)
    waiting = [p for p in prompts if p.number not in done]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with open(options.output, "a", encoding="utf-8") as file:
        for start in range(0, len(waiting), options.batch_size):
            batch = waiting[start : start + options.batch_size]
            temperature = options.temperatures[(start // options.batch_size) % len(options.temperatures)]
            rows = write_batch(author, batch, temperature, counts)
            # default: tables hold dates, which a template renders so too; whole rows, in one go
            file.write("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
            print(f"{counts} ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)
    return counts


def write_batch(
    author: Author, batch: Sequence[Prompt], temperature: float, counts: Counts
) -> Iterator[dict[str, Any]]:
    """The rows of one batch; what can't become a row is counted as skipped (unusable) or failed (an error)."""
    options = author.options
    author.torch.manual_seed(options.seed * 1_000_003 + batch[0].number)
    try:
        if author.has_template and options.prompts is None:
            batch = author.ask(batch)
        usable = []
        for prompt in batch:
            head = author.prompt_ids(prompt) if prompt.messages or not author.has_template else []
            if not head or len(head) > options.max_prompt_tokens:
                counts.skipped += 1
            else:
                usable.append((prompt, head))
        tails = author.continue_ids([h for _, h in usable], temperature, options.max_new_tokens) if usable else []
    except (RuntimeError, ValueError) as error:
        counts.failed += len(batch)
        print(f"warning: rows {batch[0].number}..{batch[-1].number} failed: {error}", file=sys.stderr)
        return
    for (prompt, head), tail in zip(usable, tails):
        if not tail or (len(tail) == 1 and tail[0] in author.eos_token_ids):
            counts.skipped += 1  # an empty answer teaches nothing
            continue
        counts.written += 1
        counts.tokens += len(tail)
        yield author.row(prompt, head, tail)


def _prompts(options: GenerateOptions, has_template: bool) -> list[Prompt]:
    """One for each row to write."""
    if options.prompts is None:
        return [Prompt(n) for n in range(options.num_samples or 0)]
    return read_prompts(options.prompts, has_template, options.num_samples)


def read_done(output: Path) -> set[int]:
    """The indices of the rows that `output` holds already; a last line that was cut off is removed."""
    if not output.exists():
        return set()
    content = output.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(output, whole)
    done = set()
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            done.add(int(json.loads(line)["index"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{output}, line {number}: not a row of `train generate`; choose another --output"
            ) from error
    return done


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_options(argv: Sequence[str]) -> GenerateOptions:
    """Options from the command line; `--config` gives the base and its revision, as for `fit`."""
    parser = _Parser(prog="python -m train generate", description="Make training text with the base model itself.")
    parser.add_argument("--config", type=Path, help="the YAML of `fit`; its model.base and model.revision are used")
    parser.add_argument("--base", help="smollm2-135m, a folder or a hub id; instead of --config")
    parser.add_argument("--revision", help="a hub id's revision")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file; a second run goes on where it ends")
    parser.add_argument(
        "--prompts",
        help="JSONL, JSON, Parquet or hub dataset with prompt, turns, messages or conversations; else the base asks",
    )
    parser.add_argument("--num_samples", type=int, help="rows to write (with --prompts: the first so many)")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[1.0], help="one, or several taken in turn; 0 is greedy"
    )
    parser.add_argument("--max_new_tokens", type=int, default=256, help="longest answer, in tokens")
    parser.add_argument("--max_prompt_tokens", type=int, default=512, help="longer prompts are skipped")
    parser.add_argument("--batch_size", type=int, default=16, help="rows at a time")
    parser.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 or float16")
    parser.add_argument("--seed", type=int, default=0)
    values = vars(parser.parse_args(argv))
    config = values.pop("config")
    if config is not None:
        model = model_section(config)
        values["base"] = values["base"] or model["base"]
        values["revision"] = values["revision"] or model.get("revision")
    if not values["base"]:
        raise ValueError("give --config FILE (with model.base) or --base NAME")
    return GenerateOptions(temperatures=tuple(values.pop("temperature")), **values)


def main(argv: Sequence[str]) -> int:
    print(generate(parse_options(argv)))
    return 0
