"""LayerSkip's recipe in numbers: which layers a step drops, and what the loss at each depth weighs in it.

Elhoushi et al., LayerSkip, arXiv 2404.16710, §4: layer dropout that grows exponentially with depth (4.1), and an
early-exit loss at all depths through the model's own norm and unembedding, under a curriculum (4.2). Not taken over:
the time schedule of the dropout, which is for training from nothing (S(t) = 1 here). Added, as in the authors' code:
the last layer's loss counts in every step. This file knows nothing of models or Lightning.
"""

# Shape legend: L layers, B rows

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Curriculum = Literal["rotational", "gradual", "all"]
CURRICULA: tuple[Curriculum, ...] = ("rotational", "gradual", "all")


@dataclass(frozen=True, kw_only=True)
class LayerSkip:
    """How `backbone: full` trains the base.

    Args:
        max_dropout: chance that a row skips the last layer; lower layers are skipped less, the first never. The paper:
            0.1, and 0.2 for short texts.
        exit_scale: e_scale, how much the early exits' losses weigh. The paper: 0.1 to 0.2 in continued pre-training,
            1.0 in fine-tuning.
        curriculum: `rotational`: the exits behind every `rotation`-th layer, the next ones in the next step; `gradual`:
            from the last layer down to the first, which joins at half of the run; `all`: all in every step.
        rotation: R, steps in which `rotational` has come to each depth once.
        lr: highest learning rate of the base.
    """

    max_dropout: float = 0.1
    exit_scale: float = 0.2
    curriculum: Curriculum = "rotational"
    rotation: int = 8
    lr: float = 3e-5

    def check(self, where: str) -> None:
        """Raise ValueError naming the field, which is found at `where` in the config."""
        if not 0 <= self.max_dropout < 1:
            raise ValueError(f"{where}.max_dropout={self.max_dropout} must be at least 0 and less than 1")
        if not 0 <= self.exit_scale < math.inf:
            raise ValueError(f"{where}.exit_scale={self.exit_scale} must be at least 0")
        if self.curriculum not in CURRICULA:
            raise ValueError(f"{where}.curriculum={self.curriculum!r} must be one of {', '.join(CURRICULA)}")
        if self.rotation < 1:
            raise ValueError(f"{where}.rotation={self.rotation} must be at least 1")
        if not self.lr > 0:
            raise ValueError(f"{where}.lr={self.lr} must be greater than 0")


def dropout_rates(num_layers: int, max_dropout: float) -> list[float]:
    """Chance that a row skips layer l: (e^(l ln 2 / (L − 1)) − 1) · max_dropout, from 0 to max_dropout."""
    return [(2 ** (layer / max(1, num_layers - 1)) - 1) * max_dropout for layer in range(num_layers)]


def dropped_rows(num_layers: int, max_dropout: float, num_rows: int, draw: torch.Generator) -> Tensor:
    """Which rows skip which layers: [L, B] bool, drawn row by row and layer by layer on the CPU."""
    rates = torch.tensor(dropout_rates(num_layers, max_dropout)).unsqueeze(-1)
    return torch.rand(num_layers, num_rows, generator=draw) < rates


def is_enabled(recipe: LayerSkip, layer: int, num_layers: int, step: int, num_steps: int) -> bool:
    """Whether the loss behind layer `layer` (0 … L − 1) counts in step `step` of `num_steps`."""
    if layer == num_layers - 1 or recipe.curriculum == "all":
        return True
    if recipe.curriculum == "rotational":
        return layer % recipe.rotation == step % recipe.rotation
    return 2 * step / num_steps >= (num_layers - 1 - layer) / (num_layers - 1)


def exit_weights(recipe: LayerSkip, num_layers: int, step: int, num_steps: int) -> dict[int, float]:
    """Depth (number of layers below) → share of its loss; the shares of a step add up to 1.

    Before the curriculum e(l) = e_scale · Σ_{i ≤ l} i, and for the last layer L − 1 + e_scale · Σ_{i ≤ L − 2} i. So the
    loss behind the first layer weighs nothing.
    """
    last = num_layers - 1
    weights = {}
    for layer in range(num_layers):
        if layer == last:
            weight = last + recipe.exit_scale * (last - 1) * last / 2
        else:
            weight = recipe.exit_scale * layer * (layer + 1) / 2
        if weight and is_enabled(recipe, layer, num_layers, step, num_steps):
            weights[layer + 1] = weight
    total = sum(weights.values())
    return {depth: weight / total for depth, weight in weights.items()}
