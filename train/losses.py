"""KL(target ‖ exit) from states, without ever holding [tokens × vocabulary]; knows nothing of batches or masks."""

# Shape legend: N tokens, E size of the states that an unembedding reads, V' ids that the exit can propose

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 1024  # tokens whose logits stand in memory at once

Unembed = Callable[[Tensor], Tensor]  # [n, E] → [n, V']


def kl_sum(target_states: Tensor, exit_states: Tensor, unembed: Unembed, chunk: int = CHUNK) -> Tensor:
    """Sum over N tokens of KL(target ‖ exit); differentiable in `exit_states`.

    Args:
        target_states: [N, E], the target's, ready to be unembedded.
        exit_states: [N, E], the exit's.
        unembed: frozen. Over a trimmed vocabulary it gives the target's logits at the trimmed ids only, so that the
            softmax below renormalises the target over what the exit can propose.
    """
    return _ChunkedKL.apply(exit_states, target_states, unembed, chunk)


class _ChunkedKL(torch.autograd.Function):
    """The gradient is taken chunk by chunk in the forward pass: [N, E] is kept, logits are not."""

    @staticmethod
    def forward(ctx: Any, exit_states: Tensor, target_states: Tensor, unembed: Unembed, chunk: int) -> Tensor:
        total = torch.zeros((), device=exit_states.device)
        gradients = []
        for target, own in zip(target_states.detach().split(chunk), exit_states.detach().split(chunk)):
            with torch.enable_grad():
                own = own.requires_grad_(ctx.needs_input_grad[0])
                logits = unembed(own)
            loss, slope = _kl(unembed(target).float(), logits.detach().float())
            if ctx.needs_input_grad[0]:
                gradients += torch.autograd.grad(logits, own, slope.to(logits.dtype))
            total += loss
        ctx.gradient = torch.cat(gradients) if gradients else None
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None, None]:
        gradient = ctx.gradient
        return (None if gradient is None else gradient * grad_outputs[0].to(gradient.dtype)), None, None, None


def _kl(target_logits: Tensor, exit_logits: Tensor) -> tuple[Tensor, Tensor]:
    """[n, V'] each → the sum over n, and its slope q − p in the exit's logits [n, V'].

    Written out, as each pass over [n, V'] is costly here: KL = Σ p (t − x) − lse(t) + lse(x).
    """
    p, q = target_logits.softmax(dim=-1), exit_logits.softmax(dim=-1)
    expected = torch.dot(p.flatten(), (target_logits - exit_logits).flatten())
    partition = _log_partition(exit_logits, q).sum() - _log_partition(target_logits, p).sum()
    return expected + partition, q.sub_(p)


def _log_partition(logits: Tensor, probs: Tensor) -> Tensor:
    """logsumexp [n], read off the most likely id: log p = logit − lse."""
    return logits.amax(dim=-1) - probs.amax(dim=-1).log()


@torch.no_grad()
def top_ids(states: Tensor, unembed: Unembed, ids: Tensor | None = None, chunk: int = CHUNK) -> Tensor:
    """[N, E] → the most likely token id of each state [N] int64; `ids` [V'] names the rows of a trimmed unembedding."""
    picks = [unembed(part).argmax(dim=-1) for part in states.split(chunk)]
    rows = torch.cat(picks) if picks else torch.zeros(0, dtype=torch.int64, device=states.device)
    return rows if ids is None else ids[rows]
