"""`python -m infer bench`: strategies and peers side by side in one run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from infer.commands import options


def add(commands: Any) -> None:
    parser = commands.add_parser("bench", help="compare strategies in one run, as ratios to plain decoding")
    options.add_engine_options(parser)
    options.add_sampling_options(parser)
    options.add_comparison_options(parser)
    parser.add_argument("--temperatures", help="comma-separated, e.g. 0.3,0.7,1.0; each instead of --temperature")
    parser.add_argument(
        "--identity-cost", action="store_true", help="run everything without --bitwise too, and show what that gains"
    )
    parser.add_argument("--peers", default="", help="comma-separated: transformers")
    parser.add_argument("--peer-model", help="the base model for peers: a folder or hub id")
    parser.add_argument("--output", type=Path, help="write all figures to this JSON file")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from infer import bench, machine
    from infer.llm import check_device
    from infer.peers import PEERS, TransformersPeer
    from infer.report import print_bench

    names = args.strategies.split(",")
    sizes = options.batch_sizes(args)
    if max(sizes) > args.max_num_seqs:  # `check` may: the rest waits and joins as rows end
        raise ValueError(f"--batch-sizes={args.batch_sizes} must be at most --max-num-seqs={args.max_num_seqs}")
    if args.identity_cost and not args.bitwise:
        raise ValueError("--identity-cost measures with and without --bitwise: leave out --no-bitwise")
    peers = [peer for peer in args.peers.split(",") if peer]
    for peer_name in peers:
        if peer_name not in PEERS:
            raise ValueError(f"--peers: {peer_name!r} is not one of {', '.join(PEERS)}")
    options.check_output(args.output)
    if peers and not args.peer_model:
        raise ValueError("--peers needs --peer-model: the base model's folder or hub id")
    rows = options.prompt_rows(args)
    params, policy = options.sampling_params(args), options.policy_of(args)
    temperatures = _temperatures(args)
    each = [replace(params, temperature=temperature) for temperature in temperatures]
    for one in each:
        options.need_seed(one, "bench")
    if peers and (not all(one.is_greedy for one in each) or params.ignore_eos or params.stop):
        raise ValueError("--peers decode greedily to their own end: leave out temperatures, --ignore-eos and --stop")
    check_device(args.device)
    here = machine.describe_machine(args.device)
    if here.load_average > 0.3:
        print(f"notice: the load average is {here.load_average}; figures of a busy machine mislead", file=sys.stderr)
    llm = options.load_llm(args, "autoregressive")
    for name in names:
        llm.use(name, policy)  # refuses unknown names before any work
    prompts = [options.token_ids(llm, row) for row in rows]
    peer = TransformersPeer(args.peer_model, llm.dtype, args.device) if peers else None
    try:
        results = bench.run_bench(
            llm,
            prompts,
            strategies=names,
            batch_sizes=sizes,
            params=params,
            policy=policy,
            temperatures=temperatures,
            bitwise=(True, False) if args.identity_cost else None,
            peer=peer,
            on_progress=_show_progress,
        )
    finally:
        if peer is not None:
            peer.close()
    print(file=sys.stderr)
    table = bench.summary(results)
    roofs = {
        row["batch_size"]: machine.share_of_roof(llm, row["tokens_per_second"], here)
        for row in reversed(table)  # of several, the first
        if row["strategy"] == bench.BASELINE and row["batch_size"] == 1
    }
    print_bench(table, llm, here, roofs)
    if args.output:
        record = {"machine": asdict(here), "backend": llm.backend, "dtype": llm.dtype, "rows": table}
        args.output.write_text(json.dumps(record | {"share_of_roof": roofs}, indent=2) + "\n")
    return 0


def _temperatures(args: argparse.Namespace) -> list[float]:
    if args.temperatures is None:
        return [args.temperature]
    try:
        values = [float(value) for value in args.temperatures.split(",")]
    except ValueError:
        raise ValueError(f"--temperatures={args.temperatures!r} must be numbers, e.g. 0.3,0.7,1.0") from None
    return list(dict.fromkeys(values))


def _show_progress(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
