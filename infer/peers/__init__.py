"""Peers that the bench measures beside us, each in a process of its own that answers line by line.

A peer gets token ids and gives back token ids and the seconds it took; between requests it waits and uses no processor,
so that runs can alternate. `hugging_face` and `llama` are the peers' side. Theirs is the first line, {"ready": true};
then a JSON object a line comes and goes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Name → whether it decodes several prompts at once.
PEERS = {
    "transformers": True,
    "transformers-layerskip": False,  # assisted generation takes one
    "transformers-prompt-lookup": False,
    "llama-cpp": False,
}


@dataclass(frozen=True, slots=True)
class Margins:
    """Of a peer's logits at one position."""

    top_two: float  # between the two largest
    gap: float  # between the largest and the lowest of the tokens that were asked about; top_two if none was
    largest: float  # magnitude of all


class Peer:
    """Another runtime, greedy, on the same token ids.

    Args:
        name: one of `PEERS`.
        model: the base model's folder or hub id; for llama-cpp a GGUF file, whose own dtype is what runs.
        early_exit: layers that transformers-layerskip drafts with.
        context: most tokens of a prompt with its answer, which llama-cpp makes room for; 0: as many as the model knows.
        python: interpreter of the environment in which the peer's package is installed.

    Raises:
        ValueError: the peer could not load the model.
    """

    def __init__(
        self,
        name: str,
        model: str,
        dtype: str,
        device: str,
        *,
        num_threads: int,
        early_exit: int | None = None,
        context: int = 0,
        python: str = sys.executable,
    ) -> None:
        self.name = name
        options = ["--model", model, "--num-threads", str(num_threads)]
        if name == "llama-cpp":  # by its path: that environment has nothing of ours
            command = [python, str(Path(__file__).with_name("llama.py")), *options, "--context", str(context)]
        else:
            command = [python, "-m", "infer.peers.hugging_face", *options, "--dtype", dtype, "--device", device]
            if name == "transformers-layerskip":
                command += ["--early-exit", str(early_exit)]
            elif name == "transformers-prompt-lookup":
                command += ["--prompt-lookup"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._read()  # that it is ready
        except ValueError:
            self.close()
            raise

    @property
    def takes_many(self) -> bool:
        return PEERS[self.name]

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], float]:
        """Token ids after each prompt, and the seconds that took."""
        reply = self._ask({"prompts": [list(p) for p in prompts], "max_tokens": max_tokens})
        return reply["token_ids"], reply["seconds"]

    def margins(self, prompt: Sequence[int], token_ids: Sequence[int]) -> Margins:
        """How near to each other the logits after `prompt` lie; of the transformers peer alone."""
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
            raise ValueError(f"the {self.name} peer ended before its answer; its own message stands above")
        return json.loads(line)

    def close(self) -> None:
        """End the process; it leaves when its input closes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
