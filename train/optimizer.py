"""AdamW's groups and the course of the learning rate; knows nothing of models or Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def parameter_groups(
    parts: Sequence[tuple[Sequence[nn.Parameter], float]], weight_decay: float, betas: tuple[float, float]
) -> list[dict[str, Any]]:
    """Of each part (parameters, highest learning rate) its matrices, which decay, and the rest, which does not."""
    groups = []
    for parameters, lr in parts:
        for decays in (True, False):
            own = [p for p in parameters if (p.ndim > 1) == decays]
            if own:
                decay = weight_decay if decays else 0.0
                groups.append({"params": own, "lr": lr, "betas": betas, "weight_decay": decay})
    return groups


def adamw(groups: Sequence[dict[str, Any]], fused: bool) -> torch.optim.AdamW:
    """fused: in one pass over each parameter, on a CPU a quarter of the time; not for shards, and not with a
    GradScaler."""
    optimizer = torch.optim.AdamW(groups, fused=fused or None)
    # A fused one could undo a GradScaler's scaling by itself; for that Lightning refuses to clip its gradients, though
    # there be no scaler
    optimizer._step_supports_amp_scaling = False
    return optimizer


def lr_scale(step: int, warmup_steps: int, num_steps: int) -> float:
    """Share of the highest rate: it grows linearly in the warm-up, and then falls linearly to a tenth."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    left = 1 - (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return 0.1 + 0.9 * max(0.0, left)


def set_rates(scheduler: Any, groups: Sequence[dict[str, Any]], scale: Callable[[int], float]) -> None:
    """What `parameter_groups` says holds from now on, whatever a checkpoint has put into optimizer and scheduler."""
    scheduler.base_lrs = [group["lr"] for group in groups]
    for group, own in zip(scheduler.optimizer.param_groups, groups, strict=True):
        group["initial_lr"], group["betas"] = own["lr"], own["betas"]
        group["lr"] = own["lr"] * scale(scheduler.last_epoch)
        group["weight_decay"] = own["weight_decay"]
