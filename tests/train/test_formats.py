"""B08: conversations in every convention become the same tokens, or are told with the reason."""

import copy

import pytest

from tests.train.conftest import END, TEMPLATE, make_tokenizer
from train.formats import Encoder

PLAIN = [{"role": "user", "content": "so"}, {"role": "assistant", "content": "now"}]


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return Encoder(tokenizer, [END], 320)


def said(name, value):
    return {"from": name, "value": value}


def turn(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [said("human", "so"), said("gpt", "now")]},
        {"conversations": [said("user", "so"), said("assistant", "now")]},
        {"conversations": PLAIN},
        {"messages": [said("human", "so"), turn("assistant", "now")]},
        {"messages": [{"role": "user", "from": "human", "value": "so"}, said("model", "now")]},
        {"messages": [{**t, "from": None, "value": None} for t in PLAIN], "text": None, "system": None},
        {"prompt": "so", "response": "now"},
        {"messages": [PLAIN[0], {**PLAIN[1], "tool_calls": [], "weight": 1}], "tools": []},
        {"messages": [{**PLAIN[0], "weight": 0}, PLAIN[1]], "tools": "[]"},
    ],
)
def test_every_convention_gives_the_same_tokens(encoder, row):
    assert encoder(row) == encoder({"messages": PLAIN})


def test_a_system_field_is_the_first_turn(encoder):
    turns = [said("human", "so"), said("gpt", "now")]
    wanted = encoder({"messages": [turn("system", "slow"), *PLAIN]})
    assert encoder({"conversations": turns, "system": "slow"}) == wanted
    assert encoder({"conversations": [said("system", "slow"), *turns], "system": "slow"}) == wanted
    with pytest.raises(ValueError, match="two different system prompts"):
        encoder({"conversations": [said("system", "snow"), *turns], "system": "slow"})


def test_all_turns_are_kept_also_two_of_one_role_and_a_first_of_the_assistants(encoder, tokenizer):
    row = {"conversations": [said("gpt", "a"), said("human", "so"), said("human", "slow"), said("gpt", "now")]}
    encoded = encoder(row)
    assert tokenizer.decode(encoded.token_ids).count("<|im_start|>") == 4
    assert tokenizer.decode([t for t, m in zip(*encoded) if m]) == "a<|im_end|>now<|im_end|>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": []}, "conversations must be a non-empty list"),
        ({"conversations": "so"}, "conversations must be a non-empty list"),
        ({"conversations": ["so"]}, r"conversations\[0\] is no object"),
        ({"conversations": [said("human", None), said("gpt", "a")]}, r"conversations\[0\]\.content .* is null"),
        ({"messages": [{"role": "user"}, turn("assistant", "a")]}, r"messages\[0\]\.content .* is missing"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]\.role .* is missing"),
        ({"messages": [turn("user", [{"type": "text"}])]}, r"messages\[0\]\.content must be a text, got list; join"),
        ({"messages": [*PLAIN, turn("tool", "7")]}, r"messages\[2\]: the role 'tool' is none of"),
        ({"messages": [turn("user", "a"), {**turn("assistant", "b"), "tool_calls": [{}]}]}, r"\[1\]\.tool_calls"),
        ({"messages": [turn("user", "a"), {**turn("assistant", "b"), "weight": 0}]}, r"messages\[1\]\.weight=0"),
        ({"messages": PLAIN, "tools": [{"name": "f"}]}, "tools: "),
        ({"prompt": "so", "response": "now", "tools": '[{"name": "f"}]'}, "tools: "),
        ({"messages": [{"role": "user", "from": "gpt", "value": "a"}]}, "differ"),
        ({"messages": [turn("user", "a")]}, "no assistant turn"),
        ({"messages": PLAIN, "system": 7}, "system must be a text, got int"),
        ({"text": None, "messages": None}, "every value is null"),
        ({"token_ids": [1, 1, 5], "loss_mask": [0, 0, 1]}, r"BOS \(1\) twice"),
    ],
)
def test_a_shape_that_cant_be_used_is_told_with_the_reason(encoder, row, reason):
    with pytest.raises(ValueError, match=reason):
        encoder(row)


def test_an_empty_list_of_calls_does_not_reach_the_template(tokenizer):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{% for m in messages if m.tool_calls is defined %}{{ 1 // 0 }}{% endfor %}" + TEMPLATE
    row = {"messages": [PLAIN[0], {**PLAIN[1], "tool_calls": []}]}
    assert Encoder(strict, [END], 320)(row) == Encoder(tokenizer, [END], 320)({"messages": PLAIN})


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_pair_that_is_not_complete_ends_without_eos(template):
    encoder = Encoder(make_tokenizer(template), [END], 320)
    row = {"prompt": "so", "response": "now"}
    assert END in encoder(row).token_ids[-2:] and END not in encoder({**row, "complete": False}).token_ids[-2:]
