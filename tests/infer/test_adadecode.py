"""AdaDecode: each token from the lowest exit that is sure of it, deferred layers later, and no token is changed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from infer.batch import RING_SIZE
from infer.params import SamplingParams
from infer.row import Row
from infer.strategy import Policy, stages_of
from tests.infer.test_invariants import entries, fresh_row, layered_model, paged
from tests.tiny_engine import PROMPTS, Script, Tiny, make_manifest, make_model, model_of, oracle, texts_of
from train.heads import ExitConfig

NUM_TOKENS, GAMMA = 24, 4
TEXTS = texts_of("llama", PROMPTS[:3], NUM_TOKENS)
DRAFT, MIDDLE, TARGET = 0, 1, 2


class Surely:
    """Exits that are right where `is_right` says so, and sure of it where `is_sure` does."""

    def __init__(self, is_sure, is_right=lambda *where: True):
        self.is_sure = is_sure
        self.script = Script(TEXTS, lambda *where: self.note(where) or is_right(*where))

    def note(self, where):
        self.where = where

    def __call__(self, row, tier, position, logits):
        line = self.script(row, tier, position, logits)  # 0.994 for one id of 128
        number, tier, offset, round_ = self.where
        return line if self.is_sure(number, tier, offset, round_) else line * 0.05  # 0.013


class Calls:
    """Tier and most new positions of every call of an exit, target's included."""

    def __init__(self, tiny: Tiny) -> None:
        self.made: list[tuple[int, int]] = []
        advance = tiny.runner.advance

        def noted(rows, tier):
            self.made.append((tier, max(len(row) - row.cursors[tier] for row in rows)))
            return advance(rows, tier)

        tiny.runner.advance = noted


def run(is_sure, is_right=lambda *where: True, prompts=PROMPTS[:1], **options):
    tiny = Tiny(model_of(), "adadecode", Policy(num_draft_tokens=GAMMA, exit_threshold=0.5),
                rig=Surely(is_sure, is_right), **options)  # fmt: skip
    calls = Calls(tiny)
    requests = tiny.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS) for p in prompts]
    return tiny, calls.made, requests


def test_a_token_comes_from_the_lowest_exit_that_is_sure():
    """The draft exit is sure of even places, the intermediate of all: it runs the layers put off for both tokens."""
    tiny, calls, (request,) = run(lambda row, tier, offset, number: tier == MIDDLE or offset % 2 == 0)
    round_ = [(DRAFT, 1), (DRAFT, 1), (MIDDLE, 2), (DRAFT, 1), (DRAFT, 1), (MIDDLE, 2), (TARGET, GAMMA + 1)]
    assert calls[: 2 * len(round_)] == round_ * 2
    assert list(request.output().outputs[0].proposers[:10]) == [DRAFT, MIDDLE, DRAFT, MIDDLE, TARGET] * 2
    assert tiny.round.stats[1].num_accepted == tiny.round.stats[1].num_draft_tokens > 0


def test_where_no_exit_is_sure_the_target_decides_at_once():
    tiny, calls, _ = run(lambda row, tier, offset, number: offset < 1)
    assert calls[:4] == [(DRAFT, 1), (DRAFT, 1), (MIDDLE, 2), (TARGET, 2)]
    tiny, calls, _ = run(lambda *where: False)
    assert set(calls) == {(DRAFT, 1), (MIDDLE, 1), (TARGET, 1)}
    assert tiny.round.stats[1].num_draft_tokens == 0


def test_exits_that_are_always_sure_draft_as_layerskip_does():
    _, calls, _ = run(lambda *where: True)
    assert calls[: GAMMA + 1] == [(DRAFT, 1)] * GAMMA + [(TARGET, GAMMA + 1)]


def test_rows_of_a_batch_choose_each_for_itself():
    """At every place the rows differ in which exit is sure, and in whether it is right."""
    draw = random.Random(0)
    table = {(r, t, o, n): draw.random() for r in range(3) for t in (0, 1) for o in range(9) for n in range(30)}
    tiny, calls, _ = run(
        lambda *where: table[where] < 0.6, lambda *where: table[where] < 0.45, prompts=PROMPTS[:3], bitwise_range=(2, 6)
    )
    assert {tier for tier, _ in calls} == {DRAFT, MIDDLE, TARGET}
    stats = tiny.round.stats[1]
    assert 0 < stats.num_accepted < stats.num_draft_tokens


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 3.0}], ids=str
)
@pytest.mark.parametrize("threshold", [0.0, 0.014, 0.018, 0.03])
def test_honest_exits_give_plain_decodings_tokens(threshold, params):
    prompts = PROMPTS[:4]
    each = [SamplingParams(seed=b, max_tokens=14, **params) for b in range(len(prompts))]
    want = [r.token_ids for r in Tiny(model_of(), "autoregressive").generate(prompts, each)]
    tiny = Tiny(model_of(), "adadecode", Policy(num_draft_tokens=3, exit_threshold=threshold))
    assert [r.token_ids for r in tiny.generate(prompts, each)] == want
    assert tiny.round.stats[1].num_draft_tokens > 0 or threshold > 0.02


@pytest.mark.parametrize("heads", [("layer", "layer", "layer"), ("native", "linear", "layer")], ids=str)
def test_three_lower_exits_are_asked_in_turn(heads):
    exits = [ExitConfig(name=f"exit{n}", layer=n + 1, head=head) for n, head in enumerate(heads)]
    model = make_model("llama", exits)

    def rig(row: Row, tier: int, position: int, logits: Tensor) -> Tensor:
        return logits * (100 if (position + tier) % 4 == 0 else 0)

    tiny = Tiny(model, "adadecode", Policy(num_draft_tokens=5, exit_threshold=0.5), rig=rig)
    calls = Calls(tiny)
    got = tiny.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=14))
    assert [r.token_ids for r in got] == [oracle("llama", p, 14) for p in PROMPTS[:3]]
    assert {tier for tier, _ in calls.made} == {0, 1, 2, 3}
    assert {proposer for r in got for proposer in r.output().outputs[0].proposers} > {3}


def test_an_exit_that_is_never_asked_catches_up_before_its_ring_wraps():
    """The draft exit is sure for 200 tokens, then only the intermediate is; its keys are those of a fresh row."""

    def rig(row: Row, tier: int, position: int, logits: Tensor) -> Tensor:
        if tier == TARGET:
            return torch.zeros_like(logits).index_fill_(0, torch.tensor([20 + position % 7]), 10.0)
        is_sure = tier == MIDDLE or position < 210
        return torch.zeros_like(logits).index_fill_(0, torch.tensor([20 + position % 7]), 10.0 if is_sure else 0.0)

    rig.rigs_target = True  # type: ignore[attr-defined]
    tiny = Tiny(
        layered_model(), "adadecode", Policy(num_draft_tokens=5, exit_threshold=0.5), rig=rig, max_model_len=255
    )
    request = tiny.request(PROMPTS[1], SamplingParams(temperature=0, max_tokens=None))
    tiny.engine.add(request)
    lags = []
    while tiny.engine.has_unfinished:
        tiny.engine.step()
        row = request.row
        assert row is not None
        lags.append(len(row) - 1 - row.exit_cursors[MIDDLE])
        if not request.is_finished and lags[-1] < max(lags[-2:]):
            other, fresh = fresh_row(tiny, row.token_ids)
            stop = row.exit_cursors[MIDDLE]
            for (kind, tier, pages), (_, _, fresh_pages) in zip(paged(tiny), paged(other), strict=True):
                if (kind, tier) == ("exit", MIDDLE):
                    torch.testing.assert_close(
                        entries(pages, row, stop), entries(fresh_pages, fresh, stop), rtol=1e-4, atol=1e-5
                    )
    assert request.token_ids == [20 + p % 7 for p in range(len(PROMPTS[1]), 255)]
    assert RING_SIZE - 20 < max(lags) < RING_SIZE, "neither too early nor too late"


def test_one_lower_exit_is_enough_and_none_is_too_few():
    manifest = make_manifest(make_model(exits=[ExitConfig(name="draft", layer=2, head="native")]))
    draft, target = stages_of("adadecode", Policy(num_draft_tokens=3), manifest)
    assert (draft.exits, draft.repeats, target.tier) == ((0,), 3, 1)
    manifest = replace(manifest, tiers=[replace(manifest.tiers[-1], start=0)], exits=manifest.exits[-1:])
    with pytest.raises(ValueError, match="strategy='adadecode' needs 2 tiers, the artifact has 1"):
        stages_of("adadecode", Policy(), manifest)


@pytest.mark.parametrize("value", [-0.1, 1, True, None, "0.5"])
def test_a_threshold_is_a_probability_below_one(value):
    with pytest.raises(ValueError, match=r"exit_threshold=.* must be a number of at least 0 and below 1"):
        Policy(exit_threshold=value)
