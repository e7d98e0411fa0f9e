"""Exits at every depth of a base at once: untrained, fitted in closed form, and scored on rows.

One row at a time: of all depths only that row's label positions stand in memory, [N, L, D], and of their logits one
chunk of one exit. This file knows nothing of costs, files or command lines.
"""

# Shape legend: N label positions, n of a chunk, L layers of the base, D hidden size, V vocabulary, V' ids that an exit
# can propose

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from train.batches import collate, widen
from train.chat import Encoded
from train.heads import ExitConfig, ExitHead, HeadKind
from train.linear_loss import CHUNK
from train.model import EarlyExitModel
from train.ridge import Fit, Moments, fit_linear

KINDS: tuple[HeadKind, ...] = ("native", "linear")  # what costs no training


@dataclass(frozen=True)
class Scores:
    """How exits at depths 1 … L − 1 agree with the target at N label positions."""

    target: Tensor  # [N] int64, the target's most likely ids
    breaks: Tensor  # [N] bool, True where a new stretch of labels begins
    picks: Mapping[HeadKind, Tensor]  # [L − 1, N] int64
    acceptance: Mapping[HeadKind, Tensor]  # [L − 1] float64, mean of 1 − TV(target, exit) at temperature 1


def exits_everywhere(base: PreTrainedModel, head: HeadKind, draft_vocab: Tensor | None = None) -> EarlyExitModel:
    """An exit after each of layers 1 … L − 1, over the ids of `draft_vocab` [V'] or all."""
    size = None if draft_vocab is None else len(draft_vocab)
    depths = range(1, base.config.num_hidden_layers)
    exits = [ExitConfig(name=f"depth_{depth}", layer=depth, head=head, vocab_size=size) for depth in depths]
    vocabs = {} if draft_vocab is None else {e.name: draft_vocab for e in exits}
    model = EarlyExitModel(base, exits, vocabs)
    model.heads.float().requires_grad_(False)  # as in training, whatever the base's precision is
    return model


@torch.no_grad()
def label_states(model: EarlyExitModel, row: Encoded) -> list[Tensor]:
    """What predicts the row's labels: the base's hidden states [N, D] after 1 … L layers, before any norm."""
    batch = widen(collate([row]), model.family.max_positions)
    device = model.family.unembedding.device
    before_label = batch.loss_mask[0, 1:].nonzero().flatten().to(device)  # [N]
    layers = range(1, model.family.num_layers + 1)
    return [hidden[0, before_label] for hidden in model.hidden_after(layers, batch.token_ids.to(device))]


@torch.no_grad()
def fit_heads(model: EarlyExitModel, rows: Sequence[Encoded], tuning_rows: Sequence[Encoded]) -> list[Fit]:
    """Fit the `linear` head of every depth (4 (L − 1) D² numbers in float64 while it lasts).

    Args:
        rows: what the heads are fitted on.
        tuning_rows: what the ridges are chosen on; then the heads are fitted on these rows too.
    """
    size, device = model.family.hidden_size, model.family.unembedding.device
    fitted, tuning = ([Moments([size], size, device) for _ in model.exits] for _ in range(2))
    for moments, own_rows in ((fitted, rows), (tuning, tuning_rows)):
        for row in own_rows:
            *below, final = label_states(model, row)
            for sums, hidden in zip(moments, below, strict=True):
                sums.add(hidden, final.double() - hidden.double())
    fits = [fit_linear(*sums) for sums in zip(fitted, tuning)]
    for head, fit in zip(_heads(model), fits):
        assert head.linear is not None, head.config
        head.linear.weight.copy_(fit.weight)
    return fits


@torch.no_grad()
def score(models: Mapping[HeadKind, EarlyExitModel], rows: Sequence[Encoded]) -> Scores:
    """Picks and acceptance of every exit; the models share base, depths and draft vocabulary."""
    first = next(iter(models.values()))
    device, shape = first.family.unembedding.device, (len(first.exits), sum(row.num_labels for row in rows))
    ids = first.draft_vocabs.get(first.exits[0].name)
    unembed = first.exit_unembedding(first.exits[0].name)  # gathered once for all
    target_picks = torch.zeros(shape[1], dtype=torch.int64, device=device)
    picks = {kind: torch.zeros(shape, dtype=torch.int64, device=device) for kind in models}
    accepted = {kind: torch.zeros(shape[0], dtype=torch.float64, device=device) for kind in models}
    done = 0
    for row in rows:
        *below, final = label_states(first, row)
        for start in range(0, len(final), CHUNK):
            part = slice(start, min(start + CHUNK, len(final)))
            place = slice(done + part.start, done + part.stop)
            logits = first.unembed(first.target_states(final[part])).float()  # [n, V]
            target_picks[place] = logits.argmax(dim=-1)
            law = logits.softmax(dim=-1)
            law = law if ids is None else law[:, ids]  # [n, V']: what lies outside is never accepted
            for kind, model in models.items():
                for n, head in enumerate(_heads(model)):
                    own = unembed(head.readout(below[n][part])).float()  # [n, V']
                    rows_of_ids = own.argmax(dim=-1)
                    picks[kind][n, place] = rows_of_ids if ids is None else ids[rows_of_ids]
                    accepted[kind][n] += torch.minimum(law, own.softmax(dim=-1)).sum()
        done += len(final)
    return Scores(
        target_picks.cpu(),
        torch.cat([_breaks(row) for row in rows]),
        {kind: own.cpu() for kind, own in picks.items()},
        {kind: own.cpu() / max(1, done) for kind, own in accepted.items()},
    )


def _heads(model: EarlyExitModel) -> list[ExitHead]:
    """By depth."""
    return [cast(ExitHead, model.heads[exit_.name]) for exit_ in model.exits]


def _breaks(row: Encoded) -> Tensor:
    """[N] bool: where a stretch of labels begins; the row's first token is predicted by nothing, and no label."""
    mask = torch.tensor([False, *row.loss_mask[1:]])
    begins = mask[1:] & ~mask[:-1]
    return begins[mask[1:]]
