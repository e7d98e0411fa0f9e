"""Admission, ends and failures of requests: nobody waits for ever, nobody keeps blocks, nobody harms a neighbour."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from infer.llm import LLM
from infer.params import SamplingParams
from infer.request_maker import RequestMaker
from infer.strategy import Policy, stages_of
from tests.tiny_engine import (
    IN_PLACE,
    NAN_ID,
    PROMPTS,
    STRATEGIES,
    IdText,
    Script,
    Tiny,
    all_is_free,
    make_manifest,
    make_model,
    model_of,
    nan_model,
    oracle,
)
from train.heads import ExitConfig

GREEDY = SamplingParams(temperature=0, max_tokens=12)


# ---- room ----


@pytest.mark.parametrize("strategy", IN_PLACE)
@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(40, 4), (30, 10)])
def test_a_request_that_the_pool_can_never_hold_is_refused_and_those_behind_it_run(num_prompt, max_tokens, strategy):
    """A19: 8 blocks of 4."""
    tiny = Tiny(model_of(), strategy, num_blocks=9)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    first, third = tiny.request([5] * 20, params), tiny.request([6] * 20, params)
    tiny.engine.add(first)
    with pytest.raises(ValueError, match=r"need 1[01] KV blocks of 4, the pool has 8.*num_blocks"):
        tiny.engine.add(tiny.request([5] * num_prompt, params))
    tiny.engine.add(third)
    tiny.drain()
    assert [len(r.token_ids) for r in (first, third)] == [max_tokens] * 2
    assert all_is_free(tiny)


def test_requests_wait_for_blocks_in_the_order_in_which_they_came():
    tiny = Tiny(model_of(), "hispec", num_blocks=9)
    requests = [tiny.request([7] * n, SamplingParams(temperature=0, max_tokens=4)) for n in (20, 20, 1)]
    for request in requests:
        tiny.engine.add(request)
    tiny.engine.step()
    assert [r.row is not None for r in requests] == [True, False, False]  # the small one does not overtake
    tiny.drain()
    assert [len(r.token_ids) for r in requests] == [4, 4, 4]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_aborting_gives_back_what_a_waiting_or_running_request_holds(strategy):
    tiny = Tiny(model_of(), strategy, max_num_seqs=2)
    requests = [tiny.request(p, GREEDY) for p in PROMPTS[:4]]
    for request in requests:
        tiny.engine.add(request)
    tiny.engine.step()
    free = tiny.engine.pool.num_free
    tiny.engine.abort(requests[3].request_id)  # waits
    assert tiny.engine.pool.num_free == free
    tiny.engine.abort(requests[0].request_id)  # runs
    assert tiny.engine.pool.num_free > free
    tiny.engine.abort("nobody")
    tiny.engine.check_integrity()
    tiny.drain()
    assert [r.finish_reason for r in requests] == ["abort", "length", "length", "abort"]
    assert [r.token_ids for r in requests[1:3]] == [oracle("llama", p, 14)[:12] for p in PROMPTS[1:3]]
    assert all_is_free(tiny)


def test_a_step_without_requests_does_nothing():
    tiny = Tiny(model_of(), "hispec")
    assert tiny.engine.step() == []


# ---- NaN ----


class NanAt:
    """NaN logits at chosen exits for the rows whose prompt begins with `first`, from the n-th generated token on."""

    def __init__(self, tiers, first: int, after: int = 0) -> None:
        self.tiers, self.first, self.after = tiers, first, after
        self.rigs_target = True

    def __call__(self, row, tier, position, logits):
        hit = tier in self.tiers and row.token_ids[0] == self.first and position >= row.num_prompt_tokens + self.after
        return torch.full_like(logits, torch.nan) if hit else logits


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_whose_target_gives_nan_fails_alone(strategy, after):
    """A14."""
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=3), rig=NanAt({2}, PROMPTS[1][0], after))
    got = tiny.generate(PROMPTS[:3], GREEDY)
    assert [r.finish_reason for r in got] == ["length", "error", "length"]
    assert got[1].stop_reason == "the target's logits are not finite"
    lengths = (12, after, 12)
    assert [r.token_ids for r in got] == [oracle("llama", p, 14)[:n] for p, n in zip(PROMPTS, lengths)]
    assert all_is_free(tiny)


def test_a_row_that_ended_before_its_nan_ends_well():
    texts = oracle("llama", PROMPTS[0], 14)
    tiny = Tiny(model_of(), "hispec", rig=NanAt({2}, PROMPTS[0][0], 2))
    (request,) = tiny.generate(PROMPTS[:1], GREEDY, eos=[texts[1]])
    assert (request.token_ids, request.finish_reason) == (texts[:2], "stop")


@pytest.mark.parametrize("tiers", [{0}, {1}, {0, 1}], ids=str)
def test_nan_in_lower_exits_changes_no_token(tiers):
    tiny = Tiny(model_of(), "hispec", rig=NanAt(tiers, PROMPTS[1][0]))
    assert [r.token_ids for r in tiny.generate(PROMPTS[:3], GREEDY)] == [
        oracle("llama", p, 14)[:12] for p in PROMPTS[:3]
    ]


@pytest.mark.parametrize("bad", [(NAN_ID, 3, 4), (3, 4, NAN_ID), (NAN_ID,)], ids=str)
def test_nan_in_a_rows_states_reaches_no_neighbour_through_padding(bad):
    """The failing row accepts nothing, the others all, so it is padded; padding must not carry its NaN to anybody."""
    model, texts = nan_model()
    texts[bad] = [*bad]
    tiny = Tiny(model, "hispec", rig=Script(texts, lambda row, tier, offset, number: list(texts)[row] != bad))
    good = [(5, 9, 3), (11,) * 17]
    requests = tiny.generate([good[0], bad, good[1]], GREEDY)
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    assert [[*r.prompt_token_ids, *r.token_ids] for r in (requests[0], requests[2])] == [
        texts[p][: len(p) + 12] for p in good
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_of_a_failed_row_are_clean_for_the_next_one(strategy):
    model, texts = nan_model()
    tiny = Tiny(model, strategy, num_blocks=9 if strategy in IN_PLACE else 30)
    assert tiny.generate([[NAN_ID] * 20], GREEDY)[0].finish_reason == "error"
    (request,) = tiny.generate([(11,) * 17], GREEDY)
    assert request.finish_reason == "length"
    assert [*request.prompt_token_ids, *request.token_ids] == texts[(11,) * 17][:29]


# ---- prompts, as LLM takes them ----


class ByteIds(IdText):
    """One id per character, none for the empty text: a tokenizer without BOS."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % 128 for c in text]}


def make_llm(strategy: str = "hispec", num_blocks: int = 64, max_model_len: int = 32) -> LLM:
    """An LLM without an artifact behind it."""
    tiny = Tiny(model_of(), strategy, num_blocks=num_blocks, max_model_len=max_model_len)
    llm = LLM.__new__(LLM)
    llm.manifest, llm.engine, llm.tokenizer = tiny.manifest, tiny.engine, ByteIds()
    llm._maker = RequestMaker(llm.tokenizer, llm.manifest, seed=0)
    llm._chooser, llm.max_num_seqs = SimpleNamespace(follow_plan=lambda num_rows: None), 8
    return llm


@pytest.mark.parametrize("prompts", ["", [""], [[]], {"prompt_token_ids": []}, ["fine", ""]], ids=str)
def test_an_empty_prompt_is_refused_and_the_next_request_works(prompts):
    """A17."""
    llm = make_llm()
    with pytest.raises(ValueError, match="is empty"):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_unfinished
    assert llm.generate([], GREEDY) == []
    (output,) = llm.generate("   ", GREEDY)
    assert len(output.outputs[0].token_ids) == 12


def test_an_empty_prompt_begins_at_bos_where_the_tokenizer_adds_one():
    """A17."""

    class WithBos(ByteIds):
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, *super().__call__(text)["input_ids"]]}

    llm = make_llm()
    llm._maker._tokenizer = WithBos()
    (output,) = llm.generate("", GREEDY)
    assert output.prompt_token_ids == (1,)
    assert list(output.outputs[0].token_ids) == oracle("llama", (1,), 12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_tokens", [None, 1, 50])
def test_a_prompt_must_leave_room_for_one_token(max_tokens, strategy):
    """A18."""
    llm = make_llm(strategy)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    (output,) = llm.generate([[3] * 31], params)
    assert output.outputs[0].token_ids == tuple(oracle("llama", (3,) * 31, 1))
    assert output.outputs[0].finish_reason == "length"
    for num_tokens in (32, 33):
        with pytest.raises(ValueError, match=rf"{num_tokens} tokens.*max_model_len is 32"):
            llm.generate([[3] * num_tokens], params)


def test_requests_without_a_seed_draw_different_ones():
    llm = make_llm()
    outputs = llm.generate([[5, 9, 3]] * 4, SamplingParams(temperature=1.5, max_tokens=12))
    assert len({o.outputs[0].token_ids for o in outputs}) == 4


def test_output_names_the_judges_and_counts_what_they_saw():
    llm = make_llm()
    (output,) = llm.generate([PROMPTS[0]], GREEDY)
    assert [t.tier for t in output.metrics.tiers] == ["intermediate", "target"]
    assert all(0 <= t.num_accepted <= t.num_draft_tokens for t in output.metrics.tiers)


# ---- policies ----


@pytest.mark.parametrize("name", [field.name for field in fields(Policy) if field.type == "int"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_a_policy_number_must_be_a_positive_whole_number(name, value):
    if (name, value) == ("num_branches", 0):
        assert Policy(num_branches=0).num_branches == 0  # the one that may be none
        return
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Policy(**{name: value})


def test_the_longest_ngram_is_at_least_the_shortest():
    assert Policy(max_ngram=1, min_ngram=1).max_ngram == 1
    with pytest.raises(ValueError, match="max_ngram=1 must be at least min_ngram=2"):
        Policy(max_ngram=1)


def test_an_unknown_strategy_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match="strategy='medusa' is not one of autoregressive, layerskip, hispec"):
        stages_of("medusa", Policy(), make_manifest(model_of()))


def test_a_policy_beyond_the_exported_query_length_is_refused():
    manifest = make_manifest(model_of())  # checked up to 32
    assert stages_of("hispec", Policy(num_draft_tokens=15, window=16), manifest)[0].repeats == 15
    assert stages_of("layerskip", Policy(num_draft_tokens=31), manifest)[0].repeats == 31
    for strategy, policy in [
        ("hispec", Policy(num_draft_tokens=16, window=16)),
        ("layerskip", Policy(num_draft_tokens=32)),
        ("prompt_lookup", Policy(num_lookup_tokens=32)),
        ("ngram_layerskip", Policy(num_draft_tokens=32)),
        ("ngram_layerskip", Policy(num_lookup_tokens=32)),
    ]:
        with pytest.raises(ValueError, match=r"query of 33 tokens.*up to 32"):
            stages_of(strategy, policy, manifest)


def test_a_strategy_needs_enough_exits():
    manifest = make_manifest(make_model(exits=[ExitConfig(name="draft", layer=2, head="native")]))
    assert [s.tier for s in stages_of("layerskip", Policy(), manifest)] == [0, 1]
    with pytest.raises(ValueError, match="needs 3 tiers, the artifact has 2"):
        stages_of("hispec", Policy(), manifest)
