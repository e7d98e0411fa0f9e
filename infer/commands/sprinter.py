"""`python -m infer calibrate-sprinter`: fit the classifier of the lossy strategy `sprinter` to an artifact."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from infer.commands import options


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate-sprinter", help="fit the classifier that the lossy strategy `sprinter` needs, from sample prompts"
    )
    options.add_engine_options(parser)
    options.add_prompt_options(parser, needs_prompts=True)
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens per prompt (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    parser.add_argument(
        "--least-right",
        type=float,
        default=0.9,
        help="share of the tokens kept unverified that the target would have accepted (default 0.9)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from infer.params import SamplingParams
    from infer.sprinter import write_classifier
    from infer.sprinter_fit import HELD_OUT, collect, fit

    if not 0 < args.least_right <= 1:
        raise ValueError(f"--least-right={args.least_right} must lie in (0, 1], e.g. 0.9")
    params = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)
    options.need_seed(params, "calibrate-sprinter")
    rows = options.prompt_rows(args)
    if len(rows) < HELD_OUT:
        raise ValueError(
            f"--prompts, --num-prompts: {len(rows)} prompts are too few, as every {HELD_OUT}th is kept from the fit: "
            f"give at least {HELD_OUT}"
        )
    llm = options.load_llm(args, "autoregressive")
    prompts = [options.token_ids(llm, row) for row in rows]
    found = collect(llm, prompts, params, args.num_draft_tokens, options.show_progress)
    print(file=sys.stderr)
    classifier = fit(llm, found, args.least_right)
    write_classifier(llm.artifact, classifier)
    print(f"{classifier.num_samples} drafted tokens; on those of every fifth prompt, kept from the fit:")
    for one in classifier.settings:
        mark = " <- taken" if one.threshold == classifier.threshold else ""
        print(f"  threshold {one.threshold:.2f}: {one.kept:6.1%} kept unverified, {one.right:6.1%} of them right{mark}")
    print("sprinter is lossy: run it with --strategy sprinter --allow-lossy")
    return 0
