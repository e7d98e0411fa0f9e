"""Which of the target's hidden states a drafted position has for its context, in training.

Serving drafts in windows: after the target has verified position v, positions v + 1, v + 2, … are drafted with the
target's state at v, until it verifies again. The prompt has no context, nor has a position whose state an exit computes
only after the target has passed it. Training cuts rows into such windows. A window's length is not known before
serving, so all lengths come; one context for all exits, as serving has it.
"""

# Shape legend: B rows or packed sequences, T tokens, D hidden size

from __future__ import annotations

import torch
from torch import Tensor


def after_prompt(loss_mask: Tensor) -> Tensor:
    """Where a context may be: [B, T] bool, at every label and at the token before it, which predicts the first."""
    drafted = loss_mask.clone()
    drafted[:, :-1] |= loss_mask[:, 1:]
    return drafted


def tokens_back(positions: Tensor, drafted: Tensor | None, longest: int, draw: torch.Generator | None = None) -> Tensor:
    """How far back the verified token lies: [B, T] int64, 1 … `longest`, or 0 where a position has no context.

    Args:
        positions: [B, T] int64, 0 where a packed row begins.
        drafted: [B, T] bool, positions that come after a prompt; None: there are none.
        longest: a window holds 1 … `longest` positions with a context; the longest are followed by one without.
        draw: a CPU generator of every row's window length and phase; without one they go by the row's number.
    """
    if drafted is None or not longest:
        return torch.zeros_like(positions)
    if draw is not None:
        length, phase = torch.randint(0, 2**31, (2, len(positions)), generator=draw).to(positions.device)
    else:
        length = torch.arange(len(positions), device=positions.device)
        phase = length // (longest + 1)
    length = 1 + length % (longest + 1)  # [B] 1 … longest + 1
    back = 1 + (positions + phase.unsqueeze(-1)) % length.unsqueeze(-1)
    return torch.where(drafted & (back <= longest) & (back <= positions), back, 0)


def always_back(positions: Tensor, drafted: Tensor, offset: int) -> Tensor:
    """As `tokens_back`, with every context `offset` tokens back: what drafts at one place of a window see."""
    return torch.where(drafted & (positions >= offset), offset, 0)


def context_states(last: Tensor, back: Tensor, reach: int) -> Tensor:
    """last [B, T, D], the target's hidden states, → those `back` [B, T] positions earlier.

    Zeros where `back` is 0 or more than `reach`, an exit's own `context`.
    """
    columns = torch.arange(last.shape[1], device=last.device) - back
    states = last.gather(1, columns.unsqueeze(-1).expand_as(last))
    is_within = (back > 0) & (back <= reach)
    return torch.where(is_within.unsqueeze(-1), states, 0.0)  # not a product: padding may hold inf in float16
