"""`python -m infer generate`: prompts in, texts out; with --check, compared with plain decoding's."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.commands import options
from infer.commands.sampling import add_sampling_options, sampling_params

if TYPE_CHECKING:
    from infer.llm import LLM
    from infer.params import SamplingParams
    from infer.prompts import PromptRow


def add(commands: Any) -> None:
    parser = commands.add_parser("generate", help="complete prompts; streams a single one to the terminal")
    options.add_engine_options(parser)
    add_sampling_options(parser)
    options.add_strategy_options(parser)
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; may be given several times")
    parser.add_argument(
        "--prompts",
        type=Path,
        help=".jsonl or .parquet (prompt, turns or messages), a folder of them, .txt, or - for standard input",
    )
    parser.add_argument(
        "--output", type=Path, help="write one JSON object per text to this file, in the prompts' order"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with --output where an interrupted run of the same prompts and options stopped",
    )
    parser.add_argument("--n", type=int, default=1, help="texts per prompt, each with noise of its own (default 1)")
    parser.add_argument("--raw", action="store_true", help="complete the text itself, without the chat template")
    parser.add_argument("--check", action="store_true", help="also decode plainly and compare token by token")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from infer.output import incomplete
    from infer.prompts import PromptRow, read_prompts

    rows = [PromptRow(str(i), [{"role": "user", "content": text}]) for i, text in enumerate(args.prompt)]
    rows += read_prompts(args.prompts) if args.prompts else []
    if not rows:
        raise ValueError("nothing to complete: give --prompt TEXT or --prompts FILE")
    params = replace(sampling_params(args), n=args.n)
    options.check_output(args.output)
    if args.resume and (args.output is None or args.check):
        raise ValueError("--resume goes on with a file: it needs --output, and can't --check what it does not write")
    if args.check:
        options.need_seed(params, "--check")
    if args.check and args.verification != "identity" and not params.is_greedy:
        raise ValueError(
            "--check compares tokens, and --verification rejection keeps but their law: leave one of them out"
        )
    llm = options.load_llm(args, args.strategy, args.verification)
    if args.strategy == "auto" and llm.plan is None:
        print(
            "decoding plainly, without a plan for this artifact here; python -m infer plan makes one, or give "
            "--strategy hispec to speculate",
            file=sys.stderr,
        )
    prompts: list[Any] = [options.token_ids(llm, row, args.raw) for row in rows]
    if len(rows) == args.n == 1 and args.output is None:
        outputs = [_stream(llm, prompts[0], params)]
    else:
        outputs = _write_all(llm, rows, prompts, params, args)
    print(_acceptance_line(outputs), file=sys.stderr)
    if failed := [text for output in outputs for text in incomplete(output)]:
        print(f"error: {len(failed)} texts are incomplete: {failed[0].stop_reason}", file=sys.stderr)
        return 1
    return _compare(llm, prompts, params, outputs) if args.check else 0


def _stream(llm: LLM, prompt: list[int], params: SamplingParams) -> Any:
    shown = 0
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()
    return output


def _write_all(
    llm: LLM, rows: list[PromptRow], prompts: list[Any], params: SamplingParams, args: argparse.Namespace
) -> list[Any]:
    """Complete the prompts and write each as soon as those before it are; the outputs of this run."""
    from infer.text_file import TextFile, check_complete, partial_of

    if args.output is None:
        return _complete(llm, rows, prompts, params, _print_lines)
    keys = [(row.id, index) for row in rows for index in range(params.n)]
    if args.resume and args.output.exists() and not partial_of(args.output).exists():
        check_complete(args.output, keys)
        print(f"{args.output} is complete: nothing to resume", file=sys.stderr)
        return []
    with TextFile(args.output, keys, resume=args.resume) as file:
        num_done, rest = divmod(file.num_kept, params.n)
        if rest:
            raise ValueError(
                f"--resume: {file.partial} ends within a prompt's {params.n} texts: delete its last {rest}"
            )
        if num_done:
            print(f"resumed: {num_done} of {len(rows)} prompts are complete", file=sys.stderr)
        outputs = _complete(llm, rows[num_done:], prompts[num_done:], params, file.write)
        file.finish()
    return outputs


def _print_lines(records: list[dict[str, Any]]) -> None:
    sys.stdout.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    sys.stdout.flush()


def _complete(
    llm: LLM,
    rows: list[PromptRow],
    prompts: list[Any],
    params: SamplingParams,
    write: Callable[[list[dict[str, Any]]], None],
) -> list[Any]:
    """All outputs in the prompts' order, each written in its turn, under a bar if somebody watches."""
    outputs: list[Any] = []
    early: dict[int, Any] = {}  # complete, but not in its turn
    num_tokens, began = 0, time.perf_counter()
    with _progress(len(rows)) as advance:
        for number, output in llm.as_completed(prompts, params) if prompts else ():
            early[number] = output
            num_tokens += sum(len(done.token_ids) for done in output.outputs)
            advance(f"{num_tokens / (time.perf_counter() - began):.1f} tokens/s")
            while len(outputs) in early:
                next_ = early.pop(len(outputs))
                write(_records(rows[len(outputs)], next_))
                outputs.append(next_)
    return outputs


def _records(row: PromptRow, output: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": row.id,
            **({"index": done.index} if len(output.outputs) > 1 else {}),
            "text": done.text,
            "num_tokens": len(done.token_ids),
            "finish_reason": done.finish_reason,
        }
        for done in output.outputs
    ]


@contextmanager
def _progress(num_prompts: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, if that is a terminal; what it yields is told of every prompt."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_prompts, speed="")
        yield lambda speed: progress.update(task, advance=1, speed=speed)


def _acceptance_line(outputs: list[Any]) -> str:
    from infer.bench import Acceptance

    total = Acceptance()
    for output in outputs:
        total.add(output.metrics.tiers)
    parts = [f"{tier} {length:.2f}" for tier, length in total.mean_lengths().items()]
    num_tokens = sum(len(done.token_ids) for output in outputs for done in output.outputs)
    return f"{num_tokens} tokens; mean acceptance length: {', '.join(parts) or 'nothing drafted'}"


def _compare(llm: LLM, prompts: list[Any], params: SamplingParams, outputs: list[Any]) -> int:
    """Decode again without speculation; exit code 1 when any token differs."""
    llm.use("autoregressive")
    plain = [done.token_ids for output in llm.generate(prompts, params) for done in output.outputs]
    got = [done.token_ids for output in outputs for done in output.outputs]
    same = sum(a == b for a, b in zip(got, plain, strict=True))
    print(f"check: {same} of {len(got)} equal to plain decoding, token for token", file=sys.stderr)
    return 0 if same == len(got) else 1
