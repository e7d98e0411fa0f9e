"""One batch of validation: what target and exits would pick, at every place of a window; knows nothing of Lightning."""

# Shape legend: B rows, T tokens, N label positions of a batch

from __future__ import annotations

import torch
from torch import Tensor

from train.base_pass import BasePass
from train.batches import Batch
from train.context import after_prompt, always_back
from train.figures import Figures
from train.labels import labels_of, losses_of
from train.linear_loss import top_ids
from train.model import EarlyExitModel, ExitOutputs


def count(model: EarlyExitModel, batch: Batch, passed: BasePass, figures: Figures) -> None:
    """Add the batch, which the base has `passed`, to the figures."""
    drafted, target = after_prompt(batch.loss_mask), model.target_states(passed.last)
    picks: dict[str, list[Tensor]] = {e.name: [] for e in model.exits}  # exit name → of each place [N]
    # The places of a window, whose contexts differ; the last one is that of all places without a context
    for place in range(1, model.longest_context + 2):
        back = always_back(passed.positions, drafted, place)
        states = model.exit_states(passed, back, only_context=place > 1)
        labels = labels_of(batch, ExitOutputs(target, states, {}))
        if place == 1:
            losses = losses_of(model, labels)
            target_picks = top_ids(labels.target, model.unembed)
        for name, own in labels.exits.items():
            picks[name].append(top_ids(own, model.exit_unembedding(name), model.draft_vocabs.get(name)))
    by_place = {name: torch.stack(own) for name, own in picks.items()}
    figures.update(losses, {"target": target_picks, **by_place}, labels.breaks)
