"""Prompts are computed beside rows that decode, in portions: nobody waits for a long prompt, and nothing changes."""

import pytest

from infer.params import SamplingParams
from tests.tiny_engine import PROMPTS, STRATEGIES, Tiny, model_of, oracle

NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
LONG = tuple(range(2, 92))  # 89 positions in chunks of 8


def prefilled(tiny: Tiny) -> list[int]:
    """The sizes of the chunks that are computed from now on, in turn."""
    sizes: list[int] = []
    prefill = tiny.runner.prefill

    def counting(row, tiers):  # type: ignore[no-untyped-def]
        sizes.append(len(tiny.runner.next_chunk(row)))
        prefill(row, tiers)

    tiny.runner.prefill = counting
    return sizes


@pytest.mark.parametrize("budget", [1, 8, 20, 512])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_budget_gives_the_same_tokens(strategy, budget):
    tiny = Tiny(model_of(), strategy, max_num_prefill_tokens=budget)
    prompts = [*PROMPTS[:4], LONG, PROMPTS[4]]
    assert [r.token_ids for r in tiny.generate(prompts, GREEDY)] == [oracle("llama", p, NUM_TOKENS) for p in prompts]


@pytest.mark.parametrize(("budget", "most"), [(1, 8), (8, 8), (15, 15), (16, 16), (24, 24), (50, 50)])
def test_a_step_prefills_at_most_its_budget_and_at_least_one_chunk(budget, most):
    tiny = Tiny(model_of(), "autoregressive", max_num_prefill_tokens=budget)
    sizes = prefilled(tiny)
    for prompt in (LONG, PROMPTS[1], LONG, PROMPTS[2]):
        tiny.engine.add(tiny.request(prompt, GREEDY))
    while tiny.engine._prefilling or tiny.engine.waiting:
        sizes.clear()
        tiny.engine.step()
        tiny.engine.check_integrity()
        assert 0 < sum(sizes) <= most


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_decoding_row_gains_tokens_in_every_step_of_a_long_prefill(strategy):
    tiny = Tiny(model_of(), strategy, max_num_prefill_tokens=8)
    first = tiny.request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=60))
    long = tiny.request(LONG, GREEDY)
    tiny.engine.add(first)
    tiny.engine.step()
    tiny.engine.add(long)
    for _ in range(11):
        before = len(first.token_ids)
        tiny.engine.step()
        assert first.is_finished or len(first.token_ids) > before
        assert long.token_ids == []
    tiny.drain()
    assert first.token_ids[:NUM_TOKENS] == oracle("llama", PROMPTS[0], NUM_TOKENS)
    assert long.token_ids == oracle("llama", LONG, NUM_TOKENS)


def test_a_short_prompt_overtakes_a_long_one_that_came_before():
    tiny = Tiny(model_of(), "hispec", max_num_prefill_tokens=8)
    long, short = tiny.request(LONG, GREEDY), tiny.request(PROMPTS[0], GREEDY)
    tiny.engine.add(long)
    tiny.engine.add(short)
    for _ in range(3):
        tiny.engine.step()
    assert short.token_ids and not long.token_ids


def test_a_prompt_may_be_aborted_or_preempted_between_its_chunks():
    tiny = Tiny(model_of(), "hispec", max_num_prefill_tokens=8)
    gone, back = tiny.request(LONG, GREEDY), tiny.request(LONG[::-1], GREEDY)
    tiny.engine.add(gone)
    tiny.engine.add(back)
    for _ in range(5):
        tiny.engine.step()
    tiny.engine.abort(gone.request_id)
    tiny.engine._preempt(back)
    tiny.engine.check_integrity()
    tiny.drain()
    assert (gone.finish_reason, gone.token_ids) == ("abort", [])
    assert back.token_ids == oracle("llama", LONG[::-1], NUM_TOKENS)
    assert tiny.engine.pool.num_free == tiny.engine.pool.num_blocks - 1
