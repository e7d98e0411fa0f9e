"""A fault does nothing elsewhere: rows of the failing call end with its cause, and the engine serves on."""

import pytest
import torch

from infer.params import SamplingParams
from infer.strategy import Policy
from tests.tiny_engine import (
    NAN_ID,
    PROMPTS,
    STRATEGIES,
    Script,
    Tiny,
    all_is_free,
    make_model,
    model_of,
    nan_model,
    oracle,
    texts_of,
)

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
ROWS = PROMPTS[:3]


def want() -> list[list[int]]:
    return [oracle("llama", p, 14)[:NUM_TOKENS] for p in ROWS]


class RaisesOn:
    """Every program of the runner, counted together; the k-th call from `arm` on raises."""

    def __init__(self, tiny: Tiny) -> None:
        self.left = -1
        for programs in (tiny.runner._trunks, tiny.runner._exits, tiny.runner._unembeds):
            for number, (program, *rest) in enumerate(programs):
                programs[number] = (self._wrap(program), *rest)

    def _wrap(self, program):  # type: ignore[no-untyped-def]
        def call(*args):  # type: ignore[no-untyped-def]
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("out of luck")
            return program(*args)

        return call


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7, 9, 12, 15, 20, 26, 33])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_program_that_raises_once_ends_the_rows_of_its_call_and_no_other(strategy, k):
    tiny = Tiny(model_of(), strategy)
    fault = RaisesOn(tiny)
    fault.left = k
    requests = [tiny.request(p, GREEDY) for p in ROWS]
    for request in requests:
        tiny.engine.add(request)
    tiny.drain()
    failed = [r for r in requests if r.finish_reason == "error"]
    assert failed or fault.left > 0
    for request, text in zip(requests, want()):
        assert request.token_ids == text[: len(request.token_ids)]
        if request in failed:
            assert request.stop_reason == "RuntimeError: out of luck"
            assert request.output().outputs[0].stop_reason == "RuntimeError: out of luck"
        else:
            assert (request.token_ids, request.finish_reason) == (text, "length")
    assert all_is_free(tiny)
    assert [r.token_ids for r in tiny.generate(ROWS, GREEDY)] == want()


@pytest.mark.parametrize("k", range(1, 40, 3))
def test_rows_of_other_calls_take_the_round_again_and_give_their_own_tokens(k):
    """The range splits a round into calls of few rows, so that a fault always finds rows that it does not hit."""
    script = Script(texts_of("llama", ROWS, 14), lambda row, tier, offset, number: (row + offset) % 3 > 0)
    tiny = Tiny(model_of(), "hispec", Policy(num_draft_tokens=2), bitwise_range=(1, 6), rig=script)
    requests = [tiny.request(p, GREEDY) for p in ROWS]
    for request in requests:
        tiny.engine.add(request)
    tiny.engine.step()
    trunk, *rest = tiny.runner._trunks[2]
    calls = 0

    def raising(x, *args):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == k:
            raise RuntimeError("out of luck")
        return trunk(x, *args)

    tiny.runner._trunks[2] = (raising, *rest)
    tiny.drain()
    reasons = [r.finish_reason for r in requests]
    assert reasons.count("error") < 3
    assert calls < k or "error" in reasons
    for request, text in zip(requests, want()):
        assert request.token_ids == (text if request.finish_reason == "length" else text[: len(request.token_ids)])
    assert all_is_free(tiny)


def test_a_program_that_always_raises_ends_every_request():
    tiny = Tiny(model_of(), "hispec")

    def broken(*args):  # type: ignore[no-untyped-def]
        raise MemoryError("no memory")

    tiny.runner._trunks[0] = (broken, *tiny.runner._trunks[0][1:])
    got = tiny.generate(PROMPTS, GREEDY)
    assert {(r.finish_reason, r.stop_reason, tuple(r.token_ids)) for r in got} == {
        ("error", "MemoryError: no memory", ())
    }
    assert all_is_free(tiny)


def test_a_tokenizer_that_stumbles_ends_its_request_alone():
    tiny = Tiny(model_of(), "hispec")
    requests = [tiny.request(p, GREEDY) for p in ROWS]

    def push(token_id: int) -> bool:
        raise KeyError(token_id)

    requests[1].detokenizer.push = push
    for request in requests:
        tiny.engine.add(request)
    tiny.drain()
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    assert [r.token_ids for r in requests[::2]] == want()[::2]
    assert all_is_free(tiny)


# ---- NaN where nobody looks ----


def test_a_rejected_token_whose_own_states_are_nan_spoils_nobody():
    """The last drafted token is never scored at its own exit, and the judge above rejects a token before it: its NaN
    stands beyond the row's cursor, and in the blocks that the next row gets."""
    model, texts = nan_model()
    prompt = (5, 9, 3)

    def rig(row, tier, position, logits):  # type: ignore[no-untyped-def]
        offset = position - row.num_committed
        wanted = NAN_ID if tier == 0 and offset == 1 and row.token_ids[0] == 5 else None
        if wanted is None:
            return logits
        return torch.zeros_like(logits).index_fill_(0, torch.tensor([wanted], device=logits.device), 10.0)

    tiny = Tiny(model, "layerskip", Policy(num_draft_tokens=2), num_blocks=9, rig=rig)
    (first,) = tiny.generate([prompt], SamplingParams(temperature=0, max_tokens=2 + NUM_TOKENS))
    assert first.token_ids == texts[prompt][3 : 3 + len(first.token_ids)]
    (second,) = tiny.generate([(11,) * 17], GREEDY)
    assert second.finish_reason == "length"
    assert [*second.prompt_token_ids, *second.token_ids] == texts[(11,) * 17][: 17 + NUM_TOKENS]
    assert all(page.isfinite().all() for page in (p[1:] for p in tiny.runner._pages))


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_a_prompt_of_nan_that_nobody_has_read_yet_leaves_clean_blocks(how):
    model, _ = nan_model()
    tiny = Tiny(model, "hispec", num_blocks=17, max_num_prefill_tokens=8)
    request = tiny.request([NAN_ID] * 40, GREEDY)
    tiny.engine.add(request)
    tiny.engine.step()
    assert not request.row.is_ready
    if how == "abort":
        tiny.engine.abort(request.request_id)
    else:
        tiny.engine._preempt(request)
    assert all(page[1:].isfinite().all() for page in tiny.runner._pages)
    tiny.drain()
    assert request.finish_reason == ("abort" if how == "abort" else "error")


def test_a_model_without_faults_has_its_blocks_cleared_never(monkeypatch):
    """Clearing costs a write to every layer; only what may hold NaN is worth it."""
    tiny = Tiny(make_model(), "hispec")
    monkeypatch.setattr(tiny.runner, "clear", lambda blocks: pytest.fail("cleared"))
    tiny.generate(ROWS, GREEDY)
