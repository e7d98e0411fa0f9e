"""Masks and prompts of each family of chat templates: labels are what serving would have the base write, no more."""

from types import SimpleNamespace

import pytest

from infer.request_maker import RequestMaker
from tests.train.templates import CHATML, GEMMA, LLAMA3, OPENS_A_THOUGHT, QWEN3, REWRITING
from train.formats import Encoder
from train.lint import Answers, check_row, label_runs

FAMILIES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "gemma": GEMMA}
SYSTEM = {"role": "system", "content": "You know"}
TWO_TURNS = [
    {"role": "user", "content": "The assistant?"},
    {"role": "assistant", "content": "So slow"},
    {"role": "user", "content": "So slow"},
    {"role": "assistant", "content": "The user"},
]


def encoder_of(family):
    tokenizer = family.tokenizer()
    return Encoder(tokenizer, [tokenizer.eos_token_id], len(tokenizer))


def labels(encoder, encoded):
    return [encoder.tokenizer.decode(encoded.token_ids[start:stop]) for start, stop in label_runs(encoded)]


def answers_of(family, messages):
    """What carries loss, and what the lint says of it."""
    encoder, row = encoder_of(family), {"messages": messages}
    encoded = encoder(row)
    return labels(encoder, encoded), check_row(encoder, row, encoded)


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_both_answers_and_their_ends_carry_loss_and_nothing_else(name):
    eos = FAMILIES[name].eos
    assert answers_of(FAMILIES[name], TWO_TURNS) == ([f"So slow{eos}", f"The user{eos}"], Answers(2))


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
def test_a_system_turn_carries_no_loss(name):
    spoken, answers = answers_of(FAMILIES[name], [SYSTEM, *TWO_TURNS[:2]])
    assert len(spoken) == 1 and "know" not in spoken[0] and answers == Answers(1)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_row_begins_with_servings_own_prompt_and_holds_one_bos(name):
    """B07: template and tokenizer could each put a BOS."""
    encoder = encoder_of(FAMILIES[name])
    encoded = encoder({"messages": TWO_TURNS[:2]})
    manifest = SimpleNamespace(base=SimpleNamespace(name=name, vocab_size=1), eos_token_ids=[])
    served = RequestMaker(encoder.tokenizer, manifest, seed=0).chat_prompt(TWO_TURNS[:1])  # type: ignore[arg-type]
    start = encoded.loss_mask.index(True)
    assert encoded.token_ids[:start] == served
    if FAMILIES[name].adds_bos:
        assert encoded.token_ids.count(encoder.tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "<think>\nis it?\n</think>\n\nnow"},
        {"content": "now", "reasoning_content": "is it?"},
    ],
)
def test_a_thought_carries_loss_as_the_base_writes_it_itself(answer):
    spoken, answers = answers_of(QWEN3, [TWO_TURNS[0], {"role": "assistant", **answer}])
    assert spoken == ["<think>\nis it?\n</think>\n\nnow<|im_end|>"] and answers == Answers(1)


def test_an_empty_thought_carries_loss_too_since_serving_leaves_it_to_the_base():
    assert answers_of(QWEN3, TWO_TURNS[:2])[0] == ["<think>\n\n</think>\n\nSo slow<|im_end|>"]


@pytest.mark.parametrize("family", [QWEN3, REWRITING], ids=["qwen3", "rewriting"])
def test_answers_that_the_template_rewrites_carry_no_loss_and_are_counted(family):
    turns = [{**TWO_TURNS[0], "content": "The assistant knows"}, *TWO_TURNS[1:]]
    spoken, answers = answers_of(family, turns)
    assert len(spoken) == 1 and spoken[0].endswith("The user<|im_end|>")
    assert answers == Answers(2, num_rewritten=1)
    with pytest.raises(ValueError, match="rewrites every assistant turn"):
        encoder_of(family)({"messages": [*turns[:2], turns[2], turns[2]]})


def test_a_prompt_that_no_written_answer_continues_is_refused():
    with pytest.raises(ValueError, match=r"messages\[1\] otherwise than serving asks .*<think>.*train generate"):
        encoder_of(OPENS_A_THOUGHT)({"messages": TWO_TURNS[:2]})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [([SYSTEM, *TWO_TURNS[:2]], "System role not supported"), ([TWO_TURNS[0], *TWO_TURNS[:2]], "must alternate")],
)
def test_what_a_template_refuses_is_told_in_its_words(messages, reason):
    with pytest.raises(ValueError, match=f"chat template refuses.*{reason}"):
        encoder_of(GEMMA)({"messages": messages})
