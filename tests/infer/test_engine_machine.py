"""Anything that can happen to an engine, in any order: requests come, are stepped, preempted, aborted, fail, and end.

Whatever happens, what a request shows is what plain decoding gives it alone, blocks and rings are accounted for after
every step, and in the end all of them are back.
"""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from infer.params import SamplingParams
from infer.payoff import Payoff
from infer.request import Request
from infer.row import Row
from infer.strategy import Policy
from tests.tiny_engine import PROMPTS, STRATEGIES, Tiny, all_is_free, model_of, stub_programs

MOST_TOKENS = 10
MOST_CHOICES = 3
# A row's law, without how long it is: prompts × these are all the texts that the machine can ask for.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top_p": {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    "hot": {"temperature": 2.0, "top_k": 30, "seed": 6},
}
RIGS = ("honest", "right", "wrong", "mixed")


@functools.cache
def plain(prompt: tuple[int, ...], kind: str, choice: int) -> list[int]:
    tiny = Tiny(model_of(), "autoregressive")
    request = tiny.request(prompt, SamplingParams(**KINDS[kind], max_tokens=MOST_TOKENS))
    request.choice = choice
    tiny.engine.add(request)
    tiny.drain()
    return request.token_ids


def rig_of(name: str, seed: int):  # type: ignore[no-untyped-def]
    """Lower exits that give the target's token always, never, or by a rule of row and position."""
    if name == "honest":
        return None

    def rig(row: Row, tier: int, position: int, logits: Tensor) -> Tensor:
        prompt = tuple(row.token_ids[: row.num_prompt_tokens])
        kind = next(k for k, v in KINDS.items() if v["temperature"] == row.params.temperature)
        text = [*prompt, *plain(prompt, kind, row.choice)]
        token = text[position] if position < len(text) else 0
        is_right = name == "right" or (name == "mixed" and hash((seed, prompt, row.choice, tier, position)) % 3 > 0)
        token = token if is_right else (token + 1 + tier) % len(logits)
        return torch.full_like(logits, -50.0).index_fill_(0, torch.tensor([token], device=logits.device), 50.0)

    return rig


class Whim(Payoff):
    """Speculates, and shows prompts to exits, by the throw of a coin."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._coin = random.Random(seed)

    def _pays(self, rows: Sequence[Row]) -> bool:
        return self._coin.random() < 0.5

    def expects_gain(self, *_: float) -> bool:
        return self._coin.random() < 0.5


class FaultyCalls:
    """Makes the n-th call of a program over pages from now on raise."""

    def __init__(self, tiny: Tiny) -> None:
        self.left = 0
        self._call = tiny.runner._call
        for programs in (tiny.runner._trunks, tiny.runner._exits):
            for number, (program, *rest) in enumerate(programs):
                programs[number] = (functools.partial(self._run, program), *rest)

    def _run(self, program, *args):  # type: ignore[no-untyped-def]
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of luck")
        return program(*args)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        strategy=st.sampled_from(STRATEGIES),
        policy=st.builds(
            Policy,
            num_draft_tokens=st.integers(1, 4),
            window=st.integers(1, 5),
            inner_rounds=st.integers(1, 3),
            num_lookup_tokens=st.integers(1, 9),
            max_ngram=st.integers(2, 4),
            min_ngram=st.integers(1, 2),
            confidence_threshold=st.sampled_from([0.0, 0.0, 0.1, 0.6]),
            lookahead_window=st.integers(1, 3),
            lookahead_ngram=st.integers(2, 4),
            lookahead_guesses=st.integers(1, 3),
            num_branches=st.sampled_from([0, 0, 1, 3]),
            branch_threshold=st.sampled_from([0.0, 0.015]),  # honest exits give 0.01 to 0.03
            exit_threshold=st.sampled_from([0.0, 0.015, 0.02, 0.6]),  # honest exits give 0.01 to 0.03
        ),
        rig=st.sampled_from(RIGS),
        seed=st.integers(0, 2**32),
        num_blocks=st.sampled_from([9, 12, 16, 30, 100]),
        max_num_seqs=st.integers(1, 8),
        bitwise_range=st.sampled_from([None, (1, 4), (2, 3), (2, 8)]),
        max_num_prefill_tokens=st.sampled_from([1, 8, 20, 512]),
        enable_prefix_caching=st.booleans(),
        adaptive=st.booleans(),
    )
    def start(self, strategy: str, policy: Policy, rig: str, seed: int, adaptive: bool, **options: Any) -> None:
        self.tiny = Tiny(model_of(), strategy, policy, rig=rig_of(rig, seed), **options)
        self.tiny.engine.payoff = Whim(seed) if adaptive else None
        self.faults = FaultyCalls(self.tiny)
        self.requests: list[tuple[Request, str]] = []
        self.shown: dict[int, int] = {}

    @rule(
        prompt=st.sampled_from(PROMPTS),
        kind=st.sampled_from(sorted(KINDS)),
        max_tokens=st.integers(1, MOST_TOKENS),
        n=st.sampled_from([1, 1, 1, 2, MOST_CHOICES]),
    )
    def submit(self, prompt: tuple[int, ...], kind: str, max_tokens: int, n: int) -> None:
        request = self.tiny.request(prompt, SamplingParams(**KINDS[kind], max_tokens=max_tokens, n=n))
        try:
            self.tiny.engine.add(request)
        except ValueError:
            pool, scratch = self.tiny.engine.pool, self.tiny.round.num_scratch_blocks
            assert pool.num_blocks_for(request.max_len) + scratch >= pool.num_blocks
            return
        self.requests.append((request, kind))

    @precondition(lambda self: self.tiny.engine.has_unfinished)
    @rule(num=st.integers(1, 4))
    def step(self, num: int) -> None:
        for _ in range(num):
            for request in self.tiny.engine.step():
                row = request.row
                assert row is not None
                if request.finish_reason != "error":
                    row.check_integrity()
            self.tiny.engine.check_integrity()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request, _ = data.draw(st.sampled_from(self.requests))
        self.tiny.engine.abort(request.request_id)
        assert request.is_answered

    @precondition(lambda self: self.tiny.engine.running)
    @rule(num=st.integers(1, 3))
    def preempt(self, num: int) -> None:
        for request in self.tiny.engine.running[: -num - 1 : -1]:
            self.tiny.engine._preempt(request)

    @precondition(lambda self: self.tiny.engine.has_unfinished)
    @rule(calls=st.integers(1, 12))
    def fail_soon(self, calls: int) -> None:
        self.faults.left = calls

    @invariant()
    def nothing_is_lost_and_nothing_shown_is_wrong(self) -> None:
        self.tiny.engine.check_integrity()
        for leader, kind in self.requests:
            for request in (leader, *leader.siblings):
                want = plain(leader.prompt_token_ids, kind, request.choice)[: request.params.max_tokens]
                got = request.token_ids
                assert got == want[: len(got)]
                assert len(got) >= self.shown.get(id(request), 0)
                assert got == want or request.finish_reason != "length"
                self.shown[id(request)] = len(got)

    def teardown(self) -> None:
        if not hasattr(self, "tiny"):
            return
        self.tiny.drain()
        self.nothing_is_lost_and_nothing_shown_is_wrong()
        assert all(leader.is_answered for leader, _ in self.requests)
        assert all_is_free(self.tiny)
        assert not self.tiny.engine.kv.sharing and not self.tiny.engine.kv._suspects


def profile(max_examples: int, stateful_step_count: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=stateful_step_count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


TestEngine = EngineMachine.TestCase
TestEngine.settings = profile(30, 12)


@pytest.mark.slow
class TestEngineLong(EngineMachine.TestCase):
    settings = profile(2000, 15)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ten_thousand_short_requests_through_64_blocks(strategy):
    """Programs that do nothing, so that it is the engine that is tried: all end, and neither blocks nor memory stay."""
    tiny = Tiny(model_of(), strategy, num_blocks=64, max_num_seqs=8)
    stub_programs(tiny)
    draw = random.Random(0)
    num_objects: list[int] = []
    for _ in range(10):
        requests = []
        for _ in range(1000):
            prompt = [draw.randrange(100) for _ in range(draw.randint(1, 40))]
            params = SamplingParams(temperature=0, max_tokens=draw.randint(1, 40), n=draw.choice([1, 1, 1, 1, 2]))
            requests.append(tiny.request(prompt, params))
            tiny.engine.add(requests[-1])
        while tiny.engine.has_unfinished:
            tiny.engine.step()
        tiny.engine.check_integrity()
        for request in requests:
            assert [o.finish_reason for o in request.output().outputs] == ["length"] * request.params.n
            assert all(len(o.token_ids) == request.params.max_tokens for o in request.output().outputs)
        del requests, request
        gc.collect()
        num_objects.append(len(gc.get_objects()))
    assert all_is_free(tiny)
    assert tiny.engine.num_preemptions > 0
    assert max(num_objects[1:]) < num_objects[1] * 1.001 + 500
