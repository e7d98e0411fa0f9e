import pytest

from tests.train.conftest import END
from train.chat import encode_messages, encode_text


def labels(tokenizer, encoded):
    return tokenizer.decode([t for t, m in zip(*encoded) if m])


def turn(role, content):
    return {"role": role, "content": content}


def test_only_the_assistants_tokens_and_their_eos_carry_loss(tokenizer):
    encoded = encode_messages(tokenizer, [turn("user", "know?"), turn("assistant", "So slow")], [END])
    assert labels(tokenizer, encoded) == "So slow<|im_end|>"
    assert encoded.token_ids[-2] == END and encoded.loss_mask[-2] and not encoded.loss_mask[-1]


def test_every_assistant_turn_carries_loss(tokenizer):
    messages = [turn("user", "a"), turn("assistant", "one"), turn("user", "b"), turn("assistant", "two")]
    assert labels(tokenizer, encode_messages(tokenizer, messages, [END])) == "one<|im_end|>two<|im_end|>"


def test_an_answer_that_stands_in_other_turns_too_is_not_mistaken_for_them(tokenizer):
    messages = [turn("assistant", "a"), turn("user", "a user message"), turn("assistant", "user")]
    assert labels(tokenizer, encode_messages(tokenizer, messages, [END])) == "a<|im_end|>user<|im_end|>"


def test_an_unfinished_answer_ends_without_eos(tokenizer):
    encoded = encode_messages(tokenizer, [turn("user", "a"), turn("assistant", "so s")], [END], complete=False)
    assert labels(tokenizer, encoded) == "so s" and encoded.loss_mask[-1]


@pytest.mark.parametrize(("prompt", "answer"), [("The s", "now"), ("x", "\n\nyes"), ("so ", " now")])
def test_a_token_over_the_seam_counts_as_answer(tokenizer, prompt, answer):
    encoded = encode_text(tokenizer, answer, prompt=prompt)
    whole = tokenizer.decode(encoded.token_ids)
    assert whole == prompt + answer
    assert labels(tokenizer, encoded).endswith(answer)
    assert encoded.loss_mask == sorted(encoded.loss_mask)


def test_a_template_that_strips_content_marks_what_is_left(tokenizer):
    import copy

    stripping = copy.deepcopy(tokenizer)
    stripping.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | trim")
    encoded = encode_messages(stripping, [turn("assistant", " A \n"), turn("user", "user message")], [END])
    assert labels(stripping, encoded) == "A<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "non-empty"),
        ([turn("user", "a")], "no assistant"),
        ([turn("user", None), turn("assistant", "a")], r"messages\[0\].content"),
        ([turn("user", ["a"]), turn("assistant", "a")], r"messages\[0\].content"),
        ([{"from": "gpt", "value": "a"}], r"messages\[0\].role"),
    ],
)
def test_malformed_messages_are_told_with_the_reason(tokenizer, messages, reason):
    with pytest.raises(ValueError, match=reason):
        encode_messages(tokenizer, messages, [END])


@pytest.mark.real
def test_the_embedded_models_stock_template_marks_the_answer_and_its_eos(real_base):
    """B04: the template has no generation block, and its default system turn names an assistant."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(real_base)
    encoded = encode_messages(own, [turn("user", "What is AI?"), turn("assistant", "AI assistant")], [own.eos_token_id])
    assert labels(own, encoded) == "AI assistant<|im_end|>"
    assert own.decode(encoded.token_ids).count("<|im_start|>") == 3  # system, user, assistant: no BOS before them
