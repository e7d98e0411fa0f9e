"""Strategies and peers side by side, in one run, on the same prompts.

Every group of prompts is run by each contender in turn (A B C, B C A, …), so that a drift of the machine's speed meets
all alike. What is quoted is the median over groups of the ratio of times to plain decoding; speed is never asserted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product

from infer.llm import LLM
from infer.output import TierMetrics, check_whole
from infer.params import SamplingParams
from infer.peers import Peer
from infer.plan import Plan
from infer.row import Row
from infer.strategy import Policy, Setting
from infer.verify import mean_acceptance_length

BASELINE = "autoregressive"
WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to decode, and in what conditions.

    Contenders that differ in `name`, `bitwise` or `verification` alone run in turn; the first plain one of them is
    their baseline.
    """

    name: str  # a strategy, `auto`, or a peer
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
    workloads: list[str] = field(default_factory=list)  # of each group
    stage_seconds: list[float] = field(default_factory=list)  # by stage, in its judgements; empty for peers
    num_target_calls: int = 0

    @property
    def tokens_per_second(self) -> float:
        return sum(self.num_tokens) / sum(self.seconds)

    @property
    def throughput(self) -> float | None:
        """Tokens per second of the groups that fill the batch; None if there is none."""
        full = len(self.token_ids) // self.contender.batch_size
        return sum(self.num_tokens[:full]) / sum(self.seconds[:full]) if full else None

    def ratios(self, baseline: Result, workload: str | None = None) -> list[float]:
        """Speed relative to the baseline's, group by group (of one workload), in ascending order."""
        pairs = zip(self.num_tokens, self.seconds, baseline.num_tokens, baseline.seconds, strict=True)
        return sorted(
            (n / s) / (bn / bs)
            for number, (n, s, bn, bs) in enumerate(pairs)
            if workload is None or self.workloads[number] == workload
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
    workloads: Sequence[str] | None = None,
    tuned: Mapping[tuple[str, int, str], Setting] | None = None,
    peers: Sequence[Peer] = (),
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """All strategies and peers in all conditions; the baseline is always among them.

    Args:
        policy: of the strategies that `tuned` has nothing for.
        workloads: of each prompt; a group is of one. None: they are all alike.
        tuned: (strategy or `auto`, batch size, workload) → what runs in its place.
        temperatures: each takes the place of the one in `params`; None is that one alone.
        bitwise: each strategy runs once with every value; None is what `llm` has. That is as it was afterwards.
        verifications: each strategy that drafts runs once with every one.
    """
    names = list(dict.fromkeys([BASELINE, *strategies]))
    before = llm.engine.runner.bitwise
    results: list[Result] = []
    others = {peer.name: peer for peer in peers}

    def run(workload: str, group: Sequence[Sequence[int]], params: SamplingParams, result: Result) -> None:
        name, batch_size = result.contender.name, result.contender.batch_size
        if name in others:
            _run_peer(others[name], group, params, result)
        else:
            _run(llm, (tuned or {}).get((name, batch_size, workload), Setting(name, policy)), group, params, result)

    for batch_size in dict.fromkeys(batch_sizes):
        groups = _groups(prompts, workloads or [""] * len(prompts), batch_size)
        for temperature in dict.fromkeys(temperatures or [params.temperature]):
            contenders = [
                Contender(name, batch_size, temperature, bits, verification)
                for name in names
                for bits in bitwise or [before]
                for verification in (("identity",) if name == BASELINE else dict.fromkeys(verifications))
            ]
            contenders += [
                Contender(name, batch_size, temperature)
                for name, peer in others.items()
                if batch_size == 1 or peer.takes_many
            ]
            by_contender = {contender: Result(contender) for contender in contenders}
            warmup = SamplingParams(temperature=0, max_tokens=WARMUP_TOKENS)
            for contender in contenders:
                run(*groups[0], warmup, Result(contender))
            own_params = replace(params, temperature=temperature)
            for number, (workload, group) in enumerate(groups):
                turn = number % len(contenders)
                for contender in contenders[turn:] + contenders[:turn]:
                    run(workload, group, own_params, by_contender[contender])
                    by_contender[contender].workloads.append(workload)
                on_progress(f"batch {batch_size}, temperature {temperature:g}: {number + 1}/{len(groups)} groups")
            results += by_contender.values()
    llm.use(BASELINE, bitwise=before)
    return results


def settings_of(
    plan: Plan, names: Sequence[str], sizes: Sequence[int], kinds: Mapping[str, str], *, is_tuned: bool
) -> dict[tuple[str, int, str], Setting]:
    """What the plan chose for `auto`, and, if tuned, the numbers that it found best for each strategy.

    Args:
        kinds: workload of prompts → the plan's workload that `auto` is run as; empty: its choice for all texts.
    """
    found = {}
    for size, (workload, kind) in product(sizes, kinds.items()):
        entry, best = plan.entry_for(size), plan.tuned_for(size) if is_tuned else {}
        for name in names:
            figure = entry.figure_for(kind) if name == "auto" else best.get(name)
            if figure is not None:
                found[name, size, workload] = figure.setting
    return found


def _groups(
    prompts: Sequence[Sequence[int]], workloads: Sequence[str], batch_size: int
) -> list[tuple[str, list[Sequence[int]]]]:
    """Neighbours of one workload, as many as a batch has."""
    groups = []
    for workload, pairs in groupby(zip(workloads, prompts, strict=True), key=lambda pair: pair[0]):
        own = [prompt for _, prompt in pairs]
        groups += [(workload, own[i : i + batch_size]) for i in range(0, len(own), batch_size)]
    return groups


def _run(llm: LLM, setting: Setting, group: Sequence[Sequence[int]], params: SamplingParams, result: Result) -> None:
    """Decode one group and write down what that took and gave."""
    contender = result.contender
    is_adaptive = contender.name == "auto" and contender.verification == "identity"  # as `auto` is for users
    llm.use(*setting, verification=contender.verification, bitwise=contender.bitwise, adaptive=is_adaptive)
    round_ = llm.engine.round
    result.stage_seconds = result.stage_seconds or [0.0] * len(round_.stages)
    act, target = round_._act, len(round_.stages) - 1

    def timed(rows: list[Row], level: int) -> set[Row]:
        start = time.perf_counter()
        unsure = act(rows, level)  # which waits for the device: its last act is to read picks, or who is unsure
        result.stage_seconds[level] += time.perf_counter() - start
        result.num_target_calls += level == target
        return unsure

    round_._act = timed  # type: ignore[method-assign]
    start = time.perf_counter()
    outputs = llm.generate(list(group), params)
    seconds = time.perf_counter() - start
    check_whole(outputs)
    for output in outputs:
        result.acceptance.add(output.metrics.tiers)
    _note(result, [list(output.outputs[0].token_ids) for output in outputs], seconds)


def _run_peer(peer: Peer, group: Sequence[Sequence[int]], params: SamplingParams, result: Result) -> None:
    assert params.max_tokens is not None
    _note(result, *peer.generate(group, params.max_tokens))


def _note(result: Result, token_ids: list[list[int]], seconds: float) -> None:
    result.seconds.append(seconds)
    result.num_tokens.append(sum(len(ids) for ids in token_ids))
    result.token_ids += token_ids
