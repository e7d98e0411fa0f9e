"""Where hidden states wait between two tiers: for every tier a ring of RING_SIZE positions for each row.

Row r's position p waits in slot r.ring · RING_SIZE + p % RING_SIZE; `Query.ring` names the slots of a call. Ring 0
belongs to no row and takes the padding. Whoever computes must see to it that nothing unread is written over.
"""

# Shape legend: B rows, T query positions, D hidden

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.batch import RING_SIZE, Query, to_device
from infer.row import Row


class Rings:
    """
    Args:
        dtype: of the states.
    """

    def __init__(
        self, num_tiers: int, max_num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = ((max_num_seqs + 1) * RING_SIZE, hidden_size)
        self.of_tier = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_tiers)]
        self._device = device

    def write(self, tier: int, query: Query, hidden: Tensor) -> None:
        """hidden [B, T, D]: what the tier has left of the query's positions."""
        self.of_tier[tier][query.ring] = hidden.flatten(0, 1)

    def read(self, tier: int, query: Query) -> Tensor:
        """[B, T, D]: what the tier has left of the query's positions."""
        assert query.width <= RING_SIZE, f"{query.width} positions do not fit a ring of {RING_SIZE}"
        batch, width = query.positions.shape
        return self.of_tier[tier][query.ring].view(batch, width, -1)

    def write_target(self, row: Row, position: int, state: Tensor) -> None:
        """state [D]: what the target has left of one position."""
        self.of_tier[-1][_slot(row, position)] = state

    def contexts(self, rows: Sequence[Row], query: Query, reach: int) -> Tensor:
        """[B, T, D]: the target's state of each row's last verified token, for the `reach` positions after that token;
        zeros beyond them, for those before, which an exit has yet to catch up with, and in rows where that state was
        never computed."""
        begins, slots = [], []
        for row in rows:
            cursor, has_state = row.cursors[-1], row.cursors[-1] > row.first_state
            begins.append(cursor if has_state else row.max_len)
            slots.append(_slot(row, cursor - 1) if has_state else 0)
        first, ring = to_device(torch.tensor([begins, slots]), self._device)
        states = self.of_tier[-1][ring].unsqueeze(1)  # [B, 1, D]
        places = query.positions - first.unsqueeze(1)  # 0 for the first position after that token
        return torch.where(((places >= 0) & (places < reach)).unsqueeze(-1), states, 0.0)

    @torch.inference_mode()
    def keep(self, row: Row, start: int, num_positions: int, states: Sequence[Sequence[Tensor]]) -> None:
        """Write states of a branch (`BranchScores.states`) in all tiers, for the row's positions from `start` on."""
        slots = [_slot(row, position) for position in range(start, start + num_positions)]
        ring = to_device(torch.tensor(slots), self._device)
        for own, pieces in zip(self.of_tier, states, strict=True):
            own[ring] = (pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)))[:num_positions]


def _slot(row: Row, position: int) -> int:
    return row.ring * RING_SIZE + position % RING_SIZE
