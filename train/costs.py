"""What a tier's call costs, and what acceptance is therefore worth: predicted speed relative to plain decoding.

A small batch is bound by reading weights, so a call costs what it reads, however many tokens it judges. A tier's call
takes its last token through all the layers below it (the bonus token), so it reads those too. Measured figures come
from `python -m infer bench`; these are for comparing exits while they train.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

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


def check_costs(costs: Mapping[str, float], names: Sequence[str]) -> None:
    """Raise ValueError unless every cost is that of an exit or the target, and greater than 0."""
    for name, cost in costs.items():
        if name not in (*names, "target"):
            raise ValueError(f"model.costs: {name!r} is none of {', '.join(names)}, target")
        if not cost > 0:
            raise ValueError(f"model.costs.{name}={cost} must be greater than 0 (a plain step costs 1)")


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
