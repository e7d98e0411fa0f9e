"""The states that predict a batch's labels, and the exits' losses there; knows nothing of Lightning."""

# Shape legend: B rows, T tokens, N label positions of a batch, E size of the states that the unembedding reads

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from train.batches import Batch
from train.linear_loss import Judge, LossSum, Readout, exit_losses
from train.model import EarlyExitModel, ExitOutputs


class Labels(NamedTuple):
    """States at the positions that predict labels."""

    ids: Tensor  # [N] int64, the labels themselves
    target: Tensor  # [N, E]
    exits: dict[str, Tensor]  # exit name → [N, E]
    breaks: Tensor  # [N] bool, True where a new stretch of labels begins
    depths: dict[int, Tensor]  # depth → [N, E], what LayerSkip's losses read
    log_partition: Tensor | None  # [N] of the target's logits, where the feature cache knows it


def labels_of(batch: Batch, outputs: ExitOutputs) -> Labels:
    """The label at t is predicted at t − 1."""
    mask = batch.loss_mask[:, 1:]
    begins = mask & ~batch.loss_mask[:, :-1]
    pick = {name: states[:, :-1][mask] for name, states in outputs.exits.items()}
    depths = {depth: states[:, :-1][mask] for depth, states in outputs.depths.items()}
    partition = None if batch.kept is None else batch.kept.log_partition[:, :-1][mask]
    return Labels(batch.token_ids[:, 1:][mask], outputs.target[:, :-1][mask], pick, begins[mask], depths, partition)


def losses_of(model: EarlyExitModel, labels: Labels) -> dict[str, LossSum]:
    """Exit name → its loss, summed over the labels."""
    judge = Judge(labels.target, labels.ids, model.unembed, labels.log_partition)
    readouts = {
        e.name: Readout(e.training_loss, model.exit_unembedding(e.name), model.draft_vocabs.get(e.name))
        for e in model.exits
    }
    return exit_losses(judge, readouts, labels.exits)
