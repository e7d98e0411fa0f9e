"""What a tier's call costs, and what acceptance is therefore worth: predicted speed relative to plain decoding.

A small batch is bound by reading weights, so a call costs what it reads, however many tokens it judges. A tier's call
takes its last token through all the layers below it (the bonus token), so it reads those too. Measured figures come
from `python -m infer bench`; these are for comparing exits while they train.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from train.acceptance import Acceptance, Walk
from train.model import EarlyExitModel


def default_costs(model: EarlyExitModel) -> dict[str, float]:
    """Exit name or `target` → weights that one call reads, relative to a plain step."""
    family = model.family
    layers = [_numel(layer.parameters()) for layer in family.decoder.layers]
    plain = sum(layers) + family.vocab_size * family.exit_size
    costs = {}
    for exit_ in model.exits:
        rows = exit_.vocab_size or family.vocab_size
        read = sum(layers[: exit_.layer]) + _numel(model.heads[exit_.name].parameters()) + rows * family.exit_size
        costs[exit_.name] = read / plain
    return {**costs, "target": 1.0}


def check_costs(costs: Mapping[str, float], names: Sequence[str], where: str = "model.costs") -> None:
    """Raise ValueError unless every cost is that of an exit or the target, and greater than 0."""
    for name, cost in costs.items():
        if name not in (*names, "target"):
            raise ValueError(f"{where}: {name!r} is none of {', '.join(names)}, target")
        if not 0 < cost < math.inf:
            raise ValueError(f"{where}.{name}={cost} must be greater than 0 (a plain step costs 1)")


def measured_ratios(ratios: Mapping[int, float], num_depths: int) -> Tensor:
    """What to multiply the default costs of depths 1 … `num_depths` by: [num_depths] float64.

    Args:
        ratios: depth → measured cost / default cost. Between such depths the ratio is interpolated, beyond them it is
            that of the nearest, so that a depth does not look cheap for not having been measured.
    """
    known = sorted(ratios)
    if not known:
        return torch.ones(num_depths, dtype=torch.float64)
    return torch.from_numpy(np.interp(range(1, num_depths + 1), known, [ratios[depth] for depth in known]))


def single_exit_speedup(acceptance: Acceptance, exit_cost: float, target_cost: float) -> float:
    """Of `layerskip` with this exit, at the best number of drafts up to the γ that was counted.

    A round of j drafts gives 1 + Σ rates tokens for j calls of the exit and one of the target (Leviathan, Kalman,
    Matias, arXiv 2211.17192, theorem 3.8, with measured rates in place of αʲ).
    """
    rates = acceptance.rates
    return max((1 + sum(rates[:j])) / (j * exit_cost + target_cost) for j in range(1, len(rates) + 1))


def walk_speedup(walk: Walk, costs: Sequence[float]) -> float:
    """Of `hispec` over all exits; costs of the tiers in the order of `walk.calls`."""
    spent = sum(calls * cost for calls, cost in zip(walk.calls, costs, strict=True))
    return walk.num_tokens / spent if spent else 1.0


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)
