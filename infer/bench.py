"""Strategies and peers side by side, in one run, on the same prompts.

Every group of prompts is run by each contender in turn (A B C, B C A, …), so that a drift of the machine's speed meets
all alike. What is quoted is the median over groups of the ratio of times to plain decoding; speed is never asserted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infer.artifact import host_capability
from infer.llm import LLM
from infer.output import TierMetrics
from infer.params import SamplingParams
from infer.peers import TransformersPeer
from infer.strategy import Policy

BASELINE = "autoregressive"
WARMUP_TOKENS = 8


@dataclass(slots=True)
class Result:
    """One contender at one batch size; lists have one entry per group of prompts."""

    name: str
    batch_size: int
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)  # per prompt
    tiers: dict[str, list[int]] = field(default_factory=dict)  # judge → [num_drafts, num_draft_tokens, num_accepted]

    @property
    def tokens_per_second(self) -> float:
        return sum(self.num_tokens) / sum(self.seconds)

    def ratios(self, baseline: Result) -> list[float]:
        """Speed relative to the baseline's, group by group."""
        return [
            (n / s) / (bn / bs)
            for n, s, bn, bs in zip(self.num_tokens, self.seconds, baseline.num_tokens, baseline.seconds, strict=True)
        ]

    def add_tiers(self, metrics: Sequence[TierMetrics]) -> None:
        for tier in metrics:
            counts = self.tiers.setdefault(tier.tier, [0, 0, 0])
            for i, value in enumerate((tier.num_drafts, tier.num_draft_tokens, tier.num_accepted)):
                counts[i] += value

    def acceptance(self) -> dict[str, TierMetrics]:
        return {tier: TierMetrics(tier, counts[0], counts[1], counts[2]) for tier, counts in self.tiers.items()}


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a bench ran, so that its figures can be read."""

    num_threads: int
    load_average: float  # over the last minute, at the start
    copy_gigabytes_per_second: float  # read and written bytes together
    capability: str
    torch_version: str


def run_bench(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    strategies: Sequence[str],
    batch_sizes: Sequence[int],
    params: SamplingParams,
    policy: Policy,
    peer: TransformersPeer | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """All strategies (and the peer) at all batch sizes; the baseline is always among them."""
    names = [BASELINE, *(s for s in strategies if s != BASELINE)]
    contenders = [*names, "transformers"] if peer is not None else names

    def run(name: str, group: Sequence[Sequence[int]], run_params: SamplingParams, result: Result | None) -> None:
        if name == "transformers":
            assert peer is not None and run_params.max_tokens is not None
            token_ids, seconds = peer.generate(group, run_params.max_tokens)
        else:
            llm.use(name, policy)
            start = time.perf_counter()
            outputs = llm.generate(list(group), run_params)
            seconds = time.perf_counter() - start
            token_ids = [list(output.outputs[0].token_ids) for output in outputs]
            if result is not None:
                for output in outputs:
                    result.add_tiers(output.metrics.tiers)
        if result is not None:
            result.seconds.append(seconds)
            result.num_tokens.append(sum(len(ids) for ids in token_ids))
            result.token_ids += token_ids

    results: list[Result] = []
    for batch_size in batch_sizes:
        groups = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
        by_name = {name: Result(name, batch_size) for name in contenders}
        for name in contenders:
            run(name, groups[0], SamplingParams(temperature=0, max_tokens=WARMUP_TOKENS), None)
        for number, group in enumerate(groups):
            turn = number % len(contenders)
            for name in contenders[turn:] + contenders[:turn]:
                run(name, group, params, by_name[name])
            on_progress(f"batch {batch_size}: {number + 1}/{len(groups)} groups")
        results += by_name.values()
    return results


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One record per contender and batch size, ready for a table or JSON."""
    baselines = {r.batch_size: r for r in results if r.name == BASELINE}
    rows = []
    for result in results:
        baseline = baselines[result.batch_size]
        ratios = sorted(result.ratios(baseline))
        equal = sum(a == b for a, b in zip(result.token_ids, baseline.token_ids, strict=True))
        rows.append(
            {
                "strategy": result.name,
                "batch_size": result.batch_size,
                "tokens_per_second": round(result.tokens_per_second, 2),
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_low": round(ratios[len(ratios) // 4], 3),
                "ratio_high": round(ratios[-1 - len(ratios) // 4], 3),
                "mean_acceptance_length": {
                    tier: round(metrics.mean_acceptance_length, 3) for tier, metrics in result.acceptance().items()
                },
                "num_identical": equal,
                "num_prompts": len(result.token_ids),
                "num_tokens": sum(result.num_tokens),
            }
        )
    return rows


def describe_machine(device: str) -> Machine:
    """Measure what a ratio needs as its background."""
    load = os.getloadavg()[0]
    return Machine(
        num_threads=torch.get_num_threads(),
        load_average=round(load, 2),
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
    total = sum(_weights_size(llm, name) for name in path_programs)
    itemsize = getattr(torch, llm.dtype).itemsize
    return total - llm.manifest.base.vocab_size * llm.manifest.base.exit_size * itemsize


def _weights_size(llm: LLM, program: str) -> int:
    """From the weights file, or where an artifact has compiled programs only, the package: its code is about 1 %."""
    files, build = llm.manifest.files, llm.build
    weights = files.get(f"weights/{llm.dtype}/{program}.safetensors")
    return (weights or files[f"programs/{build.folder_name}/{build.programs[program].file}"]).size


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
