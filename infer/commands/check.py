"""`python -m infer check`: every strategy against plain decoding, and Hugging Face beside them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from infer.commands import options
from infer.commands.sampling import add_sampling_options, sampling_params


def add(commands: Any) -> None:
    parser = commands.add_parser("check", help="show that every strategy gives plain decoding's tokens on your prompts")
    options.add_engine_options(parser)
    add_sampling_options(parser)
    options.add_comparison_options(parser)
    parser.add_argument("--peer-model", help="compare with Hugging Face's greedy texts too: its folder or hub id")
    parser.add_argument("--json", type=Path, help="write all results, each difference with its gap, to this file")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Exit code 1 when any text differs from plain decoding's by more than a tie."""
    import torch

    from infer.check import check, target_error
    from infer.peers import Peer
    from infer.report import print_comparison

    sizes = options.batch_sizes(args)
    params, policy = sampling_params(args), options.policy_of(args)
    options.need_seed(params, "check")
    options.check_output(args.json, "--json")
    if args.peer_model and not options.is_plain(params):
        raise ValueError("--peer-model compares greedy texts, made freely: leave out all but --max-tokens")
    rows = options.prompt_rows(args)
    llm = options.load_llm(args, "autoregressive")
    names = options.strategy_names(args, llm, lossy=args.strategies != "all")  # `check` refuses those that are named
    prompts = [options.token_ids(llm, row) for row in rows]
    error = target_error(llm) if args.peer_model else 0.0
    peer = None
    if args.peer_model:
        threads = torch.get_num_threads()
        peer = Peer("transformers", args.peer_model, llm.dtype, args.device, num_threads=threads)
    try:
        results = check(
            llm, prompts, params, strategies=names, batch_sizes=sizes, policy=policy, peer=peer,
            max_logit_error=error, on_result=print_comparison, on_progress=options.show_progress,
        )  # fmt: skip
    finally:
        if peer is not None:
            peer.close()
    if args.json:
        record = {"artifact": args.artifact, "backend": llm.backend, "dtype": llm.dtype, "bitwise": args.bitwise,
                  "peer_model": args.peer_model, "max_logit_error": error, "prompts": [row.id for row in rows],
                  "results": [result.record() for result in results]}  # fmt: skip
        options.write_whole(args.json, json.dumps(record, indent=2) + "\n")
    return 0 if all(result.is_lossless for result in results) else 1
