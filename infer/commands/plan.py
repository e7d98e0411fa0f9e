"""`python -m infer plan`: which strategy is fastest here, batch size by batch size, for `LLM` to follow."""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Any

from infer.commands import options


def add(commands: Any) -> None:
    parser = commands.add_parser("plan", help="measure which strategy is fastest here; LLM(strategy='auto') follows it")
    options.add_engine_options(parser)
    options.add_prompt_options(parser, default="four questions of its own")
    parser.add_argument("--batch-sizes", default="1,4,16", help="comma-separated (default 1,4,16)")
    parser.add_argument("--max-tokens", type=int, default=48, help="most new tokens per prompt (default 48)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    parser.add_argument("--verification", default="identity", help="identity (default) or rejection, of sampled drafts")
    parser.add_argument(
        "--margin", type=float, default=0.03, help="by which a strategy must beat plain decoding (default 0.03)"
    )
    parser.add_argument(
        "--by-workload", action="store_true",
        help="choose for each file of --prompts DIR too, for LLM(workload=NAME) and --workload NAME",
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from infer import calibration
    from infer.machine import load_average, note_if_busy
    from infer.params import SamplingParams
    from infer.plan import Plan, PlanEntry, Sample, write_plan
    from infer.profile import question_rows
    from infer.prompts import read_prompts
    from infer.report import print_plan
    from infer.strategy import Policy

    sizes = sorted(set(options.batch_sizes(args)))
    if sizes[-1] > args.max_num_seqs:
        raise ValueError(f"--batch-sizes={args.batch_sizes} must be at most --max-num-seqs={args.max_num_seqs}")
    if options.policy_of(args) != Policy():
        raise ValueError("plan tries its own --num-draft-tokens, --window and --inner-rounds: leave them out")
    if not 0 <= args.margin < math.inf:
        raise ValueError(f"--margin={args.margin} must be at least 0, e.g. 0.03 for 3 %")
    params = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)
    options.need_seed(params, "plan")
    every = read_prompts(args.prompts) if args.prompts else question_rows()
    rows = options.some_of(args, list(every))
    workloads = [row.workload for row in rows] if args.by_workload else None
    if workloads and not all(workloads):
        raise ValueError("--by-workload needs --prompts DIR, with a file for each kind of text")
    if workloads and (left_out := {row.workload for row in every}.difference(workloads)):
        raise ValueError(f"--num-prompts={args.num_prompts} takes none of {', '.join(sorted(left_out))}: give more")
    note_if_busy(load_average())
    llm = options.load_llm(args, "autoregressive", args.verification)
    prompts = [options.token_ids(llm, row) for row in rows]
    calibration.check_fills(llm, prompts, sizes[-1], params)  # before any other work is done
    entries: list[PlanEntry] = []
    for size in sizes:
        began = time.monotonic()
        smaller = entries[-1] if entries else None
        entry = calibration.plan_batch(
            llm, prompts, size, params, args.margin, options.show_progress, workloads, smaller
        )
        entries.append(entry)
        seconds = round(time.monotonic() - began)
        options.show_progress("")
        chosen = f"{entry.chosen.strategy}, {entry.chosen.ratio:.2f} of plain decoding's speed"
        print(f"batch {size}: {chosen}, in {seconds} s", file=sys.stderr)
    sample = Sample(
        num_prompts=len(prompts),
        max_tokens=args.max_tokens,
        temperature=float(args.temperature),
        seed=args.seed,
        margin=float(args.margin),
    )
    plan = Plan(conditions=llm.conditions, sample=sample, entries=entries)
    write_plan(llm.artifact.path, plan)
    print_plan(plan)
    return 0
