"""Where the linear parts of heads begin: W and C in closed form, before the first step.

A decoder layer that stands where it has never stood needs many steps to learn what a ridge regression finds in one
pass. `linear` is fitted to the target's last hidden state, `linear_layer` and a context to what the copied last layer
is used to read: the hidden state below it. One row at a time; of the tokens only sums are kept (`train.ridge`).
"""

# Shape legend: N label positions of a row, D hidden size

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from train.batches import collate, widen
from train.chat import Encoded
from train.context import after_prompt, context_states, tokens_back
from train.heads import ExitHead
from train.model import EarlyExitModel
from train.ridge import Fit, Moments, fit_linear
from train.shards import gathered, set_whole

TUNING_EVERY = 5  # each fifth row chooses the ridge


def fit_linear_parts(model: EarlyExitModel, rows: Sequence[Encoded], num_labels: int) -> dict[str, Fit]:
    """Set W and C of all heads that have them; exit name → the fit.

    Args:
        rows: training rows, of which the first are read until they hold `num_labels` labels.
    """
    parts = {name: linear_parts(cast(ExitHead, head)) for name, head in model.heads.items()}
    parts = {name: found for name, found in parts.items() if found}
    size, device = model.family.hidden_size, model.family.unembedding.device
    sums = {name: [Moments([size] * len(p), size, device) for _ in range(2)] for name, p in parts.items()}
    seen, draw = 0, torch.Generator().manual_seed(0)
    for number, row in enumerate(rows):
        if not parts or seen >= num_labels:
            break
        for name, (features, rest) in _observations(model, row, list(parts), draw).items():
            sums[name][number % TUNING_EVERY == TUNING_EVERY - 1].add(features, rest)
        seen += row.num_labels
    fits = {}
    for name, linears in parts.items() if seen else ():
        fits[name] = fit = fit_linear(*sums[name])
        for linear, weight in zip(linears, fit.weight.split(size, dim=1), strict=True):
            set_whole(linear.weight, weight)
    return fits


def linear_parts(head: ExitHead) -> list[nn.Linear]:
    """W, or C, or both in this order."""
    entry = head.entry
    found = [head.linear] if entry is None else [entry.linear, entry.context_linear]
    return [linear for linear in found if linear is not None]


@torch.no_grad()
def _observations(
    model: EarlyExitModel, row: Encoded, names: Sequence[str], draw: torch.Generator
) -> dict[str, tuple[Tensor, Tensor]]:
    """Exit name → features [N, D or 2 D] and what W and C are to add to the exit's hidden states [N, D]."""
    batch = widen(collate([row]), model.family.max_positions)
    device, num_layers = model.family.unembedding.device, model.family.num_layers
    exits = {e.name: e for e in model.exits if e.name in names}
    depths = sorted({e.layer for e in exits.values()} | {num_layers - 1, num_layers})
    hidden = dict(zip(depths, model.hidden_after(depths, batch.token_ids.to(device))))
    before_label = batch.loss_mask[0, 1:].nonzero().flatten().to(device)
    drafted = after_prompt(batch.loss_mask).to(device)
    positions = torch.arange(batch.token_ids.shape[1], device=device).unsqueeze(0)
    back = tokens_back(positions, drafted, model.longest_context, draw)
    found = {}
    for name, exit_ in exits.items():
        head = cast(ExitHead, model.heads[name])
        below = hidden[exit_.layer]
        wanted = hidden[num_layers - 1 if exit_.has_layer else num_layers]
        features = []
        if exit_.head in ("linear", "linear_layer"):
            features.append(below)
        if head.entry is not None and head.entry.context_norm is not None:
            states = context_states(hidden[num_layers], back, exit_.context)
            with gathered(head):
                features.append(head.entry.context_norm(states.to(head.dtype)))
        rest = wanted.double() - below.double()
        found[name] = torch.cat([f[0, before_label].double() for f in features], dim=-1), rest[0, before_label]
    return found
