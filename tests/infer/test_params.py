import dataclasses
import math

import pytest

from infer.params import MAX_STOP_STRINGS, SamplingParams


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens) == (1.0, 1.0, 0, None, 16)
    assert params.skip_special_tokens and not params.ignore_eos and not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-1, -0.1, math.nan, math.inf, True, "0.5", None)],
        *[("top_p", v) for v in (0, -0.1, 1.1, math.nan, True, None)],
        *[("top_k", v) for v in (-5, 1.5, True, None)],
        *[("max_tokens", v) for v in (0, -186, 1.5, True)],
        *[("seed", v) for v in (2**64, -(2**63) - 1, 1.0, True, "7")],
        *[("stop", v) for v in ("", [""], ["a", ""], [1], 1, ["x"] * (MAX_STOP_STRINGS + 1))],
        *[("stop_token_ids", v) for v in ([-1], [1.0], [True], 3, "3")],
        *[("ignore_eos", v) for v in (1, None, "yes")],
    ],
)
def test_bad_values_are_refused_by_the_name_of_their_field(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 1.5), ("frequency_penalty", -2.0), ("repetition_penalty", 1.3),
        ("repetition_penalty", 0), ("min_p", 0.1), ("min_tokens", 8), ("logprobs", 0), ("logprobs", 5),
        ("prompt_logprobs", 1), ("logit_bias", {1: 2.0}), ("bad_words", ["x"]), ("allowed_token_ids", [1]),
        ("detokenize", False), ("structured_outputs", {"json": {}}), ("truncate_prompt_tokens", 5),
        ("spaces_between_special_tokens", False),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_and_never_ignored(field, value):
    with pytest.raises(ValueError, match=f"{field}=.*not supported"):
        SamplingParams(**{field: value})


def test_default_values_of_unsupported_fields_are_accepted_and_unknown_fields_are_not():
    SamplingParams(n=1, presence_penalty=0, repetition_penalty=1, logprobs=None, min_tokens=0)
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_both_readings_of_a_64_bit_seed_are_one_seed():
    assert SamplingParams(seed=2**64 - 1).seed == SamplingParams(seed=-1).seed == -1
    assert SamplingParams(seed=2**63).seed == -(2**63)
    assert SamplingParams(seed=0).seed == 0


def test_stop_has_one_spelling_and_params_can_be_replaced():
    params = SamplingParams(stop="a", stop_token_ids=[3], seed=2**63)
    assert (params.stop, params.stop_token_ids) == (("a",), (3,))
    assert dataclasses.replace(params, top_p=0.5).stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == SamplingParams().stop_token_ids == ()


def test_params_are_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        SamplingParams(0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-39, True), (1e-9, True), (1e-5, False), (1, False)])
def test_tiny_temperatures_are_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy is greedy


@pytest.mark.parametrize("n", [0, -1, 129, 1.5, True, None])
def test_n_must_be_a_whole_number_from_1_to_128(n):
    with pytest.raises(ValueError, match=f"n={n}"):
        SamplingParams(n=n)
