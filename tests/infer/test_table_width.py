"""Widths of block tables: enough for a call, and none that a kernel's sums make a token's bits depend on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.table_width import PERIOD, fit_table, table_width

GAPS = [(192, 384)]


@given(num_slots=st.integers(1, 5000), block_size=st.sampled_from([1, 8, 16, 48, 64, 128, 256]))
def test_a_table_reaches_as_far_as_asked_and_never_ends_in_a_gap(num_slots, block_size):
    width = table_width(num_slots, block_size, GAPS)
    assert width * block_size >= num_slots
    last = (width * block_size - 1) % PERIOD + 1
    assert not 192 < last < 384
    assert table_width(width * block_size, block_size, GAPS) == width  # what is wide enough stays


@given(num_slots=st.integers(1, 5000), block_size=st.integers(1, 64))
def test_without_gaps_it_is_no_wider_than_needed(num_slots, block_size):
    assert 0 <= table_width(num_slots, block_size, ()) * block_size - num_slots < block_size


@pytest.mark.parametrize(
    ("num_slots", "expected"),
    [(192, 12), (193, 24), (384, 24), (385, 25), (512, 32), (513, 33), (512 + 192, 44), (512 + 193, 56)],
)
def test_a_gap_comes_again_every_period(num_slots, expected):
    assert table_width(num_slots, 16, GAPS) == expected


def test_whole_periods_are_a_gap_too():
    assert [table_width(n, 16, [(0, PERIOD)]) for n in (1, 512, 513)] == [32, 32, 64]


@given(table=st.lists(st.integers(1, 99), min_size=1), num_blocks=st.integers(1, 20))
def test_a_fitted_table_has_a_rows_own_blocks_alone(table, num_blocks):
    fitted = fit_table(table, num_blocks)
    assert len(fitted) == num_blocks
    assert fitted[: len(table)] == table[:num_blocks]
    assert set(fitted[len(table) :]) <= {table[0]}
