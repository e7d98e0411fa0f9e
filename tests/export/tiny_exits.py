"""Tiny early-exit models whose heads are no copies of the base, so that a swapped part shows."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.tiny_models import make_tiny_model
from train.heads import ExitConfig
from train.model import EarlyExitModel

NUM_LAYERS = 4  # one for each tier of ALL_HEADS
ALL_HEADS = (
    ExitConfig(name="first", layer=1, head="native"),
    ExitConfig(name="draft", layer=2, head="linear_layer", vocab_size=32, context=3),
    ExitConfig(name="intermediate", layer=3, head="linear"),
)


def make_early_exit(family: str, exits: Sequence[ExitConfig], **config: Any) -> EarlyExitModel:
    """A tiny model of `family` with random heads; trimmed exits keep every third id."""
    base = make_tiny_model(family, **({"num_hidden_layers": NUM_LAYERS} | config))
    vocabs = {e.name: torch.arange(0, 3 * e.vocab_size, 3) for e in exits if e.vocab_size is not None}
    model = EarlyExitModel(base, exits, vocabs).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.heads.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()
