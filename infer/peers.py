"""Peers that the bench measures beside us, each in a process of its own that answers line by line.

A peer gets token ids and gives back token ids and the seconds it took; between requests it waits and uses no processor,
so that runs can alternate. `python -m infer.peers --model DIR --dtype bfloat16` is the transformers peer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

PEERS = ("transformers",)


@dataclass(frozen=True, slots=True)
class Margins:
    """Of a peer's logits at one position."""

    top_two: float  # between the two largest
    gap: float  # between the largest and the lowest of the tokens that were asked about; top_two if none was
    largest: float  # magnitude of all


class TransformersPeer:
    """Hugging Face `generate`, greedy, on the same token ids.

    Raises:
        ValueError: the peer could not load the model.
    """

    def __init__(self, model: str, dtype: str, device: str) -> None:
        command = [sys.executable, "-m", "infer.peers", "--model", model, "--dtype", dtype, "--device", device]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()  # that it is ready

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], float]:
        """Token ids after each prompt, and the seconds that took."""
        reply = self._ask({"prompts": [list(p) for p in prompts], "max_tokens": max_tokens})
        return reply["token_ids"], reply["seconds"]

    def margins(self, prompt: Sequence[int], token_ids: Sequence[int]) -> Margins:
        """How near to each other the logits after `prompt` lie."""
        return Margins(**self._ask({"margins": list(prompt), "token_ids": list(token_ids)}))

    def _ask(self, request: dict) -> dict:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError("the transformers peer ended before its answer; its own message stands above")
        return json.loads(line)

    def close(self) -> None:
        """End the process; it leaves when its input closes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def main() -> None:
    """The peer's side: load the model, then answer requests from stdin until it closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    os.environ.pop("MKL_CBWR", None)  # ours, for bitwise identity; a user of the peer would not have it
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval().to(args.device)
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
            out = model.generate(ids, attention_mask=mask, max_new_tokens=request["max_tokens"], do_sample=False)
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
