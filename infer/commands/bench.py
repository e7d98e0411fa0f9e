"""`python -m infer bench`: strategies and peers side by side in one run; with --profile, where a step's time goes; with
--programs, backends side by side; with --memory, what each set of programs adds to a process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer import bench_plots
from infer.commands import memory_bench, options, program_bench
from infer.commands.sampling import add_sampling_options, sampling_params

if TYPE_CHECKING:
    from infer.llm import LLM
    from infer.machine import Machine
    from infer.peers import Peer
    from infer.strategy import Setting


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
    parser.add_argument(
        "--tuned", action="store_true", help="each strategy with the numbers that `infer plan` found best for it"
    )
    parser.add_argument(
        "--by-workload", action="store_true", help="auto as the plan chose for each file of prompts by itself"
    )
    parser.add_argument(
        "--peers",
        default="",
        help="comma-separated: transformers, transformers-layerskip, transformers-prompt-lookup, llama-cpp",
    )
    parser.add_argument("--peer-model", help="the base model for transformers peers: a folder or hub id")
    parser.add_argument("--peer-gguf", help="the base model for llama-cpp, in the dtype to compare (infer.peers.gguf)")
    parser.add_argument("--peer-python", default=sys.executable, help="llama-cpp's Python (default: this one)")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots and a Markdown table into this folder")
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
        foreign = {
            "--temperatures": args.temperatures,
            "--identity-cost": args.identity_cost,
            "--peers": args.peers,
            "--tuned": args.tuned,
            "--by-workload": args.by_workload,
            "--plots": args.plots,
            "--verifications": args.verifications != "identity",
        }
        if given := [flag for flag, value in foreign.items() if value]:
            raise ValueError(f"--profile measures one setting: leave out {', '.join(given)}")
    return _profile(args, sizes) if args.profile else _compare(args, sizes)


def _compare(args: argparse.Namespace, sizes: list[int]) -> int:
    from infer import bench, machine
    from infer.bench_summary import exact_match, summary
    from infer.report import print_bench, print_workloads

    if args.prompts is None:
        raise ValueError("bench needs --prompts FILE: only --profile has some of its own")
    if args.identity_cost and not args.bitwise:
        raise ValueError("--identity-cost measures with and without --bitwise: leave out --no-bitwise")
    if args.by_workload and "auto" not in args.strategies.split(","):
        raise ValueError("--by-workload is about the strategy auto: add it to --strategies")
    peer_names = _peer_names(args)
    if args.plots is not None:
        bench_plots.check_folder(args.plots)
    rows = options.prompt_rows(args)
    params, policy = sampling_params(args), options.policy_of(args)
    temperatures = _temperatures(args)
    each = [replace(params, temperature=temperature) for temperature in temperatures]
    for one in each:
        options.need_seed(one, "bench")
    if peer_names and not all(options.is_plain(one) for one in each):
        raise ValueError("--peers decode greedily and freely to their own end: leave out all but --max-tokens")
    workloads = [row.workload for row in rows]
    here, llm, names, tuned = _prepare(args, sizes, workloads)
    prompts = [options.token_ids(llm, row) for row in rows]
    peers: list[Peer] = []
    context = max(map(len, prompts)) + max(args.max_tokens, bench.WARMUP_TOKENS)
    try:
        for name in peer_names:
            peers.append(_start_peer(name, args, llm, context))
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
            workloads=workloads,
            tuned=tuned,
            peers=peers,
            on_progress=options.show_progress,
        )
    finally:
        for peer in peers:
            peer.close()
    print(file=sys.stderr)
    table = summary(results)
    for record, result in zip(table, results, strict=True):
        texts = [llm.tokenizer.decode(ids, skip_special_tokens=True) for ids in result.token_ids]
        record["exact_match"] = exact_match(texts, [row.reference for row in rows])
    single = [r["tokens_per_second"] for r in table if r["strategy"] == bench.BASELINE and r["batch_size"] == 1]
    share = machine.share_of_roof(llm, single[0], here) if single else None
    print_bench(table, llm, here, share)
    print_workloads(table)
    figures = {"rows": table, "share_of_roof": share}
    _write(args, here, llm, figures)
    if args.plots is not None:
        bench_plots.write(figures, args.plots)
    return 0


def _peer_names(args: argparse.Namespace) -> list[str]:
    from infer.peers import PEERS

    names = [name for name in args.peers.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--peers: {name!r} is not one of {', '.join(PEERS)}")
        if name == "llama-cpp" and not args.peer_gguf:
            raise ValueError("--peers=llama-cpp needs --peer-gguf: the base model as a .gguf file")
        if name != "llama-cpp" and not args.peer_model:
            raise ValueError(f"--peers={name} needs --peer-model: the base model's folder or hub id")
    return names


def _start_peer(name: str, args: argparse.Namespace, llm: LLM, context: int) -> Peer:
    import torch

    from infer.peers import Peer

    is_llama = name == "llama-cpp"
    return Peer(
        name,
        args.peer_gguf if is_llama else args.peer_model,
        llm.dtype,
        args.device,
        num_threads=torch.get_num_threads(),
        early_exit=llm.manifest.tiers[0].stop,
        context=context,
        python=args.peer_python if is_llama else sys.executable,
    )


def _profile(args: argparse.Namespace, sizes: list[int]) -> int:
    from infer import profile
    from infer.report import print_profile

    params, policy = sampling_params(args), options.policy_of(args)
    rows = options.prompt_rows(args, profile.question_rows())
    here, llm, names, _ = _prepare(args, sizes, [""])
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


def _prepare(
    args: argparse.Namespace, sizes: list[int], workloads: Sequence[str]
) -> tuple[Machine, LLM, list[str], dict[tuple[str, int, str], Setting]]:
    """The machine, measured while nothing else runs, then the model, the strategies that are to run, and what runs in
    the place of which."""
    from infer import bench
    from infer.device import check_device
    from infer.machine import describe_machine, note_if_busy
    from infer.strategy import Setting, paper_depths

    check_device(args.device)
    here = describe_machine(args.device)
    note_if_busy(here.load_average)
    has_plan = args.tuned or "auto" in args.strategies.split(",")
    llm = options.load_llm(args, "auto" if has_plan else "autoregressive")
    plan = llm.plan
    if has_plan and plan is None:
        raise ValueError("--tuned and the strategy auto need a plan that holds here: python -m infer plan ARTIFACT")
    names = options.strategy_names(args, llm)
    kinds = {workload: workload if args.by_workload else "" for workload in workloads}
    if plan and args.by_workload:
        for name in kinds:
            plan.check_workload(name)
    tuned = bench.settings_of(plan, names, sizes, kinds, is_tuned=args.tuned) if plan else {}
    for name in names:  # refuses unknown ones before any work
        for verification in args.verifications.split(","):
            for size, workload in product(sizes, kinds):
                setting = tuned.get((name, size, workload), Setting(name, options.policy_of(args)))
                llm.use(*setting, verification=verification)
    llm.use("autoregressive")
    if "hispec_paper" in names and (note := paper_depths(llm.manifest)):
        print(note, file=sys.stderr)
    return here, llm, names, tuned


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
