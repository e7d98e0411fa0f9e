"""Losses from states: unembedding and loss together, chunk by chunk, so that [tokens × vocabulary] never stands whole.

The target's logits are computed once per chunk, for all exits, and thrown away with it; its law on the ids of a trimmed
vocabulary once for all exits that have these ids. The gradient is taken in the
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

from train.losses import ExitLoss, Laws, TargetLaw, evaluate

CHUNK = 256  # tokens whose logits stand in memory at once; on CPU larger ones are slower
SLICE = 16  # of these, tokens whose laws are computed together on CPU: [16, 8192] stays in the core's own cache

Unembed = Callable[[Tensor], Tensor]  # [n, E] → [n, V], or [n, V'] of a trimmed vocabulary


class Readout(NamedTuple):
    """How an exit's states become a loss."""

    loss: ExitLoss
    unembed: Unembed  # frozen; the judge's own rows `ids`, so that it reads the judge's states as well
    ids: Tensor | None  # [V'] int64 ascending, the ids of a trimmed vocabulary; equal ones best be one tensor


class Judge(NamedTuple):
    """What the exits are compared with."""

    states: Tensor  # [N, E] the target's, ready to be unembedded
    labels: Tensor  # [N] int64 the text's own tokens
    unembed: Unembed  # over the whole vocabulary
    log_partition: Tensor | None = None  # [N] float32, the logsumexp of its logits, where that is known already


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
        groups = _alike(readouts)
        for start in range(0, len(judge.labels), chunk):
            part = slice(start, start + chunk)
            whole, partitions = _whole_logits(judge, readouts, part, dtype)
            for group in groups:
                with torch.enable_grad():
                    own = [states[n][part].detach().requires_grad_(needed[n]) for n in group]
                    logits = [readouts[n].unembed(x) for n, x in zip(group, own)]  # [n, V']
                slopes = [torch.empty_like(z, requires_grad=False) for z in logits]
                loss, unembed, ids = readouts[group[0]]
                target = whole if ids is None else unembed(judge.states[part].detach())  # [n, V']
                assert target is not None
                for piece in (slice(first, first + size) for first in range(0, len(target), size)):
                    partition = None if ids is None else partitions[loss.temperature][piece]
                    law = TargetLaw(_at(target[piece], loss.temperature, dtype), partition)
                    for n, z, slope in zip(group, logits, slopes):
                        laws = Laws(law, _at(z.detach()[piece], loss.temperature, dtype), rows[n][part][piece])
                        values, slope[piece] = evaluate(readouts[n].loss, laws)
                        sums[n] += values
                for n, x, z, slope in zip(group, own, logits, slopes):
                    gradient = gradients[n]
                    if gradient is not None:
                        (gradient[part],) = torch.autograd.grad(z, x, slope)
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


def _alike(readouts: Sequence[Readout]) -> list[list[int]]:
    """Numbers of the exits in groups that compare with one law of the target's: one tensor of ids, one temperature."""
    groups: dict[tuple[int, float], list[int]] = {}
    for n, readout in enumerate(readouts):
        groups.setdefault((id(readout.ids), readout.loss.temperature), []).append(n)
    return list(groups.values())


def _whole_logits(
    judge: Judge, readouts: Sequence[Readout], part: slice, dtype: torch.dtype
) -> tuple[Tensor | None, dict[float, Tensor]]:
    """The target's logits of a chunk [n, V], and temperature → their logsumexp [n] for the exits that are trimmed; the
    logits are None where none needs them."""
    temperatures = {r.loss.temperature for r in readouts if r.ids is not None}
    known = {} if judge.log_partition is None else {1.0: judge.log_partition[part].to(dtype)}
    if temperatures <= set(known) and all(r.ids is not None for r in readouts):
        return None, known
    logits = judge.unembed(judge.states[part].detach())
    return logits, {t: known[t] if t in known else log_partition(logits, t) for t in temperatures}


def _at(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = logits.to(dtype)
    return logits if temperature == 1 else logits / temperature


def log_partition(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[n, V] → logsumexp [n], at least float32; on CPU a few rows at a time, which stay in the cache: three times as
    fast."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
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
