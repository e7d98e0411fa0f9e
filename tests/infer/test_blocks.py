import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infer.blocks import NULL_BLOCK, BlockPool


class Rows(RuleBasedStateMachine):
    """Rows that come, grow, ask for too much and go, in any order (DESIGN §6, invariant 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=9, block_size=4)
        self.rows: list[list[int]] = []

    @rule(num=st.integers(0, 8))
    def add(self, num: int) -> None:
        if num <= self.pool.num_free:
            self.rows.append(self.pool.allocate(num))
            assert len(self.rows[-1]) == num

    @rule(extra=st.integers(1, 5))
    def ask_for_too_much(self, extra: int) -> None:
        before = self.pool.num_free
        with pytest.raises(AssertionError, match="are free"):
            self.pool.allocate(before + extra)
        assert self.pool.num_free == before

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), num=st.integers(0, 10))
    def grow(self, data: st.DataObject, num: int) -> None:
        row = data.draw(st.sampled_from(self.rows))
        before, free = list(row), self.pool.num_free
        if self.pool.grow(row, num):
            assert row[: len(before)] == before and len(row) == max(num, len(before))
        else:  # all or nothing
            assert num - len(before) > free == self.pool.num_free and row == before

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        row = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        kept = {block for other in self.rows for block in other}
        freed = self.pool.free(row)
        assert freed == [block for block in row if block not in kept]
        if freed:
            with pytest.raises(AssertionError, match="freed twice"):
                self.pool.free(freed)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        head = row[: data.draw(st.integers(0, len(row)))]
        self.pool.share(head)
        self.rows.append(head)

    @invariant()
    def every_block_is_free_or_owned(self) -> None:
        self.pool.check_integrity(self.rows)
        owned = {block for row in self.rows for block in row}
        assert len(owned) == 8 - self.pool.num_free
        assert NULL_BLOCK not in owned


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("owned", [[], [[1, 2], [2]], [[1]], [[1, 2], [3]], [[0, 1, 2]]])
def test_check_integrity_sees_lost_doubled_and_unknown_blocks(owned):
    pool = BlockPool(num_blocks=6, block_size=4)
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(AssertionError):
        pool.check_integrity(owned)
    pool.check_integrity([[1, 2]])


@pytest.mark.parametrize("block", [0, -1, 6])
def test_free_refuses_blocks_that_no_row_can_own(block):
    with pytest.raises(AssertionError, match="not one that a row can own"):
        BlockPool(num_blocks=6, block_size=4).free([block])


def test_num_blocks_for_rounds_up():
    pool = BlockPool(num_blocks=2, block_size=16)
    assert [pool.num_blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(("num_blocks", "block_size", "name"), [(1, 16, "num_blocks"), (2, 0, "block_size")])
def test_impossible_sizes_are_refused_by_name(num_blocks, block_size, name):
    with pytest.raises(ValueError, match=f"{name}="):
        BlockPool(num_blocks, block_size)
