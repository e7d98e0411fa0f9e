import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.params import SamplingParams
from infer.row import Row


def make_row(num_tokens: int = 5, cursors: tuple[int, ...] = (4, 4, 4), max_len: int = 40) -> Row:
    row = Row(
        range(num_tokens), SamplingParams(), seed=0, max_len=max_len, num_tiers=len(cursors), num_stages=1,
        blocks=[1, 2], ring=1,
    )  # fmt: skip
    row.cursors = list(cursors)
    row.exit_cursors = [max(c - 1, 0) for c in cursors]
    return row


def state(row: Row) -> tuple:
    return list(row.token_ids), list(row.cursors), list(row.exit_cursors), list(row.block_table), row.ring


@st.composite
def rows(draw: st.DrawFn) -> Row:
    num_tokens = draw(st.integers(1, 20))
    falling = sorted((draw(st.integers(0, num_tokens - 1)) for _ in range(3)), reverse=True)
    return make_row(num_tokens, tuple(falling))


@given(row=rows(), keep=st.integers(0, 20))
def test_truncate_is_idempotent(row, keep):
    row.truncate(keep)
    once = state(row)
    row.truncate(keep)
    assert state(row) == once


@given(row=rows(), extra=st.lists(st.integers(0, 99), max_size=8))
def test_truncate_after_append_restores_state(row, extra):
    before = state(row)
    for token_id in extra:
        row.append(token_id)
    row.cursors[0] = len(row)  # the lowest tier has computed all of it
    row.truncate(len(before[0]))
    assert row.token_ids == before[0]
    assert row.cursors[1:] == before[1][1:]
    assert row.cursors[0] == len(before[0])
    assert (row.block_table, row.ring) == before[3:]


@given(row=rows(), first=st.integers(1, 20), second=st.integers(1, 20))
def test_two_truncations_are_the_shorter_one(row, first, second):
    other = make_row(len(row), tuple(row.cursors))
    row.truncate(first)
    row.truncate(second)
    other.truncate(min(first, second))
    assert state(row) == state(other)
    assert row.cursors == sorted(row.cursors, reverse=True)
    assert all(cursor <= len(row) for cursor in row.cursors + row.exit_cursors)


def test_num_committed_is_one_beyond_the_targets_cursor():
    assert make_row(9, (8, 6, 3)).num_committed == 4


def test_a_full_row_takes_no_token():
    row = make_row(4, (3,), max_len=5)
    row.append(1)
    with pytest.raises(AssertionError, match="full at 5"):
        row.append(1)


@pytest.mark.parametrize("cursors", [(4, 4, 3), (5, 4, 4), (3, 3, 3)])
def test_check_integrity_sees_a_tier_that_is_not_before_the_last_token(cursors):
    make_row(5).check_integrity()
    with pytest.raises(AssertionError, match="cursors"):
        make_row(5, cursors).check_integrity()


def test_check_integrity_sees_an_exit_ahead_of_its_tier():
    row = make_row(5)
    row.exit_cursors[1] = 5
    with pytest.raises(AssertionError, match="ahead"):
        row.check_integrity()
