import dataclasses
import math

import pytest

from infer.params import MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_STOP_STRINGS, SamplingParams


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
        *[("detokenize", v) for v in (1, None, "yes")],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan, True, None)],
        *[(f"{name}_penalty", v) for name in ("presence", "frequency") for v in (-2.1, 2.1, math.nan, True, None, "1")],
        *[("repetition_penalty", v) for v in (0, -1, math.nan, math.inf, True, None)],
        *[("min_tokens", v) for v in (-1, 17, 1.0, True, None)],  # max_tokens is 16
        *[(name, v) for name in ("logprobs", "prompt_logprobs") for v in (-2, 1.0, True, "3")],
        *[("logit_bias", v) for v in ({-1: 1.0}, {1.0: 1.0}, {"AI": 1.0}, {True: 1.0}, [1], "x")],
        *[("logit_bias", {5: v}) for v in (math.nan, math.inf, -1000, 100.5, True, "1", None)],
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)),
        *[("allowed_token_ids", v) for v in ([], [-1], [1.0], [True], 3, "3")],
        *[("bad_words", v) for v in ("word", [""], ["a", ""], ["  "], [1], 1, ["x"] * (MAX_BAD_WORDS + 1))],
    ],
)
def test_bad_values_are_refused_by_the_name_of_their_field(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("truncate_prompt_tokens", 5), ("spaces_between_special_tokens", False),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_and_never_ignored(field, value):
    with pytest.raises(ValueError, match=f"{field}=.*not supported"):
        SamplingParams(**{field: value})


def test_default_values_of_unsupported_fields_are_accepted_and_unknown_fields_are_not():
    SamplingParams(n=1, structured_outputs=None, truncate_prompt_tokens=None)
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("presence_penalty", v) for v in (-2, 0, 2.0)],
        *[("frequency_penalty", v) for v in (-2.0, 2)],
        *[("repetition_penalty", v) for v in (0.1, 1, 50)],
        *[("min_p", v) for v in (0, 1, 0.5)],
        *[("min_tokens", v) for v in (0, 16)],
        *[(name, v) for name in ("logprobs", "prompt_logprobs") for v in (-1, 0, 5, None)],
        *[("logit_bias", v) for v in (None, {}, {3: 100}, {3: -100.0, 4: 1})],
        ("allowed_token_ids", None),
        ("detokenize", False),
    ],
)
def test_values_at_the_bounds_are_taken(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_fields_with_several_spellings_get_one():
    assert SamplingParams(allowed_token_ids=[3, 4]).allowed_token_ids == (3, 4)
    assert SamplingParams(bad_words=["a", "b"]).bad_words == ("a", "b")
    assert SamplingParams().bad_words == ()
    biases = {3: 1.0}
    params = SamplingParams(logit_bias=biases)
    biases[4] = 2.0
    assert params.logit_bias == {3: 1.0}


def test_min_tokens_needs_no_limit_above_it():
    assert SamplingParams(min_tokens=100, max_tokens=None).min_tokens == 100


def test_stop_strings_need_a_text():
    with pytest.raises(ValueError, match=r"detokenize=False.*stop"):
        SamplingParams(detokenize=False, stop="x")


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("stop_token_ids", [3, 128], [127]),
        ("allowed_token_ids", [128], [127]),
        ("logit_bias", {128: 1.0}, {127: 1.0}),
        ("logprobs", 129, 128),
        ("prompt_logprobs", 129, -1),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused_by_name(field, bad, good):
    SamplingParams(**{field: good}).check_vocabulary(128)
    with pytest.raises(ValueError, match=f"{field}.*12[89]"):
        SamplingParams(**{field: bad}).check_vocabulary(128)


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
