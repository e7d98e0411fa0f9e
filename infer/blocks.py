"""Which KV blocks are free.

    block 0                    the null block: padding writes there, no row ever owns it
    blocks 1 .. num_blocks-1   each is either free or owned by exactly one row

Knows numbers only: neither rows, nor what a block holds, nor where.
"""

from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be at least 2: block {NULL_BLOCK} is kept for padding")
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: the block freed last is still in cache
        self._is_free = [block != NULL_BLOCK for block in range(num_blocks)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, num: int) -> list[int]:
        """All or nothing: whoever asks has looked at `num_free` first."""
        assert 0 <= num <= self.num_free, f"asked for {num} blocks, {self.num_free} are free"
        blocks = [self._free.pop() for _ in range(num)]
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def grow(self, blocks: list[int], num: int) -> bool:
        """Bring `blocks` up to `num` of them. All or nothing: False when too few are free."""
        missing = num - len(blocks)
        if missing > self.num_free:
            return False
        if missing > 0:
            blocks += self.allocate(missing)
        return True

    def free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert NULL_BLOCK < block < self.num_blocks, f"block {block} is not one that a row can own"
            assert not self._is_free[block], f"block {block} freed twice"
            self._is_free[block] = True
            self._free.append(block)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Blocks owned by rows + free blocks = all blocks but the null block, none of them twice."""
        held = sorted([*self._free, *(block for blocks in owned for block in blocks)])
        expected = list(range(NULL_BLOCK + 1, self.num_blocks))
        assert held == expected, (
            f"lost {sorted(set(expected) - set(held))}, held twice {sorted({b for b in held if held.count(b) > 1})}, "
            f"unknown {sorted(set(held) - set(expected))}"
        )
        assert sorted(self._free) == [b for b in expected if self._is_free[b]], "free list and flags disagree"
