"""`python -m infer generate|bench|inspect ARTIFACT …`: the runtime from a terminal.

A user's mistake ends with one line on stderr and exit code 2. Imports wait until a command needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.sampling_options import add_sampling_options, sampling_params

if TYPE_CHECKING:
    from infer.llm import LLM
    from infer.params import SamplingParams
    from infer.prompts import PromptRow
    from infer.strategy import Policy


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infer", description="Run an exported model, exactly and faster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="complete prompts; streams a single one to the terminal")
    _add_engine_options(generate)
    generate.add_argument("--prompt", action="append", default=[], help="a prompt; may be given several times")
    generate.add_argument(
        "--prompts", type=Path, help=".jsonl (prompt, turns or messages), .txt, or a folder of .jsonl"
    )
    generate.add_argument("--output", type=Path, help="write one JSON object per prompt to this file")
    generate.add_argument("--strategy", default="auto", help="autoregressive, layerskip, hispec or auto (default)")
    generate.add_argument("--raw", action="store_true", help="complete the text itself, without the chat template")
    generate.add_argument("--check", action="store_true", help="also decode plainly and compare token by token")
    generate.set_defaults(run=_generate)
    bench = commands.add_parser("bench", help="compare strategies in one run, as ratios to plain decoding")
    _add_engine_options(bench)
    _add_prompt_options(bench)
    bench.add_argument("--peers", default="", help="comma-separated: transformers")
    bench.add_argument("--peer-model", help="the base model for peers: a folder or hub id")
    bench.add_argument("--output", type=Path, help="write all figures to this JSON file")
    bench.set_defaults(run=_bench)
    check = commands.add_parser("check", help="show that every strategy gives plain decoding's tokens on your prompts")
    _add_engine_options(check)
    _add_prompt_options(check)
    check.add_argument("--peer-model", help="compare with Hugging Face's greedy texts too: its folder or hub id")
    check.set_defaults(run=_check)
    inspect = commands.add_parser("inspect", help="what an artifact holds, and what its parity checks found")
    inspect.add_argument("artifact")
    inspect.set_defaults(run=_inspect)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="folder that `python -m export` wrote")
    parser.add_argument("--backend", default="auto", help="inductor, eager or auto (default)")
    parser.add_argument("--dtype", help="float32 or bfloat16; default: the artifact's first")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda, as exported")
    add_sampling_options(parser)
    parser.add_argument("--num-draft-tokens", type=int, default=2, help="γ, tokens drafted per judgement (default 2)")
    parser.add_argument("--window", type=int, default=4, help="N_i, tentative tokens that call the target (default 4)")
    parser.add_argument(
        "--inner-rounds", type=int, default=4, help="R, early verifications per target call (default 4)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=16, help="most prompts at once (default 16)")


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", "--data-dir", type=Path, required=True, help="prompt file, or a folder of .jsonl")
    parser.add_argument("--num-prompts", type=int, help="take this many, spread evenly over the file")
    parser.add_argument("--strategies", default="autoregressive,layerskip,hispec", help="comma-separated")
    parser.add_argument("--batch-sizes", default="1", help="comma-separated, e.g. 1,8")


def _policy(args: argparse.Namespace) -> Policy:
    from infer.strategy import Policy

    return Policy(num_draft_tokens=args.num_draft_tokens, window=args.window, inner_rounds=args.inner_rounds)


def _load(args: argparse.Namespace, strategy: str) -> LLM:
    from infer.llm import LLM

    return LLM(
        args.artifact,
        strategy,
        backend=args.backend,
        dtype=args.dtype,
        device=args.device,
        max_num_seqs=args.max_num_seqs,
        num_draft_tokens=args.num_draft_tokens,
        window=args.window,
        inner_rounds=args.inner_rounds,
    )


def _token_ids(llm: LLM, row: PromptRow, raw: bool) -> list[int]:
    if raw or not llm.tokenizer.chat_template:
        return list(llm.tokenizer(row.text)["input_ids"])
    return llm.chat_prompt(row.messages)


def _generate(args: argparse.Namespace) -> int:
    from infer.prompts import PromptRow, read_prompts

    rows = [PromptRow(str(i), [{"role": "user", "content": text}]) for i, text in enumerate(args.prompt)]
    rows += read_prompts(args.prompts) if args.prompts else []
    if not rows:
        raise ValueError("nothing to complete: give --prompt TEXT or --prompts FILE")
    params = sampling_params(args)
    _check_output(args.output)
    if args.check:
        _need_seed(params, "--check")
    if args.strategy == "auto":
        print("decoding plainly; give --strategy hispec to speculate", file=sys.stderr)
    llm = _load(args, args.strategy)
    prompts: list[Any] = [_token_ids(llm, row, args.raw) for row in rows]
    if len(rows) == 1 and args.output is None:
        outputs = [_stream(llm, prompts[0], params)]
    else:
        outputs = llm.generate(prompts, params)
        _write(rows, outputs, args.output)
    print(_acceptance_line(outputs), file=sys.stderr)
    if failed := [done for output in outputs for done in output.outputs if done.finish_reason in ("error", "abort")]:
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


def _write(rows: list[PromptRow], outputs: list[Any], path: Path | None) -> None:
    lines = []
    for row, output in zip(rows, outputs, strict=True):
        done = output.outputs[0]
        record = {
            "id": row.id,
            "text": done.text,
            "num_tokens": len(done.token_ids),
            "finish_reason": done.finish_reason,
        }
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    if path is None:
        sys.stdout.writelines(lines)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(lines), encoding="utf-8")
    temporary.replace(path)


def _acceptance_line(outputs: list[Any]) -> str:
    from infer.bench import Result

    total = Result("", 0)
    for output in outputs:
        total.add_tiers(output.metrics.tiers)
    parts = [f"{tier} {m.mean_acceptance_length:.2f}" for tier, m in total.acceptance().items()]
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return f"{num_tokens} tokens; mean acceptance length: {', '.join(parts) or 'nothing drafted'}"


def _compare(llm: LLM, prompts: list[Any], params: SamplingParams, outputs: list[Any]) -> int:
    """Decode again without speculation; exit code 1 when any token differs."""
    llm.use("autoregressive")
    plain = llm.generate(prompts, params)
    same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(outputs, plain, strict=True))
    print(f"check: {same} of {len(prompts)} equal to plain decoding, token for token", file=sys.stderr)
    return 0 if same == len(prompts) else 1


def _check_output(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"--output {path}: name a file in a folder that exists")


def _need_seed(params: SamplingParams, flag: str) -> None:
    if not params.is_greedy and params.seed is None:
        raise ValueError(f"{flag} compares sampled text only under --seed: without one every run draws its own")


def _check(args: argparse.Namespace) -> int:
    """Exit code 1 when any text differs from plain decoding's by more than a tie."""
    from infer.check import check, target_error
    from infer.peers import TransformersPeer
    from infer.report import print_comparison

    names, sizes = args.strategies.split(","), _batch_sizes(args)
    params, policy = sampling_params(args), _policy(args)
    _need_seed(params, "check")
    if args.peer_model and not params.is_greedy:
        raise ValueError("--peer-model compares greedy texts: leave --temperature out")
    if args.peer_model and params.structured_outputs:
        raise ValueError("--peer-model compares free texts: leave the text's form out")
    rows = _prompt_rows(args)
    llm = _load(args, "autoregressive")
    for name in names:
        llm.use(name, policy)  # refuses unknown names before any work
    prompts = [_token_ids(llm, row, raw=False) for row in rows]
    error = target_error(llm)
    peer = TransformersPeer(args.peer_model, llm.dtype, args.device) if args.peer_model else None
    try:
        results = check(
            llm, prompts, params, strategies=names, batch_sizes=sizes, policy=policy, peer=peer,
            max_logit_error=error, on_result=print_comparison,
        )  # fmt: skip
    finally:
        if peer is not None:
            peer.close()
    return 0 if all(result.is_lossless for result in results) else 1


def _prompt_rows(args: argparse.Namespace) -> list[PromptRow]:
    from infer.prompts import read_prompts

    rows = read_prompts(args.prompts)
    if args.num_prompts is None or args.num_prompts >= len(rows):
        return rows
    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts={args.num_prompts} must be at least 1")
    step = len(rows) / args.num_prompts
    return [rows[int(i * step)] for i in range(args.num_prompts)]


def _batch_sizes(args: argparse.Namespace) -> list[int]:
    try:
        sizes = [int(size) for size in args.batch_sizes.split(",")]
    except ValueError:
        raise ValueError(f"--batch-sizes={args.batch_sizes!r} must be whole numbers, e.g. 1,8") from None
    if min(sizes) < 1:
        raise ValueError(f"--batch-sizes={args.batch_sizes} must be at least 1")
    return sizes


def _bench(args: argparse.Namespace) -> int:
    from infer import bench
    from infer.llm import check_device
    from infer.peers import PEERS, TransformersPeer
    from infer.report import print_bench

    names = args.strategies.split(",")
    sizes = _batch_sizes(args)
    if max(sizes) > args.max_num_seqs:  # `check` may: the rest waits and joins as rows end
        raise ValueError(f"--batch-sizes={args.batch_sizes} must be at most --max-num-seqs={args.max_num_seqs}")
    peers = [peer for peer in args.peers.split(",") if peer]
    for peer_name in peers:
        if peer_name not in PEERS:
            raise ValueError(f"--peers: {peer_name!r} is not one of {', '.join(PEERS)}")
    _check_output(args.output)
    if peers and not args.peer_model:
        raise ValueError("--peers needs --peer-model: the base model's folder or hub id")
    rows = _prompt_rows(args)
    params, policy = sampling_params(args), _policy(args)
    _need_seed(params, "bench")
    if peers and (not params.is_greedy or params.ignore_eos or params.stop or params.structured_outputs):
        raise ValueError(
            "--peers decode greedily and freely to their own end: leave out --temperature, --ignore-eos, --stop and "
            "the text's form"
        )
    check_device(args.device)
    machine = bench.describe_machine(args.device)
    if machine.load_average > 0.3:
        print(f"notice: the load average is {machine.load_average}; figures of a busy machine mislead", file=sys.stderr)
    llm = _load(args, "autoregressive")
    for name in names:
        llm.use(name, policy)  # refuses unknown names before any work
    prompts = [_token_ids(llm, row, raw=False) for row in rows]

    def progress(text: str) -> None:
        print(f"\r{text}", end="", file=sys.stderr, flush=True)

    peer = TransformersPeer(args.peer_model, llm.dtype, args.device) if peers else None
    try:
        results = bench.run_bench(
            llm,
            prompts,
            strategies=names,
            batch_sizes=sizes,
            params=params,
            policy=policy,
            peer=peer,
            on_progress=progress,
        )
    finally:
        if peer is not None:
            peer.close()
    print(file=sys.stderr)
    table = bench.summary(results)
    roofs = {
        r.batch_size: bench.share_of_roof(llm, r.tokens_per_second, machine)
        for r in results
        if r.name == bench.BASELINE and r.batch_size == 1
    }
    print_bench(table, llm, machine, roofs)
    if args.output:
        record = {"machine": asdict(machine), "backend": llm.backend, "dtype": llm.dtype, "rows": table}
        args.output.write_text(json.dumps(record | {"share_of_roof": roofs}, indent=2) + "\n")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from infer.artifact import Artifact
    from infer.report import print_artifact

    print_artifact(Artifact.open(args.artifact))
    return 0
