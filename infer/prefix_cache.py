"""Which blocks hold the KV of which beginnings of prompts, so that the next prompt of that beginning begins behind it.

    entry    one whole prefill chunk: its ids, its blocks, and the chunk before it

Whole chunks only: a chunk cut short by its prompt's end was computed in a call of another shape, and its KV may have
other bits (DESIGN §7). An entry's key is a SHA-256 over the whole beginning, and its ids are compared on a hit all the
same. Entries own their blocks as rows do; the one that was not used for longest goes first. Knows neither rows nor what
is in a block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from infer.blocks import BlockPool

Key = bytes


class Entry(NamedTuple):
    token_ids: tuple[int, ...]
    blocks: list[int]


class PrefixCache:
    """Chunks by the prompt that leads to them.

    Args:
        pool: owns the blocks.
        chunk_size: tokens in a prefill chunk, a multiple of the block size.
    """

    def __init__(self, pool: BlockPool, chunk_size: int) -> None:
        assert chunk_size % pool.block_size == 0, (chunk_size, pool.block_size)
        self.pool = pool
        self.chunk_size = chunk_size
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # the first is the next to go

    @property
    def blocks(self) -> list[list[int]]:
        return [entry.blocks for entry in self._entries.values()]

    def match(self, token_ids: Sequence[int], tiers: Sequence[int]) -> list[int]:
        """Blocks of the longest known beginning, without the last token, which is always a query.

        tiers: those whose exits the blocks must have been filled for.
        """
        found: list[Key] = []
        for key, chunk in self._chunks(token_ids, tiers):
            entry = self._entries.get(key)
            if entry is None or entry.token_ids != chunk:
                break
            found.append(key)
        self._touch(found)
        return [block for key in found for block in self._entries[key].blocks]

    def insert(self, token_ids: Sequence[int], tiers: Sequence[int], blocks: Sequence[int]) -> None:
        """The prompt's whole chunks are computed, in the first of these blocks."""
        keys, step = list[Key](), self.chunk_size // self.pool.block_size
        for number, (key, chunk) in enumerate(self._chunks(token_ids, tiers)):
            if key not in self._entries:
                held = list(blocks[number * step : (number + 1) * step])
                self.pool.share(held)
                self._entries[key] = Entry(chunk, held)
            keys.append(key)
        self._touch(keys)

    def pop_idle(self) -> list[int] | None:
        """Give up the entry that was not used for longest, of those whose blocks nobody else owns: its blocks, for the
        caller to free. None if there is no such entry."""
        for key, entry in self._entries.items():
            if self._is_idle(entry):
                del self._entries[key]
                return entry.blocks
        return None

    @property
    def num_idle_blocks(self) -> int:
        """What `pop_idle` would give in all."""
        return sum(len(entry.blocks) for entry in self._entries.values() if self._is_idle(entry))

    def _is_idle(self, entry: Entry) -> bool:
        return all(self.pool.num_owners(block) == 1 for block in entry.blocks)

    def _touch(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):  # a chunk is of no use without those before it, so it must go first
            self._entries.move_to_end(key)

    def _chunks(self, token_ids: Sequence[int], tiers: Sequence[int]) -> list[tuple[Key, tuple[int, ...]]]:
        key, chunks = hashlib.sha256(repr(list(tiers)).encode()).digest(), []
        for start in range(0, len(token_ids) - self.chunk_size, self.chunk_size):
            chunk = tuple(token_ids[start : start + self.chunk_size])
            key = hashlib.sha256(key + array("q", chunk).tobytes()).digest()
            chunks.append((key, chunk))
        return chunks
