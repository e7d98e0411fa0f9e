"""Penalties, biases and masks are functions of a row's own prefix, the same at every tier (DESIGN §7, A07, A08).

The oracle is Hugging Face's forward, one token at a time, with each rule written down plainly.
"""

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.hispec import NAN_LOGITS, NOTHING_ALLOWED
from infer.noise import gumbel
from infer.params import SamplingParams
from infer.processors import Processors, Rules, bad_word_ids
from infer.sampler import PickParams, pick
from infer.strategy import Policy
from tests.tiny_artifact import make_tokenizer
from tests.tiny_engine import PROMPTS, STRATEGIES, IdText, Script, Tiny, hf_logits, make_model, make_trimmed_model
from train.heads import ExitConfig

NUM_TOKENS = 14
ROWS = PROMPTS[:4]
EOS = (126, 127)

# ---- the oracle ----


@functools.cache
def soft_model():
    """Logits lie close together, as penalties of at most 2 must be able to change what is picked."""
    return soften(make_model())


def soften(model):
    with torch.no_grad():
        model.base.lm_head.weight.mul_(0.1)
    return model


def processed(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> torch.Tensor:
    out = logits.clone()  # [V] float32
    for i in range(len(out)):
        if params.allowed_token_ids is not None and i not in params.allowed_token_ids:
            out[i] = -math.inf
    for word in params.bad_words:
        ids = IdText()(word)["input_ids"]
        if [*output, ids[-1]][-len(ids) :] == ids:
            out[ids[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for i in {*EOS, *params.stop_token_ids}:
            out[i] = -math.inf
    for i, bias in (params.logit_bias or {}).items():
        out[i] += bias
    for i in {*prompt, *output}:
        factor = params.repetition_penalty
        out[i] = out[i] / factor if out[i] > 0 else out[i] * factor
    for i in set(output):
        out[i] -= params.frequency_penalty * output.count(i)
        out[i] -= params.presence_penalty
    return out


def picked(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    if params.is_greedy:
        return int(logits.argmax())
    scaled = logits.double() / params.temperature
    law = scaled.softmax(dim=0)
    kept = law >= params.min_p * law.max() * (1 - 1e-12)
    if params.top_k > 0:
        kept &= scaled >= scaled[kept].sort(descending=True).values[: params.top_k][-1]
    if params.top_p < 1:
        law = scaled.masked_fill(~kept, -math.inf).softmax(dim=0)
        order = law.argsort(descending=True)
        size = int((law[order].cumsum(dim=0) < params.top_p).sum()) + 1
        kept &= law >= law[order[min(size, len(order)) - 1]]
    key = [torch.tensor([x], device=logits.device) for x in (params.seed, 0, position)]
    noise = gumbel(*key, torch.arange(len(logits), device=logits.device))[0]
    return int((scaled + noise).masked_fill(~kept, -math.inf).argmax())


@functools.cache
def next_logits(text: tuple[int, ...]) -> torch.Tensor:
    return hf_logits(soft_model(), text)[-1]


def oracle(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """What plain decoding must give; nothing of ours but the noise takes part."""
    output: list[int] = []
    ends = {*EOS, *params.stop_token_ids}
    while len(output) < params.max_tokens and not (output and output[-1] in ends):
        logits = processed(next_logits((*prompt, *output)), list(prompt), output, params)
        output.append(picked(logits, params, len(prompt) + len(output)))
    return output


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, **fields})


def sampled(seed: int = 3, **fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": NUM_TOKENS, **fields})


@functools.cache
def plain_text(row: int) -> list[int]:
    return oracle(ROWS[row], greedy())


def a_bad_word(num_tokens: int) -> str:
    """A piece out of the middle of the first row's plain text."""
    return " ".join(str(i) for i in plain_text(0)[4 : 4 + num_tokens])


def setting(name: str) -> SamplingParams:
    """Parameters that change what at least one row gives: see the test of that name."""
    text = plain_text(0)
    return {
        "presence": lambda: greedy(presence_penalty=2.0),
        "presence below 0": lambda: greedy(presence_penalty=-2.0),
        "frequency": lambda: greedy(frequency_penalty=2.0),
        "frequency below 0": lambda: greedy(frequency_penalty=-2.0),
        "repetition": lambda: greedy(repetition_penalty=1.8),
        "repetition below 1": lambda: greedy(repetition_penalty=0.5),
        "bias": lambda: greedy(logit_bias={text[3]: -100, 77: 1.5, 78: 0.5}),
        "allowed": lambda: greedy(allowed_token_ids=list(range(0, 120, 5))),
        "bad word": lambda: greedy(bad_words=[a_bad_word(1)]),
        "bad words": lambda: greedy(bad_words=[a_bad_word(3), a_bad_word(2), "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"]),
        "min_tokens": lambda: greedy(min_tokens=6, stop_token_ids=[text[1], text[3]]),
        "min_p": lambda: sampled(temperature=0.15, min_p=0.4),
        "min_p with the others": lambda: sampled(temperature=0.15, min_p=0.4, top_k=12, top_p=0.9),
        "sampled penalties": lambda: sampled(
            temperature=0.3, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3
        ),
        "all at once": lambda: sampled(
            temperature=0.2, min_p=0.05, top_k=40, top_p=0.95, presence_penalty=-1.0, frequency_penalty=0.7,
            repetition_penalty=1.2, logit_bias={9: 3.0, 13: -4.0}, allowed_token_ids=list(range(2, 90)),
            bad_words=[a_bad_word(1), "9 9"], min_tokens=5, stop_token_ids=[9, 13],
        ),
    }[name]()  # fmt: skip


SETTINGS = (
    "presence", "presence below 0", "frequency", "frequency below 0", "repetition", "repetition below 1", "bias",
    "allowed", "bad word", "bad words", "min_tokens", "min_p", "min_p with the others", "sampled penalties",
    "all at once",
)  # fmt: skip


@functools.cache
def wanted(name: str) -> list[list[int]]:
    return [oracle(p, setting(name)) for p in ROWS]


def ids_of(requests: list) -> list[list[int]]:
    return [r.token_ids for r in requests]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_changes_the_text(name):
    """Else the tests below would hold of an engine that ignores it."""
    fields = {"min_p": 0.0} if name.startswith("min_p") else {}
    idle = SamplingParams(
        temperature=setting(name).temperature, top_k=setting(name).top_k, top_p=setting(name).top_p,
        seed=setting(name).seed, max_tokens=NUM_TOKENS, stop_token_ids=setting(name).stop_token_ids, **fields,
    )  # fmt: skip
    assert wanted(name) != [oracle(p, idle) for p in ROWS]


# ---- the engine against the oracle ----

POLICIES = {"autoregressive": [(1, 1, 1)], "layerskip": [(1, 4, 4), (5, 4, 4)], "hispec": [(1, 1, 1), (5, 7, 3)]}
CASES = [(strategy, policy) for strategy, policies in POLICIES.items() for policy in policies]
PATTERNS = {
    "accept all": lambda row, tier, offset, number: True,
    "reject all": lambda row, tier, offset, number: False,
    "reject at 1": lambda row, tier, offset, number: offset != 1,
    "alternate by row and round": lambda row, tier, offset, number: (row + number) % 2 == 0,
    "draft right, intermediate wrong": lambda row, tier, offset, number: tier == 0,
    "tiers take turns": lambda row, tier, offset, number: (offset + tier + number) % 2 == 0,
}


def policy_of(numbers: tuple[int, int, int]) -> Policy:
    return Policy(num_draft_tokens=numbers[0], window=numbers[1], inner_rounds=numbers[2])


@pytest.mark.parametrize(("strategy", "policy"), CASES)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_gives_the_oracles_tokens(name, strategy, policy):
    tiny = Tiny(soft_model(), strategy, policy_of(policy))
    assert ids_of(tiny.generate(ROWS, setting(name), EOS)) == wanted(name)


@pytest.mark.parametrize("pattern", PATTERNS)
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


def twin_model(vocab: torch.Tensor | None = None):
    """Layers from the third on add nothing, so every exit has the target's own logits."""
    size = None if vocab is None else len(vocab)
    model = make_model(exits=[
        ExitConfig(name="draft", layer=2, head="native", vocab_size=size),
        ExitConfig(name="intermediate", layer=4, head="native"),
    ])  # fmt: skip
    with torch.no_grad():
        for layer in model.base.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    if vocab is not None:
        model.set_draft_vocab("draft", vocab)
    return soften(model)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_tier_that_equals_its_judge_is_accepted_always(name):
    """Invariant 6: so the drafts went through the same processors, after the same prefixes."""
    model = _twin()
    for strategy, policy in (("layerskip", (4, 1, 1)), ("hispec", (2, 4, 4))):
        tiny = Tiny(model, strategy, policy_of(policy))
        tiny.generate(ROWS, dataclasses.replace(setting(name), max_tokens=20), EOS)
        for stats in tiny.round.stats[1:]:
            assert stats.num_accepted == stats.num_draft_tokens > 0


_twin = functools.cache(twin_model)


@functools.cache
def trimmed_model():
    return soften(make_trimmed_model(torch.arange(1, 128, 3)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SETTINGS)
def test_trimmed_exits_find_the_ids_and_ignore_those_that_they_lack(name, strategy):
    tiny = Tiny(trimmed_model(), strategy, policy_of((3, 4, 2)))
    assert ids_of(tiny.generate(ROWS, setting(name), EOS)) == wanted(name)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
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


# ---- nothing left to pick, and NaN ----


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 5, "top_k": 3, "min_p": 0.1}], ids=str)
def test_an_exit_that_has_none_of_the_allowed_ids_proposes_anything(strategy, fields):
    params = greedy(allowed_token_ids=list(range(0, 120, 3)), **fields)  # the exits hold 1, 4, 7, …
    tiny = Tiny(trimmed_model(), strategy)
    requests = tiny.generate(ROWS, params, EOS)
    assert ids_of(requests) == [oracle(p, params) for p in ROWS]
    assert {r.finish_reason for r in requests} == {"length"}
    assert not any(r.row.has_nan for r in requests)
    assert all(stats.num_draft_tokens > 0 for stats in tiny.round.stats[1:])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_whose_target_has_nothing_left_fails_alone(strategy):
    tiny = Tiny(soft_model(), strategy)
    stuck = greedy(allowed_token_ids=[7], bad_words=["7 7 7"])
    never = greedy(allowed_token_ids=[126], min_tokens=2)
    got = tiny.generate(ROWS, [greedy(), stuck, never, setting("frequency")], EOS)
    assert ids_of(got) == [plain_text(0), [7, 7], [], wanted("frequency")[3]]
    assert [r.finish_reason for r in got[:3]] == ["length", "abort", "abort"]
    assert [r.stop_reason for r in got[1:3]] == [NOTHING_ALLOWED] * 2
    assert not any(r.row.has_nan for r in got)


class NanAt:
    """NaN in one column of the target's logits, or in all, for the second row from its third token on."""

    rigs_target = True

    def __init__(self, column: int | slice) -> None:
        self.column = column

    def __call__(self, row, tier, position, logits):
        if tier == 2 and tuple(row.token_ids[:2]) == ROWS[1][:2] and position >= row.num_prompt_tokens + 2:
            logits = logits.clone()
            logits[self.column] = math.nan
        return logits


@pytest.mark.parametrize("column", [slice(None), 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_fails_its_row_even_where_the_broken_id_may_not_be_picked(strategy, column):
    name = "allowed"
    tiny = Tiny(soft_model(), strategy, rig=NanAt(column))
    got = tiny.generate(ROWS, setting(name), EOS)
    assert ids_of(got) == [text[:2] if b == 1 else text for b, text in enumerate(wanted(name))]
    assert (got[1].finish_reason, got[1].stop_reason, got[1].row.has_nan) == ("abort", NAN_LOGITS, True)


# ---- where a text ends ----


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_min_tokens_masks_eos_and_lets_stop_strings_pass(strategy):
    """A08: EOS or a stop string at the second token; no end counts before the token after the first min_tokens."""
    text = plain_text(0)
    tiny = Tiny(soft_model(), strategy)
    (request,) = tiny.generate(ROWS[:1], greedy(min_tokens=8), eos=[text[1]])
    assert len(request.token_ids) >= 8 and text[1] not in request.token_ids[:8]
    for n in (1, 2, 3, 8):
        stop = [f"<{text[1]}>", f"<{text[6]}>"]
        (request,) = tiny.generate(ROWS[:1], greedy(min_tokens=n, stop=stop))
        end = next((i for i in range(n, NUM_TOKENS) if text[i] in (text[1], text[6])), NUM_TOKENS)
        assert request.token_ids == text[: end + 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stop_tokens_text_is_kept_if_stop_strings_are(strategy):
    text = plain_text(0)
    shown = {False: text[:4], True: text[:5]}
    for keep, ids in shown.items():
        tiny = Tiny(soft_model(), strategy)
        (request,) = tiny.generate(ROWS[:1], greedy(stop_token_ids=[text[4]], include_stop_str_in_output=keep))
        assert (request.token_ids, request.stop_reason) == (text[:5], text[4])
        assert request.text == "".join(f"<{i}>" for i in ids)


def test_a_stop_token_may_complete_a_stop_string():
    text = plain_text(0)
    params = greedy(stop_token_ids=[text[4]], stop=[f"{text[4]}"], include_stop_str_in_output=True)
    (request,) = Tiny(soft_model(), "hispec").generate(ROWS[:1], params)
    assert (request.token_ids, request.stop_reason) == (text[:5], f"{text[4]}")
    assert request.text == "".join(f"<{i}>" for i in text[:5]).removesuffix(">")


def test_min_tokens_holds_eos_back_under_ignore_eos_too():
    text = plain_text(0)
    (request,) = Tiny(soft_model(), "hispec").generate(ROWS[:1], greedy(min_tokens=4, ignore_eos=True), eos=[text[1]])
    assert text[1] not in request.token_ids[:4] and len(request.token_ids) == NUM_TOKENS


# ---- anything at all ----

ids = st.integers(0, 127)
numbers = st.fixed_dictionaries(
    {"max_tokens": st.integers(6, 10)},
    optional={
        "presence_penalty": st.sampled_from([-2, -0.5, 1.5]),
        "frequency_penalty": st.sampled_from([-1.0, 0.3, 2]),
        "repetition_penalty": st.sampled_from([0.6, 1.2, 3.0]),
        "logit_bias": st.dictionaries(ids, st.floats(-20, 20), max_size=5),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=40),
        "bad_words": st.lists(
            st.lists(st.integers(0, 20), min_size=1, max_size=3).map(lambda x: " ".join(map(str, x)))
        ),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(ids, max_size=10),
    },
)
ways = st.one_of(
    st.just({"temperature": 0}),
    st.fixed_dictionaries(
        {"temperature": st.floats(0.3, 2), "seed": st.integers(0, 2**63)},
        optional={
            "min_p": st.sampled_from([0.01, 0.2, 1.0]),
            "top_k": st.sampled_from([1, 5, 30]),
            "top_p": st.sampled_from([0.4, 0.9]),
        },
    ),
)
row_params = st.builds(lambda a, b: SamplingParams(**a, **b), numbers, ways)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    rows=st.lists(st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=9), row_params), min_size=1, max_size=4),
    strategy=st.sampled_from(STRATEGIES[1:]),
    policy=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3)).map(policy_of),
    is_trimmed=st.booleans(),
    rig_seed=st.none() | st.integers(0, 2**32),
)
def test_any_mixture_gives_plain_decodings_tokens_and_the_oracles(rows, strategy, policy, is_trimmed, rig_seed):
    model = trimmed_model() if is_trimmed else soft_model()
    plain = Tiny(model, "autoregressive")
    want = [plain.generate([prompt], params, EOS)[0] for prompt, params in rows]
    rig = None
    if rig_seed is not None and not is_trimmed:
        texts = {tuple(p): [*p, *r.token_ids] for (p, _), r in zip(rows, want)}
        rig = Script(texts, lambda *where: hash((rig_seed, *where)) % 4 > 0)
    tiny = Tiny(model, strategy, policy, rig=rig)
    got = tiny.generate([p for p, _ in rows], [params for _, params in rows], EOS)
    assert ids_of(got) == ids_of(want)
    assert [r.stop_reason for r in got] == [r.stop_reason for r in want]
    for (prompt, params), request in zip(rows, got):
        if request.finish_reason != "abort":
            assert request.token_ids == oracle(tuple(prompt), params)


# ---- each rule by hand ----

LOGITS = [2.0, -1.0, 0.5, 4.0, 0.0, -3.0]
INF = math.inf


def by_hand(text: list[int], num_prompt: int, start: int, vocab: list[int] | None = None, **fields: object):
    """The logits for every position from start + 1 to the text's end, one row alone."""
    rules = Rules.of(SamplingParams(**fields), num_prompt, [5], IdText())
    columns = None if vocab is None else torch.tensor(vocab)
    lines = torch.tensor(LOGITS if vocab is None else [LOGITS[i] for i in vocab]).repeat(len(text) - start, 1)
    processors = Processors([rules], lines.shape[1], columns, torch.device("cpu"))
    return processors.apply(lines, [text], [start], [len(text) - start]).tolist()


def test_presence_is_taken_off_once_and_of_the_output_only():
    assert by_hand([3, 0, 0, 1], 1, 3, presence_penalty=0.5) == [[1.5, -1.5, 0.5, 4.0, 0.0, -3.0]]


def test_frequency_is_taken_off_for_every_time():
    assert by_hand([3, 0, 0, 1], 1, 3, frequency_penalty=0.5) == [[1.0, -1.5, 0.5, 4.0, 0.0, -3.0]]


def test_repetition_divides_or_multiplies_and_sees_the_prompt():
    assert by_hand([3, 0, 1], 1, 2, repetition_penalty=2.0) == [[1.0, -2.0, 0.5, 2.0, 0.0, -3.0]]


def test_penalties_come_in_vllms_order_after_the_bias():
    """(2 + 4) / 2 − 2 × 0.5 − 0.25"""
    got = by_hand([3, 0, 0], 1, 2, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25,
                  logit_bias={0: 4.0})  # fmt: skip
    assert got == [[1.75, -1.0, 0.5, 2.0, 0.0, -3.0]]


def test_every_position_has_its_own_prefix():
    got = by_hand([3, 0, 2, 0], 1, 0, frequency_penalty=1.0)
    assert [line[0] for line in got] == [2.0, 1.0, 1.0, 0.0]
    assert [line[2] for line in got] == [0.5, 0.5, -0.5, -0.5]


def test_a_bias_is_added_and_can_make_an_id_win():
    assert by_hand([3], 1, 0, logit_bias={5: 10.0, 3: -4.0}) == [[2.0, -1.0, 0.5, 0.0, 0.0, 7.0]]


def test_only_allowed_ids_are_left_and_no_bias_brings_others_back():
    got = by_hand([3], 1, 0, allowed_token_ids=[1, 4], logit_bias={0: 100})
    assert got == [[-INF, -1.0, -INF, -INF, 0.0, -INF]]


def test_min_tokens_masks_eos_and_stop_tokens_until_that_many():
    got = by_hand([3, 1, 1, 1], 1, 0, min_tokens=2, stop_token_ids=[3])
    masked = [2.0, -1.0, 0.5, -INF, 0.0, -INF]
    assert got == [masked, masked, LOGITS, LOGITS]


def test_a_bad_words_last_token_is_masked_after_its_others():
    got = by_hand([3, 1, 2, 1], 1, 0, bad_words=["1 2 4", "1 0", "3 3"])
    assert got[0] == LOGITS  # 3 stands in the prompt
    assert got[1] == [-INF, -1.0, 0.5, 4.0, 0.0, -3.0]
    assert got[2] == [2.0, -1.0, 0.5, 4.0, -INF, -3.0]
    assert got[3] == got[1]


def test_a_bad_word_of_one_token_is_masked_always():
    assert by_hand([3, 1], 2, 0, bad_words=["3"]) == [[2.0, -1.0, 0.5, -INF, 0.0, -3.0]] * 2


def test_a_trimmed_vocabulary_gets_the_same_logits_for_the_ids_it_has():
    fields = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "logit_bias": {3: 1.0, 4: 2.0}, "bad_words": ["5"],
              "allowed_token_ids": [0, 3, 4, 5], "min_tokens": 9, "stop_token_ids": [4]}  # fmt: skip
    full = by_hand([3, 0, 4, 4], 1, 1, **fields)
    for vocab in ([0, 3, 5], [1, 2], [4], list(range(6))):
        assert by_hand([3, 0, 4, 4], 1, 1, vocab, **fields) == [[line[i] for i in vocab] for line in full]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_rules_keeps_its_logits_and_the_given_ones_stay_as_they_are(dtype):
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits.clone()
    rules = Rules.of(SamplingParams(presence_penalty=1.0), 1, [], IdText())
    got = Processors([None, rules, None], 6, None, torch.device("cpu")).apply(
        logits, [[1, 2], [3, 0, 2], [4]], [1, 1, 0], [2, 2, 1]
    )
    assert torch.equal(logits, before)
    assert torch.equal(got[[0, 1, 4]], logits[[0, 1, 4]].float())
    assert got[2].tolist() == (logits[2].float() - torch.tensor([1.0, 0, 0, 0, 0, 0])).tolist()
    assert got[3].tolist() == (logits[3].float() - torch.tensor([1.0, 0, 1, 0, 0, 0])).tolist()


def test_a_masked_nan_still_breaks_its_row():
    rules = Rules.of(SamplingParams(allowed_token_ids=[0]), 1, [], IdText())
    logits = torch.tensor([[1.0, math.nan, 0.0], [1.0, 2.0, 0.0]])
    got = Processors([rules, rules], 3, None, torch.device("cpu")).apply(logits, [[1], [1]], [0, 0], [1, 1])
    assert pick(got, PickParams.of([SamplingParams(temperature=0)] * 2, [0, 0], [1, 1])).tolist() == [-1, 0]


def test_a_request_that_asks_for_nothing_has_no_rules():
    for fields in ({}, {"min_p": 0.3}, {"logit_bias": {}}, {"bad_words": []}, {"logprobs": 3}):
        assert Rules.of(SamplingParams(**fields), 3, [5], IdText()) is None
    assert Rules.of(SamplingParams(min_tokens=3), 3, [], IdText()) is None  # nothing to hold back
    assert Rules.of(SamplingParams(min_tokens=3), 3, [5], IdText()).stop_ids == (5,)


# ---- bad words as tokens ----


def test_bad_words_are_tokenised_with_and_without_a_space_as_in_vllm():
    tokenizer = make_tokenizer()

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    for word in ("people", " people", "river", "stones", "qz", "Hello"):
        bare, spaced = tokens(word.lstrip()), tokens(" " + word.lstrip())
        both = spaced[0] != bare[0] and len(spaced) == len(bare)
        assert bad_word_ids([word], tokenizer) == ((bare, spaced) if both else (bare,))
    assert [len(bad_word_ids([word], tokenizer)) for word in ("people", "the", "qz")] == [2, 1, 1]
    with pytest.raises(ValueError, match="bad_words holds 'x', which has no tokens"):
        bad_word_ids(["x"], IdText())
