"""`speculate=False`: a row that is decoded plainly among rows that speculate."""

from __future__ import annotations

import pytest

from infer.params import SamplingParams
from infer.strategy import Policy
from tests.tiny_engine import PROMPTS, STRATEGIES, Tiny, model_of, oracle

NUM_TOKENS = 14
LOOP = (7, 8, 9) * 4  # something to look up
SPECULATING = [
    strategy for strategy in (*STRATEGIES, "prompt_lookup", "ngram_layerskip") if strategy != "autoregressive"
]


def params(speculate: bool) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, speculate=speculate)


@pytest.mark.parametrize("strategy", dict.fromkeys(SPECULATING))
def test_plain_rows_among_speculating_ones_get_the_same_tokens_and_no_drafts(strategy):
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=3, exit_threshold=0.0))
    prompts = [*PROMPTS[:3], LOOP]
    pairs = [(prompt, flag) for prompt in prompts for flag in (True, False)]
    requests = tiny.generate([prompt for prompt, _ in pairs], [params(flag) for _, flag in pairs])
    for request, (prompt, is_speculating) in zip(requests, pairs, strict=True):
        assert request.token_ids == oracle("llama", tuple(prompt), NUM_TOKENS)
        if not is_speculating:
            assert not any(tier.num_drafts for tier in request.output().metrics.tiers)
            assert set(request.output().outputs[0].proposers) == {2}
    assert any(stats.num_drafts for stats in tiny.round.stats)


def test_a_plain_row_alone_runs_no_exit_but_the_targets():
    tiny = Tiny(model_of(), "hispec")
    judged: list[int] = []
    logits = tiny.runner.logits
    tiny.runner.logits = lambda tier, states: judged.append(tier) or logits(tier, states)
    tiny.generate(PROMPTS[:2], params(False))
    assert judged == [2] * NUM_TOKENS


def test_a_plain_row_survives_preemption_and_a_cached_prompt():
    tiny = Tiny(model_of(), "hispec", num_blocks=14, enable_prefix_caching=True)
    for flag in (False, True, False):
        (request,) = tiny.generate([PROMPTS[2]], params(flag))
        assert request.token_ids == oracle("llama", PROMPTS[2], NUM_TOKENS)
    both = tiny.generate([PROMPTS[2], PROMPTS[1]], [params(False), params(True)])
    assert [r.token_ids for r in both] == [oracle("llama", p, NUM_TOKENS) for p in (PROMPTS[2], PROMPTS[1])]


def test_it_must_be_a_bool():
    with pytest.raises(ValueError, match="speculate=1 must be True or False"):
        SamplingParams(speculate=1)  # type: ignore[arg-type]
