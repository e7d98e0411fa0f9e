"""What loading adds to a process's memory: each set of programs in a fresh process that has imported all before.

Resident bytes as the system counts them: touched pages of mapped files are among them, though it may take these back.
Run as a module it is that process, and prints its Growth as JSON.
"""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from infer.artifact import Artifact, ProgramSet
from infer.device import RUNTIME_PACKAGES

_STATUS = Path("/proc/self/status")
_LEAST_BLOCKS = 8  # of the KV pool, which is no part of the model


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes beyond those after the imports."""

    name: str  # of the set's folder
    model: int  # weights that a plain step reads: layers and unembedding, in the programs' dtype
    programs: int  # once these are loaded
    ready: int  # with the tokenizer and a small KV pool
    used: int  # after the first tokens
    peak: int  # at any time


def check_system() -> None:
    """ValueError where nobody tells what is resident."""
    if not _STATUS.exists():
        raise ValueError("--memory reads /proc/self/status, which this system does not have: measure on Linux")


def measure(artifact: Artifact, sets: list[ProgramSet]) -> Iterator[Growth]:
    """One set after the other; RuntimeError with what its process said where one fails."""
    for one in sets:
        argv = [sys.executable, "-m", "infer.memory", str(artifact.path), one.build.backend, one.build.dtype]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{one.build.folder_name}: {done.stderr.strip()}")
        yield Growth(**json.loads(done.stdout.splitlines()[-1]))


def _resident() -> int:
    (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def _grow(path: str, backend: str, dtype: str) -> Growth:
    import torch
    import transformers

    from infer import backends
    from infer.llm import LLM
    from infer.machine import weight_bytes
    from infer.params import SamplingParams

    _ = transformers.AutoTokenizer  # imported when it is first asked for
    for package in RUNTIME_PACKAGES.get(backend, ()):
        importlib.import_module(package)
    artifact = Artifact.open(path)
    chosen = artifact.select(backend, dtype)
    torch.set_num_threads(chosen.build.num_threads)
    before = _resident()
    programs = backends.load(artifact, chosen)
    loaded = _resident()
    llm = LLM(
        artifact, "autoregressive", backend=backend, dtype=dtype, num_blocks=_LEAST_BLOCKS, max_num_seqs=1,
        programs=programs,
    )  # fmt: skip
    ready = _resident()
    llm.generate({"prompt_token_ids": [1]}, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Growth(
        name=chosen.build.folder_name,
        model=weight_bytes(llm),
        programs=loaded - before,
        ready=ready - before,
        used=_resident() - before,
        peak=max(peak - before, 0),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_grow(*sys.argv[1:]))))
