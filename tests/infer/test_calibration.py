"""What the planner is given: where seconds are put down, what is counted, and what comes of it. Time is a stand-in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer import calibration
from infer.calibration import compare, plan_batch, probe
from infer.llm import LLM
from infer.params import SamplingParams
from infer.planner import PLAIN, settings
from infer.strategy import Policy, Setting
from tests.infer.test_profile import Clock
from tests.tiny_artifact import load

PARAMS = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[5, 9, 3], [7, 8, 9, 10, 11], [20, 21]]
PLAIN_SETTING = Setting(PLAIN)


@pytest.fixture(scope="module")
def loaded(artifact: Path) -> LLM:
    return load(artifact, strategy="autoregressive")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calibration, "time", clock)
    monkeypatch.setattr(calibration, "MIN_GROUPS", 3)
    return clock


def slowed(programs: dict[str, Callable], clock: Clock, seconds: Callable[[str], float]) -> dict[str, Callable]:
    return {name: clock.slow(program, seconds(name)) for name, program in programs.items()}


def as_intermediate(programs: dict[str, Callable]) -> dict[str, Callable]:
    """The layers above the intermediate exit, which is the base's own head, do nothing: the two agree always."""
    return programs | {"target.trunk": lambda x, *_: x}


@pytest.fixture
def llm(loaded: LLM) -> Any:
    runner, before = loaded.engine.runner, loaded.engine.runner.programs
    loaded.use(PLAIN)
    yield loaded
    runner.bind(before, bitwise=True)


def test_seconds_of_calls_go_by_tier_and_width_and_the_rest_is_overhead(llm: LLM, clock: Clock, monkeypatch) -> None:
    runner = llm.engine.runner
    runner.bind(slowed(runner.programs, clock, lambda name: 2.0 if name.endswith("trunk") else 1.0), bitwise=False)
    monkeypatch.setattr(llm.engine, "step", clock.slow(llm.engine.step, 4.0))
    record = probe(llm, [PROMPTS[:1], PROMPTS[1:2]], Setting("layerskip", Policy(num_draft_tokens=3)), PARAMS)
    # A draft: trunk, exit, unembedding. The target: three trunks, its exit, the unembedding.
    assert {key: set(seconds) for key, seconds in record.calls.items()} == {
        (0, 1): {4.0}, **{key: {8.0} for key in record.calls if key[0] == 2}
    }  # fmt: skip
    assert len(record.calls[2, 4]) > 3
    assert set(record.overheads) == {4.0}


def test_rounds_that_are_not_full_are_not_timed_but_judged(llm: LLM, clock: Clock, monkeypatch) -> None:
    runner, sizes = llm.engine.runner, []
    advance = runner.advance

    def note(rows: Any, tier: int) -> Any:
        if isinstance(llm.engine.round, calibration._TimedRound):  # not while it warms up
            sizes.append(len(rows))
        return advance(rows, tier)

    monkeypatch.setattr(runner, "advance", note)
    runner.bind(as_intermediate(runner.programs), bitwise=True)
    setting = Setting("hispec", Policy(num_draft_tokens=2, window=4))
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (30, 30)]
    prompts = [[5, 9, 3], [7] * 50]  # the second is full after 14 tokens
    record = probe(llm, [prompts], setting, params[0])
    assert sum(len(seconds) for seconds in record.calls.values()) == sizes.count(2) < len(sizes)
    llm.use(*setting)
    outputs = llm.generate(prompts, params)
    assert record.verdicts[0] == []
    for level, verdicts in enumerate(record.verdicts[1:]):
        tiers = [output.metrics.tiers[level] for output in outputs]
        counts = sum(t.num_draft_tokens for t in tiers), sum(t.num_accepted for t in tiers)
        assert (sum(n for n, _ in verdicts), sum(n for _, n in verdicts)) == counts


def test_a_text_too_short_to_draft_in_is_refused_with_the_remedy(llm: LLM) -> None:
    for setting in (PLAIN_SETTING, Setting("layerskip")):
        with pytest.raises(ValueError, match=r"no full round in which all of 1 prompts decode: raise --max-tokens=1 "):
            probe(llm, [PROMPTS[:1]], setting, SamplingParams(temperature=0, max_tokens=1))
    with pytest.raises(ValueError, match="hispec: no full round"):  # rounds there are, but none with room for drafts
        probe(llm, [PROMPTS[2:]], Setting("hispec"), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert not llm.engine.has_unfinished


def test_ratios_are_tokens_by_seconds_and_each_takes_its_turn_at_being_first(
    llm: LLM, clock: Clock, monkeypatch
) -> None:
    runner, order = llm.engine.runner, []
    monkeypatch.setattr(calibration, "NUM_SCREENED", 9)
    runner.bind(slowed(as_intermediate(runner.programs), clock, lambda name: 10.0 if name == "target.trunk" else 0.5),
                bitwise=False)  # fmt: skip
    compared = [Setting("layerskip", Policy(num_draft_tokens=1)), Setting("hispec", Policy(num_draft_tokens=1))]
    use = llm.use
    monkeypatch.setattr(llm, "use", lambda *given, **more: (order.append(Setting(*given)), use(*given, **more)))
    groups = [PROMPTS[:2], PROMPTS[1:], PROMPTS[:2]]
    ratios = compare(llm, groups, compared, PARAMS)
    contenders = [PLAIN_SETTING, *compared]
    assert order == [contenders[i] for i in (0, 1, 2, 1, 2, 0, 2, 0, 1)]
    for number, group in enumerate(groups):
        speeds = []
        for setting in contenders:
            use(*setting)
            start = clock.now
            num_tokens = sum(len(out.outputs[0].token_ids) for out in llm.generate(group, PARAMS))
            speeds.append(num_tokens / (clock.now - start))
        assert [ratios[setting][number] for setting in compared] == pytest.approx([s / speeds[0] for s in speeds[1:]])
    assert min(ratios[compared[1]]) > 1.5


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_target_that_its_intermediate_replaces_makes_hispec_the_plan(llm: LLM, clock: Clock, batch_size: int) -> None:
    runner = llm.engine.runner
    runner.bind(slowed(as_intermediate(runner.programs), clock, lambda name: 10.0 if name == "target.trunk" else 0.05),
                bitwise=False)  # fmt: skip
    entry = plan_batch(llm, PROMPTS, batch_size, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), 0.03)
    chosen, second = entry.chosen, entry.runner_up
    assert entry.batch_size == batch_size and chosen.strategy == "hispec" and chosen.policy.window == 8
    # 8 or more tokens for a call of the target; what is predicted leaves the prompt out
    assert 5 < chosen.ratio < chosen.predicted < 12
    assert chosen.ratio_low <= chosen.ratio
    assert second is not None and second.strategy == "hispec" and 1 < second.ratio <= chosen.ratio
    assert llm.strategy == PLAIN


def test_where_every_candidate_loses_plain_decoding_is_the_plan(llm: LLM, clock: Clock) -> None:
    runner = llm.engine.runner
    runner.bind(slowed(runner.programs, clock, lambda _: 1.0), bitwise=False)  # drafts cost as much as the target
    llm.use(PLAIN, verification="rejection")
    entry = plan_batch(llm, PROMPTS[:2], 1, PARAMS, 0.05)
    assert (entry.chosen.strategy, entry.chosen.ratio, entry.chosen.predicted) == (PLAIN, 1, 1)
    assert entry.runner_up is not None and entry.runner_up.ratio <= 1.05  # lookups cost nothing here, and find a little
    assert llm.verification == "rejection"


def test_an_artifact_without_lower_exits_is_planned_too(llm: LLM, clock: Clock, monkeypatch) -> None:
    runner = llm.engine.runner
    runner.bind(slowed(runner.programs, clock, lambda _: 1.0), bitwise=False)
    monkeypatch.setattr(calibration, "settings", lambda manifest: {})
    monkeypatch.setattr(calibration, "UNPREDICTED", [])
    entry = plan_batch(llm, PROMPTS[:1], 1, PARAMS, 0.03)
    assert entry.chosen.strategy == PLAIN and entry.runner_up is None


def test_a_setting_that_is_far_behind_is_run_no_further(llm: LLM, clock: Clock, monkeypatch) -> None:
    runner, order = llm.engine.runner, []
    runner.bind(slowed(as_intermediate(runner.programs), clock, lambda name: 10.0 if name == "target.trunk" else 0.5),
                bitwise=False)  # fmt: skip
    good, bad = Setting("hispec", Policy(num_draft_tokens=1)), Setting("layerskip", Policy(num_draft_tokens=5))
    use = llm.use
    monkeypatch.setattr(llm, "use", lambda *given, **more: (order.append(Setting(*given)), use(*given, **more)))
    groups = [PROMPTS[:1], PROMPTS[1:2]] * 3
    ratios = compare(llm, groups, [good, bad], PARAMS)
    assert min(ratios[good]) > 1.2 > max(ratios[bad]) and len(ratios[good]) == 6 and len(ratios[bad]) == 2
    assert order.count(bad) == calibration.NUM_SCREENED and order.count(good) == order.count(PLAIN_SETTING) == 6
    order.clear()
    ratios = compare(llm, groups, [good, bad], PARAMS, kinds=["code", "news"] * 3)  # as many of each kind
    assert len(ratios[good]) == 6 and len(ratios[bad]) == order.count(bad) == 4


def test_what_is_good_for_one_kind_of_text_is_run_on() -> None:
    one, other = Setting("layerskip"), Setting("hispec")
    ratios = {one: [0.5, 1.5, 0.5, 1.5], other: [0.8, 1.0, 0.8, 1.0]}
    assert calibration._promising(ratios, ["code", "news"] * 2) == {one}
    ratios[other] = [0.95, 1.0, 0.95, 1.0]
    assert calibration._promising(ratios, ["code", "news"] * 2) == {one, other}


def test_a_strategy_far_behind_at_fewer_rows_is_not_tried_at_more(llm: LLM, clock: Clock, monkeypatch) -> None:
    runner, seen = llm.engine.runner, set()
    runner.bind(slowed(runner.programs, clock, lambda _: 1.0), bitwise=False)
    monkeypatch.setattr(calibration, "probe", lambda llm, groups, setting, params: seen.add(setting.strategy) or
                        probe(llm, groups, setting, params))  # fmt: skip

    def rigged(llm: LLM, groups: Any, compared: Any, *_: Any) -> dict[Setting, list[float]]:
        seen.update(one.strategy for one in compared)
        return {one: [1.1 if one.strategy == "layerskip" else 0.8] * len(groups) for one in compared}

    monkeypatch.setattr(calibration, "compare", rigged)
    first = plan_batch(llm, PROMPTS, 1, PARAMS, 0.03)
    assert seen >= {PLAIN, "layerskip", "hispec", "prompt_lookup"}
    seen.clear()
    second = plan_batch(llm, PROMPTS, 2, PARAMS, 0.03, smaller=first)
    assert seen == {PLAIN, "layerskip"} == {one.strategy for one in second.tuned}
    assert second.chosen.strategy == "layerskip"
    seen.clear()
    plan_batch(llm, PROMPTS, 4, PARAMS, 0.03, smaller=second)
    assert seen == {PLAIN, "layerskip"}


def test_a_setting_of_which_too_little_was_seen_is_not_chosen(llm: LLM, clock: Clock, monkeypatch) -> None:
    llm.engine.runner.bind(slowed(llm.engine.runner.programs, clock, lambda _: 1.0), bitwise=False)

    def rigged(llm: LLM, groups: Any, compared: Any, *_: Any) -> dict[Setting, list[float]]:
        return {one: [3.0] * 2 if number else [1.5] * len(groups) for number, one in enumerate(compared)}

    monkeypatch.setattr(calibration, "compare", rigged)
    assert plan_batch(llm, PROMPTS, 1, PARAMS, 0.03).chosen.ratio == 1.5


def test_groups_fill_the_batch_and_hold_every_prompt() -> None:
    prompts = [[i] for i in range(7)]
    for batch_size in (1, 2, 3, 16):
        groups = calibration._groups(prompts, batch_size)
        assert {len(group) for group in groups} == {batch_size} and len(groups) >= calibration.MIN_GROUPS
        assert {tuple(p) for group in groups for p in group} == {tuple(p) for p in prompts}


def test_groups_are_of_one_workload_each_and_hold_every_prompt() -> None:
    prompts, workloads = [[i] for i in range(9)], ["a", "b", "a", "c", "a", "a", "a", "a", "a"]
    for batch_size in (1, 2, 16):
        kinds, groups = calibration._by_kind(prompts, workloads, batch_size)
        assert {len(group) for group in groups} == {batch_size} and kinds[:3] == ["a", "b", "c"]
        for name in "abc":
            own = [group for kind, group in zip(kinds, groups, strict=True) if kind == name]
            assert len(own) >= calibration.MIN_GROUPS
            assert {p[0] for group in own for p in group} == {i for i, kind in enumerate(workloads) if kind == name}


def test_each_workload_has_what_is_fastest_in_it(llm: LLM, clock: Clock, monkeypatch) -> None:
    """Speculation doubles the speed in one kind of text, and halves it in the other."""
    runner = llm.engine.runner
    runner.bind(slowed(runner.programs, clock, lambda _: 1.0), bitwise=False)
    workloads = ["code", "news", "code"]

    def rigged(llm: LLM, groups: Any, compared: Any, *_: Any) -> dict[Setting, list[float]]:
        ratios = [2.0 if group[0] != PROMPTS[1] else 0.5 for group in groups]
        return {one: ratios if number else [0.9] * len(groups) for number, one in enumerate(compared)}

    monkeypatch.setattr(calibration, "compare", rigged)
    entry = plan_batch(llm, PROMPTS, 1, PARAMS, 0.03, workloads=workloads)
    code, news = entry.figure_for("code"), entry.figure_for("news")
    assert code.strategy != PLAIN and (code.ratio, code.ratio_low, code.predicted) == (2, 2, None)
    assert (news.strategy, news.ratio) == (PLAIN, 1)
    assert list(entry.by_workload) == ["code", "news"] and entry.figure_for("poems") == entry.chosen
    assert plan_batch(llm, PROMPTS, 1, PARAMS, 0.03).by_workload == {}


def test_probed_settings_are_the_ends_of_each_strategys_grid(llm: LLM, clock: Clock, monkeypatch) -> None:
    seen = []

    def note(llm: LLM, groups: Any, setting: Setting, params: SamplingParams) -> Any:
        seen.append(setting)
        return probe(llm, groups, setting, params)

    runner = llm.engine.runner
    runner.bind(slowed(runner.programs, clock, lambda _: 1.0), bitwise=False)
    monkeypatch.setattr(calibration, "probe", note)
    plan_batch(llm, PROMPTS[:1], 1, PARAMS, 0.03)
    grid = settings(llm.manifest)
    ends = [one for tried in grid.values() for one in dict.fromkeys((tried[0], tried[-1]))]
    assert seen == [PLAIN_SETTING, *ends]
