"""Every field of SamplingParams, asked of `LLM` itself: it has its effect, and the same one under speculation.

Each case is the text without the field and with it. If the field were ignored everywhere, the two would be equal; if it
were ignored by the target where it judges drafts, speculation would differ from plain decoding. That lower tiers honour
it, without which drafts are just worse, is what the twin models of test_rules_losslessness.py and test_choices.py show.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from infer.params import _ONLY_ACCEPTED
from infer.strategy import Policy

PROMPTS = ["Hello, world!", "the river and the sea", "A small text"]
NUM_TOKENS = 12
EOS = 0
POLICIES = {"layerskip": Policy(num_draft_tokens=4), "hispec": Policy(num_draft_tokens=3, window=5)}


@pytest.fixture(scope="module")
def llm(artifact: Path) -> LLM:
    return LLM(artifact, seed=0)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, **fields})


def sampled(**fields: Any) -> dict[str, Any]:
    return {"temperature": 8.0, "seed": 1, **fields}


def cases(ids: list[int], text: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Field → what else is asked for, and the field with its value; `ids` and `text`: the first prompt's, plainly."""
    ends_at_once: dict[str, Any] = {"logit_bias": {EOS: 100}}
    few = {"allowed_token_ids": list(range(5, 290, 7))}
    return {
        "temperature": (sampled(), {"temperature": 2.0}),
        "top_p": (sampled(), {"top_p": 0.5}),
        "top_k": (sampled(), {"top_k": 3}),
        "min_p": (sampled(), {"min_p": 0.5}),
        "seed": (sampled(), {"seed": 2}),
        "n": (sampled(), {"n": 3}),
        "max_tokens": ({}, {"max_tokens": 5}),
        "min_tokens": (ends_at_once, {"min_tokens": 5}),
        "stop": ({}, {"stop": [text[4:7]]}),
        "stop_token_ids": ({}, {"stop_token_ids": [ids[4]]}),
        "ignore_eos": (ends_at_once, {"ignore_eos": True}),
        "skip_special_tokens": ({**ends_at_once, "ignore_eos": True}, {"skip_special_tokens": False}),
        "include_stop_str_in_output": ({"stop": [text[4:7]]}, {"include_stop_str_in_output": True}),
        "detokenize": ({}, {"detokenize": False}),
        "presence_penalty": (few, {"presence_penalty": 2.0}),
        "frequency_penalty": (few, {"frequency_penalty": 2.0}),
        "repetition_penalty": ({}, {"repetition_penalty": 3.0}),
        "logit_bias": ({}, {"logit_bias": {ids[2]: -100, 77: 20.0}}),
        "allowed_token_ids": ({}, few),
        "bad_words": ({}, {"bad_words": [c for c in text if c.isascii() and c.isalpha()]}),
        "logprobs": ({}, {"logprobs": 2}),
        "prompt_logprobs": ({}, {"prompt_logprobs": 2}),
        "structured_outputs": ({}, {"structured_outputs": StructuredOutputsParams(regex="[0-9]{3}x+")}),
    }


FIELDS = tuple(cases([1] * NUM_TOKENS, "x" * NUM_TOKENS))


def seen(output: RequestOutput) -> list[Any]:
    """All that a user sees but times; of log probabilities the ids and ranks, as values may differ by rounding."""

    def of(entries: list[Any] | None) -> Any:
        return entries and [entry and {i: one.rank for i, one in entry.items()} for entry in entries]

    return [(o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason, of(o.logprobs)) for o in output.outputs] + [
        of(output.prompt_logprobs)
    ]


def generate(llm: LLM, strategy: str, fields: dict[str, Any]) -> list[list[Any]]:
    llm.use(strategy, POLICIES.get(strategy))
    return [seen(output) for output in llm.generate(PROMPTS, params(**fields))]


@pytest.fixture(scope="module")
def chosen(llm: LLM) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    llm.use("autoregressive")
    done = llm.generate(PROMPTS, params())[0].outputs[0]
    return cases(list(done.token_ids), done.text)


def test_no_field_is_left_out():
    # `speculate` changes no text: test_speculate.py
    assert set(FIELDS) == {f.name for f in dataclasses.fields(SamplingParams)} - set(_ONLY_ACCEPTED) - {"speculate"}


@pytest.mark.parametrize("name", FIELDS)
def test_it_has_its_effect_and_the_same_one_under_speculation(llm, chosen, name):
    others, field = chosen[name]
    assert set(field) == {name}
    without, plain = (generate(llm, "autoregressive", fields) for fields in (others, {**others, **field}))
    assert without != plain
    for strategy in POLICIES:
        assert generate(llm, strategy, {**others, **field}) == plain
