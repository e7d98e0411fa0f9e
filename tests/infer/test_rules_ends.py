"""How texts end under rules: nothing is left to pick, logits are NaN, stop tokens and strings, min_tokens."""

import math

import pytest

from infer.failures import NAN_LOGITS, NOTHING_ALLOWED
from tests.infer.rules_oracle import (
    EOS,
    NUM_TOKENS,
    ROWS,
    greedy,
    ids_of,
    oracle,
    plain_text,
    setting,
    soft_model,
    trimmed_model,
    wanted,
)
from tests.tiny_engine import STRATEGIES, Tiny

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
    assert [r.finish_reason for r in got[:3]] == ["length", "error", "error"]
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
    assert (got[1].finish_reason, got[1].stop_reason, got[1].row.has_nan) == ("error", NAN_LOGITS, True)


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
