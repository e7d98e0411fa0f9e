"""What a judge has to rule on: a line of logits for every position that it has computed, after the rows' own rules.

`LineMaker` makes the lines of one call, `judging` rules on them.
"""

# Shape legend: N lines (one per position, all rows together), V vocabulary (perhaps trimmed), G words of 32 ids

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.batch import to_device
from infer.failures import ProgramError
from infer.processors import Processors
from infer.row import Row
from infer.sampler import PickParams

_MAX_BATCHES = 16  # sets of rows judged together that are kept


@dataclass(frozen=True, slots=True)
class Lines:
    """What one call of a judge has to rule on: a line of logits per position, row after row.

    Row b has counts[b] lines, for the tokens at positions starts[b] + 1 and up: those in drafted[b], and one more.
    """

    rows: Sequence[Row]
    level: int  # of the judging stage
    is_target: bool
    logits: Tensor  # [N, V], after the rows' rules
    ids: Tensor | None  # [V] int64, the real ids of a trimmed vocabulary; None: 0..V-1
    row_params: PickParams  # an entry per row
    starts: Sequence[int]
    counts: Sequence[int]
    drafted: Sequence[Sequence[int]]

    def params(self) -> PickParams:
        """The rows' sampling parameters, an entry per line."""
        owners = [b for b, count in enumerate(self.counts) for _ in range(count)]
        positions = [s + 1 + t for s, count in zip(self.starts, self.counts, strict=True) for t in range(count)]
        device = self.logits.device
        return self.row_params.at(to_device(torch.tensor(owners), device), to_device(torch.tensor(positions), device))

    def unsure(self, num_accepted: Sequence[int], least: float) -> set[Row]:
        """The rows in which the line of the judge's own token gives no id the probability `least`."""
        first, own = 0, []
        for count, accepted in zip(self.counts, num_accepted, strict=True):
            own.append(first + accepted)
            first += count
        logits = self.logits[own].float()
        surest = (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp().tolist()
        return {row for row, sure in zip(self.rows, surest, strict=True) if sure < least}


class _Batch:
    """What follows from the rows that are judged together, kept as most often the same ones come again."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = list(rows)
        columns = [r.params for r in rows], [r.seed for r in rows], [0] * len(rows)
        self.params = PickParams.of(*columns, device, [r.choice for r in rows])
        self.has_rules = any(r.rules is not None for r in rows)
        self.processors: dict[int, Processors] = {}  # by tier, as vocabularies differ


class LineMaker:
    """Makes the lines of a round's judges.

    Args:
        vocabs: of each tier's exit: [V] int64 sorted ids of a trimmed vocabulary, None for a whole one.
        target_level: the last stage's.
    """

    def __init__(self, vocabs: Sequence[Tensor | None], target_level: int, device: torch.device) -> None:
        self._vocabs, self._target_level, self._device = vocabs, target_level, device
        self._batches: dict[tuple[Row, ...], _Batch] = {}

    def make(
        self,
        rows: list[Row],
        level: int,
        tier: int,
        logits: Tensor,
        starts: list[int],
        texts: Sequence[list[int]] | None = None,
    ) -> Lines:
        """Lines out of logits [N, V] of the tier's exit, for the rows' positions from `starts` on.

        texts: the rows' tokens, where they are not their own.
        """
        texts = [row.token_ids for row in rows] if texts is None else texts
        counts = [len(text) - start for text, start in zip(texts, starts, strict=True)]
        batch = self._batch_of(rows)
        return Lines(
            rows=rows,
            level=level,
            is_target=level == self._target_level,
            logits=self._processed(batch, logits, texts, starts, counts, tier) if batch.has_rules else logits,
            ids=self._vocabs[tier],
            row_params=batch.params,
            starts=starts,
            counts=counts,
            drafted=[text[start + 1 :] for text, start in zip(texts, starts, strict=True)],
        )

    def _batch_of(self, rows: list[Row]) -> _Batch:
        key = tuple(rows)
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) == _MAX_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = _Batch(rows, self._device)
        return batch

    def _processed(
        self,
        batch: _Batch,
        logits: Tensor,
        texts: Sequence[list[int]],
        starts: list[int],
        counts: list[int],
        tier: int,
    ) -> Tensor:
        """The logits after what the batch's rows ask for, given each row's text before each position."""
        if tier not in batch.processors:
            rules = [row.rules for row in batch.rows]
            batch.processors[tier] = Processors(rules, logits.shape[1], self._vocabs[tier], self._device)
        masks = _masks(batch.rows, texts, starts, counts)
        return batch.processors[tier].apply(logits, texts, starts, counts, masks)


def _masks(
    rows: Sequence[Row], texts: Sequence[list[int]], starts: Sequence[int], counts: Sequence[int]
) -> dict[int, Tensor]:
    """What the rows' grammars allow at their positions, for those that have one: row's number → [count, G] int32."""
    masks = {}
    for b, (row, text, start, count) in enumerate(zip(rows, texts, starts, counts, strict=True)):
        if row.grammar is not None:
            num_prompt = row.num_prompt_tokens
            try:
                masks[b] = row.grammar.masks(text[num_prompt:], start + 1 - num_prompt, count)
            except Exception as error:  # one text's, so its neighbours need not end with it
                raise ProgramError([row]) from error
    return masks
