"""Runs the tiers' programs over rows: the one place where tensors meet the artifact's programs.

Owns the KV pages and the rings between tiers; moves the rows' cursors; keeps every call of decoding inside the range in
which a token's results have the same bits (prefill has chunks of its own), and lets no call pass that `Border` forbids.
Decides nothing about what to draft or accept.
"""

# Shape legend: B rows, T query positions, D hidden, E exit size, V vocabulary, N tokens of all rows together

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.batch import BlockTables, Query, in_parts, make_query, to_device, token_rectangle
from infer.border import Border, BorderError, Takes, takes_of
from infer.branches import Branch, make_branch_query
from infer.branches import calls as branch_calls
from infer.cuda_graphs import without_graphs
from infer.failures import ProgramError
from infer.logprobs import score
from infer.manifest import Manifest, ProgramInfo
from infer.rings import Rings
from infer.row import Row
from infer.table_width import Gaps

Program = Callable[..., Tensor]
Range = tuple[int, int] | None  # of tokens in a call
Bound = tuple[Program, Range, list[Tensor], Takes]  # a program, its range, its pages, and what it takes before them

_KEPT_TIMES = 9
_MAX_SCORED = 64  # prompt tokens whose logits, in float64, are held at once


class BranchScores(NamedTuple):
    logits: Tensor  # [N, V] of the target for the branches' scored tokens, branch after branch
    states: list[list[list[Tensor]]]  # of each branch in each tier: the hidden states of its tokens, in pieces [T, D]


class Runner:
    """Programs and pages.

    Args:
        manifest: what the artifact holds.
        programs: name → callable, as `infer.backends.load` returns them.
        infos: name → what export measured and recorded of the program.
        draft_vocabs: exit name → [V'] int64 sorted ids of a trimmed exit.
        num_blocks: size of the pool, the null block included.
        max_num_seqs: most rows that run at once.
        dtype: of hidden states and pages.
        bitwise: keep calls inside the ranges in which a token's results have the same bits; see `bind`.
        slot_gaps: widths that block tables do not have then (`table_width`).
    """

    def __init__(
        self,
        manifest: Manifest,
        programs: Mapping[str, Program],
        infos: Mapping[str, ProgramInfo],
        draft_vocabs: Mapping[str, Tensor],
        *,
        num_blocks: int,
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
        bitwise: bool = True,
        slot_gaps: Gaps = (),
    ) -> None:
        base, tiers = manifest.base, manifest.tiers
        self.device = device
        self.block_size = manifest.block_size
        self.prefill_chunk = manifest.limits.prefill_chunk
        self.num_tiers = len(tiers)
        self._max_batch = manifest.limits.max_batch
        self._tiers, self._infos, self._slot_gaps = tiers, infos, slot_gaps
        exits = {e.name: e for e in manifest.exits}
        self.exits = [exits[tier.exit] for tier in tiers]
        self.vocabs = [draft_vocabs.get(e.name) for e in self.exits]
        shape = (num_blocks, self.block_size, base.num_kv_heads, base.head_dim)
        # One tensor per layer, each its own storage (DESIGN §5). Zeroed: 0 × NaN of a page never written is NaN.
        # Keys and values of layer l are pages 2·l and 2·l + 1.
        self._pages = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * manifest.num_kv_layers)]
        # Made once: graphs hold their addresses
        self._pages_of = {
            name: [page for layer in info.kv_layers for page in self._pages[2 * layer : 2 * layer + 2]]
            for name, info in infos.items()
        }
        self.rings = Rings(self.num_tiers, max_num_seqs, base.hidden_size, dtype, device)

        self._border = Border(self.block_size, num_blocks, manifest.limits.max_model_len, base.vocab_size, device)
        self._takes = takes_of(manifest, dtype)
        self._tables = BlockTables(device, self._border.check_blocks)
        self._exit_seconds: deque[float] = deque(maxlen=_KEPT_TIMES)  # of a token, in the latest chunks of prompts
        self._last_query: tuple[list[Row], list[range], Query] | None = None
        self.bind(programs, bitwise=bitwise)

    def bind(self, programs: Mapping[str, Program], *, bitwise: bool) -> None:
        """Call these programs from now on, between two requests.

        Without `bitwise` the programs' ranges are ignored: no call is cut or padded for their sake, and a token's last
        bits may depend on what is computed with it.
        """
        self.programs, self.bitwise = dict(programs), bitwise
        ranges = {name: info.bitwise_range if bitwise else None for name, info in self._infos.items()}
        self._gaps = self._slot_gaps if bitwise else ()
        # One for all programs over pages, so that level tiers can share a call's tensors
        paged = [ranges[name] for name, info in self._infos.items() if info.kv_layers]
        self._min_tokens = max((limits[0] for limits in paged if limits), default=1)
        self._max_tokens = min((limits[1] for limits in paged if limits), default=self.prefill_chunk)

        def bound(name: str) -> Bound:
            # Where there is no range, calls are not cut: equality then rests on the margins of the logits, as
            # `inspect` shows, and not on their bits.
            return programs[name], ranges[name], self._pages_of[name], self._takes[name]

        self._trunks = [bound(f"{tier.name}.trunk") for tier in self._tiers]
        self._exits = [bound(f"{e.name}.exit") for e in self.exits]
        self._unembeds = [bound(f"{e.name}.unembed" if e.vocab_size else "unembed") for e in self.exits]

    @torch.inference_mode()
    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that hold NaN before another row gets them: an unwritten slot is masked, but 0 × NaN is NaN."""
        for page in self._pages:
            page[list(blocks)] = 0

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy a block, so that a row can write where others only read."""
        for page in self._pages:
            page[target] = page[source]

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the entries of slots, in all layers."""
        if sources:
            source, target = to_device(torch.tensor([sources, targets]), self.device)
            for page in self._pages:
                flat = page.flatten(0, 1)
                flat[target] = flat[source]

    # ---- prefill ----

    def next_chunk(self, row: Row) -> range:
        """The positions that `prefill` would compute next in a row that is not ready.

        The prompt's chunks are aligned and depend on its length alone, so that a row's KV does not depend on strategy,
        neighbours, or how often it is computed. Tokens that the row has generated itself, computed again after it had
        lost its blocks, come in calls of a size that gives the bits of decoding.
        """
        return self._chunk(row, row.cursors[-1])

    def _chunk(self, row: Row, start: int) -> range:
        last = row.num_prompt_tokens - 1
        if start < last:
            return range(start, min(start + self.prefill_chunk, last))
        return range(start, min(start + self._max_tokens, len(row) - 1))

    @torch.inference_mode()
    def prefill(self, row: Row, tiers_with_exit: Sequence[int]) -> None:
        """Compute the row's next chunk in all tiers, and in these tiers' exits."""
        span = self.next_chunk(row)
        x = self._compute_chunk(row, span, self.num_tiers, tiers_with_exit)
        last = span.stop - 1  # where the first window's context will be
        self.rings.write_target(row, last, x[0, last - span.start])
        if row.scores is not None and row.scores.num_prompt is not None:
            self._score_prompt(row, span, x.flatten(0, 1))
        row.skip(span.stop, tiers_with_exit, first_state=last)

    @property
    def exit_seconds(self) -> float:
        """What exits took lately of a token of a prompt, on the host; 0 while nobody has asked any."""
        return statistics.median(self._exit_seconds) if self._exit_seconds else 0.0

    @torch.inference_mode()
    def fill_exits(self, row: Row, tiers_with_exit: Sequence[int]) -> None:
        """Compute these exits' keys in a row whose prompt was computed without them, up to its last token.

        The states that they read are gone, so the trunks below them run again: in the calls that `prefill` made, so
        that what these write over are the same bits.
        """
        tiers = [tier for tier in tiers_with_exit if self.exits[tier].has_kv]
        start, last = 0, len(row) - 1
        while tiers and start < last:
            span = self._chunk(row, start)
            self._compute_chunk(row, span, max(tiers) + 1, tiers)
            start = span.stop
        for tier in tiers:
            row.exit_cursors[tier] = last
        row.exits_wait = False

    def _compute_chunk(self, row: Row, span: range, num_tiers: int, tiers_with_exit: Sequence[int]) -> Tensor:
        """[1, T, D]: what so many tiers leave of a row's chunk."""
        min_width = 1 if span.start < row.num_prompt_tokens - 1 else self._min_tokens
        tables = BlockTables(self.device, self._border.check_blocks)  # its own: no other call has this width
        query = self._new_query([row], [span], min_width, tables)
        x, seconds = self._token_ids(query, [span]), 0.0
        for tier in range(num_tiers):
            x = self._call(_ungraphed(self._trunks[tier]), x, query)
            if tier in tiers_with_exit and self.exits[tier].has_kv:
                began = time.perf_counter()
                # a prompt has no context, so that its pages do not depend on where a cached prefix ended
                states = torch.cat([x, torch.zeros_like(x)], dim=-1) if self.exits[tier].context else x
                self._call(_ungraphed(self._exits[tier]), states, query)
                seconds += time.perf_counter() - began
        if seconds:
            self._exit_seconds.append(seconds / len(span))
        return x

    def _score_prompt(self, row: Row, span: range, hidden: Tensor) -> None:
        """Write down the log probabilities of the tokens after `span`; hidden [T, D] is the last tier's there."""
        assert row.scores is not None and row.scores.num_prompt is not None
        token_ids = row.token_ids[span.start + 1 : min(span.stop + 1, row.num_prompt_tokens)]
        if not token_ids or span.start != len(row.scores.prompt):
            return  # computed once more: written down before
        target = self.num_tiers - 1
        ids = torch.tensor(token_ids, device=self.device).split(_MAX_SCORED)
        for part, states in zip(ids, hidden[: len(token_ids)].split(_MAX_SCORED), strict=True):
            logits = self.logits(target, self._flat(self._exits[target], states))
            row.scores.prompt += score(logits, part, row.scores.num_prompt)

    # ---- decoding ----

    @torch.inference_mode()
    def advance(self, rows: Sequence[Row], tier: int) -> Tensor:
        """Bring tiers 0..tier to the rows' ends; what `logits` takes, [N, E], for all positions new to `tier`.

        Positions come row after row, each row's from its old cursor to its end.

        Raises:
            ProgramError: a program over pages raised. Whatever is raised, the rows are left half computed.
        """
        self._last_query = None
        starts = [row.cursors[tier] for row in rows]
        for level in range(tier + 1):
            self._advance(rows, level)
        return self._exit_states(rows, tier, starts)

    @torch.inference_mode()
    def logits(self, tier: int, states: Tensor) -> Tensor:
        """[N, V] of `tier`'s exit for states [N, E] of `advance`; a trimmed exit gives [N, V']."""
        return self._flat(self._unembeds[tier], states)

    def max_logits(self, tier: int) -> int | None:
        """Most lines of logits that one call gives; those of more are copied together. None: any number."""
        return _most(self._unembeds[tier])

    @torch.inference_mode()
    def score_branches(self, branches: Sequence[Branch]) -> BranchScores:
        """Logits for the last `num_scored` tokens of each branch, and the states of all.

        No cursor moves, no ring gets anything, and no exit but the target's runs.
        """
        ranges = [limits[1] for _, limits, *_ in self._trunks if limits]
        limit = min(ranges, default=None)
        states: list[list[list[Tensor]]] = [[[] for _ in self._trunks] for _ in branches]
        for pieces in branch_calls(branches, limit, self._max_batch):
            min_width = -(-self._min_tokens // len(pieces))
            query, x = self._new_branch_query(branches, pieces, min_width)
            for tier, trunk in enumerate(self._trunks):
                x = self._call(trunk, x, query)
                for (number, span), hidden in zip(pieces, x, strict=True):
                    states[number][tier].append(hidden[: len(span)])
        scored = [torch.cat(own[-1])[-branch.num_scored :] for own, branch in zip(states, branches, strict=True)]
        target = self.num_tiers - 1
        return BranchScores(self.logits(target, self._flat(self._exits[target], torch.cat(scored))), states)

    def _new_branch_query(
        self, branches: Sequence[Branch], pieces: Sequence[tuple[int, range]], min_width: int
    ) -> tuple[Query, Tensor]:
        called = [branches[number] for number, _ in pieces]
        try:
            self._border.check_spans(called, [span for _, span in pieces])
            self._border.check_blocks([branch.block_table for branch in called])
            self._border.check_ids([token_id for branch in called for token_id in branch.token_ids])
            query, x = make_branch_query(branches, pieces, self.block_size, self.device, min_width, self._gaps)
            self._border.check_query(query)
        except BorderError as error:
            raise ProgramError([branch.row for branch in called]) from error
        return query, x

    def _advance(self, rows: Sequence[Row], tier: int) -> None:
        """Run the trunk over each row's positions from its cursor to its end; states go to the tier's ring."""
        if all(row.cursors[tier] == len(row.token_ids) for row in rows):
            return  # a lower exit has been asked already
        trunk = self._trunks[tier]
        for part, spans in in_parts(rows, [row.cursors[tier] for row in rows], _most(trunk)):
            query = self._query(part, spans)
            if tier == 0:
                x = self._token_ids(query, spans)
            else:
                x = self.rings.read(tier - 1, query)
            hidden = self._call(trunk, x, query)
            self.rings.write(tier, query, hidden)
        for row in rows:
            row.cursors[tier] = len(row.token_ids)

    def _exit_states(self, rows: Sequence[Row], tier: int, starts: list[int]) -> Tensor:
        """[N, E]: what the unembedding reads, for positions from `starts` to the rows' ends."""
        program = self._exits[tier]
        has_kv = self.exits[tier].has_kv
        states = []
        # A `layer` exit may lag behind its tier and catches up first; the others compute just what is asked for.
        begins = [row.exit_cursors[tier] for row in rows] if has_kv else starts
        for part, spans in in_parts(rows, begins, _most(program)):
            query = self._query(part, spans)
            x = self.rings.read(tier, query)
            if self.exits[tier].context:
                x = torch.cat([x, self.rings.contexts(part, query, self.exits[tier].context)], dim=-1)
            if has_kv:
                out = self._call(program, x, query).flatten(0, 1)
            else:
                out = x.flatten(0, 1)
            states.append(out if query.is_full else out[query.flat_index(self.device)])
        flat = states[0] if len(states) == 1 else torch.cat(states)
        if has_kv:
            flat = _drop_leading(
                flat,
                [len(r) - b for r, b in zip(rows, begins, strict=True)],
                [s - b for s, b in zip(starts, begins, strict=True)],
            )
            for row in rows:
                row.exit_cursors[tier] = len(row.token_ids)
            return flat
        return self._flat(program, flat)

    def _flat(self, program: Bound, states: Tensor) -> Tensor:
        run, bitwise_range, _, takes = program
        self._border.check_input(takes, states)
        return _in_chunks(run, states, bitwise_range)

    def _query(self, rows: list[Row], spans: list[range]) -> Query:
        """The tensors of a call. Tiers that stand level compute the same positions, so the last ones are kept."""
        if self._last_query is not None and self._last_query[0] == rows and self._last_query[1] == spans:
            return self._last_query[2]
        min_width = -(-self._min_tokens // len(rows))
        query = self._new_query(rows, spans, min_width, self._tables)
        self._last_query = (rows, spans, query)
        return query

    def _new_query(self, rows: list[Row], spans: list[range], min_width: int, tables: BlockTables) -> Query:
        try:
            self._border.check_spans(rows, spans)
            query = make_query(rows, spans, self.block_size, self.device, min_width, tables, self._gaps)
            self._border.check_query(query)
        except BorderError as error:
            raise ProgramError(rows) from error
        return query

    def _token_ids(self, query: Query, spans: Sequence[range]) -> Tensor:
        """[B, T] int64: what the lowest trunk takes."""
        try:
            return token_rectangle(query.rows, spans, query.width, self.device, self._border.check_ids)
        except BorderError as error:
            raise ProgramError(query.rows) from error

    def _call(self, program: Bound, x: Tensor, query: Query) -> Tensor:
        run, _, pages, takes = program
        try:
            self._border.check_input(takes, x, query)
            return run(x, query.positions, query.slots, query.block_table, pages)
        except Exception as error:
            raise ProgramError(query.rows) from error


def _most(program: Bound) -> int | None:
    """Tokens in a call of it; None: any number."""
    bitwise_range = program[1]
    return bitwise_range[1] if bitwise_range else None


def _ungraphed(program: Bound) -> Bound:
    run, bitwise_range, pages, takes = program
    return without_graphs(run), bitwise_range, pages, takes


def _drop_leading(flat: Tensor, lengths: list[int], drops: list[int]) -> Tensor:
    """Rows of `flat` [sum(lengths), E] without the first `drops[b]` of each row's `lengths[b]`."""
    if not any(drops):
        return flat
    return torch.cat([part[drop:] for part, drop in zip(flat.split(lengths), drops, strict=True)])


def _in_chunks(program: Program, states: Tensor, bitwise_range: Range) -> Tensor:
    """Run a program over tokens [N, ..] in calls within its range: in chunks if too many, padded if too few."""
    if bitwise_range is None:
        return program(states)
    low, high = bitwise_range
    if low <= len(states) <= high:
        return program(states)
    chunks = states.split(high)
    missing = [max(0, low - len(chunk)) for chunk in chunks]
    padded = [torch.cat([c, c[:1].expand(n, -1)]) if n else c for c, n in zip(chunks, missing, strict=True)]
    return torch.cat([program(p)[: len(c)] for p, c in zip(padded, chunks, strict=True)])
