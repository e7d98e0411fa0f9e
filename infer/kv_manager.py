"""Who holds which KV blocks: running rows, and prompts that are kept for those who will need them again.

    a row's own blocks        it writes them
    a prompt's whole blocks   read by all choices of the prompt together; the block that it fills in part is copied
    cached chunks             read by every prompt of that beginning (`PrefixCache`, if there is one)

Whoever may hold NaN says so when it gives its blocks back, and they are zeroed before somebody else gets them. Decides
nothing about which row runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from infer.blocks import BlockPool
from infer.prefix_cache import PrefixCache
from infer.request import Request
from infer.row import Row
from infer.runner import Runner


class Place(NamedTuple):
    blocks: list[int]
    num_computed: int  # positions whose KV is there already


class KVManager:
    def __init__(self, pool: BlockPool, runner: Runner, prefix_cache: PrefixCache | None) -> None:
        self.pool = pool
        self.runner = runner
        self.prefix_cache = prefix_cache
        self.sharing: list[Request] = []  # leaders that hold their prompt's blocks for siblings still to be admitted
        self._suspects: set[int] = set()  # blocks that may hold NaN and have other owners yet

    def allocate(self, request: Request, num_blocks: int, tiers: Sequence[int]) -> Place | None:
        """Blocks for a request that is about to run, those that are known already among them; None: too few are free.

        tiers: those whose exits read what is computed.
        """
        blocks, num_computed = self._known(request, tiers)
        self.pool.share(blocks)
        num_whole = len(blocks)
        if not self.grow(blocks, num_blocks):
            self.pool.free(blocks)
            return None
        if num_computed > num_whole * self.pool.block_size:
            shared = (request.leader or request).shared_blocks
            assert shared is not None
            self.runner.copy(shared[num_whole], blocks[num_whole])
        return Place(blocks, num_computed)

    def grow(self, blocks: list[int], num_blocks: int) -> bool:
        """Bring `blocks` up to `num_blocks`, all or nothing. Cached chunks that nobody reads are as good as free."""
        num_idle = self.prefix_cache.num_idle_blocks if self.prefix_cache else 0
        if num_blocks - len(blocks) > self.pool.num_free + num_idle:
            return False  # and nothing is given up for it
        while not self.pool.grow(blocks, num_blocks):
            idle = self.prefix_cache.pop_idle() if self.prefix_cache else None
            if idle is None:
                return False
            self.give_back(idle)
        return True

    def give_back(self, blocks: Sequence[int], may_hold_nan: bool = False) -> None:
        """Free blocks; those that may hold NaN are zeroed once their last owner goes."""
        if may_hold_nan:
            self._suspects.update(blocks)
        freed = self.pool.free(blocks)
        if self._suspects and (dirty := self._suspects.intersection(freed)):
            self.runner.clear(sorted(dirty))
            self._suspects -= dirty

    def _known(self, request: Request, tiers: Sequence[int]) -> Place:
        """The whole blocks of its prompt that are held for it or cached."""
        num_prompt, size = len(request.prompt_token_ids) - 1, self.pool.block_size
        shared = (request.leader or request).shared_blocks
        if shared is not None:
            return Place(shared[: num_prompt // size], num_prompt)
        wants_prompt_scores = request.scores is not None and request.scores.num_prompt is not None
        if self.prefix_cache is None or wants_prompt_scores:  # those need the hidden states, which nobody keeps
            return Place([], 0)
        blocks = self.prefix_cache.match(request.prompt_token_ids, tiers)
        return Place(blocks, len(blocks) * size)

    # ---- kept prompts ----

    def share(self, leader: Request, row: Row) -> None:
        """Hold the computed prompt for the leader's siblings. The leader goes on to write in the last block."""
        num_whole, rest = divmod(len(leader.prompt_token_ids) - 1, self.pool.block_size)
        shared = row.block_table[:num_whole]
        if rest:
            last = list[int]()
            if not self.grow(last, 1):
                return  # the siblings compute the prompt themselves
            self.runner.copy(row.block_table[num_whole], last[0])
        self.pool.share(shared)
        leader.shared_blocks = shared + last if rest else shared
        self.sharing.append(leader)

    def unshare_if_done(self, sibling: Request) -> None:
        """Give the prompt's blocks back when every sibling has begun."""
        leader = sibling.leader
        if leader is None or leader.shared_blocks is None:
            return
        if all(s.row is not None or s.is_finished for s in leader.siblings):
            self._unshare(leader)

    def relieve(self) -> bool:
        """Give up a prompt that is held, whose siblings will compute it themselves; False if there is none."""
        if self.sharing:
            self._unshare(self.sharing[-1])
            return True
        return False

    def _unshare(self, leader: Request) -> None:
        assert leader.shared_blocks is not None and leader.row is not None
        self.sharing.remove(leader)
        self.give_back(leader.shared_blocks, leader.row.may_hold_nan)
        leader.shared_blocks = None

    def remember(self, row: Row, tiers: Sequence[int]) -> None:
        """Cache the prompt of a row that a round of all tiers has read without finding NaN."""
        if self.prefix_cache is not None and not row.may_hold_nan:
            self.prefix_cache.insert(row.token_ids[: row.num_prompt_tokens], tiers, row.block_table)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Invariant 3 of DESIGN §6, for these rows' block tables and all that is kept."""
        kept = [leader.shared_blocks or [] for leader in self.sharing]
        cached = self.prefix_cache.blocks if self.prefix_cache else []
        self.pool.check_integrity([*tables, *kept, *cached])
