"""Each rule by hand, on logits of six ids, and bad words as tokens."""

import math

import pytest
import torch

from infer.params import SamplingParams
from infer.processors import Processors, Rules, bad_word_ids
from infer.sampler import PickParams, pick
from tests.tiny_artifact import make_tokenizer
from tests.tiny_engine import IdText

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
