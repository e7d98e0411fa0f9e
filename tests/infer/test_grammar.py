"""Structured outputs are exact under speculation: a grammar's mask is a function of the row's prefix, at every tier."""

import functools
import itertools
import json
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.failures import NOTHING_IN_GRAMMAR
from infer.grammar import GrammarCompiler, GrammarState
from infer.params import SamplingParams
from infer.strategy import Policy
from infer.structured_outputs import StructuredOutputsParams
from tests.tiny_artifact import VOCAB_SIZE, make_tokenizer
from tests.tiny_engine import IN_PLACE, PROMPTS, STRATEGIES, Tiny, hf_logits, make_model
from train.heads import ExitConfig

EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "color": {"enum": ["red", "green", None]},
        "n": {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 99}, "maxItems": 2},
    },
    "required": ["ok", "n"],
}
CHOICES = ["yes", "no", "no way", 'say "é"\n']
REGEX = r"[a-f]{2,6}-\d\d(xy|z){0,3}"
WANTED = {
    "json": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex=REGEX),
    "choice": StructuredOutputsParams(choice=CHOICES),
    "gbnf": StructuredOutputsParams(grammar='root ::= term ("+" term)? \nterm ::= [1-9] [0-9]? | "(" term ")"'),
    "lark": StructuredOutputsParams(grammar='start: WORD " " WORD\nWORD: /[a-z]{2,4}/'),
}
NUM_TOKENS = 60
SPECULATING = [("layerskip", (1, 4, 4)), ("layerskip", (4, 4, 4)), ("hispec", (1, 1, 1)), ("hispec", (3, 6, 3))]


@functools.cache
def tokenizer():
    return make_tokenizer()


@functools.cache
def model():
    return make_model(vocab_size=VOCAB_SIZE)


@functools.cache
def trimmed_model(*texts: str):
    """Lower exits that know EOS and the tokens of these texts alone."""
    vocab = torch.tensor(sorted({EOS, *(i for text in texts for i in tokenizer()(text)["input_ids"])}))
    exits = [
        ExitConfig(name="draft", layer=2, head="layer", vocab_size=len(vocab)),
        ExitConfig(name="intermediate", layer=4, head="linear", vocab_size=len(vocab)),
    ]
    trimmed = make_model(exits=exits, vocab_size=VOCAB_SIZE)
    for exit_ in exits:
        trimmed.set_draft_vocab(exit_.name, vocab)
    return trimmed


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB_SIZE, [EOS])


@functools.cache
def grammar(kind: str):
    return compiler().compile(WANTED[kind])


def engine(strategy: str, policy=(2, 4, 4), of=None, **options) -> Tiny:
    numbers = Policy(num_draft_tokens=policy[0], window=policy[1], inner_rounds=policy[2])
    return Tiny(of or model(), strategy, numbers, tokenizer=tokenizer(), **options)


def params(kind: str, seed: int | None = None, **fields) -> SamplingParams:
    how = {"temperature": 0} if seed is None else {"temperature": 1.5, "seed": seed, "top_p": 0.98}
    return SamplingParams(**how, **{"max_tokens": NUM_TOKENS, "structured_outputs": WANTED[kind]} | fields)


EACH = [params(kind, seed) for kind in WANTED for seed in (None, 7)] + [SamplingParams(temperature=0, max_tokens=9)]
ROWS = [PROMPTS[number % len(PROMPTS)] for number in range(len(EACH))]


@functools.cache
def plain(number: int) -> list[int]:
    """The row alone, by plain decoding."""
    return engine("autoregressive").generate([ROWS[number]], EACH[number], [EOS])[0].token_ids


def is_whole(kind: str, text: str) -> bool:
    if kind == "json":
        value = json.loads(text)
        assert list(value) in (["ok", "n"], ["ok", "color", "n"]), text
        assert isinstance(value["ok"], bool) and value.get("color") in ("red", "green", None)
        return len(value["n"]) <= 2 and all(isinstance(n, int) and -3 <= n <= 99 for n in value["n"])
    if kind == "choice":
        return text in CHOICES
    expressions = {
        "regex": REGEX, "gbnf": r"\(*[1-9][0-9]?\)*(\+\(*[1-9][0-9]?\)*)?", "lark": "[a-z]{2,4} [a-z]{2,4}",
    }  # fmt: skip
    return re.fullmatch(expressions[kind], text) is not None


# ---- plain decoding keeps to the form ----


@pytest.mark.parametrize("kind", WANTED)
def test_texts_have_the_form_that_was_asked_for(kind):
    tiny = engine("autoregressive")
    several = [params(kind), *(params(kind, seed) for seed in range(5))]
    requests = tiny.generate([PROMPTS[2]] * len(several), several, [EOS])
    for request in requests:
        assert request.finish_reason == "stop" and request.stop_reason is None
        assert request.token_ids[-1] == EOS and EOS not in request.token_ids[:-1]
        assert is_whole(kind, request.text), request.text
    assert len({request.text for request in requests}) > 1
    free = tiny.generate([PROMPTS[2]], params(kind, structured_outputs=None), [EOS])[0]
    assert free.token_ids != requests[0].token_ids


def test_choices_are_picked_from_the_targets_own_logits():
    """The oracle: Hugging Face's logits, and every id tried by hand."""
    for prompt in PROMPTS[:4]:
        ids: list[int] = []
        while EOS not in ids:
            logits = hf_logits(model(), [*prompt, *ids])[-1]
            for i in range(VOCAB_SIZE):
                longer = b"".join(as_bytes(j) for j in (*ids, i))
                whole = [choice.encode() for choice in CHOICES]
                is_right = longer in whole if i == EOS else any(c.startswith(longer) for c in whole)
                if not is_right:
                    logits[i] = -torch.inf
            ids.append(int(logits.argmax()))
        got = engine("autoregressive").generate([prompt], params("choice"), [EOS])[0]
        assert got.token_ids == ids


def as_bytes(token_id: int) -> bytes:
    """What a token of the byte-level vocabulary spells; EOS has no text."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's table: the others become 256 and up
    octets = {chr(256 + n): octet for n, octet in enumerate(sorted({*range(256)} - {*shown}))}
    octets |= {chr(octet): octet for octet in shown}
    return b"" if token_id == EOS else bytes(octets[c] for c in tokenizer().convert_ids_to_tokens(token_id))


# ---- speculation changes nothing ----


@pytest.mark.parametrize(("strategy", "policy"), [("autoregressive", (1, 1, 1)), *SPECULATING])
def test_every_strategy_and_batch_gives_plain_decodings_tokens(strategy, policy):
    """Rows of all kinds and one without a grammar, greedy and seeded, share the batch as it grows and shrinks."""
    requests = engine(strategy, policy, max_num_seqs=6).generate(ROWS, EACH, [EOS])
    assert [request.token_ids for request in requests] == [plain(number) for number in range(len(ROWS))]


@pytest.mark.parametrize("strategy", IN_PLACE)
def test_preempted_rows_go_on_where_they_were(strategy):
    tiny = engine(strategy, num_blocks=24)
    requests = tiny.generate(ROWS, EACH, [EOS])
    assert tiny.engine.num_preemptions > 0
    assert [request.token_ids for request in requests] == [plain(number) for number in range(len(ROWS))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_choices_of_one_prompt_walk_the_grammar_on_their_own(strategy):
    several = params("regex", 3, n=4)
    (request,) = engine(strategy).generate([PROMPTS[1]], several, [EOS])
    (alone,) = engine("autoregressive", max_num_seqs=1).generate([PROMPTS[1]], several, [EOS])
    outputs = request.output().outputs
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone.output().outputs]
    assert len({o.text for o in outputs}) == 4 and all(is_whole("regex", o.text) for o in outputs)


@pytest.mark.parametrize(
    "texts", [('{"ok": truefalse, "n": [1]}', "abcdef-0123456789xyz"), ("%%&&",)], ids=["some", "none"]
)
@pytest.mark.parametrize(("strategy", "policy"), SPECULATING)
def test_trimmed_exits_may_lack_the_ids_that_the_grammar_allows(strategy, policy, texts):
    tiny = engine(strategy, policy, of=trimmed_model(*texts))
    requests = tiny.generate(ROWS, EACH, [EOS])
    assert [request.token_ids for request in requests] == [plain(number) for number in range(len(ROWS))]


@pytest.mark.parametrize(("strategy", "policy"), SPECULATING)
def test_wrong_and_broken_drafts_leave_no_trace(strategy, policy):
    """A lower exit proposes ids at random, or none at all, which counts as id 0: EOS, where it can't come yet."""

    def rig(row, tier, position, logits):
        noise = torch.Generator().manual_seed(position * 7 + tier)
        if position % 5 == 0:
            return torch.full_like(logits, torch.nan)
        return torch.randn(logits.shape, generator=noise)

    tiny = engine(strategy, policy, rig=rig)
    requests = tiny.generate(ROWS, EACH, [EOS])
    assert [request.token_ids for request in requests] == [plain(number) for number in range(len(ROWS))]
    assert 0 < tiny.round.stats[-1].num_accepted < tiny.round.stats[-1].num_draft_tokens


@pytest.mark.parametrize(("strategy", "policy"), SPECULATING)
@pytest.mark.parametrize("seed", [None, 5])
def test_exits_that_equal_the_target_are_accepted_always(strategy, policy, seed):
    """They have the target's raw logits, most of which the grammars refuse: so their drafts are masked too."""

    def rig(row, tier, position, logits):
        return hf_logits(model(), row.token_ids[:position])[-1]

    tiny = engine(strategy, policy, rig=rig)
    tiny.generate(PROMPTS[: len(WANTED)], [params(kind, seed) for kind in WANTED], [EOS])
    for stats in tiny.round.stats[1:]:
        assert stats.num_accepted == stats.num_draft_tokens > 0


def test_log_probabilities_are_the_models_own():
    (request,) = engine("hispec").generate([PROMPTS[1]], params("regex", logprobs=1), [EOS])
    logits = hf_logits(model(), [*PROMPTS[1], *request.token_ids])[len(PROMPTS[1]) - 1 : -1].double()
    raw = logits.log_softmax(dim=-1)
    for line, token_id, one in zip(raw, request.token_ids, request.output().outputs[0].logprobs, strict=True):
        assert one[token_id].logprob == pytest.approx(float(line[token_id]), abs=1e-4)
    assert any(one[i].rank > 1 for i, one in zip(request.token_ids, request.logprobs, strict=True))


# ---- where wishes meet ----


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_eos_follows_the_end_under_ignore_eos(strategy):
    (request,) = engine(strategy).generate([PROMPTS[1]], params("choice", ignore_eos=True), [EOS])
    (text,) = engine("autoregressive").generate([PROMPTS[1]], params("choice"), [EOS])
    assert request.token_ids == text.token_ids + [EOS] * (NUM_TOKENS - len(text.token_ids))
    assert request.text == text.text in CHOICES
    assert request.finish_reason == "length"


@pytest.mark.parametrize(
    "fields",
    [{"min_tokens": 30}, {"allowed_token_ids": [5, 6, 7]}, {"allowed_token_ids": list(range(1, 300))}],
    ids=str,
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_without_a_token_to_pick_ends_by_itself_and_says_why(strategy, fields):
    tiny = engine(strategy)
    stuck, other = tiny.generate([PROMPTS[1], ROWS[2]], [params("choice", **fields), EACH[2]], [EOS])
    assert (stuck.finish_reason, stuck.stop_reason) == ("error", NOTHING_IN_GRAMMAR)
    whole = engine("autoregressive").generate([PROMPTS[1]], params("choice", **fields), [EOS])[0]
    assert stuck.token_ids == whole.token_ids and EOS not in stuck.token_ids
    assert other.token_ids == plain(2)


def test_min_tokens_lengthen_a_text_that_can_go_on():
    wanted = StructuredOutputsParams(regex="[ab]+")
    fields = {"min_tokens": 12, "structured_outputs": wanted, "logit_bias": {EOS: 100}}
    (request,) = engine("hispec").generate([PROMPTS[1]], params("regex", **fields), [EOS])
    assert len(request.token_ids) == 13 and re.fullmatch("[ab]+", request.text)


def test_a_grammar_that_the_vocabulary_can_not_spell_ends_the_row():
    wanted = StructuredOutputsParams(regex="a")
    only_b = {"structured_outputs": wanted, "bad_words": ["a"]}
    (request,) = engine("hispec").generate([PROMPTS[1]], params("regex", **only_b), [EOS])
    assert request.stop_reason == NOTHING_IN_GRAMMAR and request.token_ids == []


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_grammar_that_raises_ends_its_row_alone(strategy, k):
    """The k-th mask of two rows fails; those beside them, with such grammars and without, lose and repeat nothing."""
    tiny = engine(strategy, max_num_seqs=len(ROWS))
    requests = [tiny.request(prompt, params, [EOS]) for prompt, params in zip(ROWS, EACH, strict=True)]
    for request in requests:
        tiny.engine.add(request)
    tiny.engine.step()
    for number in (0, 3):
        grammar = requests[number].row.grammar
        grammar.masks = raising_on(k, grammar.masks)
    tiny.drain()
    for number, request in enumerate(requests):
        if number in (0, 3):
            assert (request.finish_reason, request.stop_reason) == ("error", "RuntimeError: out of luck")
            assert request.token_ids == plain(number)[: len(request.token_ids)] != plain(number)
        else:
            assert request.token_ids == plain(number) and request.finish_reason != "error"
    assert tiny.engine.pool.num_free == tiny.engine.pool.num_blocks - 1


def raising_on(k, function):
    calls = itertools.count(1)

    def call(*args):
        if next(calls) == k:
            raise RuntimeError("out of luck")
        return function(*args)

    return call


# ---- masks ----


def ids_of(mask: torch.Tensor) -> set[int]:
    return {i for i in range(VOCAB_SIZE) if int(mask[i // 32]) >> (i % 32) & 1}


def test_special_tokens_and_ids_without_a_token_are_never_allowed():
    """The text of a special token is left out of the answer: were it counted, the rest would be too short."""
    special = make_tokenizer()
    special.add_special_tokens({"additional_special_tokens": ["abab"]})
    number = special.convert_tokens_to_ids("abab")
    wide = GrammarCompiler(special, VOCAB_SIZE + 40, [EOS]).compile(StructuredOutputsParams(regex="[^x]{4}"))
    mask = GrammarState(wide).masks([], 0, 1)[0]
    allowed = {i for i in range(VOCAB_SIZE + 40) if int(mask[i // 32]) >> (i % 32) & 1}
    assert number >= VOCAB_SIZE and allowed and max(allowed) < VOCAB_SIZE and EOS not in allowed


def test_masks_after_the_end_allow_eos_alone_and_after_a_refused_token_anything():
    state = GrammarState(grammar("choice"))
    no, x = (tokenizer()(text)["input_ids"] for text in ("no", "x"))
    masks = state.masks([*no, EOS, *x, EOS], 0, len(no) + 3)
    assert EOS not in ids_of(masks[0]) and EOS in ids_of(masks[len(no)])
    assert ids_of(masks[-2]) == ids_of(masks[-1]) == {EOS}
    assert (state.masks([*no, *x, EOS], len(no) + 1, 2) == -1).all()
    assert ids_of(state.masks(no, len(no), 1)[0]) == ids_of(masks[len(no)])


texts = st.lists(st.sampled_from([EOS, *tokenizer()('nosayew {}":')["input_ids"]]), max_size=7)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kind=st.sampled_from(["choice", "json", "lark"]), asked=st.lists(texts, min_size=1, max_size=6), data=st.data())
def test_masks_depend_on_the_prefix_alone(kind, asked, data):
    """One state, asked in any order about prefixes that part, end or are refused, against a new state each time."""
    state = GrammarState(grammar(kind))
    for text in asked:
        start = data.draw(st.integers(0, len(text)))
        count = data.draw(st.integers(1, len(text) - start + 1))
        got = state.masks(text, start, count)
        for line in range(count):
            assert got[line].equal(GrammarState(grammar(kind)).masks(text[: start + line], start + line, 1)[0])
