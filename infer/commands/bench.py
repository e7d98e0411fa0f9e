"""`python -m infer bench`: strategies and peers side by side in one run; with --profile, where a step's time goes; with
--programs, backends side by side; with --memory, what each set of programs adds to a process."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.commands import memory_bench, options, program_bench
from infer.commands.sampling import add_sampling_options, sampling_params

if TYPE_CHECKING:
    from infer.llm import LLM
    from infer.machine import Machine


def add(commands: Any) -> None:
    parser = commands.add_parser("bench", help="compare strategies in one run, as ratios to plain decoding")
    options.add_engine_options(parser)
    add_sampling_options(parser)
    options.add_comparison_options(parser, needs_prompts=False)  # --profile has some
    parser.add_argument("--temperatures", help="comma-separated, e.g. 0.3,0.7,1.0; each instead of --temperature")
    parser.add_argument(
        "--verifications", default="identity", help="comma-separated: identity, rejection (see LLM's verification)"
    )
    parser.add_argument(
        "--identity-cost", action="store_true", help="run everything without --bitwise too, and show what that gains"
    )
    parser.add_argument("--peers", default="", help="comma-separated: transformers")
    parser.add_argument("--peer-model", help="the base model for peers: a folder or hub id")
    parser.add_argument("--output", "--json", type=Path, metavar="FILE", help="write all figures to this JSON file")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="instead: the runtime's own time per call, and each part's share of a step (batch sizes 1,8,16)",
    )
    program_bench.add_options(parser)
    memory_bench.add_options(parser)
    parser.set_defaults(run=lambda args: _run(args, parser), batch_sizes=None)


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.memory:
        memory_bench.check_options(args, parser)
        options.check_output(args.output)
        return memory_bench.run(args)
    program_bench.check_options(args, parser)
    if args.programs:
        args.batch_sizes = args.batch_sizes or "1,8"
        options.check_output(args.output)
        return program_bench.run(args)
    args.batch_sizes = args.batch_sizes or ("1,8,16" if args.profile else "1")
    sizes = options.batch_sizes(args)
    if max(sizes) > args.max_num_seqs:  # `check` may: the rest waits and joins as rows end
        raise ValueError(f"--batch-sizes={args.batch_sizes} must be at most --max-num-seqs={args.max_num_seqs}")
    options.check_output(args.output)
    if args.profile:
        foreign = {"--temperatures": args.temperatures, "--identity-cost": args.identity_cost, "--peers": args.peers,
                   "--verifications": args.verifications != "identity"}  # fmt: skip
        if given := [flag for flag, value in foreign.items() if value]:
            raise ValueError(f"--profile measures one setting: leave out {', '.join(given)}")
    return _profile(args, sizes) if args.profile else _compare(args, sizes)


def _compare(args: argparse.Namespace, sizes: list[int]) -> int:
    from infer import bench, machine
    from infer.peers import PEERS, TransformersPeer
    from infer.report import print_bench

    names = args.strategies.split(",")
    if args.prompts is None:
        raise ValueError("bench needs --prompts FILE: only --profile has some of its own")
    if args.identity_cost and not args.bitwise:
        raise ValueError("--identity-cost measures with and without --bitwise: leave out --no-bitwise")
    peers = [peer for peer in args.peers.split(",") if peer]
    for peer_name in peers:
        if peer_name not in PEERS:
            raise ValueError(f"--peers: {peer_name!r} is not one of {', '.join(PEERS)}")
    if peers and not args.peer_model:
        raise ValueError("--peers needs --peer-model: the base model's folder or hub id")
    rows = options.prompt_rows(args)
    params, policy = sampling_params(args), options.policy_of(args)
    temperatures = _temperatures(args)
    each = [replace(params, temperature=temperature) for temperature in temperatures]
    for one in each:
        options.need_seed(one, "bench")
    if peers and not all(options.is_plain(one) for one in each):
        raise ValueError("--peers decode greedily and freely to their own end: leave out all but --max-tokens")
    here, llm = _prepare(args, names)
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
            verifications=args.verifications.split(","),
            peer=peer,
            on_progress=options.show_progress,
        )
    finally:
        if peer is not None:
            peer.close()
    print(file=sys.stderr)
    table = bench.summary(results)
    single = [r["tokens_per_second"] for r in table if r["strategy"] == bench.BASELINE and r["batch_size"] == 1]
    share = machine.share_of_roof(llm, single[0], here) if single else None
    print_bench(table, llm, here, share)
    _write(args, here, llm, {"rows": table, "share_of_roof": share})
    return 0


def _profile(args: argparse.Namespace, sizes: list[int]) -> int:
    from infer import profile
    from infer.report import print_profile

    names, params, policy = args.strategies.split(","), sampling_params(args), options.policy_of(args)
    rows = options.prompt_rows(args, profile.question_rows())
    here, llm = _prepare(args, names)
    prompts = [options.token_ids(llm, row) for row in rows]
    overheads = profile.measure_overhead(llm, names, sizes, policy)
    shares = profile.measure_shares(llm, prompts, names, sizes, params, policy)
    print_profile(overheads, shares)
    record = {
        "overhead": [asdict(one) | {"us_per_row": one.us_per_row} for one in overheads],
        "shares": [asdict(one) for one in shares],
    }
    _write(args, here, llm, record)
    return 0


def _prepare(args: argparse.Namespace, names: list[str]) -> tuple[Machine, LLM]:
    """The machine, measured while nothing else runs, and then the model."""
    from infer.device import check_device
    from infer.machine import describe_machine, note_if_busy

    check_device(args.device)
    here = describe_machine(args.device)
    note_if_busy(here.load_average)
    llm = options.load_llm(args, "autoregressive")
    for name in names:  # refuses unknown ones before any work
        for verification in args.verifications.split(","):
            llm.use(name, options.policy_of(args), verification=verification)
    llm.use("autoregressive")
    return here, llm


def _write(args: argparse.Namespace, here: Machine, llm: LLM, figures: dict[str, Any]) -> None:
    if args.output:
        where = {"machine": asdict(here), "backend": llm.backend, "dtype": llm.dtype}
        options.write_whole(args.output, json.dumps(where | figures, indent=2) + "\n")


def _temperatures(args: argparse.Namespace) -> list[float]:
    if args.temperatures is None:
        return [args.temperature]
    try:
        values = [float(value) for value in args.temperatures.split(",")]
    except ValueError:
        raise ValueError(f"--temperatures={args.temperatures!r} must be numbers, e.g. 0.3,0.7,1.0") from None
    return list(dict.fromkeys(values))
