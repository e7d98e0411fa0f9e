"""How many blocks the table of a call has: as many as its positions need, or more where their sums need it.

Attention sums over all slots of a table, masked ones are zeros. A kernel that halves some numbers of slots adds up the
same entries in another order than where it takes them in one go, so a token's last bits would depend on how far the
call that computes it reaches. `export.bitwise` finds out by trial which numbers to leave out.
"""

from __future__ import annotations

from collections.abc import Sequence

PERIOD = 512  # slots; PyTorch's attention on the CPU takes keys in pieces of so many (`kvSplitSize`)

Gaps = Sequence[tuple[int, int]]  # (low, high): a last piece of more than `low` slots is filled up to `high`


def table_width(num_slots: int, block_size: int, gaps: Gaps) -> int:
    """Blocks of a table that reaches so many slots."""
    num_blocks = -(-num_slots // block_size)
    if gaps:
        last = (num_blocks * block_size - 1) % PERIOD + 1
        for low, high in gaps:
            if low < last < high:
                return -(-(num_blocks * block_size + high - last) // block_size)
    return num_blocks


def fit_table(table: list[int], num_blocks: int) -> list[int]:
    """A row's table [M], at least one block, as so many.

    What it lacks is filled up with a block of the row's own, which positions mask: nobody reads the null block, where
    the padding of a row whose states are NaN leaves NaN, and 0 × NaN would reach its neighbours.
    """
    return table[:num_blocks] + table[:1] * (num_blocks - len(table))
