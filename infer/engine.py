"""The loop: make room → admit → prefill → run one outer round → hand out what was committed.

Rows join and leave between outer rounds. A row gets the blocks that its tokens and the next round need, and more before
every round; when none are left the youngest row gives its own back and waits at the front of the queue, to be computed
again (`Runner.next_chunk` says why that changes nothing). So the oldest row always goes on, and as no request is taken
that the pool could not hold alone, all of them end. Knows neither text nor prompts' origin: `LLM` does.

    waiting    preempted rows, then requests that have never run, in the order in which they came
    running    in the order of their admission: [0] is never preempted while another runs

A step prefills at most `max_num_prefill_tokens`, a chunk of one row after a chunk of another, so that a long prompt stalls
neither the rows that decode nor the short prompts behind it.
"""

from __future__ import annotations

from collections import deque

from infer.blocks import BlockPool
from infer.hispec import Round
from infer.request import Request
from infer.row import Row
from infer.runner import Runner


class Engine:
    """Continuous batching over one list of stages.

    Args:
        runner: programs and pages.
        round_: what one step does to the running rows.
        pool: the blocks of the runner's pages.
        max_num_seqs: most rows that run at once.
        max_num_prefill_tokens: most tokens that a step prefills; a step with work for it does at least one chunk.
    """

    def __init__(
        self, runner: Runner, round_: Round, pool: BlockPool, max_num_seqs: int, max_num_prefill_tokens: int = 512
    ) -> None:
        self.runner = runner
        self.round = round_
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.max_num_prefill_tokens = max_num_prefill_tokens
        self.num_preemptions = 0
        self._prefilling: deque[Request] = deque()  # those of `running` that are not ready; [0] gets the next chunk
        self._free_rings = list(range(max_num_seqs, 0, -1))

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def check_fits(self, request: Request) -> None:
        """ValueError when the pool could never hold the request, so that it would wait for ever."""
        needed, usable = self.pool.num_blocks_for(request.max_len), self.pool.num_blocks - 1
        if needed > usable:
            raise ValueError(
                f"request {request.request_id}: prompt of {len(request.prompt_token_ids)} tokens and up to "
                f"{request.max_len - len(request.prompt_token_ids)} new ones need {needed} KV blocks of "
                f"{self.pool.block_size}, the pool has {usable}: lower max_tokens, or give LLM a larger num_blocks"
            )

    def add(self, request: Request) -> None:
        self.check_fits(request)
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """End a request at once, waiting or running; unknown ids are ignored, as it may just have finished."""
        for request in [*self.waiting, *self.running]:
            if request.request_id == request_id:
                request.abort("aborted by the caller")
                self._release(request)

    def step(self) -> list[Request]:
        """One outer round; the requests that it touched, finished ones included."""
        self._make_room()
        self._admit()
        self._prefill()
        touched = [request for request in self.running if _row(request).is_ready]
        rows = [_row(request) for request in touched]
        before = [row.num_committed for row in rows]
        self.round.run(rows)
        for request, row, start in zip(touched, rows, before, strict=True):
            row.check_integrity()
            if row.is_broken:
                request.commit(row.token_ids[start : row.num_committed - 1])
                if not request.is_finished:
                    request.abort("the target's logits are NaN")
            else:
                request.commit(row.token_ids[start : row.num_committed])
            if request.is_finished:
                self._release(request)
        return touched

    # ---- rows come ----

    def _admit(self) -> None:
        while self.waiting and self._free_rings:
            request, blocks = self.waiting[0], list[int]()
            num_tokens = len(request.prompt_token_ids) + len(request.token_ids)
            if not self.pool.grow(blocks, self._num_blocks_for_round(num_tokens, request.max_len)):
                return
            self.waiting.popleft()
            self._place(request, blocks)
            self.running.append(request)
            if not _row(request).is_ready:
                self._prefilling.append(request)

    def _place(self, request: Request, blocks: list[int]) -> None:
        ring = self._free_rings.pop()
        if request.row is not None:
            request.row.restart(blocks, ring, self.runner.num_tiers)
            return
        request.row = Row(
            request.prompt_token_ids,
            request.params,
            seed=request.seed,
            max_len=request.max_len,
            num_tiers=self.runner.num_tiers,
            num_stages=len(self.round.stages),
            blocks=blocks,
            ring=ring,
        )

    def _prefill(self) -> None:
        num_left = self.max_num_prefill_tokens
        while self._prefilling:
            request = self._prefilling[0]
            row = _row(request)
            num_tokens = len(self.runner.next_chunk(row))
            if num_tokens > num_left < self.max_num_prefill_tokens:
                return
            num_left -= num_tokens
            self._prefilling.popleft()
            self.runner.prefill(row, self.round.judging_tiers)
            if not row.is_ready:
                self._prefilling.append(request)

    # ---- blocks ----

    def _num_blocks_for_round(self, num_tokens: int, max_len: int) -> int:
        """Blocks for all positions below those of the next round and its own."""
        return self.pool.num_blocks_for(min(num_tokens - 1 + self.round.reach, max_len))

    def _make_room(self) -> None:
        """Give every row the blocks of its next round, the oldest first; the youngest make way."""
        number = 0
        while number < len(self.running):
            row = _row(self.running[number])
            if self.pool.grow(row.block_table, self._num_blocks_for_round(len(row), row.max_len)):
                number += 1
            else:
                self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        """Take back all that a running row holds, to be computed again; its tokens stay as they are."""
        self._take_back(request)
        _row(request).restart([], 0, self.runner.num_tiers)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    # ---- rows go ----

    def _release(self, request: Request) -> None:
        """Give back all that a finished request holds, wherever it stands."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self._take_back(request)

    def _take_back(self, request: Request) -> None:
        row = _row(request)
        self.running.remove(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        if row.may_hold_nan:
            self.runner.clear(row.block_table)
        self.pool.free(row.block_table)
        self._free_rings.append(row.ring)

    def check_integrity(self) -> None:
        """Invariant 3 of DESIGN §6, asserted between steps."""
        self.pool.check_integrity(_row(request).block_table for request in self.running)
        rings = [_row(request).ring for request in self.running]
        assert 0 not in rings and len({*rings, *self._free_rings}) == len(rings) + len(self._free_rings), rings
        assert set(self._prefilling) == {r for r in self.running if not _row(r).is_ready}
        assert not any(request.row and request.row.block_table for request in self.waiting), "a waiting row has blocks"


def _row(request: Request) -> Row:
    assert request.row is not None
    return request.row
