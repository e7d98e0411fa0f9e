"""The side of the transformers peers: `generate` alone, with early-exit drafts of the model's own layers (LayerSkip,
`assistant_early_exit`), or with prompt lookup."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

NUM_LOOKUP_TOKENS = 10  # transformers' own example; its other numbers are its defaults


def main() -> None:
    """Load the model, then answer requests from stdin until it closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-threads", type=int, required=True)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--early-exit", type=int)
    how.add_argument("--prompt-lookup", action="store_true")
    args = parser.parse_args()
    os.environ.pop("MKL_CBWR", None)  # ours, for bitwise identity; a user of the peer would not have it
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.num_threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval().to(args.device)
    speculation: dict[str, Any] = {}
    if args.early_exit:
        speculation = {"assistant_early_exit": args.early_exit}
    elif args.prompt_lookup:
        speculation = {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "margins" in request:
            with torch.inference_mode():
                logits = model(torch.tensor([request["margins"]], device=args.device)).logits[0, -1].float()
            first, second = logits.topk(2).values.tolist()
            lowest = min(logits[request["token_ids"]].tolist(), default=second)
            reply = {"top_two": first - second, "gap": first - lowest, "largest": float(logits.abs().max())}
            print(json.dumps(reply), flush=True)
            continue
        prompts = request["prompts"]
        longest = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=args.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=args.device)
        eos = model.generation_config.eos_token_id
        ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=request["max_tokens"], do_sample=False, **speculation
            )
            tokens = out[:, longest:].tolist()
        seconds = time.perf_counter() - start
        rows = [_until_end(row, ends) for row in tokens]
        print(json.dumps({"token_ids": rows, "seconds": seconds}), flush=True)


def _until_end(token_ids: list[int], ends: set[int]) -> list[int]:
    """Up to and including the first end; `generate` pads shorter rows behind it."""
    for index, token_id in enumerate(token_ids):
        if token_id in ends:
            return token_ids[: index + 1]
    return token_ids


if __name__ == "__main__":
    main()
