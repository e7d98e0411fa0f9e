"""One optimizer step over several micro-batches: every token weighs the same, and a broken step is left out.

This file knows nothing of losses or Lightning: it is given sums and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from train.shards import whole


class Step:
    """What has been summed since the last optimizer step, on this rank.

    A step whose loss or gradient is not finite is left out: its gradients are removed, so that the optimizer touches
    neither weights nor moments.

    Args:
        max_skipped: steps that may be left out one after another; one more is an error.
    """

    def __init__(self, max_skipped: int) -> None:
        self.max_skipped = max_skipped
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self.begin()

    def begin(self) -> None:
        self.num_tokens = 0
        self.loss: float | Tensor = 0.0

    def add(self, loss: Tensor, num_tokens: int) -> None:
        """loss: the micro-batch's, summed over its `num_tokens` tokens."""
        self.loss = self.loss + loss.detach()
        self.num_tokens += num_tokens

    def finish(self, parameters: Mapping[str, nn.Parameter], reduce: Callable[[Tensor], Tensor], undo: float) -> None:
        """Turn the gradients of sums into those of the mean over the step's tokens, of all ranks; or remove them.

        The mean of micro-batch means would favour short rows.

        Args:
            reduce: sums over ranks.
            undo: what the gradients were divided by on the way.

        Raises:
            ValueError: too many steps in a row were not finite.
        """
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        loss = torch.as_tensor(self.loss, dtype=torch.float64)
        tokens = torch.tensor(float(self.num_tokens), dtype=torch.float64, device=loss.device)
        num_tokens, total = reduce(torch.stack([tokens, loss])).tolist()
        self.begin()
        if num_tokens:
            torch._foreach_mul_(gradients, undo / num_tokens)
        norm = float(whole(torch.nn.utils.get_total_norm(gradients)))
        is_finite = math.isfinite(total) and math.isfinite(norm)
        if not is_finite or not num_tokens:
            for parameter in parameters.values():
                parameter.grad = None
        self._count(is_finite, total, norm)

    def _count(self, is_finite: bool, loss: float, norm: float) -> None:
        self.num_skipped_in_a_row = 0 if is_finite else self.num_skipped_in_a_row + 1
        self.num_skipped += not is_finite
        if self.num_skipped_in_a_row > self.max_skipped:
            raise ValueError(
                f"{self.num_skipped_in_a_row} optimizer steps in a row were left out, since loss ({loss}) or gradient "
                f"(norm {norm}) was not finite; the weights are those from before. Lower model.lr, set "
                "trainer.gradient_clip_val, train in trainer.precision bf16-mixed or 32-true, or look at the rows; "
                f"model.max_skipped_steps={self.max_skipped} allows for more"
            )

    # ---- half a step, for a run that stops between micro-batches ----

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        return {"num_tokens": self.num_tokens, "loss": float(self.loss), "gradients": gradients}

    def load_state(self, state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
        self.num_tokens, self.loss = state["num_tokens"], state["loss"]
        for name, gradient in state["gradients"].items():
            parameters[name].grad = gradient.to(parameters[name].device)
