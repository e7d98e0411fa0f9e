"""Self-distillation data: the base model answers prompts, or asks the questions itself first.

Rows are written as they end, each with its index, so that a second run goes on where the first one stopped: an index
that the file holds is done. What was skipped or failed is tried again; a row's tokens follow from --seed and its index
alone, so that the same becomes of it again unless its failure was a passing one, and neither a restart, --batch_size
nor --shard changes any row. Of two rows with the same tokens in one file, the one that ends first stays (files of
several shards may still share some).

This file knows nothing of exits or training, nor of how tokens are made (`author`) and rows read (`row_texts`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train.generate_options import GenerateOptions, parse_options
from train.prompts import Prompt, read_openings, read_prompts

if TYPE_CHECKING:
    from train.author import Author
    from train.row_texts import RowTexts
    from train.writing import Counts

_SECONDS_BETWEEN_REPORTS = 10


def generate(options: GenerateOptions) -> Counts:
    """Write options.output and say how many rows came of it."""
    from train.writing import Writing

    texts = _texts(options)
    prompts = [p for p in _prompts(options, texts.has_template) if options.holds(p.number)]
    done = read_done(options.output, texts)
    author = _author(options, texts)
    room = author.max_model_len
    if room is not None and options.max_new_tokens >= room:
        raise ValueError(
            f"--max_new_tokens={options.max_new_tokens} leaves no room for a prompt: "
            f"the longest sequence is {room} tokens; give less"
        )
    writing = Writing(options, texts, author, seen=set(done.values()))
    counts = writing.counts
    counts.asked = len(prompts)
    counts.before = counts.written = sum(p.number in done for p in prompts)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    started = reported = time.monotonic()
    with open(options.output, "a", encoding="utf-8") as file:
        for rows in writing.rows([p for p in prompts if p.number not in done]):
            # default: tables hold dates, which a template renders so too; whole rows, in one go
            file.write("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
            file.flush()
            if rows:
                os.fsync(file.fileno())
            if (now := time.monotonic()) - reported > _SECONDS_BETWEEN_REPORTS:
                reported = now
                print(f"{counts} ({now - started:.0f} s)", file=sys.stderr, flush=True)
    assert counts.written + counts.failed + counts.skipped == counts.asked, counts
    return counts


def _texts(options: GenerateOptions) -> RowTexts:
    """With an artifact from its files, as it is what will be served."""
    from train.formats import make_encoder
    from train.row_texts import RowTexts

    if options.artifact is None:
        assert options.base is not None
        return RowTexts(make_encoder(options.base, options.revision))
    from train.engine_author import check_artifact

    check_artifact(options)
    return RowTexts(make_encoder(str(options.artifact.absolute())))


def _author(options: GenerateOptions, texts: RowTexts) -> Author:
    import torch

    from infer.device import check_device

    # An artifact is made for one device, most often the CPU
    usual = "cuda" if options.artifact is None and torch.cuda.is_available() else "cpu"
    device = options.device or usual
    check_device(device)
    if options.artifact is not None:
        from infer import LLM
        from train.engine_author import EngineAuthor

        strategy, dtype, rows = options.strategy, options.dtype, options.batch_size
        return EngineAuthor(LLM(options.artifact, strategy, dtype=dtype, device=device, max_num_seqs=rows))
    from train.author import HuggingFaceAuthor
    from train.base_model import load_base

    assert options.base is not None
    model = load_base(options.base, options.revision, options.dtype or "bfloat16")
    return HuggingFaceAuthor(model.to(device), texts.eos_token_ids, texts.encoder.max_positions)


def _prompts(options: GenerateOptions, has_template: bool) -> list[Prompt]:
    """One for each row to write, of all shards."""
    if options.prompts is not None:
        return read_prompts(options.prompts, has_template, options.num_samples)
    openings = [""] if options.openings is None else read_openings(options.openings)
    # The next opening once every temperature has had one, so that all meet all
    turns = range(options.num_samples or 0)
    return [Prompt(n, text=openings[n // len(options.temperatures) % len(openings)]) for n in turns]


def read_done(output: Path, texts: RowTexts) -> dict[int, bytes]:
    """Index → digest of the rows that `output` holds already; a last line that was cut off is removed."""
    if not output.exists():
        return {}
    content = output.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(output, whole)
    done = {}
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            row = json.loads(line)
            done[int(row["index"])] = texts.digest_of(row)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{output}, line {number}: not a row of `train generate` with this base ({error}); "
                "choose another --output"
            ) from error
    return done


def main(argv: Sequence[str]) -> int:
    print(generate(parse_options(argv)))
    return 0
