"""Log probabilities are the target's own, of committed tokens only, whatever was drafted (A09, A10)."""

import functools
import math

import pytest
import torch

from infer.logprobs import ScoreLog, as_logprobs, score
from infer.output import Logprob
from infer.params import SamplingParams
from infer.strategy import Policy
from tests.tiny_engine import PROMPTS, STRATEGIES, Script, Tiny, hf_logits, model_of, oracle, texts_of

NUM_TOKENS = 10
ROWS = (*PROMPTS[:4], (20,) * 9)  # chunks of 8: prompts of 3, 9, 17, 1 and 9 tokens
VOCAB_SIZE = 128
CASES = [("autoregressive", (1, 1, 1)), ("layerskip", (5, 4, 4)), ("hispec", (1, 1, 1)), ("hispec", (3, 7, 3))]
PATTERNS = {"accept all": lambda *where: True, "reject all": lambda *where: False,
            "take turns": lambda row, tier, offset, number: (row + offset + tier + number) % 2 == 0}  # fmt: skip


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, **fields})


@functools.cache
def hf_logprobs(text: tuple[int, ...]) -> torch.Tensor:
    """[T, V] of Hugging Face's own forward: line t is the law of token t + 1."""
    return hf_logits(model_of(), text).double().log_softmax(dim=-1)


def check(entries: list[dict[int, Logprob]], token_ids: list[int], law: torch.Tensor, num: int) -> None:
    """Entry by entry: the token's own value and rank, and exactly the `num` most probable ids."""
    assert len(entries) == len(token_ids) == len(law)
    for entry, token_id, line in zip(entries, token_ids, law):
        order = line.argsort(descending=True).tolist()
        top = order[: VOCAB_SIZE if num == -1 else num]
        assert set(entry) == {*top, token_id}
        assert next(iter(entry)) == token_id
        for i, one in entry.items():
            assert one.logprob == pytest.approx(float(line[i]), abs=1e-4)
            # Two programs may order two ids differently that are equal but for rounding
            assert int((line > line[i] + 1e-4).sum()) < one.rank <= int((line >= line[i] - 1e-4).sum())
            assert one.decoded_token == f"<{i}>"


@pytest.mark.parametrize(("strategy", "policy"), CASES)
@pytest.mark.parametrize("num", [0, 1, 3, -1])
def test_every_token_has_the_values_of_hugging_faces_logits(num, strategy, policy):
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=policy[0], window=policy[1], inner_rounds=policy[2]))
    for prompt, request in zip(ROWS, tiny.generate(ROWS, greedy(logprobs=num))):
        done = request.output().outputs[0]
        assert list(done.token_ids) == oracle("llama", prompt, NUM_TOKENS)
        check(done.logprobs, list(done.token_ids), hf_logprobs((*prompt, *done.token_ids))[len(prompt) - 1 : -1], num)
        own = [entry[i].logprob for entry, i in zip(done.logprobs, done.token_ids)]
        assert done.cumulative_logprob == pytest.approx(math.fsum(own))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_they_do_not_depend_on_what_is_drafted(strategy, pattern):
    plain = Tiny(model_of(), "autoregressive").generate(ROWS, greedy(logprobs=3))
    script = Script(texts_of("llama", ROWS, NUM_TOKENS), PATTERNS[pattern])
    got = Tiny(model_of(), strategy, Policy(num_draft_tokens=3), rig=script).generate(ROWS, greedy(logprobs=3))
    for one, other in zip(got, plain, strict=True):
        same(one.output().outputs[0].logprobs, other.output().outputs[0].logprobs)


def same(entries: list[dict[int, Logprob]], others: list[dict[int, Logprob]]) -> None:
    assert [list(e) for e in entries] == [list(o) for o in others]
    for entry, other in zip(entries, others):
        assert {i: one.rank for i, one in entry.items()} == {i: one.rank for i, one in other.items()}
        assert [one.logprob for one in entry.values()] == pytest.approx(
            [one.logprob for one in other.values()], abs=5e-6
        )  # a few last bits: float32 sums in calls of other sizes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_they_are_those_before_temperature_and_penalties(strategy):
    params = SamplingParams(
        temperature=1.7, top_k=50, seed=4, max_tokens=NUM_TOKENS, logprobs=2, presence_penalty=2.0,
        logit_bias={7: 20.0}, allowed_token_ids=list(range(60)),
    )  # fmt: skip
    (request,) = Tiny(model_of(), strategy).generate(ROWS[:1], params)
    done = request.output().outputs[0]
    law = hf_logprobs((*ROWS[0], *done.token_ids))[len(ROWS[0]) - 1 : -1]
    check(done.logprobs, list(done.token_ids), law, 2)
    assert any(entry[i].rank > 2 for entry, i in zip(done.logprobs, done.token_ids))  # else nothing was told apart


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_ask_for_nothing_get_nothing(strategy):
    each = [greedy(logprobs=2), greedy(), greedy(prompt_logprobs=1), greedy(logprobs=0, prompt_logprobs=-1)]
    outputs = [r.output() for r in Tiny(model_of(), strategy).generate(ROWS[:4], each)]
    assert [o.outputs[0].logprobs is None for o in outputs] == [False, True, True, False]
    assert [o.outputs[0].cumulative_logprob is None for o in outputs] == [False, True, True, False]
    assert [o.prompt_logprobs is None for o in outputs] == [True, True, False, False]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bitwise_range", [None, (2, 5)])
@pytest.mark.parametrize("num", [0, 2, -1])
def test_prompts_have_one_entry_a_token_and_none_for_the_first(num, bitwise_range, strategy):
    tiny = Tiny(model_of(), strategy, bitwise_range=bitwise_range)
    requests = tiny.generate(ROWS, greedy(prompt_logprobs=num, max_tokens=3))
    for prompt, request in zip(ROWS, requests):
        first, *entries = request.output().prompt_logprobs
        assert first is None
        check(entries, list(prompt[1:]), hf_logprobs(prompt)[:-1], num)


def test_a_prompt_longer_than_what_is_scored_at_once_has_all_its_entries():
    prompt = tuple(1 + (7 * i) % 120 for i in range(100))  # the embedding of id 0 is 0, which makes ties
    tiny = Tiny(model_of(), "hispec")
    tiny.runner.prefill_chunk = 96
    (request,) = tiny.generate([prompt], greedy(prompt_logprobs=1, max_tokens=2))
    check(request.output().prompt_logprobs[1:], list(prompt[1:]), hf_logprobs(prompt)[:-1], 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_text_that_ends_inside_a_window_has_one_entry_a_token(strategy):
    text = oracle("llama", ROWS[0], 14)
    script = Script(texts_of("llama", ROWS, 14), lambda *where: True)
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=5), rig=script)
    (request,) = tiny.generate(ROWS[:1], greedy(logprobs=1), eos=[text[3]])
    done = request.output().outputs[0]
    assert len(done.logprobs) == len(done.token_ids) == text.index(text[3]) + 1
    assert done.cumulative_logprob == pytest.approx(sum(e[i].logprob for e, i in zip(done.logprobs, done.token_ids)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_they_grow_with_the_tokens_that_are_shown(strategy):
    tiny = Tiny(model_of(), strategy)
    request = tiny.request(ROWS[1], greedy(logprobs=1, prompt_logprobs=0))
    tiny.engine.add(request)
    assert (request.output().prompt_logprobs, request.output().outputs[0].logprobs) == (None, [])
    shown: list[dict[int, Logprob]] = []
    while not request.is_finished:
        tiny.engine.step()
        done = request.output().outputs[0]
        assert len(done.logprobs) == len(done.token_ids)
        assert done.logprobs[: len(shown)] == shown
        assert len(request.output().prompt_logprobs) == len(ROWS[1])
        shown = done.logprobs


class NanAt:
    rigs_target = True

    def __call__(self, row, tier, position, logits):
        return torch.full_like(logits, math.nan) if tier == 2 and position >= row.num_prompt_tokens + 4 else logits


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_that_fails_keeps_the_entries_of_its_tokens(strategy):
    (request,) = Tiny(model_of(), strategy, rig=NanAt()).generate(ROWS[:1], greedy(logprobs=1))
    done = request.output().outputs[0]
    assert done.finish_reason == "error"
    assert len(done.logprobs) == len(done.token_ids) == 4
    assert all(math.isfinite(entry[i].logprob) for entry, i in zip(done.logprobs, done.token_ids))


# ---- by hand ----


def test_scores_by_hand():
    law = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.45, 0.45]])
    first, second = score(law.log(), torch.tensor([2, 0]), 1)
    assert (first.ids, first.rank) == ([2, 0], 3)
    assert first.logprobs == pytest.approx([math.log(0.2), math.log(0.5)])
    assert (second.ids[0], second.rank, len(second.ids)) == (0, 3, 2)
    (whole,) = score(law[:1].log(), torch.tensor([1]), -1)
    assert (whole.ids, whole.rank) == ([1, 0, 1, 2], 2)
    (alone,) = score(law[:1].log(), torch.tensor([1]), 0)
    assert (alone.ids, alone.rank) == ([1], 2)
    assert score(law[:0], torch.tensor([], dtype=torch.int64), 2) == []


def test_an_entry_lists_the_token_first_and_once():
    (one,) = score(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([1]), 2)
    entry = as_logprobs(one, lambda i: str(i))
    assert list(entry) == [1, 0]
    assert [(e.rank, e.decoded_token) for e in entry.values()] == [(2, "1"), (1, "0")]


def test_a_request_that_asks_for_nothing_has_no_log():
    assert ScoreLog.of(None, None) is None
    assert ScoreLog.of(0, None) is not None and ScoreLog.of(None, 0) is not None
