"""What a bench's results say: one record per contender, ready for a table, a plot or JSON."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from infer.bench import BASELINE, Result
from infer.peers import PEERS

MISSED = 0.05  # chance that an interval does not hold the median


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One record per contender.

    `ratio_…` is the speed relative to the baseline, `ratio_to_bitwise` that of a contender without bitwise equality
    relative to itself with it, `ratio_to_batch_1` that of its full batches relative to itself at batch 1. The last two
    are None where there is nothing to compare with. `workloads` has each workload's own ratio and the interval that
    holds its median (None: too few groups); `ratio_mean` is the mean of these medians. `verification_to_drafting` is
    the time in the judgements of all stages but the first ÷ the first's; None where nothing drafts.
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
        is_peer = contender.name in PEERS
        ratios = result.ratios(baseline)
        kept = None if contender.bitwise else by_contender.get(replace(contender, bitwise=True))
        single = by_contender.get(replace(contender, batch_size=1))
        speedup = None
        if single is not None and single.throughput and result.throughput is not None:
            speedup = round(result.throughput / single.throughput, 2)
        workloads = {name: _workload(result, baseline, name) for name in dict.fromkeys(result.workloads)}
        drafting, *judging = result.stage_seconds or [0.0]
        rows.append(
            {
                "strategy": contender.name,
                "batch_size": contender.batch_size,
                "temperature": contender.temperature,
                "bitwise": None if is_peer else contender.bitwise,
                "verification": None if is_peer or contender.name == BASELINE else contender.verification,
                "tokens_per_second": round(result.tokens_per_second, 2),
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_low": round(ratios[len(ratios) // 4], 3),
                "ratio_high": round(ratios[-1 - len(ratios) // 4], 3),
                "ratio_to_bitwise": round(statistics.median(result.ratios(kept)), 3) if kept else None,
                "ratio_to_batch_1": speedup,
                "workloads": workloads,
                "ratio_mean": round(statistics.mean(one["ratio"] for one in workloads.values()), 3)
                if workloads
                else None,
                "mean_acceptance_length": {
                    tier: round(length, 3) for tier, length in result.acceptance.mean_lengths().items()
                },
                "target_calls_per_token": None
                if is_peer
                else round(result.num_target_calls / sum(result.num_tokens), 3),
                "verification_to_drafting": round(sum(judging) / drafting, 2) if judging and drafting else None,
                "stage_shares": [round(one / sum(result.seconds), 3) for one in result.stage_seconds],
                "num_identical": sum(a == b for a, b in zip(result.token_ids, baseline.token_ids, strict=True)),
                "num_prompts": len(result.token_ids),
                "num_tokens": sum(result.num_tokens),
            }
        )
    return rows


def _workload(result: Result, baseline: Result, name: str) -> dict[str, Any]:
    ratios = result.ratios(baseline, name)
    interval = median_interval(ratios)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "interval": None if interval is None else [round(end, 3) for end in interval],
        "num_groups": len(ratios),
    }


def median_interval(values: Sequence[float], missed: float = MISSED) -> tuple[float, float] | None:
    """An interval that holds the median of what `values` are drawn from with probability ≥ 1 − missed, whatever their
    law: two order statistics, as the number of values below the median is binomial. None with too few values."""
    ordered, n = sorted(values), len(values)
    below, skipped = 0.0, -1  # chance that at most `skipped` values lie below the median
    while skipped + 1 < n / 2 and 2 * (below + math.comb(n, skipped + 1) / 2**n) <= missed:
        skipped += 1
        below += math.comb(n, skipped) / 2**n
    return None if skipped < 0 else (ordered[skipped], ordered[n - 1 - skipped])


def exact_match(texts: Sequence[str], references: Sequence[str | None]) -> float | None:
    """Share of texts whose last number is the answer, of the references that end in GSM8K's `#### answer`; None without
    any."""
    pairs = [
        (text, ref.rpartition("####")[2]) for text, ref in zip(texts, references, strict=True) if ref and "####" in ref
    ]
    return sum(_last_number(text) == _last_number(ref) for text, ref in pairs) / len(pairs) if pairs else None


def _last_number(text: str) -> float | None:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None
