"""What rows ask for, together with what the engine does to them: preemption, choices, cached prompts, faults."""

import pytest

from infer.params import SamplingParams
from infer.strategy import Policy
from tests.tiny_engine import IN_PLACE, PROMPTS, STRATEGIES, Tiny, model_of

ROWS = PROMPTS[:4]
ALL_RULES = SamplingParams(
    temperature=1.1,
    top_p=0.95,
    min_p=0.01,
    seed=5,
    max_tokens=12,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    logit_bias={7: 3.0, 9: -4.0},
    allowed_token_ids=list(range(1, 80)),
    logprobs=2,
    prompt_logprobs=1,
)


def same(request, prompt, params):
    """As plain decoding of this prompt alone; values to 1e-4, as calls of other shapes may add in another order."""
    got = request.output()
    want = Tiny(model_of(), "autoregressive").generate([prompt], params)[0].output()
    assert [o.token_ids for o in got.outputs] == [o.token_ids for o in want.outputs]
    pairs = [(a.logprobs, b.logprobs) for a, b in zip(got.outputs, want.outputs, strict=True)]
    for ours, theirs in [*pairs, (got.prompt_logprobs[1:], want.prompt_logprobs[1:])]:
        assert [list(entry) for entry in ours] == [list(entry) for entry in theirs]
        assert [v.rank for entry in ours for v in entry.values()] == [v.rank for e in theirs for v in e.values()]
        values = [v.logprob for entry in theirs for v in entry.values()]
        assert [v.logprob for entry in ours for v in entry.values()] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("strategy", IN_PLACE)
def test_rows_that_are_preempted_keep_their_rules_and_scores(strategy):
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=3), num_blocks=10)
    for request, prompt in zip(tiny.generate(ROWS, ALL_RULES), ROWS, strict=True):
        same(request, prompt, ALL_RULES)
    assert tiny.engine.num_preemptions > 0


@pytest.mark.parametrize("num_blocks", [12, 256])
@pytest.mark.parametrize("strategy", IN_PLACE)
def test_choices_have_rules_and_scores_of_their_own(strategy, num_blocks):
    params = SamplingParams(**{**vars(ALL_RULES), "n": 3})
    tiny = Tiny(model_of(), strategy, num_blocks=num_blocks)
    (request,) = tiny.generate([ROWS[1]], params)
    same(request, ROWS[1], params)
    ids = [o.token_ids for o in request.output().outputs]
    assert len(set(ids)) == 3
    assert all(len(o.logprobs) == len(o.token_ids) for o in request.output().outputs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cached_prompt_is_scored_all_the_same(strategy):
    tiny = Tiny(model_of(), strategy, enable_prefix_caching=True)
    prompt = PROMPTS[2]  # 17 tokens, two whole chunks
    plain = SamplingParams(temperature=0, max_tokens=4)
    tiny.generate([prompt], plain)
    (request,) = tiny.generate([prompt], ALL_RULES)
    same(request, prompt, ALL_RULES)
    assert len(request.output().prompt_logprobs) == len(prompt)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_round_that_breaks_off_leaves_no_scores(strategy, monkeypatch):
    """The row that did not fail takes the round again and has one entry a token."""
    tiny = Tiny(model_of(), strategy)
    judge = tiny.round._judge
    calls = []

    def breaks_once(rows, level):
        unsure = judge(rows, level)
        calls.append(level)
        if len(calls) == 2 * len(tiny.round.stages):
            raise tiny_fault(rows[:1])
        return unsure

    monkeypatch.setattr(tiny.round, "_judge", breaks_once)
    broken, whole = tiny.generate(ROWS[:2], ALL_RULES)
    assert broken.finish_reason == "error"
    same(whole, ROWS[1], ALL_RULES)


def tiny_fault(rows):
    from infer.failures import ProgramError

    return ProgramError(rows)


def test_a_prompt_ready_at_once_whose_text_ends_in_its_first_round_still_gives_all_choices():
    """Its siblings must be queued before the round: the leader is gone after it. Fault and leader in one step."""
    tiny = Tiny(model_of(), "autoregressive", max_num_seqs=3)

    def fails(row, tiers):
        raise tiny_fault([row])

    tiny.runner.prefill = fails
    one = SamplingParams(temperature=0, max_tokens=1)
    failing, also_failing, first, second = (
        tiny.request(ROWS[1], one),
        tiny.request(ROWS[2], one),
        tiny.request((1,), SamplingParams(temperature=1, seed=1, max_tokens=1, n=2)),
        tiny.request((2,), SamplingParams(temperature=1, seed=1, max_tokens=1, n=2)),
    )
    for request in (failing, also_failing, first, second):
        tiny.engine.add(request)
    tiny.drain()
    assert failing.finish_reason == "error"
    assert first.is_answered and second.is_answered


def test_an_interrupt_leaves_rows_that_can_go_on(monkeypatch):
    tiny = Tiny(model_of(), "hispec")
    request = tiny.request(ROWS[1], ALL_RULES)
    tiny.engine.add(request)
    tiny.engine.step()
    judge = tiny.round._judge

    def interrupted(rows, level):
        unsure = judge(rows, level)
        if level == len(tiny.round.stages) - 1:
            raise KeyboardInterrupt
        return unsure

    with monkeypatch.context() as patch:
        patch.setattr(tiny.round, "_judge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiny.engine.step()
    tiny.drain()
    same(request, ROWS[1], ALL_RULES)


def test_an_allocation_that_can_not_succeed_leaves_the_prefix_cache_alone():
    tiny = Tiny(model_of(), "autoregressive", num_blocks=20, enable_prefix_caching=True)
    tiny.generate([PROMPTS[2]], SamplingParams(temperature=0, max_tokens=1))
    assert len(tiny.prefix_cache.blocks) == 2
    assert not tiny.engine.kv.grow([], 20)
    assert len(tiny.prefix_cache.blocks) == 2
    assert tiny.engine.kv.grow(blocks := [], 19) and len(blocks) == 19
    assert not tiny.prefix_cache.blocks


def test_a_token_without_text_has_a_logprob_all_the_same():
    class Picky:
        def decode(self, token_ids, *, skip_special_tokens):
            if len(token_ids) == 1 and token_ids[0] % 2:
                raise OverflowError("no such token")
            return "x" * len(token_ids)

    (request,) = (tiny := Tiny(model_of(), "autoregressive")).generate([ROWS[1]], ALL_RULES)
    request.detokenizer._tokenizer = Picky()
    texts = {i: one.decoded_token for e in request.output().outputs[0].logprobs for i, one in e.items()}
    assert all((text is None) == (token_id % 2 == 1) for token_id, text in texts.items())
    assert len({i % 2 for i in texts}) == 2 and not tiny.engine.has_unfinished
