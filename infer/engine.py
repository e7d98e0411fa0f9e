"""The loop: make room → admit → prefill → run one outer round → hand out what was committed.

Rows join and leave between outer rounds. A row gets the blocks that its tokens and the next round need, and more before
every round; when none are left the youngest row gives its own back and waits at the front of the queue, to be computed
again (`Runner.next_chunk` says why that changes nothing). So the oldest row always goes on, and as no request is taken
that the pool could not hold alone, all of them end. Knows neither text nor prompts' origin: `LLM` does.

    waiting    preempted rows, then requests that have never run, in the order in which they came
    running    in the order of their admission: [0] is never preempted while another runs

A step prefills at most `max_num_prefill_tokens`, a chunk of one row after a chunk of another, so that a long prompt
stalls neither the rows that decode nor the short prompts behind it.

With n > 1 the leader computes the prompt; its siblings get to the front of the queue then and begin behind it, in the
prompt's own blocks, which they read together, and in a copy of the last one if the prompt fills it in part.

An exception out of a program ends the rows of that call, one out of a grammar its row, with the cause; the others take
the round again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

from infer.blocks import BlockPool
from infer.failures import ProgramError
from infer.kv_manager import KVManager
from infer.params import SamplingParams
from infer.payoff import Payoff
from infer.prefix_cache import PrefixCache
from infer.request import Request
from infer.round import Round
from infer.row import Row
from infer.runner import Runner

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one list of stages.

    Args:
        runner: programs and pages.
        round_: what one step does to the running rows.
        pool: the blocks of the runner's pages.
        max_num_seqs: most rows that run at once.
        max_num_prefill_tokens: most tokens that a step prefills; a step with work for it does at least one chunk.
        prefix_cache: over the same pool; None computes every prompt.
    """

    def __init__(
        self,
        runner: Runner,
        round_: Round,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_prefill_tokens: int = 512,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.runner = runner
        self.round = round_
        self.payoff: Payoff | None = None  # decides which rounds speculate; None: all do
        self.pool = pool
        self.kv = KVManager(pool, runner, prefix_cache)
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
        scratch, usable = self._num_scratch_blocks(request.params), self.pool.num_blocks - 1
        needed = self.pool.num_blocks_for(request.max_len) + scratch
        if needed > usable:
            raise ValueError(
                f"request {request.request_id}: prompt of {len(request.prompt_token_ids)} tokens and up to "
                f"{request.max_len - len(request.prompt_token_ids)} new ones need {needed} KV blocks of "
                f"{self.pool.block_size}{f' ({scratch} for branches)' if scratch else ''}, the pool has {usable}: "
                "lower max_tokens, or give LLM a larger num_blocks"
            )

    def add(self, request: Request) -> None:
        self.check_fits(request)
        request.arrival_time = time.perf_counter()
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """End a request at once, waiting or running; unknown ids are ignored, as it may just have finished."""
        for request in [*self.waiting, *self.running]:
            if request.request_id == request_id:
                for sibling in request.pending:
                    sibling.abort("aborted by the caller")
                request.pending.clear()
                request.abort("aborted by the caller")
                self._release(request)

    def step(self) -> list[Request]:
        """One outer round; the requests that it touched, finished ones included."""
        self._make_room()
        self._admit()
        failed = self._prefill()
        self._admit_siblings()
        touched = [request for request in self.running if _row(request).is_ready]
        failed += self._run_round(touched)
        for request in touched:
            if request.is_finished:
                self._release(request)
        return [*touched, *(request for request in failed if request not in touched)]

    def _run_round(self, requests: Sequence[Request]) -> list[Request]:
        """Decode and commit; the requests that failed."""
        rows = [_row(request) for request in requests]
        before = [row.num_committed for row in rows]
        if self.payoff is not None and rows:
            self.payoff.choose(rows)
        try:
            self._fill_exits(rows)
            began = time.perf_counter()
            self.round.run(rows)
        except BaseException as error:
            for row, num_committed in zip(rows, before, strict=True):
                row.rewind(num_committed)
            if not isinstance(error, Exception):  # Ctrl-C: the rows can go on later
                raise
            hit = {id(row) for row in (error.rows if isinstance(error, ProgramError) else rows)}
            failed = [request for request, row in zip(requests, rows, strict=True) if id(row) in hit]
            self._fail(failed, error)
            return failed
        now = time.perf_counter()
        if self.payoff is not None and rows:
            gained = [row.num_committed - start for row, start in zip(rows, before, strict=True)]
            self.payoff.note(rows, gained, now - began)
        for request, row, start in zip(requests, rows, before, strict=True):
            row.check_integrity()
            stop = row.num_committed - row.is_broken  # the token that NaN logits gave is none
            try:
                request.commit(row.token_ids[start:stop])
                request.note_time(now)
            except Exception as error:  # a tokenizer may stumble over ids that a model should not give
                self._fail([request], error)
            if start == row.num_prompt_tokens and request.choice == 0 and request.finish_reason != "error":
                self.kv.remember(row, self.round.judging_tiers)
            if row.is_broken and not request.is_finished:
                logger.error("request %s failed: %s", request.request_id, row.failure)
                request.break_off(row.failure or "")
        return []

    def _fill_exits(self, rows: Sequence[Row]) -> None:
        """Let exits that passed a prompt over catch up with it in the rows that are about to speculate."""
        waiting = [row for row in rows if row.exits_wait and row.speculates]
        if not waiting:
            return
        began = time.perf_counter()
        for row in waiting:
            self.runner.fill_exits(row, self.round.judging_tiers)
        if self.payoff is not None:
            self.payoff.note_fill(sum(map(len, waiting)), time.perf_counter() - began)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        cause = error.__cause__ if isinstance(error, ProgramError) and error.__cause__ else error
        logger.error("requests %s failed", [request.request_id for request in requests], exc_info=cause)
        for request in requests:
            for sibling in request.pending:  # they have the same prompt
                sibling.fail(cause)
            request.pending.clear()
            request.fail(cause)
            _row(request).has_nan = True  # whatever the program left in its blocks
            self._release(request)

    # ---- rows come ----

    def _admit(self) -> None:
        tiers = self.round.judging_tiers
        while self.waiting and self._free_rings:
            request = self.waiting[0]
            num_tokens = len(request.prompt_token_ids) + len(request.token_ids)
            place = self.kv.allocate(
                request, self._num_blocks_for_round(num_tokens, request.max_len, request.params), tiers
            )
            if place is None:
                if self.running or not self.kv.relieve():
                    return
                continue  # prompts that are held must not keep out the only row that there is
            self.waiting.popleft()
            row = self._place(request, place.blocks)
            row.exits_wait = not self._asks_exits(request)
            row.skip(place.num_computed, tiers)
            self.running.append(request)
            if not row.is_ready:
                self._prefilling.append(request)
            self.kv.unshare_if_done(request)

    def _asks_exits(self, request: Request) -> bool:
        """Whether its prompt's keys are to be computed in exits too, and not once it speculates, which it may never.
        Where others are to read them, they are."""
        if self.kv.prefix_cache is not None or request.siblings or request.leader is not None:
            return True
        if not request.params.speculate:
            return False
        if self.payoff is None:
            return True
        num_rows = 1 + len(self.running) + min(len(self.waiting), len(self._free_rings))
        num_tokens = len(request.prompt_token_ids) + len(request.token_ids)
        return self.payoff.expects_gain(num_rows, request.max_len - num_tokens, num_tokens, self.runner.exit_seconds)

    def _place(self, request: Request, blocks: list[int]) -> Row:
        ring, num_tiers = self._free_rings.pop(), self.runner.num_tiers
        if request.row is not None:
            request.row.restart(blocks, ring, num_tiers)
            return request.row
        request.row = Row(
            request.prompt_token_ids,
            request.params,
            seed=request.seed,
            max_len=request.max_len,
            num_tiers=num_tiers,
            num_stages=len(self.round.stages),
            blocks=blocks,
            ring=ring,
            choice=request.choice,
            rules=request.rules,
            scores=request.scores,
        )
        return request.row

    def _prefill(self) -> list[Request]:
        """Compute chunks of rows that are not ready, in turn; the requests that failed."""
        num_left, failed = self.max_num_prefill_tokens, list[Request]()
        while self._prefilling:
            request = self._prefilling[0]
            row = _row(request)
            num_tokens = len(self.runner.next_chunk(row))
            if num_tokens > num_left < self.max_num_prefill_tokens:
                break
            num_left -= num_tokens
            try:
                self.runner.prefill(row, () if row.exits_wait else self.round.judging_tiers)
            except Exception as error:
                self._fail([request], error)
                failed.append(request)
                continue
            self._prefilling.popleft()
            if not row.is_ready:
                self._prefilling.append(request)
        return failed

    def _admit_siblings(self) -> None:
        """The other choices of prompts that have just been computed come next."""
        while leaders := [r for r in self.running if r.pending and _row(r).is_ready]:
            for leader in leaders:
                self.kv.share(leader, _row(leader))
                self.waiting.extendleft(reversed(leader.pending))
                leader.pending.clear()
            self._admit()  # perhaps a leader that is ready at once

    # ---- blocks ----

    def _num_blocks_for_round(self, num_tokens: int, max_len: int, params: SamplingParams) -> int:
        """Blocks for all positions below those of the next round and its own, and for its guesses."""
        num_positions = min(num_tokens - 1 + self.round.reach, max_len)
        return self.pool.num_blocks_for(num_positions) + self._num_scratch_blocks(params)

    def _num_scratch_blocks(self, params: SamplingParams) -> int:
        return self.round.num_scratch_blocks if params.speculate else 0

    def _make_room(self) -> None:
        """Give every row the blocks of its next round, the oldest first; the youngest make way."""
        number = 0
        while number < len(self.running):
            row = _row(self.running[number])
            if self.kv.grow(row.block_table, self._num_blocks_for_round(len(row), row.max_len, row.params)):
                number += 1
            elif not self.kv.relieve():
                self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        """Take back all that a running row holds, to be computed again; its tokens stay as they are."""
        self._take_back(request)
        _row(request).restart([], 0, self.runner.num_tiers)
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        request.num_preemptions += 1

    # ---- rows go ----

    def _release(self, request: Request) -> None:
        """Give back all that a finished request holds, wherever it stands."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self._take_back(request)
        self.kv.unshare_if_done(request)

    def _take_back(self, request: Request) -> None:
        row = _row(request)
        self.running.remove(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        self.kv.give_back(row.block_table, row.may_hold_nan)
        self._free_rings.append(row.ring)

    def check_integrity(self) -> None:
        """Invariant 3 of DESIGN §6, asserted between steps."""
        self.kv.check_integrity(_row(request).block_table for request in self.running)
        rings = [_row(request).ring for request in self.running]
        assert 0 not in rings and len({*rings, *self._free_rings}) == len(rings) + len(self._free_rings), rings
        assert set(self._prefilling) == {r for r in self.running if not _row(r).is_ready}
        assert not any(request.row and request.row.block_table for request in self.waiting), "a waiting row has blocks"


def _row(request: Request) -> Row:
    assert request.row is not None
    return request.row
