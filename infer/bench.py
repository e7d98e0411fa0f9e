"""Strategies and peers side by side, in one run, on the same prompts.

Every group of prompts is run by each contender in turn (A B C, B C A, …), so that a drift of the machine's speed meets
all alike. What is quoted is the median over groups of the ratio of times to plain decoding; speed is never asserted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infer.llm import LLM
from infer.output import TierMetrics, check_whole
from infer.params import SamplingParams
from infer.peers import TransformersPeer
from infer.strategy import LOSSY, Policy
from infer.verify import mean_acceptance_length

BASELINE = "autoregressive"
PEER = "transformers"
WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to decode, and in what conditions.

    Contenders that differ in `name`, `bitwise` or `verification` alone run in turn; the first plain one of them is
    their baseline.
    """

    name: str  # a strategy or the peer
    batch_size: int
    temperature: float = 0.0
    bitwise: bool = True  # see LLM
    verification: str = "identity"  # see LLM


@dataclass(slots=True)
class Acceptance:
    """What judges made of drafts, summed over requests."""

    counts: dict[str, list[int]] = field(default_factory=dict)  # judge → [num_drafts, num_draft_tokens, num_accepted]

    def add(self, metrics: Sequence[TierMetrics]) -> None:
        for tier in metrics:
            counts = self.counts.setdefault(tier.tier, [0, 0, 0])
            for i, value in enumerate((tier.num_drafts, tier.num_draft_tokens, tier.num_accepted)):
                counts[i] += value

    def mean_lengths(self) -> dict[str, float]:
        """Judge → mean acceptance length."""
        return {
            tier: mean_acceptance_length(num_accepted, num_drafts)
            for tier, (num_drafts, _, num_accepted) in self.counts.items()
        }


@dataclass(slots=True)
class Result:
    """What one contender did; lists have one entry per group of prompts."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)  # per prompt
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def tokens_per_second(self) -> float:
        return sum(self.num_tokens) / sum(self.seconds)

    @property
    def throughput(self) -> float | None:
        """Tokens per second of the groups that fill the batch; None if there is none."""
        full = len(self.token_ids) // self.contender.batch_size
        return sum(self.num_tokens[:full]) / sum(self.seconds[:full]) if full else None

    def ratios(self, baseline: Result) -> list[float]:
        """Speed relative to the baseline's, group by group, in ascending order."""
        return sorted(
            (n / s) / (bn / bs)
            for n, s, bn, bs in zip(self.num_tokens, self.seconds, baseline.num_tokens, baseline.seconds, strict=True)
        )


def run_bench(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    strategies: Sequence[str],
    batch_sizes: Sequence[int],
    params: SamplingParams,
    policy: Policy,
    temperatures: Sequence[float] | None = None,
    bitwise: Sequence[bool] | None = None,
    verifications: Sequence[str] = ("identity",),
    peer: TransformersPeer | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """All strategies (and the peer) in all conditions; the baseline is always among them.

    Args:
        temperatures: each takes the place of the one in `params`; None is that one alone.
        bitwise: each strategy runs once with every value; None is what `llm` has. That is as it was afterwards.
        verifications: each strategy that drafts runs once with every one.
    """
    names = list(dict.fromkeys([BASELINE, *strategies]))
    before = llm.engine.runner.bitwise
    results: list[Result] = []
    for batch_size in dict.fromkeys(batch_sizes):
        groups = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
        for temperature in dict.fromkeys(temperatures or [params.temperature]):
            contenders = [
                Contender(name, batch_size, temperature, bits, verification)
                for name in names
                for bits in bitwise or [before]
                for verification in (("identity",) if name == BASELINE else dict.fromkeys(verifications))
            ]
            if peer is not None:
                contenders.append(Contender(PEER, batch_size, temperature))
            by_contender = {contender: Result(contender) for contender in contenders}
            warmup = SamplingParams(temperature=0, max_tokens=WARMUP_TOKENS)
            for contender in contenders:
                _run(llm, policy, peer, groups[0], warmup, Result(contender))
            own_params = replace(params, temperature=temperature)
            for number, group in enumerate(groups):
                turn = number % len(contenders)
                for contender in contenders[turn:] + contenders[:turn]:
                    _run(llm, policy, peer, group, own_params, by_contender[contender])
                on_progress(f"batch {batch_size}, temperature {temperature:g}: {number + 1}/{len(groups)} groups")
            results += by_contender.values()
    llm.use(BASELINE, bitwise=before)
    return results


def _run(
    llm: LLM,
    policy: Policy,
    peer: TransformersPeer | None,
    group: Sequence[Sequence[int]],
    params: SamplingParams,
    result: Result,
) -> None:
    """Decode one group and write down what that took and gave."""
    if result.contender.name == PEER:
        assert peer is not None and params.max_tokens is not None
        token_ids, seconds = peer.generate(group, params.max_tokens)
    else:
        contender = result.contender
        llm.use(contender.name, policy, verification=contender.verification, bitwise=contender.bitwise)
        start = time.perf_counter()
        outputs = llm.generate(list(group), params)
        seconds = time.perf_counter() - start
        check_whole(outputs)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        for output in outputs:
            result.acceptance.add(output.metrics.tiers)
    result.seconds.append(seconds)
    result.num_tokens.append(sum(len(ids) for ids in token_ids))
    result.token_ids += token_ids


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One record per contender, ready for a table or JSON.

    `ratio_…` is the speed relative to the baseline, `ratio_to_bitwise` that of a contender without bitwise equality
    relative to itself with it, `ratio_to_batch_1` that of its full batches relative to itself at batch 1. The last two
    are None where there is nothing to compare with.
    """
    by_contender = {result.contender: result for result in results}
    baselines: dict[tuple[int, float], Result] = {}
    for result in results:
        if result.contender.name == BASELINE:
            baselines.setdefault((result.contender.batch_size, result.contender.temperature), result)
    rows = []
    for result in results:
        contender = result.contender
        baseline = baselines[contender.batch_size, contender.temperature]
        ratios = result.ratios(baseline)
        kept = None if contender.bitwise else by_contender.get(replace(contender, bitwise=True))
        single = by_contender.get(replace(contender, batch_size=1))
        speedup = None
        if single is not None and single.throughput and result.throughput is not None:
            speedup = round(result.throughput / single.throughput, 2)
        rows.append(
            {
                "strategy": contender.name,
                "is_lossy": contender.name in LOSSY,
                "batch_size": contender.batch_size,
                "temperature": contender.temperature,
                "bitwise": contender.bitwise if contender.name != PEER else None,
                "verification": contender.verification if contender.name not in (BASELINE, PEER) else None,
                "tokens_per_second": round(result.tokens_per_second, 2),
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_low": round(ratios[len(ratios) // 4], 3),
                "ratio_high": round(ratios[-1 - len(ratios) // 4], 3),
                "ratio_to_bitwise": round(statistics.median(result.ratios(kept)), 3) if kept else None,
                "ratio_to_batch_1": speedup,
                "mean_acceptance_length": {
                    tier: round(length, 3) for tier, length in result.acceptance.mean_lengths().items()
                },
                "num_identical": sum(a == b for a, b in zip(result.token_ids, baseline.token_ids, strict=True)),
                "agreement": round(_agreement(result.token_ids, baseline.token_ids), 4),
                "num_prompts": len(result.token_ids),
                "num_tokens": sum(result.num_tokens),
            }
        )
    return rows


def _agreement(texts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> float:
    """Share of plain decoding's tokens that stand at the same place in the other texts."""
    num_equal = sum(a == b for text, other in zip(texts, plain, strict=True) for a, b in zip(text, other))
    return num_equal / max(1, sum(map(len, plain)))
