"""What the planner needs, measured on sample prompts: seconds of calls, verdicts of judges, ratios to plain decoding.

A few settings are run with a stopwatch at every judgement (`probe`), all others are predicted from these, and the best
by prediction are run in turn with plain decoding (`compare`), so that a drift of the machine's speed meets all alike.
A call of more rows has less room for drafts, so a strategy that is far behind plain decoding at one batch size is not
tried at the next; nor is a setting run further that is far behind after its first groups.
"""

# Shape legend: B rows of a batch

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from infer.llm import LLM
from infer.output import check_whole
from infer.params import SamplingParams
from infer.plan import Figure, PlanEntry
from infer.planner import (
    PLAIN,
    UNPREDICTED,
    Costs,
    chances,
    choose,
    lower_quarter,
    predict,
    settings,
    shortlist,
    typical,
)
from infer.round import Round
from infer.row import Row
from infer.strategy import LOSSY, STRATEGIES, Setting, stages_of

NUM_COMPARED = 3  # settings that are run beside plain decoding
LEAST_PREDICTED = 0.8  # of plain decoding's speed; not worth a run below, as predictions are not that wrong
LOWEST_QUARTER = 0.85  # of the chosen one; texts in which it does not pay are decoded plainly (`payoff`)
MIN_GROUPS = 5  # of prompts, three of which are the middle half
NUM_SCREENED = 2  # groups of each kind of text after which a setting that is far behind is run no more
FAR_BEHIND = 0.9  # of plain decoding's speed, or of the fastest setting's
WARMUP_TOKENS = 8

Prompts = Sequence[Sequence[int]]
Ratios = dict[Setting, list[float]]  # speed relative to plain decoding, group by group


@dataclass(slots=True)
class Record:
    """What rounds of one setting took and gave; only those in which all B rows took part are timed."""

    calls: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    # (tier, tokens per row) → seconds
    overheads: list[float] = field(default_factory=list)  # seconds of each round outside of its calls
    verdicts: list[list[tuple[int, int]]] = field(default_factory=list)  # for each stage: (proposed, accepted)


class _TimedRound(Round):
    """A round that writes down what it does."""

    def __init__(self, plain: Round, batch_size: int) -> None:
        super().__init__(plain.runner, plain.stages, plain.rule)
        self.record = Record(verdicts=[[] for _ in plain.stages])
        self.seconds_in_calls = 0.0
        self._batch_size = batch_size

    def run(self, rows: Sequence[Row]) -> None:
        self.seconds_in_calls = 0.0
        super().run(rows)
        for _, level, num_proposed, num_accepted in self._verdicts:
            self.record.verdicts[level].append((num_proposed, num_accepted))

    def _act(self, rows: list[Row], level: int) -> set[Row]:
        tier = self.stages[level].tier
        width = max(len(row.token_ids) - row.cursors[tier] for row in rows)
        start = time.perf_counter()
        unsure = super()._act(rows, level)  # has read its verdicts when it returns, so the device is done
        seconds = time.perf_counter() - start
        self.seconds_in_calls += seconds
        if len(rows) == self._batch_size:
            self.record.calls[tier, width].append(seconds)
        return unsure


def plan_batch(
    llm: LLM,
    prompts: Prompts,
    batch_size: int,
    params: SamplingParams,
    margin: float,
    on_progress: Callable[[str], None] = lambda _: None,
    workloads: Sequence[str] | None = None,
    smaller: PlanEntry | None = None,
) -> PlanEntry:
    """The best strategy for so many rows. The model decodes plainly afterwards.

    Args:
        workloads: of each prompt, to choose for each of them too; None: for all texts alike.
        smaller: what was found for fewer rows; None: nothing was.

    Raises:
        ValueError: the prompts never decode all together, or a text was cut short by a fault.
    """
    kinds, groups = _by_kind(prompts, workloads or [""] * len(prompts), batch_size)
    names = [one.strategy for one in smaller.tuned if one.ratio >= FAR_BEHIND] if smaller else STRATEGIES
    try:
        told, ratios = _measure(
            llm, groups, kinds, params, names, lambda text: on_progress(f"batch {batch_size}: {text}")
        )
    finally:
        llm.use(PLAIN, verification=llm.verification)
    plain = Setting(PLAIN)
    figures = {plain: _figure(plain, 1.0, [1.0])}
    figures |= {setting: _figure(setting, told.get(setting), own) for setting, own in ratios.items()}
    tuned: dict[str, Figure] = {}
    for one in sorted(figures.values(), key=lambda one: one.ratio):
        tuned[one.strategy] = one
    whole = {setting: own for setting, own in ratios.items() if len(own) == len(groups)}
    lowest = LOWEST_QUARTER if llm.verification == "identity" else 1.0
    chosen = figures.pop(choose(whole, margin, lowest))
    by_workload = {}
    for kind in dict.fromkeys(kinds) if workloads else ():
        own_ratios = _of_kind(whole, kinds, kind)
        best = choose(own_ratios, margin, lowest)
        by_workload[kind] = _figure(best, None, own_ratios.get(best, [1.0]))
    runner_up = max((f for f in figures.values() if f.strategy not in LOSSY), key=lambda one: one.ratio, default=None)
    return PlanEntry(
        batch_size=batch_size, chosen=chosen, runner_up=runner_up, tuned=list(tuned.values()), by_workload=by_workload
    )


def _measure(
    llm: LLM,
    groups: Sequence[Prompts],
    kinds: Sequence[str],
    params: SamplingParams,
    names: Collection[str],
    on_progress: Callable[[str], None],
) -> tuple[dict[Setting, float], Ratios]:
    """Predicted and measured speeds relative to plain decoding, of settings of these strategies."""
    plain, batch_size = Setting(PLAIN), len(groups[0])
    allowed = {name: tried for name, tried in settings(llm.manifest).items() if name in names}
    on_progress(PLAIN)
    probed = groups[: max(len(set(kinds)), -(-MIN_GROUPS // batch_size))]
    records = {plain: probe(llm, probed, plain, params)}
    for tried in allowed.values():
        for setting in dict.fromkeys((tried[0], tried[-1])):
            on_progress(f"probing {setting.strategy}")
            records[setting] = probe(llm, probed, setting, params)
    costs = _costs(list(records.values()))
    expected = predict(stages_of(*plain, llm.manifest), [()], costs, batch_size)
    predicted = {}
    for tried in allowed.values():
        odds = [chances(verdicts) for verdicts in records[tried[-1]].verdicts]
        for setting in tried:
            predicted[setting] = predict(stages_of(*setting, llm.manifest), odds, costs, batch_size)
    compared = shortlist(predicted, expected, NUM_COMPARED, LEAST_PREDICTED)
    compared += [
        one
        for one in UNPREDICTED
        if one.strategy in names and one.strategy in llm.supported(one.policy, (llm.verification,))
    ]
    told = {setting: speed / expected for setting, speed in predicted.items()}
    return told, compare(llm, groups, compared, params, on_progress, kinds)


def check_fills(llm: LLM, prompts: Prompts, batch_size: int, params: SamplingParams) -> None:
    """ValueError unless so many prompts come to decode all together, which figures for that batch size need."""
    probe(llm, _groups(prompts, batch_size)[:1], Setting(PLAIN), params)


def probe(llm: LLM, groups: Sequence[Prompts], setting: Setting, params: SamplingParams) -> Record:
    """Run every group of B prompts with this setting."""
    llm.use(*setting, verification=llm.verification)
    llm.generate(list(groups[0]), replace(params, max_tokens=WARMUP_TOKENS))
    timed = llm.engine.round = _TimedRound(llm.engine.round, len(groups[0]))
    for group in groups:
        requests = [llm.make_request(prompt, params) for prompt in group]
        for request in requests:
            request.is_streamed = False  # as in `generate`
            llm.engine.add(request)
        try:
            while not all(request.is_finished for request in requests):
                all_decode = all(r.row is not None and r.row.is_ready and not r.is_finished for r in requests)
                start = time.perf_counter()
                llm.engine.step()
                if all_decode:
                    timed.record.overheads.append(time.perf_counter() - start - timed.seconds_in_calls)
        finally:
            for request in requests:
                llm.engine.abort(request.request_id)
        check_whole(request.output() for request in requests)
    timed_tiers = {tier for tier, _ in timed.record.calls}
    if not timed.record.overheads or timed_tiers != set(timed.judging_tiers):
        raise ValueError(
            f"{setting.strategy}: no full round in which all of {len(groups[0])} prompts decode: raise "
            f"--max-tokens={params.max_tokens} or --num-blocks={llm.engine.pool.num_blocks}, or give prompts with "
            "longer answers"
        )
    return timed.record


def compare(
    llm: LLM,
    groups: Sequence[Prompts],
    compared: Sequence[Setting],
    params: SamplingParams,
    on_progress: Callable[[str], None] = lambda _: None,
    kinds: Sequence[str] = (),
) -> Ratios:
    """Run all of them and plain decoding in turn. Each takes its turn at being first.

    A setting that is `FAR_BEHIND` in every kind of text after `NUM_SCREENED` groups of each has no more ratios.

    Args:
        kinds: of text, of each group; none: they are all alike.
    """
    contenders = [Setting(PLAIN), *compared]
    ratios: Ratios = {setting: [] for setting in compared}
    kinds = kinds or [""] * len(groups)
    for number, group in enumerate(groups):
        on_progress(f"comparing, {number + 1} of {len(groups)}")
        if number == NUM_SCREENED * len(set(kinds)):
            keeping = _promising(ratios, kinds)
            contenders = [one for one in contenders if one.strategy == PLAIN or one in keeping]
        turn, speeds = number % len(contenders), {}
        for setting in contenders[turn:] + contenders[:turn]:
            llm.use(*setting, verification=llm.verification)
            start = time.perf_counter()
            outputs = llm.generate(list(group), params)
            seconds = time.perf_counter() - start
            check_whole(outputs)
            speeds[setting] = sum(len(output.outputs[0].token_ids) for output in outputs) / seconds
        for setting in contenders[1:]:
            ratios[setting].append(speeds[setting] / speeds[contenders[0]])
    return ratios


def _promising(ratios: Ratios, kinds: Sequence[str]) -> set[Setting]:
    """Those that are not far behind in some kind of text."""
    keeping = set[Setting]()
    for kind in set(kinds):
        means = {one: statistics.fmean(own) for one, own in _of_kind(ratios, kinds, kind).items() if own}
        least = FAR_BEHIND * max([1.0, *means.values()])
        keeping |= {one for one, mean in means.items() if mean >= least}
    return keeping


def _groups(prompts: Prompts, batch_size: int) -> list[Prompts]:
    """Groups of B prompts that hold every prompt at least once; prompts come again to fill them."""
    count = max(MIN_GROUPS, -(-len(prompts) // batch_size))
    return [[prompts[(g * batch_size + i) % len(prompts)] for i in range(batch_size)] for g in range(count)]


def _by_kind(prompts: Prompts, workloads: Sequence[str], batch_size: int) -> tuple[list[str], list[Prompts]]:
    """`_groups` of each workload's prompts, and the workload of each; in turn, as far as they reach."""
    own: dict[str, list[Sequence[int]]] = defaultdict(list)
    for prompt, workload in zip(prompts, workloads, strict=True):
        own[workload].append(prompt)
    turns = zip_longest(*([(kind, group) for group in _groups(few, batch_size)] for kind, few in own.items()))
    pairs = [pair for turn in turns for pair in turn if pair is not None]
    return [kind for kind, _ in pairs], [group for _, group in pairs]


def _of_kind(ratios: Ratios, kinds: Sequence[str], kind: str) -> Ratios:
    places = [place for place, other in enumerate(kinds) if other == kind]
    return {setting: [every[place] for place in places if place < len(every)] for setting, every in ratios.items()}


def _costs(records: Sequence[Record]) -> Costs:
    samples: dict[tuple[int, int], list[float]] = defaultdict(list)
    for record in records:
        for key, seconds in record.calls.items():
            samples[key] += seconds
    calls: dict[int, dict[int, float]] = defaultdict(dict)
    for (tier, num_tokens), seconds in samples.items():
        calls[tier][num_tokens] = statistics.median(seconds)
    return Costs(calls, statistics.median(second for record in records for second in record.overheads))


def _figure(setting: Setting, predicted: float | None, ratios: Sequence[float]) -> Figure:
    return Figure(
        strategy=setting.strategy,
        policy=setting.policy,
        predicted=None if predicted is None else round(predicted, 3),
        ratio=round(typical(ratios), 3),
        ratio_low=round(lower_quarter(ratios), 3),
    )
