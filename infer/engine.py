"""The loop: admit → run one outer round → hand out what was committed.

Rows join and leave between outer rounds. A row is admitted when the pool can hold it at its longest, so it can never
run out of blocks; requests wait in the order in which they came. Knows neither text nor prompts' origin: `LLM` does.
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
    """

    def __init__(self, runner: Runner, round_: Round, pool: BlockPool, max_num_seqs: int) -> None:
        self.runner = runner
        self.round = round_
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
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
        self._admit()
        running = list(self.running)
        rows = [request.row for request in running if request.row is not None]
        before = [row.num_committed for row in rows]
        self.round.run(rows)
        for request, row, start in zip(running, rows, before, strict=True):
            row.check_integrity()
            if row.is_broken:
                request.commit(row.token_ids[start : row.num_committed - 1])
                if not request.is_finished:
                    request.abort(row.failure or "")
            else:
                request.commit(row.token_ids[start : row.num_committed])
            if request.is_finished:
                self._release(request)
        return running

    def _admit(self) -> None:
        while self.waiting and self._free_rings:
            request = self.waiting[0]
            needed = self.pool.num_blocks_for(request.max_len)
            if needed > self.pool.num_free:
                return
            self.waiting.popleft()
            request.row = Row(
                request.prompt_token_ids,
                request.params,
                seed=request.seed,
                max_len=request.max_len,
                num_tiers=self.runner.num_tiers,
                num_stages=len(self.round.stages),
                blocks=self.pool.allocate(needed),
                ring=self._free_rings.pop(),
                rules=request.rules,
                scores=request.scores,
            )
            self.running.append(request)
            self.runner.prefill(request.row, self.round.judging_tiers)

    def _release(self, request: Request) -> None:
        """Give back all that the request holds, wherever it stands."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
            assert request.row is not None
            if request.row.has_nan:
                self.runner.clear(request.row.block_table)
            self.pool.free(request.row.block_table)
            self._free_rings.append(request.row.ring)

    def check_integrity(self) -> None:
        """Invariant 3 of DESIGN §6, asserted between steps."""
        self.pool.check_integrity(r.row.block_table for r in self.running if r.row is not None)
