"""`n` texts for one prompt: computed once, shared while it lasts, and each text what it would be alone."""

import pytest

from infer.params import SamplingParams
from infer.request import Request
from infer.strategy import Policy
from tests.infer.rules_oracle import twin_model
from tests.tiny_engine import IN_PLACE, NAN_ID, PROMPTS, STRATEGIES, Tiny, all_is_free, model_of, nan_model, oracle

NUM_TOKENS = 10
LENGTHS = ((1,), (5, 9, 3), (20, 21, 22, 23), (7, 8, 9, 10, 11), (3,) * 17)  # around the edges of blocks of 4


def sampled(n: int, seed: int = 3) -> SamplingParams:
    return SamplingParams(temperature=1.3, top_p=0.95, seed=seed, max_tokens=NUM_TOKENS, n=n)


def texts(request: Request) -> list[tuple[int, ...]]:
    output = request.output()
    assert [o.index for o in output.outputs] == list(range(len(output.outputs)))
    assert output.finished
    return [o.token_ids for o in output.outputs]


_alone: dict = {}


def alone(prompt: tuple[int, ...], n: int, seed: int = 3) -> list[tuple[int, ...]]:
    """Plain decoding, every choice in an engine of its own: the reference."""
    if (prompt, seed) not in _alone or len(_alone[prompt, seed]) < n:
        rows = []
        for choice in range(n):
            tiny = Tiny(model_of(), "autoregressive")
            request = tiny.request(prompt, sampled(1, seed))
            request.choice = choice
            tiny.engine.add(request)
            tiny.drain()
            rows.append(tuple(request.token_ids))
        _alone[prompt, seed] = rows
    return _alone[prompt, seed][:n]


@pytest.mark.parametrize("prompt", LENGTHS, ids=len)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_choice_gives_what_it_gives_alone(strategy, prompt):
    tiny = Tiny(model_of(), strategy)
    (request,) = tiny.generate([prompt], sampled(4))
    assert texts(request) == alone(prompt, 4)
    assert len(set(texts(request))) > 1
    assert all_is_free(tiny)


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(256, 2), (256, 8), (12, 8), (9, 3)])
@pytest.mark.parametrize("strategy", IN_PLACE)
def test_choices_in_a_batch_and_a_pool_too_small_for_them_stay_the_same(strategy, num_blocks, max_num_seqs):
    policy = Policy(num_draft_tokens=3, num_lookup_tokens=3)  # with long rounds rows are admitted one by one
    tiny = Tiny(model_of(), strategy, policy, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    prompts = [LENGTHS[4], LENGTHS[1], LENGTHS[3]]
    got = tiny.generate(prompts, [sampled(3, seed) for seed in range(3)])
    assert [texts(r) for r in got] == [alone(p, 3, seed) for seed, p in enumerate(prompts)]
    assert num_blocks > 20 or tiny.engine.num_preemptions > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_greedy_choices_are_equal(strategy):
    tiny = Tiny(model_of(), strategy)
    (request,) = tiny.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=NUM_TOKENS, n=3))
    assert texts(request) == [tuple(oracle("llama", PROMPTS[1], NUM_TOKENS))] * 3


@pytest.mark.parametrize("max_tokens", [1, NUM_TOKENS])
@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_the_prompt_is_computed_once_and_its_whole_blocks_are_shared(max_num_seqs, max_tokens):
    tiny = Tiny(model_of(), "hispec", max_num_seqs=max_num_seqs)
    chunks, prefill = [], tiny.runner.prefill
    tiny.runner.prefill = lambda row, tiers: (chunks.append(tiny.runner.next_chunk(row)), prefill(row, tiers))
    request = tiny.request((3,) * 18, SamplingParams(temperature=1, max_tokens=max_tokens, n=6))  # 4 blocks and a slot
    tiny.engine.add(request)
    shared = set()
    while tiny.engine.has_unfinished:
        tiny.engine._make_room()
        tiny.engine._admit()
        tiny.engine._prefill()
        tiny.engine._admit_siblings()
        tables = [r.row.block_table for r in tiny.engine.running]
        shared.add(tuple(tables[0][:4]))
        assert all(table[:4] == tables[0][:4] for table in tables)
        assert len({table[4] for table in tables}) == len(tables)  # each writes in its own
        tiny.engine.check_integrity()
        tiny.engine.step()
    assert chunks == [range(0, 8), range(8, 16), range(16, 17)]
    assert len(shared) == 1
    assert all_is_free(tiny)


@pytest.mark.parametrize("strategy", ["layerskip", "hispec"])  # what is looked up has no noise
def test_drafts_of_every_choice_have_its_own_noise(strategy):
    """Else those of a twin of the target would be rejected for all choices but the first: worse, not wrong."""
    tiny = Tiny(twin_model(), strategy)
    tiny.generate([PROMPTS[1]], sampled(4))
    for stats in tiny.round.stats[1:]:
        assert stats.num_accepted == stats.num_draft_tokens > 0


def test_choices_count_what_their_judges_accepted_together():
    tiny = Tiny(model_of(), "hispec")
    (request,) = tiny.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=NUM_TOKENS, n=3))
    (one,) = Tiny(model_of(), "hispec").generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    for three, single in zip(request.output().metrics.tiers, one.output().metrics.tiers, strict=True):
        assert three.num_draft_tokens == 3 * single.num_draft_tokens
        assert three.num_accepted == 3 * single.num_accepted


@pytest.mark.parametrize("num_steps", range(4))
def test_aborting_ends_all_choices_wherever_they_stand(num_steps):
    tiny = Tiny(model_of(), "hispec", max_num_seqs=2, max_num_prefill_tokens=8)
    request = tiny.request((3,) * 18, sampled(5))
    tiny.engine.add(request)
    for _ in range(num_steps):
        tiny.engine.step()
    tiny.engine.abort(request.request_id)
    assert not tiny.engine.has_unfinished
    assert [o.finish_reason for o in request.output().outputs] == ["abort"] * 5
    assert all_is_free(tiny)


def test_a_prompt_whose_program_fails_fails_all_choices():
    tiny = Tiny(model_of(), "hispec")

    def broken(*args):  # type: ignore[no-untyped-def]
        raise RuntimeError("out of luck")

    tiny.runner._trunks[1] = (broken, *tiny.runner._trunks[1][1:])
    (request,) = tiny.generate([(3,) * 18], sampled(3))
    assert [o.finish_reason for o in request.output().outputs] == ["error"] * 3
    assert all_is_free(tiny)


def test_blocks_of_a_prompt_of_nan_are_clean_when_its_last_owner_goes():
    model, want = nan_model()
    tiny = Tiny(model, "hispec", num_blocks=17)
    (request,) = tiny.generate([[NAN_ID] * 18], SamplingParams(temperature=0, max_tokens=4, n=4))
    assert [o.finish_reason for o in request.output().outputs] == ["error"] * 4
    assert all(page[1:].isfinite().all() for page in tiny.runner._pages)
    (after,) = tiny.generate([(11,) * 17], SamplingParams(temperature=0, max_tokens=12))
    assert [*after.prompt_token_ids, *after.token_ids] == want[(11,) * 17][:29]
