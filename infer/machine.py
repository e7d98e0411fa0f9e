"""The machine that figures come from: what a ratio needs as its background, and what memory allows at most."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

import torch

from infer.device import host_capability
from infer.llm import LLM


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a bench ran, so that its figures can be read."""

    num_threads: int
    load_average: float  # over the last minute, at the start
    copy_gigabytes_per_second: float  # read and written bytes together
    capability: str
    torch_version: str


def load_average() -> float:
    """Processes that wanted a processor, mean over the last minute."""
    return round(os.getloadavg()[0], 2)


def note_if_busy(load: float) -> None:
    if load > 0.3:
        print(f"notice: the load average is {load}; figures of a busy machine mislead", file=sys.stderr)


def describe_machine(device: str) -> Machine:
    """Measure what a ratio needs as its background."""
    load = load_average()
    return Machine(
        num_threads=torch.get_num_threads(),
        load_average=load,
        copy_gigabytes_per_second=round(_copy_bandwidth(device), 1),
        capability=host_capability(device),
        torch_version=torch.__version__,
    )


def share_of_roof(llm: LLM, tokens_per_second: float, machine: Machine) -> float:
    """Weight bytes × tokens/s ÷ copy bandwidth: how near plain decoding at batch 1 is to what memory allows."""
    return weight_bytes(llm) * tokens_per_second / (machine.copy_gigabytes_per_second * 1e9)


def weight_bytes(llm: LLM) -> int:
    """Bytes that one plain step must read: every layer's weights and the unembedding, not the embedding table."""
    path_programs = [f"{tier.name}.trunk" for tier in llm.manifest.tiers] + ["unembed"]
    total = sum(llm.build.programs[name].weight_bytes for name in path_programs)
    itemsize = getattr(torch, llm.dtype).itemsize
    return total - llm.manifest.base.vocab_size * llm.manifest.base.exit_size * itemsize


def _copy_bandwidth(device: str, megabytes: int = 256, repeats: int = 7) -> float:
    source = torch.ones(megabytes * 1_000_000 // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    copy()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        copy()
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times) / 1e9
