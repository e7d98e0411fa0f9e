"""The index of n-grams against a search through the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.ngram import NgramIndex


def searched(text: list[int], max_ngram: int, min_ngram: int, limit: int) -> list[int]:
    """The same by comparing the text's end with every place before it, the last place first."""
    for size in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                longer = list(text)
                while len(longer) < len(text) + limit:
                    longer.append(longer[end + len(longer) - len(text)])
                return longer[len(text) :]
    return []


def propose(text: list[int], limit: int = 4, max_ngram: int = 3, min_ngram: int = 2) -> list[int]:
    return NgramIndex(max_ngram, min_ngram).propose(text, limit)


def test_the_continuation_of_the_longest_end_wins_over_a_later_one_of_a_shorter_end():
    assert propose([1, 2, 3, 50, 51, 9, 2, 3, 60, 1, 2, 3]) == [50, 51, 9, 2]


def test_of_equal_ends_the_last_place_wins():
    assert propose([2, 3, 50, 2, 3, 60, 2, 3], limit=2) == [60, 2]


def test_fewer_tokens_than_the_shortest_end_are_not_looked_for():
    assert propose([7, 3, 50, 3], max_ngram=2) == []
    assert propose([7, 3, 50, 3], max_ngram=2, min_ngram=1) == [50, 3, 50, 3]


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 1]])
def test_a_text_too_short_to_repeat_proposes_nothing(text):
    assert propose(text) == []


def test_a_loop_goes_on():
    assert propose([8, 1, 2, 1, 2], limit=7) == [1, 2, 1, 2, 1, 2, 1]
    assert propose([5, 5, 5], limit=4) == [5, 5, 5, 5]


def test_no_room_gives_no_tokens():
    assert propose([5, 5, 5], limit=0) == []


@given(
    parts=st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    limit=st.integers(0, 9),
)
def test_an_index_that_grows_says_what_a_search_says(parts, sizes, limit):
    max_ngram, min_ngram = max(sizes), min(sizes)
    index, text = NgramIndex(max_ngram, min_ngram), list[int]()
    for part in parts:
        text += part
        assert index.propose(text, limit) == searched(text, max_ngram, min_ngram, limit)
