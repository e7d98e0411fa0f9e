"""The planner's arithmetic: closed forms, the engine's own rounds as the oracle, and what it takes to be chosen."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from infer.judging import Ruling
from infer.lines import Lines
from infer.params import SamplingParams
from infer.planner import (
    GRID,
    NUMBERS,
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
from infer.stage import Stage
from infer.strategy import STRATEGIES, Policy, Setting, stages_of
from infer.verify import Verdict
from tests.tiny_engine import make_manifest, model_of

DRAFT, MIDDLE, TARGET = 0, 1, 2
MANIFEST = make_manifest(model_of())
FLAT = Costs({DRAFT: {1: 0.05}, MIDDLE: {1: 0.3}, TARGET: {1: 1.0}})  # a call costs the same however wide it is


def stages(strategy: str, *numbers: int) -> list[Stage]:
    return stages_of(strategy, Policy(**dict(zip(("num_draft_tokens", "window", "inner_rounds"), numbers))), MANIFEST)


# ---- costs and chances ----


def test_a_call_between_two_measured_widths_costs_what_the_line_between_them_says() -> None:
    costs = Costs({TARGET: {1: 10.0, 5: 12.0, 7: 16.0}})
    assert [costs.of(TARGET, width) for width in (1, 2, 5, 6, 7, 9)] == [10, 10.5, 12, 14, 16, 20]
    assert Costs({TARGET: {3: 10.0}}).of(TARGET, 9) == Costs({TARGET: {3: 10.0}}).of(TARGET, 1) == 10
    assert Costs({TARGET: {1: 10.0, 2: 8.0}}).of(TARGET, 9) == 8  # noise must not make long calls cheap


def test_chances_are_counted_where_a_judge_came_so_far() -> None:
    assert chances([(2, 2), (2, 1), (2, 0), (1, 1)]) == [3 / 4, 1 / 2]  # the last one had no second proposal
    assert chances([(0, 0)]) == chances([]) == []
    assert chances([(3, 1)] * 4) == [1, 0]  # nobody reached the third


# ---- prediction ----


def test_plain_decoding_gives_a_token_for_each_row_and_call() -> None:
    costs = Costs({TARGET: {1: 0.02}}, overhead=0.005)
    assert predict(stages(PLAIN), [()], costs, 1) == pytest.approx(1 / 0.025)
    assert predict(stages(PLAIN), [()], costs, 4) == pytest.approx(4 / 0.025)


@pytest.mark.parametrize("gamma", [1, 3, 6])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_layerskip_is_the_closed_form_of_leviathan_kalman_and_matias(gamma, chance, batch_size) -> None:
    costs = Costs({DRAFT: {1: 0.05}, TARGET: {1: 1.0, 7: 1.6}}, overhead=0.02)
    num_tokens = sum(chance**j for j in range(gamma + 1))
    seconds = gamma * 0.05 + (1 + 0.1 * gamma) + 0.02
    got = predict(stages("layerskip", gamma), [(), [chance]], costs, batch_size)
    assert got == pytest.approx(batch_size * num_tokens / seconds)


def test_hispec_that_accepts_all_or_nothing_is_counted_by_hand() -> None:
    costs = Costs({DRAFT: {1: 1.0}, MIDDLE: {1: 10.0, 11: 20.0}, TARGET: {1: 100.0, 11: 200.0}})
    for batch_size in (1, 3):
        # Two inner rounds of 2 drafts give 6 waiting tokens: the window of 4 is full
        all_ = predict(stages("hispec", 2, 4, 4), [(), [1.0], [1.0]], costs, batch_size)
        assert all_ == pytest.approx(batch_size * 7 / (4 * 1 + 2 * 12 + 160))
        # Each inner round leaves the intermediate's own token alone, and R ends them before the window
        nothing = predict(stages("hispec", 2, 4, 3), [(), [0.0], [0.0]], costs, batch_size)
        assert nothing == pytest.approx(batch_size * 1 / (6 * 1 + 3 * 12 + 130))


class StubRunner:
    """Computes nothing; adds up what its calls would cost."""

    device = torch.device("cpu")
    num_tiers = 3
    vocabs = (None, None, None)

    def __init__(self, costs: Costs) -> None:
        self.costs, self.seconds = costs, 0.0

    def advance(self, rows: Sequence[Row], tier: int) -> Tensor:
        widths = [len(row) - row.cursors[tier] for row in rows]
        self.seconds += self.costs.of(tier, max(widths))
        for row in rows:
            row.cursors[: tier + 1] = [len(row)] * (tier + 1)
        return torch.zeros(sum(widths), 1)

    def max_logits(self, tier: int) -> None:
        return None

    def logits(self, tier: int, states: Tensor) -> Tensor:
        return states


class Dice:
    """Accepts by chance, as the planner assumes."""

    def __init__(self, odds: Sequence[Sequence[float]]) -> None:
        self.odds, self.random, self.doubted = odds, random.Random(0), set[Row]()

    def begin(self, rows: Sequence[Row]) -> None: ...

    def judge(self, lines: Lines) -> Ruling:
        verdicts = []
        for drafted in lines.drafted:
            hits = (self.random.random() < self.odds[lines.level][min(j, 1)] for j in range(len(drafted)))
            verdicts.append(Verdict(sum(1 for _ in itertools.takewhile(bool, hits)), 0))
        return Ruling(verdicts, None)


@pytest.mark.parametrize("numbers", [(2, 4, 4), (1, 8, 3), (4, 1, 1), (3, 8, 8)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_hispec_is_what_the_engines_own_rounds_take_and_give_on_average(numbers, batch_size) -> None:
    costs = Costs({DRAFT: {1: 1.0, 2: 1.5}, MIDDLE: {1: 4.0, 5: 6.0}, TARGET: {1: 10.0, 13: 40.0}})
    odds = [(), [0.7, 0.5], [0.9, 0.6]]
    runner = StubRunner(costs)
    round_ = Round(runner, stages("hispec", *numbers), Dice(odds))  # type: ignore[arg-type]
    num_tokens, num_rounds = 0, 4000 // batch_size
    rows = [
        Row([0], SamplingParams(temperature=0), seed=0, max_len=10**6, num_tiers=3, num_stages=3, blocks=[], ring=1)
        for _ in range(batch_size)
    ]
    for _ in range(num_rounds):
        before = sum(map(len, rows))
        round_.run(rows)
        num_tokens += sum(map(len, rows)) - before
    measured = num_tokens / runner.seconds
    # 4000 rows' rounds of 1 to 13 tokens: 3 standard errors are about 2 %
    assert predict(round_.stages, odds, costs, batch_size) == pytest.approx(measured, rel=0.02)


def test_the_best_of_the_grid_is_the_known_optimum() -> None:
    predicted = {s: predict(stages_of(*s, MANIFEST), [(), [0.8]], FLAT, 1) for s in settings(MANIFEST)["layerskip"]}
    by_hand = {g: sum(0.8**j for j in range(g + 1)) / (1 + 0.05 * g) for g in range(1, 7)}
    best = shortlist(predicted, 1.0, 1, 0.8)[0]
    assert best.policy.num_draft_tokens == max(by_hand, key=lambda gamma: by_hand[gamma]) == 6
    dear = replace(FLAT, calls={**FLAT.calls, DRAFT: {1: 0.4}})
    predicted = {s: predict(stages_of(*s, MANIFEST), [(), [0.8]], dear, 1) for s in predicted}
    by_hand = {g: sum(0.8**j for j in range(g + 1)) / (1 + 0.4 * g) for g in range(1, 7)}
    best = shortlist(predicted, 1.0, 1, 0.8)[0]
    assert best.policy.num_draft_tokens == max(by_hand, key=lambda gamma: by_hand[gamma]) == 2


# ---- what is tried, and what is taken ----


def test_what_an_artifact_does_not_allow_is_not_tried() -> None:
    assert {name: len(tried) for name, tried in settings(MANIFEST).items()} == {n: len(p) for n, p in GRID.items()}
    two = replace(MANIFEST.tiers[0], stop=6, exit="target"), replace(MANIFEST.tiers[0], stop=2)
    tiers = [two[1], replace(two[0], name="target", start=2)]
    assert set(settings(replace(MANIFEST, tiers=tiers))) == {"layerskip"}
    assert settings(replace(MANIFEST, tiers=[replace(two[0], name="target", start=0)])) == {}
    short = replace(MANIFEST, limits=replace(MANIFEST.limits, max_query_len=4))
    assert [s.policy.num_draft_tokens for s in settings(short)["layerskip"]] == [1, 2, 3]


def test_every_strategy_is_tuned() -> None:
    assert {*NUMBERS} == {*STRATEGIES} == {PLAIN, *settings(MANIFEST), *(setting.strategy for setting in UNPREDICTED)}


def test_a_lossy_strategy_is_never_chosen() -> None:
    exact = Setting("layerskip")
    assert choose({Setting("sprinter"): [2.0] * 5, exact: [1.1] * 5}, 0.03) == exact
    assert choose({Setting("sprinter"): [2.0] * 5}, 0.03) == Setting(PLAIN)


def test_the_shortlist_is_the_best_by_prediction_and_each_strategys_first() -> None:
    a, b, c, d = (Setting("layerskip", Policy(num_draft_tokens=gamma)) for gamma in (1, 2, 3, 4))
    predicted = {a: 70.0, b: 150.0, c: 99.0, d: 110.0}
    assert shortlist(predicted, 100.0, 3, 0.8) == [b, d, c]
    assert shortlist(predicted, 100.0, 4, 0.8) == [b, d, c]
    assert shortlist({a: 30.0, c: 50.0}, 100.0, 3, 0.8) == [c]
    assert shortlist({}, 100.0, 3, 0.8) == []
    slow, slower = Setting("hispec"), Setting("hispec", Policy(window=2))
    assert shortlist({**predicted, slow: 40.0, slower: 30.0}, 100.0, 2, 0.8) == [b, d, slow]


def test_plain_decoding_wins_ties_and_near_ties() -> None:
    a, b = Setting("layerskip"), Setting("hispec")
    plain = Setting(PLAIN)
    assert choose({}, 0.03) == plain
    assert choose({a: [1.0] * 5, b: [0.5] * 5}, 0.0) == plain
    assert choose({a: [1.03] * 5}, 0.03) == plain
    assert choose({a: [1.04] * 5, b: [1.02] * 5}, 0.03) == a
    assert choose({a: [1.04] * 5, b: [1.2] * 5}, 0.03) == b


def test_what_most_texts_gain_decides_and_not_the_one_in_the_middle() -> None:
    lookups, drafts = Setting("prompt_lookup"), Setting("ngram_layerskip")
    measured = {lookups: [1.2, 1.25, 1.35, 1.5, 1.9], drafts: [1.26, 1.33, 1.34, 1.78, 1.83]}
    assert choose(measured, 0.03) == drafts
    assert typical([9.0, 1.0, 2.0, 3.0, -5.0]) == 2 and typical([4.0]) == 4 and typical([1.0, 2.0]) == 1.5
    assert typical([0.01, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 99.0]) == 3.5, "a quarter of eight are two at each end"


def test_a_gain_above_the_margin_is_not_enough_where_a_quarter_loses() -> None:
    a, b = Setting("layerskip"), Setting("hispec")
    assert lower_quarter([5.0, 1.0, 3.0, 2.0, 4.0]) == 2.0
    noisy = [0.7, 0.8, 1.5, 1.6, 1.7]
    assert choose({a: noisy}, 0.03) == Setting(PLAIN)
    assert choose({a: noisy, b: [1.05] * 5}, 0.03) == b
