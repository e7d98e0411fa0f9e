"""What ends a row before its text is done: a call that raised, or logits that leave no token to pick."""

# Shape legend: T positions of one row, V vocabulary

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.row import Row

NAN_LOGITS = "the target's logits are not finite"
NOTHING_ALLOWED = "allowed_token_ids, bad_words and min_tokens together leave no token to pick"
NOTHING_IN_GRAMMAR = (
    "the grammar of structured_outputs, with allowed_token_ids, bad_words and min_tokens, leaves no token to pick"
)


class ProgramError(Exception):
    """A program raised (see `__cause__`) in a call for these rows, or a row's grammar; what they have computed is
    unknown, and the others can go on."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(f"a program or a grammar failed for {len(rows)} rows")
        self.rows = rows


def note_failure(row: Row, logits: Tensor, has_no_pick: Sequence[bool], has_no_token: bool) -> None:
    """Why there is no pick at some of the positions of logits [T, V]: they are broken, or the row's own rules leave no
    id of this exit's. `has_no_token`: so the row can't go on."""
    broken = [not bool(line.max().isfinite()) for line in logits[torch.tensor(has_no_pick)]]
    row.has_nan = row.has_nan or any(broken)
    if has_no_token:  # the first position without a pick is where the row stands
        nothing = NOTHING_ALLOWED if row.grammar is None else NOTHING_IN_GRAMMAR
        row.failure = NAN_LOGITS if broken[0] else nothing
