"""The rejection rule in the engine: greedy tokens stay the same, sampled ones keep their law."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from infer.judging import IdentityRule
from infer.lines import Lines
from infer.params import SamplingParams
from infer.rejection import RejectionRule
from infer.row import Row
from infer.sampler import PickParams
from infer.strategy import Policy
from tests.law import exact_law
from tests.tiny_engine import IN_PLACE, PROMPTS, Tiny, make_model, make_trimmed_model, model_of, oracle
from train.heads import ExitConfig

ROWS = PROMPTS[:4]
HOT = {"temperature": 3.0, "top_k": 50, "top_p": 0.9}


def tokens(tiny: Tiny, prompts=ROWS, **fields) -> list[list[int]]:
    each = [SamplingParams(seed=b, max_tokens=12, **(HOT | fields)) for b in range(len(prompts))]
    return [r.token_ids for r in tiny.generate(prompts, each)]


@pytest.mark.parametrize("strategy", IN_PLACE)
def test_greedy_rows_get_the_targets_tokens(strategy):
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=3, window=5), verification="rejection")
    got = tiny.generate(ROWS, SamplingParams(temperature=0, max_tokens=14))
    assert [r.token_ids for r in got] == [oracle("llama", p, 14) for p in ROWS]


@pytest.mark.parametrize("strategy", IN_PLACE)
def test_a_row_depends_neither_on_neighbours_nor_on_preemption(strategy):
    policy, alone = Policy(num_lookup_tokens=2, min_ngram=1), []
    for number, prompt in enumerate(ROWS):
        params = SamplingParams(seed=number, max_tokens=12, **HOT)
        tiny = Tiny(model_of(), strategy, policy, verification="rejection")
        alone.append(tiny.generate([prompt], params)[0].token_ids)
    assert tokens(Tiny(model_of(), strategy, policy, verification="rejection")) == alone
    crowded = Tiny(model_of(), strategy, policy, num_blocks=14, verification="rejection")
    assert tokens(crowded) == alone
    assert crowded.engine.num_preemptions > 0


def test_choices_of_a_prompt_differ():
    tiny = Tiny(model_of(), "hispec", verification="rejection")
    (leader,) = tiny.generate([ROWS[1]], SamplingParams(seed=3, n=3, max_tokens=12, **HOT))
    assert len({output.token_ids for output in leader.output().outputs}) == 3


def test_exits_that_equal_the_target_are_accepted_whole():
    exits = [ExitConfig(name="draft", layer=4, head="native"), ExitConfig(name="intermediate", layer=5, head="native")]
    model = make_model(exits=exits)
    with torch.no_grad():  # the last two layers add nothing
        for layer in model.base.model.layers[4:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    tiny = Tiny(model, "hispec", verification="rejection")
    tokens(tiny)
    for stats in tiny.round.stats[1:]:
        assert stats.num_accepted == stats.num_draft_tokens > 0


VOCAB, NUM_SAMPLES = 4, 3000


def is_quick(strategy: str, number: int) -> bool:
    """One setting each; make test-all has them all."""
    return number == {"hispec": 1, "layerskip": 0}.get(strategy)


LAW_CASES = [  # strategy, sampling, confidence_threshold
    pytest.param(strategy, setting, least, marks=[] if is_quick(strategy, number) else [pytest.mark.slow])
    for strategy in IN_PLACE[1:]
    for number, (setting, least) in enumerate(
        [({"temperature": 1.5}, 0.0), ({"min_tokens": 1}, 0.6), ({"temperature": 2.0, "top_p": 0.8}, 0.0)]
    )
]


@pytest.mark.parametrize(("strategy", "setting", "least"), LAW_CASES)
def test_sampled_texts_follow_the_exact_law(strategy, setting, least):
    """χ² over all texts of three tokens, α = 0.001, trimmed exits; the seeds are fixed: passes always or never."""
    exits = [
        ExitConfig(name="draft", layer=2, head="native", vocab_size=3),
        ExitConfig(name="intermediate", layer=4, head="native", vocab_size=3),
    ]
    model = make_model("llama", exits, vocab_size=VOCAB, pad_token_id=0)
    model.set_draft_vocab("draft", torch.tensor([0, 1, 3]))
    model.set_draft_vocab("intermediate", torch.tensor([1, 2, 3]))
    how = [SamplingParams(seed=s, max_tokens=3, **setting) for s in range(NUM_SAMPLES)]
    prompt = [1, 2, 3, 1]  # so that two tokens may be looked up at once
    law = exact_law(model, prompt, how[0], 3)
    policy = Policy(num_draft_tokens=2, window=2, min_ngram=1, confidence_threshold=least, exit_threshold=least or 0.4)
    tiny = Tiny(model, strategy, policy, num_blocks=402, max_num_seqs=100, verification="rejection")
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=3), 0)
    for request in tiny.generate([prompt] * NUM_SAMPLES, how):
        counts[tuple(request.token_ids)] += 1
    assert all(counts[text] == 0 for text, p in law.items() if p == 0)
    possible = {text: p * NUM_SAMPLES for text, p in law.items() if p > 0}
    rare = [text for text, expected in possible.items() if expected < 5]  # taken together, as χ² wants
    pairs = [(counts[t], possible[t]) for t in possible if t not in rare]
    if rare:
        pairs.append((sum(counts[t] for t in rare), sum(possible[t] for t in rare)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in pairs)
    assert statistic < chi2.ppf(0.999, len(pairs) - 1)
    assert all(0 < stats.num_accepted < stats.num_draft_tokens for stats in tiny.round.stats[1:])


def test_it_accepts_more_than_the_identity_rule():
    accepted = {}
    for verification in ("identity", "rejection"):
        tiny = Tiny(model_of(), "layerskip", max_num_seqs=16, verification=verification)
        tokens(tiny, PROMPTS * 8, temperature=8.0)
        accepted[verification] = tiny.round.stats[1].num_accepted / tiny.round.stats[1].num_draft_tokens
    assert accepted["rejection"] > accepted["identity"]


def test_ids_outside_a_trimmed_vocabulary_still_appear():
    vocab = torch.arange(0, 128, 3)
    got = tokens(Tiny(make_trimmed_model(vocab), "hispec", verification="rejection"))
    assert {i for ids in got for i in ids} - set(vocab.tolist())


# ---- single rulings ----


def lines_of(logits: torch.Tensor, drafted: list[int], level: int, is_target: bool) -> Lines:
    row = Row([1], SamplingParams(temperature=1.0), seed=5, max_len=50, num_tiers=2, num_stages=2, blocks=[1], ring=1)
    params = PickParams.of([row.params], [row.seed], [0])
    return Lines([row], level, is_target, logits, None, params, [0], [len(logits)], [drafted])


class Always:
    """Randomness whose every draw is `value`; 1.0 is more than a generator can give."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, count: int) -> np.ndarray:
        return np.full(count, self.value)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_rejection_that_leaves_nothing_over_draws_from_the_judges_law(value):
    """p = q, and rounding rejects all the same: no NaN, no id that can't be picked."""
    logits = torch.tensor([[0.3, 0.1, -torch.inf, 0.2]])
    rule = RejectionRule(2, 4)
    draft = lines_of(logits, [], 0, False)
    rule.begin(draft.rows)
    state = rule._states[draft.rows[0]]
    state.random = Always(value)
    (token,) = (verdict.own_token for verdict in rule.judge(draft).verdicts)
    judge = lines_of(torch.cat([logits, logits]), [token], 1, True)
    rule._states = {judge.rows[0]: state}
    ((accepted, own),) = rule.judge(judge).verdicts
    assert accepted == (1 if value < 1 else 0)
    assert own in (0, 3) and own == (0 if value < 1 else 3)


@pytest.mark.parametrize("is_target", [True, False])
def test_a_line_of_nan_is_a_bad_guess_below_and_no_token_at_the_target(is_target):
    rule = RejectionRule(2, 4)
    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0], [torch.nan] * 4])
    lines = lines_of(logits, [1], 1, is_target)
    rule.begin(lines.rows)
    state = rule._states[lines.rows[0]]
    state.random, state.laws[0] = Always(0.5), [np.eye(4)[1]]
    ruling = rule.judge(lines)
    assert ruling.is_broken == [False, True]
    assert ruling.verdicts == [(1, -1 if is_target else 0)]


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_line_that_is_not_finite_has_no_token_under_either_rule(value):
    logits = torch.tensor([[0.0, value, 0.0, 0.0]])
    for rule in (IdentityRule(), RejectionRule(2, 4)):
        lines = lines_of(logits, [], 1, True)
        rule.begin(lines.rows)
        assert rule.judge(lines) == ([(0, -1)], [True])


def test_nothing_of_a_round_is_kept_after_it():
    tiny = Tiny(model_of(), "hispec", verification="rejection")
    tokens(tiny)
    assert not tiny.round.rule._states
