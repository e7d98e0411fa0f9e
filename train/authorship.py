"""Whose text is it: does the base find the labels as likely as what it would write itself?

For text that a model has sampled at temperature 1, −log p(label) is on average the entropy of its own distribution at
that place; at lower temperatures it is less. Text of another author lies above, however good it is, and so does the
model's own from above temperature 1. So the mean of the difference needs no threshold that fits one model only, as a
share of first choices would. This file knows nothing of files, masks or Lightning.
"""

# Shape legend: N labels that are looked at, T tokens of one row, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from train.chat import Encoded
from train.model import EarlyExitModel

_MARGIN = 0.1  # nats per label; bf16 and the engine's kernels shift a mean by thousandths
_NUM_ROWS = 16  # spread over all
_NUM_LABELS = 128  # of one row


class Surprise(NamedTuple):
    """How the base finds N labels."""

    num_labels: int
    agreement: float  # share that are its first choice
    excess: float  # mean of −log p(label) − entropy, nats
    error: float  # standard error of that mean

    @property
    def is_foreign(self) -> bool:
        return self.excess > max(_MARGIN, 2 * self.error)

    def __str__(self) -> str:
        told = (
            f"whose text: {self.agreement:.0%} of {self.num_labels} labels are the base's first choice; "
            f"−log p exceeds its entropy by {self.excess:+.2f} ± {self.error:.2f} nats (its own samples: 0 or less)"
        )
        if not self.is_foreign:
            return told
        return (
            f"{told}. THIS IS NOT WHAT THE BASE WRITES, or was sampled above temperature 1, and exits have to foretell "
            "just that: let it answer the questions itself, with `python -m train generate --prompts FILE`"
        )


@torch.no_grad()
def surprise(model: EarlyExitModel, rows: Sequence[Encoded]) -> Surprise:
    """Ask the base about the labels of a few rows; costs a forward pass over each."""
    step = max(1, len(rows) // _NUM_ROWS)
    differences, hits = [], []
    for row in rows[::step][:_NUM_ROWS]:
        places = [n for n, is_label in enumerate(row.loss_mask) if is_label and n][:_NUM_LABELS]
        ids = torch.tensor(row.token_ids[: places[-1] + 1], device=model.family.unembedding.device)
        labels = ids[places]  # [N]
        before = torch.tensor(places, device=ids.device) - 1
        logits = model.unembed(model(ids.unsqueeze(0)).target[0, before]).float()  # [N, V]
        log_probs = logits.log_softmax(dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        differences.append(-log_probs.gather(1, labels.unsqueeze(1)).squeeze(1) - entropy)
        hits.append(logits.argmax(dim=-1) == labels)
    found, hit = torch.cat(differences), torch.cat(hits)
    error = float(found.std()) / len(found) ** 0.5 if len(found) > 1 else float("inf")
    return Surprise(len(found), float(hit.float().mean()), float(found.mean()), error)
