"""Losses from states: unembedding and loss together, chunk by chunk, so that [tokens × vocabulary] never stands whole.

The target's logits are computed once per chunk, for all exits, and thrown away with it. The gradient is taken in the
forward pass, while a chunk's logits are there: what is kept is [N, E]. The unembedding is no exit's to train and gets
none; `text_loss`, which trains a base, gives it one.
liger-kernel's fused losses are not used: they know neither trimmed vocabularies nor the acceptance.
"""

# Shape legend: N tokens, n tokens of a chunk, E size of the states that an unembedding reads, V vocabulary, V' ids that
# an exit can propose, X exits

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from train.losses import ExitLoss, Laws, evaluate

CHUNK = 256  # tokens whose logits stand in memory at once; on CPU larger ones are slower
SLICE = 16  # of these, tokens whose laws are computed together on CPU: [16, 8192] stays in the core's own cache

Unembed = Callable[[Tensor], Tensor]  # [n, E] → [n, V], or [n, V'] of a trimmed vocabulary


class Readout(NamedTuple):
    """How an exit's states become a loss."""

    loss: ExitLoss
    unembed: Unembed  # frozen
    ids: Tensor | None  # [V'] int64 ascending, the ids of a trimmed vocabulary


class Judge(NamedTuple):
    """What the exits are compared with."""

    states: Tensor  # [N, E] the target's, ready to be unembedded
    labels: Tensor  # [N] int64 the text's own tokens
    unembed: Unembed  # over the whole vocabulary


class LossSum(NamedTuple):
    """Sums over the N tokens."""

    total: Tensor  # scalar, weighted, differentiable in the exit's states
    terms: dict[str, Tensor]  # term → scalar, unweighted, detached


def exit_losses(
    judge: Judge,
    exits: Mapping[str, Readout],
    states: Mapping[str, Tensor],
    chunk: int = CHUNK,
    part: int | None = None,
) -> dict[str, LossSum]:
    """The loss of every exit, by name; differentiable in `states` [N, E]. At least float32 whatever the states are.

    part: tokens of a chunk whose laws are computed together; None: SLICE on a CPU, else the chunk.
    """
    readouts = [exits[name] for name in states]
    part = part or (SLICE if judge.states.is_cpu else chunk)
    totals, terms = _ChunkedLosses.apply(judge, readouts, (chunk, part), *states.values())
    sums, first = {}, 0
    for n, (name, readout) in enumerate(zip(states, readouts)):
        weights = readout.loss.weights
        sums[name] = LossSum(totals[n], dict(zip(weights, terms[first : first + len(weights)])))
        first += len(weights)
    return sums


class _ChunkedLosses(torch.autograd.Function):
    """→ totals [X], and all exits' terms one after another."""

    @staticmethod
    def forward(
        ctx: Any, judge: Judge, readouts: Sequence[Readout], sizes: tuple[int, int], *states: Tensor
    ) -> tuple[Tensor, Tensor]:
        chunk, size = sizes
        needed = [ctx.needs_input_grad[3 + n] for n in range(len(states))]
        gradients = [torch.zeros_like(own) if need else None for own, need in zip(states, needed)]
        rows = [_label_rows(judge.labels, readout.ids) for readout in readouts]
        dtype = torch.promote_types(judge.states.dtype, torch.float32)
        sums = [torch.zeros(len(r.loss.weights), dtype=dtype, device=judge.states.device) for r in readouts]
        for start in range(0, len(judge.labels), chunk):
            part = slice(start, start + chunk)
            target = judge.unembed(judge.states[part].detach())  # [n, V]
            trimmed = {r.loss.temperature for r in readouts if r.ids is not None}
            partitions = {t: _log_partition(target, t, dtype) for t in trimmed}
            for n, readout in enumerate(readouts):
                with torch.enable_grad():
                    own = states[n][part].detach().requires_grad_(needed[n])
                    logits = readout.unembed(own)  # [n, V']
                partition = None if readout.ids is None else partitions[readout.loss.temperature]
                slopes = torch.empty_like(logits, requires_grad=False)
                for cut in (slice(first, first + size) for first in range(0, len(target), size)):
                    inner = None if partition is None else partition[cut]
                    laws = _laws(readout, target[cut], inner, logits.detach()[cut], rows[n][part][cut], dtype)
                    values, slopes[cut] = evaluate(readout.loss, laws)
                    sums[n] += values
                gradient = gradients[n]
                if gradient is not None:
                    (gradient[part],) = torch.autograd.grad(logits, own, slopes)
        ctx.gradients = gradients
        terms = torch.cat(sums)
        ctx.mark_non_differentiable(terms)
        weights = [torch.tensor(list(r.loss.weights.values()), dtype=dtype, device=terms.device) for r in readouts]
        return torch.stack([torch.dot(w, s) for w, s in zip(weights, sums)]), terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        slopes = grad_outputs[0]  # [X]
        own = [None if g is None else g * slopes[n].to(g.dtype) for n, g in enumerate(ctx.gradients)]
        return (None, None, None, *own)


def _laws(
    readout: Readout, target: Tensor, partition: Tensor | None, logits: Tensor, label_rows: Tensor, dtype: torch.dtype
) -> Laws:
    """Of a slice: target [n, V], its partition [n] where the exit is trimmed, logits [n, V'] and label rows [n]."""
    kept, t = target if readout.ids is None else target[:, readout.ids], readout.loss.temperature
    return Laws.of(_at(kept, t, dtype), partition, _at(logits, t, dtype), label_rows)


def _at(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = logits.to(dtype)
    return logits if temperature == 1 else logits / temperature


def _log_partition(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """[n, V] → logsumexp [n]; on CPU a few rows at a time, which stay in the cache: three times as fast."""
    parts = logits.split(8) if logits.is_cpu else [logits]
    return torch.cat([_at(part, temperature, dtype).logsumexp(dim=-1) for part in parts])


def _label_rows(labels: Tensor, ids: Tensor | None) -> Tensor:
    """Where each label stands among `ids`: [N] int64, −1 if nowhere."""
    if ids is None:
        return labels
    rows = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
    return torch.where(ids[rows] == labels, rows, -1)


def text_loss(states: Tensor, labels: Tensor, unembed: Unembed, chunk: int = CHUNK) -> Tensor:
    """Cross-entropy of the text's own tokens, summed: scalar, differentiable in states [N, E] and the unembedding.

    A chunk's logits are computed once more in the backward pass instead of being kept.
    """

    def loss(part: Tensor, own: Tensor) -> Tensor:
        logits = unembed(part)  # [n, V]
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), own, reduction="sum")

    parts = zip(states.split(chunk), labels.split(chunk))
    sums = [checkpoint(loss, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(sums).sum()


@torch.no_grad()
def top_ids(states: Tensor, unembed: Unembed, ids: Tensor | None = None, chunk: int = CHUNK) -> Tensor:
    """[N, E] → the most likely token id of each state [N] int64; `ids` [V'] names the rows of a trimmed unembedding."""
    picks = [unembed(part).argmax(dim=-1) for part in states.split(chunk)]
    rows = torch.cat(picks) if picks else torch.zeros(0, dtype=torch.int64, device=states.device)
    return rows if ids is None else ids[rows]
