"""How far a trained base is from the one that training began with: KL, cross-entropy and picks on held-out rows.

One row at a time and the vocabulary in chunks; this file knows nothing of exits, files or Lightning.
"""

# Shape legend: T tokens, N label positions of a row, E size of the states that the unembedding reads

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from train.backbone import without_adapters
from train.batches import collate
from train.chat import Encoded
from train.family import DENSE_ATTENTION, Family
from train.linear_loss import CHUNK
from train.reference import Drift

NUM_LABELS = 8192  # enough for two digits of the KL, at the price of two forwards of the base


@torch.no_grad()
def measure_drift(new: Family, before: Family, rows: Sequence[Encoded], num_labels: int = NUM_LABELS) -> Drift:
    """Over the first rows that hold `num_labels` labels.

    Args:
        before: the base as training began with it; `new` itself where adapters are all that was added.
    """
    sums, seen = torch.zeros(4, dtype=torch.float64), 0
    for row in rows:
        if seen >= num_labels:
            break
        with without_adapters(before.model):
            old_states, labels = _label_states(before, row)
        new_states, _ = _label_states(new, row)
        for part in (slice(n, n + CHUNK) for n in range(0, len(labels), CHUNK)):
            old = before.unembed(old_states[part]).float().log_softmax(dim=-1)  # [n, V]
            own = new.unembed(new_states[part].to(new.unembedding.dtype)).float().log_softmax(dim=-1)
            kl = F.kl_div(own, old, log_target=True, reduction="sum")
            same = (own.argmax(dim=-1) == old.argmax(dim=-1)).sum()
            losses = [F.nll_loss(law, labels[part], reduction="sum") for law in (old, own)]
            sums += torch.stack([kl, same, *losses]).double().cpu()
        seen += len(labels)
    kl, agreement, base_loss, new_loss = (sums / max(1, seen)).tolist()
    return Drift(kl, agreement, base_loss, new_loss, seen)


def _label_states(family: Family, row: Encoded) -> tuple[Tensor, Tensor]:
    """→ the states [N, E] that predict the row's labels, and these [N] int64."""
    family.use_attention(DENSE_ATTENTION)
    batch = collate([row])
    ids, mask = batch.token_ids.to(family.unembedding.device), batch.loss_mask[0, 1:]
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    hidden = family.run_layers(family.embed(ids, positions), positions, 0, family.num_layers)
    states = family.project_out(family.final_norm()(hidden))
    mask = mask.to(ids.device)
    return states[0, :-1][mask], ids[0, 1:][mask]
