"""Penalties, biases and masks are functions of a row's own prefix, the same at every tier (DESIGN §7, A07, A08)."""

import dataclasses
import functools

import pytest
import torch

from infer.params import SamplingParams
from tests.infer.patterns import PATTERNS
from tests.infer.rules_oracle import (
    EOS,
    NUM_TOKENS,
    ROWS,
    SETTINGS,
    greedy,
    ids_of,
    oracle,
    policy_of,
    sampled,
    setting,
    soft_model,
    trimmed_model,
    twin_model,
    wanted,
)
from tests.tiny_engine import STRATEGIES, Script, Tiny

POLICIES = {"autoregressive": [(1, 1, 1)], "layerskip": [(1, 4, 4), (5, 4, 4)], "hispec": [(1, 1, 1), (5, 7, 3)]}
CASES = [(strategy, policy) for strategy, policies in POLICIES.items() for policy in policies]
CHOSEN = ("accept all", "reject all", "reject at 1", "alternate by row and round", "draft right, intermediate wrong",
          "tiers take turns")  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_changes_the_text(name):
    """Else the tests below would hold of an engine that ignores it."""
    fields = {"min_p": 0.0} if name.startswith("min_p") else {}
    idle = SamplingParams(
        temperature=setting(name).temperature, top_k=setting(name).top_k, top_p=setting(name).top_p,
        seed=setting(name).seed, max_tokens=NUM_TOKENS, stop_token_ids=setting(name).stop_token_ids, **fields,
    )  # fmt: skip
    assert wanted(name) != [oracle(p, idle) for p in ROWS]


@pytest.mark.parametrize(("strategy", "policy"), CASES)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_gives_the_oracles_tokens(name, strategy, policy):
    tiny = Tiny(soft_model(), strategy, policy_of(policy))
    assert ids_of(tiny.generate(ROWS, setting(name), EOS)) == wanted(name)


@pytest.mark.parametrize("pattern", CHOSEN)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_gives_the_oracles_tokens_whatever_is_drafted(name, pattern):
    texts = {p: [*p, *text] for p, text in zip(ROWS, wanted(name))}
    for strategy, policy in (("layerskip", (3, 1, 1)), ("hispec", (2, 4, 4))):
        script = Script(texts, PATTERNS[pattern], height=1e4)  # no penalty makes up for that
        tiny = Tiny(soft_model(), strategy, policy_of(policy), rig=script)
        assert ids_of(tiny.generate(ROWS, setting(name), EOS)) == wanted(name)
        accepted = [(s.num_accepted, s.num_draft_tokens) for s in tiny.round.stats[1:]]
        if pattern == "accept all":
            assert all(a > 0 for a, _ in accepted)


@pytest.mark.parametrize(("strategy", "policy"), CASES)
def test_rows_of_one_batch_each_keep_their_own_setting(strategy, policy):
    names = [*SETTINGS, None]  # None: a row without any
    prompts = [ROWS[b % 4] for b in range(len(names))]
    each = [greedy() if name is None else setting(name) for name in names]
    want = [oracle(p, params) for p, params in zip(prompts, each)]
    tiny = Tiny(soft_model(), strategy, policy_of(policy), max_num_seqs=5)
    assert ids_of(tiny.generate(prompts, each, EOS)) == want


_twin = functools.cache(twin_model)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_tier_that_equals_its_judge_is_accepted_always(name):
    """Invariant 6: so the drafts went through the same processors, after the same prefixes."""
    model = _twin()
    for strategy, policy in (("layerskip", (4, 1, 1)), ("hispec", (2, 4, 4))):
        tiny = Tiny(model, strategy, policy_of(policy))
        tiny.generate(ROWS, dataclasses.replace(setting(name), max_tokens=20), EOS)
        for stats in tiny.round.stats[1:]:
            assert stats.num_accepted == stats.num_draft_tokens > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SETTINGS)
def test_trimmed_exits_find_the_ids_and_ignore_those_that_they_lack(name, strategy):
    tiny = Tiny(trimmed_model(), strategy, policy_of((3, 4, 2)))
    assert ids_of(tiny.generate(ROWS, setting(name), EOS)) == wanted(name)


@pytest.mark.parametrize("strategy", ["layerskip", "hispec"])  # a lookup asks no exit
def test_a_trimmed_twin_is_accepted_wherever_the_target_stays_within_its_ids(strategy):
    """Columns are not ids: a bias, a mask or a count in the wrong column would cost acceptance."""
    vocab = torch.arange(1, 128, 3)
    model = twin_model(vocab)
    inside = sampled(
        allowed_token_ids=vocab.tolist()[3:], logit_bias={31: 4.0, 61: 2.0, 5: 50.0}, repetition_penalty=1.5,
        frequency_penalty=1.0, presence_penalty=0.5, bad_words=["31 61", "13"], min_tokens=9, stop_token_ids=[61, 10],
    )  # fmt: skip
    tiny = Tiny(model, strategy)
    tiny.generate(ROWS, inside, EOS)
    for stats in tiny.round.stats[1:]:
        assert stats.num_accepted == stats.num_draft_tokens > 0
