"""Which tier picked a token first is noted beside it, and changes nothing else."""

import pytest

from infer.output import CompletionOutput
from infer.params import SamplingParams
from infer.row import LOOKED_UP
from infer.strategy import Policy
from tests.tiny_engine import PROMPTS, Script, Tiny, model_of, texts_of

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


def proposers(strategy, is_right, policy=None, prompts=PROMPTS[:3]):
    rig = Script(texts_of("llama", prompts, NUM_TOKENS + 8), is_right)
    tiny = Tiny(model_of(), strategy, policy=policy, rig=rig)
    return [list(request.completion().proposers) for request in tiny.generate(prompts, GREEDY)]


def test_plain_decoding_is_all_the_targets():
    assert proposers("autoregressive", lambda *_: True) == [[2] * NUM_TOKENS] * 3


@pytest.mark.parametrize("gamma", [1, 3])
def test_accepted_drafts_are_the_drafts_and_the_rest_is_the_judges(gamma):
    policy = Policy(num_draft_tokens=gamma)
    found = proposers("layerskip", lambda *_: True, policy)
    want = ([0] * gamma + [2]) * NUM_TOKENS
    assert [one[:8] for one in found] == [want[:8]] * 3
    assert proposers("layerskip", lambda *_: False, policy) == [[2] * NUM_TOKENS] * 3


def test_what_the_intermediate_exit_corrects_is_its_own():
    """The draft is always wrong, the intermediate exit always right."""
    found = proposers("hispec", lambda number, tier, offset, round_: tier == 1, Policy(num_draft_tokens=2, window=4))
    assert {one for text in found for one in text} == {1, 2} and all(text[:2] == [1, 1] for text in found)


def test_what_was_looked_up_is_marked():
    tiny = Tiny(model_of(), "prompt_lookup")
    looping = SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=[5])
    (request,) = tiny.generate([(5,) * 6], looping)
    found = request.completion().proposers
    assert len(found) == 20 and set(found) == {LOOKED_UP, 2}


def test_they_stand_beside_the_tokens_through_rejection_and_preemption():
    rig = Script(texts_of("llama", PROMPTS[:3], NUM_TOKENS + 8), lambda *numbers: sum(numbers) % 2 == 0)
    tiny = Tiny(model_of(), "hispec", rig=rig, num_blocks=10)
    requests = tiny.generate(PROMPTS[:3], GREEDY)
    assert tiny.engine.num_preemptions > 0
    for request in requests:
        assert len(request.completion().proposers) == len(request.token_ids) == NUM_TOKENS
        assert len(request.row.proposers) == len(request.row.token_ids)


def test_they_are_no_part_of_a_results_equality():
    assert CompletionOutput(0, "a", (1,), proposers=b"\0") == CompletionOutput(0, "a", (1,), proposers=b"\2")
