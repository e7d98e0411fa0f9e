"""`confidence_threshold`: where an exit is unsure the judge above it decides at once, and no token changes."""

import pytest

from infer.params import SamplingParams
from infer.strategy import Policy
from tests.tiny_engine import PROMPTS, Script, Tiny, model_of, oracle, texts_of

NUM_TOKENS, GAMMA = 24, 5
TEXTS = texts_of("llama", PROMPTS[:3], NUM_TOKENS)


class Doubting:
    """A script whose exits are always right, and sure of it where `is_sure` (tier, offset, number of the round)."""

    def __init__(self, is_sure):
        self.is_sure, self.script = is_sure, Script(TEXTS, lambda *where: self.note(where))

    def note(self, where):
        self.where = where
        return True

    def __call__(self, row, tier, position, logits):
        right = self.script(row, tier, position, logits)  # 0.994 for the right id, of 128
        _, tier, offset, number = self.where
        return right if self.is_sure(tier, offset, number) else right * 0.05  # 0.013


def lengths(tiny: Tiny, level: int) -> set[int]:
    """Numbers of proposals per judgement, but for the rounds that end a text."""
    return {proposed for row_level, proposed in tiny.seen if row_level == level}


def run(strategy, policy, is_sure, **options):
    tiny = Tiny(model_of(), strategy, policy, rig=Doubting(is_sure), **options)
    tiny.seen, run_round = [], tiny.round.run

    def watched(rows):
        run_round(rows)
        tiny.seen += [(v[1], v[2]) for v in tiny.round._verdicts if len(v[0]) < v[0].max_len]

    tiny.round.run = watched
    requests = tiny.generate(list(TEXTS), SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS) for p in TEXTS]
    return tiny


@pytest.mark.parametrize("num_sure", [0, 1, 3, 9])
def test_drafting_stops_behind_the_first_unsure_token(num_sure):
    policy = Policy(num_draft_tokens=GAMMA, confidence_threshold=0.5)
    tiny = run("layerskip", policy, lambda tier, offset, number: offset < num_sure)
    assert lengths(tiny, 1) == {min(GAMMA, num_sure + 1)}


def test_without_a_threshold_doubt_changes_nothing():
    tiny = run("layerskip", Policy(num_draft_tokens=GAMMA), lambda tier, offset, number: False)
    assert lengths(tiny, 1) == {GAMMA}


def test_rows_stop_each_for_itself_and_begin_anew_every_round():
    policy = Policy(num_draft_tokens=GAMMA, confidence_threshold=0.5)
    tiny = run("layerskip", policy, lambda tier, offset, number: number % 2 == 0)
    assert lengths(tiny, 1) == {1, GAMMA}


def test_an_unsure_intermediate_leaves_its_window_to_the_target():
    policy = Policy(num_draft_tokens=2, window=9, inner_rounds=3, confidence_threshold=0.5)
    tiny = run("hispec", policy, lambda tier, offset, number: True)
    assert lengths(tiny, 2) == {9}  # three inner rounds of two drafts and the intermediate's own token
    tiny = run("hispec", policy, lambda tier, offset, number: tier == 0)
    assert lengths(tiny, 2) == {3}
    tiny = run("hispec", policy, lambda tier, offset, number: tier == 1)
    assert lengths(tiny, 1) == {1} and lengths(tiny, 2) == {6}  # one draft, three times


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, True, None, "0.5", float("nan")])
def test_a_threshold_is_a_probability_below_one(value):
    with pytest.raises(ValueError, match=r"confidence_threshold=.* must be a number of at least 0 and below 1"):
        Policy(confidence_threshold=value)
