"""What a request's metrics say of its time and of what its judges accepted."""

from contextlib import nullcontext

import pytest

from infer.failures import ProgramError
from infer.params import SamplingParams
from infer.stats import TierStats
from infer.strategy import Policy
from tests.tiny_engine import PROMPTS, STRATEGIES, Script, Tiny, model_of, texts_of

NUM_TOKENS = 14


class Clock:
    """A clock that goes one second a step of the engine."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("infer.engine.time", clock)
    return clock


def drain(tiny: Tiny, clock: Clock) -> None:
    while tiny.engine.has_unfinished:
        clock.now += 1
        tiny.engine.step()


def test_times_are_those_of_the_rounds(clock):
    tiny = Tiny(model_of(), "autoregressive", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=5)
    first, second, single = (tiny.request(p, params) for p in PROMPTS[:3])
    single.max_len = len(PROMPTS[2]) + 1
    for request in (first, second, single):
        tiny.engine.add(request)
    metrics = first.output().metrics
    assert (metrics.time_to_first_token, metrics.time_per_output_token) == (None, None)
    drain(tiny, clock)
    metrics = [request.output().metrics for request in (first, second, single)]
    assert [m.time_to_first_token for m in metrics] == [1, 6, 11]  # the wait in the queue counts
    assert [m.time_per_output_token for m in metrics] == [1, 1, None]


def test_speculation_takes_less_time_per_token_than_one_step(clock):
    texts = texts_of("llama", PROMPTS[:1], NUM_TOKENS)
    tiny = Tiny(model_of(), "layerskip", Policy(num_draft_tokens=3), rig=Script(texts, lambda *_: True))
    request = tiny.request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=13))
    tiny.engine.add(request)
    drain(tiny, clock)  # 4 + 4 + 4 + 1 tokens
    assert request.output().metrics.time_per_output_token == 3 / 12


def test_choices_count_together(clock):
    tiny = Tiny(model_of(), "autoregressive", max_num_seqs=1)
    request = tiny.request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3, n=2))
    tiny.engine.add(request)
    drain(tiny, clock)
    metrics = request.output().metrics
    assert (metrics.time_to_first_token, metrics.time_per_output_token) == (1, 1)


def test_preemptions_are_counted_by_request():
    tiny = Tiny(model_of(), "autoregressive")
    request = tiny.request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3))
    tiny.engine.add(request)
    tiny.engine.step()
    tiny.engine._preempt(request)
    tiny.drain()
    assert request.output().metrics.num_preemptions == tiny.engine.num_preemptions == 1


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_accepted_lengths_are_a_histogram_over_drafting_rounds(k):
    texts = texts_of("llama", PROMPTS[:3], NUM_TOKENS)
    rig = Script(texts, lambda row, tier, offset, number: offset < k)
    tiny = Tiny(model_of(), "layerskip", Policy(num_draft_tokens=3), rig=rig)
    for request in tiny.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=NUM_TOKENS)):
        (tier,) = request.output().metrics.tiers
        assert sum(tier.accepted_lengths) == tier.num_drafts
        assert sum(length * num for length, num in enumerate(tier.accepted_lengths)) == tier.num_accepted
        assert tier.accepted_lengths[k] >= tier.num_drafts - 1  # the last round may be cut by max_tokens


@pytest.mark.parametrize("fault", [ProgramError, KeyboardInterrupt])
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_round_that_breaks_off_and_is_run_again_is_counted_once(strategy, fault, monkeypatch):
    prompts = PROMPTS[5], PROMPTS[1]  # the first one repeats
    texts = texts_of("llama", prompts, NUM_TOKENS)

    def counts(breaks: bool) -> list[TierStats]:
        """Of the first row and of all; the second one has no room to draft, and its fault breaks off a round."""
        policy = Policy(num_draft_tokens=3, num_lookup_tokens=2, min_ngram=1)
        tiny = Tiny(model_of(), strategy, policy, rig=Script(texts, lambda *where: where[2] != 2))
        row, short = (
            tiny.request(p, SamplingParams(temperature=0, max_tokens=n)) for p, n in zip(prompts, (NUM_TOKENS, 1))
        )
        tiny.engine.add(row)
        tiny.engine.step()
        judge = tiny.round._judge

        def break_off(rows, level):  # type: ignore[no-untyped-def]
            unsure = judge(rows, level)
            if level == len(tiny.round.stages) - 1:
                raise fault([short.row])
            return unsure

        if breaks:
            tiny.engine.add(short)
            monkeypatch.setattr(tiny.round, "_judge", break_off)
            with pytest.raises(KeyboardInterrupt) if fault is KeyboardInterrupt else nullcontext():
                tiny.engine.step()
            monkeypatch.undo()
        tiny.drain()
        return [*row.row.stats, *tiny.round.stats]

    undisturbed = counts(breaks=False)
    assert undisturbed[-1].num_drafts > 2
    assert counts(breaks=True) == undisturbed


def test_totals_add_histograms_of_different_lengths():
    a, b = TierStats(), TierStats()
    a.add(3, 3)
    b.add(2, 0)
    b.add(2, 1)
    total = TierStats.total([a, b])
    assert total == TierStats(3, 7, 4, [1, 1, 0, 1])
    assert total.snapshot("target").accepted_lengths == (1, 1, 0, 1)
