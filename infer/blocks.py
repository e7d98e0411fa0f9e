"""Which KV blocks are free.

    block 0                    the null block: padding writes there, no row ever owns it
    blocks 1 .. num_blocks-1   each is either free or has owners: one, who may write it, or several, who only read

Knows numbers only: neither rows, nor what a block holds, nor where.
"""

from collections import Counter
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
        self._num_owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_owners(self, block: int) -> int:
        return self._num_owners[block]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, num: int) -> list[int]:
        """All or nothing: whoever asks has looked at `num_free` first."""
        assert 0 <= num <= self.num_free, f"asked for {num} blocks, {self.num_free} are free"
        blocks = [self._free.pop() for _ in range(num)]
        for block in blocks:
            self._num_owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Another owner for each of these blocks; from now on nobody writes them."""
        for block in blocks:
            assert self._num_owners[block] > 0, f"block {block} is free, nobody can share it"
            self._num_owners[block] += 1

    def grow(self, blocks: list[int], num: int) -> bool:
        """Bring `blocks` up to `num` of them. All or nothing: False when too few are free."""
        missing = num - len(blocks)
        if missing > self.num_free:
            return False
        if missing > 0:
            blocks += self.allocate(missing)
        return True

    def free(self, blocks: Iterable[int]) -> list[int]:
        """One owner less for each; returns those that are free now."""
        freed = []
        for block in blocks:
            assert NULL_BLOCK < block < self.num_blocks, f"block {block} is not one that a row can own"
            assert self._num_owners[block] > 0, f"block {block} freed twice"
            self._num_owners[block] -= 1
            if not self._num_owners[block]:
                freed.append(block)
        self._free += freed
        return freed

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Every block but the null block is free or has the owners that hold it, and no others."""
        held = Counter(block for blocks in owned for block in blocks)
        counts = [held.pop(block, 0) for block in range(self.num_blocks)]
        assert counts[NULL_BLOCK] == 0 and not held, f"unknown blocks {sorted(held)}, null block {counts[NULL_BLOCK]}"
        wrong = {b: (n, m) for b, (n, m) in enumerate(zip(counts, self._num_owners, strict=True)) if n != m}
        assert not wrong, f"block: (holders, owners counted) {wrong}"
        unowned = [block for block, num in enumerate(counts) if num == 0 and block != NULL_BLOCK]
        assert sorted(self._free) == unowned, f"free list {sorted(self._free)}, without owner {unowned}"
