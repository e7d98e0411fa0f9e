import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.verify import accepted_prefix_lengths, mean_acceptance_length, verify

TOKEN = st.integers(-1, 2)


@given(drafted=st.lists(TOKEN, max_size=6), data=st.data())
def test_verify_takes_the_longest_prefix_that_the_judge_picks_and_then_its_own(drafted, data):
    picks = data.draw(st.lists(TOKEN, min_size=len(drafted) + 1, max_size=len(drafted) + 1))
    num_accepted, own_token = verify(drafted, picks)
    assert drafted[:num_accepted] == picks[:num_accepted] and min(picks[:num_accepted], default=0) >= 0
    assert own_token == picks[num_accepted]
    if num_accepted < len(drafted):
        assert own_token != drafted[num_accepted] or own_token == -1
    matches = torch.tensor([[d == p >= 0 for d, p in zip(drafted, picks, strict=False)]])
    assert accepted_prefix_lengths(matches.view(1, len(drafted))).item() == num_accepted


def test_the_first_drafted_token_is_judged_too():
    # Known failure A04: draft[0] was always taken, because draft[i + 1] was compared with the choice after draft[i].
    assert verify([1], [9, 5]) == (0, 9)
    assert verify([1, 5, 6], [9, 5, 6, 7]) == (0, 9)


def test_all_accepted_gives_the_bonus_token_and_none_drafted_gives_the_own_token():
    assert verify([4, 5], [4, 5, 6]) == (2, 6)
    assert verify([], [4]) == (0, 4)


def test_a_broken_judge_accepts_nothing_and_shows_it():
    assert verify([-1, 5], [-1, 5, 6]) == (0, -1)


def test_accepted_prefix_lengths_stops_at_the_first_miss():
    matches = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1]]).bool()
    assert accepted_prefix_lengths(matches).tolist() == [3, 1, 0]


def test_mean_acceptance_length_counts_the_judges_own_token():
    assert mean_acceptance_length(30, 10) == pytest.approx(4.0)
    assert mean_acceptance_length(0, 10) == mean_acceptance_length(0, 0) == 1.0
