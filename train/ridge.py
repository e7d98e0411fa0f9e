"""The linear head in closed form: ridge regression from sums over tokens, each of which is seen once and not kept.

The head `h + W h` (DESIGN §4) is to give y, the target's hidden state before its final norm. W minimises
Σ |y − h − W h|² + λ |W|², so a large λ leaves the head native. Sums are float64: some dimensions of a decoder's hidden
states are hundreds of times larger than others, and their squares would drown the rest in float32.
"""

# Shape legend: N tokens, D hidden size

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# λ, in units of the mean over dimensions of Σ h². The squared error chooses, as agreement can't be told from sums; on
# SmolLM2-135M it likes 0.1, where agreement is within two points of its best
RIDGES = (1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


class Fit(NamedTuple):
    """A head and how it was chosen."""

    weight: Tensor  # [D, D] float64, as an `nn.Linear` holds it
    ridge: float  # of RIDGES
    unexplained: float  # share of Σ |y − h|² that the head leaves on tokens that it was not fitted on


class Moments:
    """Sums over tokens: all that a fit, and the error of any W, need to know of them."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.gram = torch.zeros(size, size, dtype=torch.float64, device=device)  # Σ h hᵀ
        self.cross = torch.zeros(size, size, dtype=torch.float64, device=device)  # Σ h (y − h)ᵀ
        self.power = torch.zeros((), dtype=torch.float64, device=device)  # Σ |y − h|²

    def add(self, hidden: Tensor, final: Tensor) -> None:
        """h and y of more tokens, [N, D] each."""
        hidden = hidden.double()
        rest = final.double() - hidden
        self.gram.addmm_(hidden.T, hidden)
        self.cross.addmm_(hidden.T, rest)
        self.power += rest.square().sum()

    def join(self, other: Moments) -> None:
        """Take in the tokens of `other`."""
        self.gram += other.gram
        self.cross += other.cross
        self.power += other.power

    def weight(self, ridge: float) -> Tensor:
        """The best W [D, D] with λ = ridge × the mean of the Gram matrix's diagonal."""
        damped = self.gram.clone()
        damped.diagonal().add_(ridge * self.gram.diagonal().mean())
        return torch.cholesky_solve(self.cross, torch.linalg.cholesky(damped)).T

    def error(self, weight: Tensor) -> float:
        """Σ |y − h − W h|² over these tokens."""
        transposed = weight.T
        return float(self.power + (transposed * (self.gram @ transposed - 2 * self.cross)).sum())


def fit_linear(fitted: Moments, tuning: Moments) -> Fit:
    """The head on the tokens of both, with the λ that does best on `tuning` when fitted on the others alone.

    `fitted` takes in `tuning`.

    Raises:
        ValueError: hidden states were not finite.
    """
    if not bool(torch.isfinite(fitted.power + tuning.power + fitted.gram.sum() + tuning.gram.sum())):
        raise ValueError("the base's hidden states are not finite; set model.dtype to float32 or bfloat16")
    error, ridge = min((tuning.error(fitted.weight(ridge)), ridge) for ridge in RIDGES)
    fitted.join(tuning)
    return Fit(fitted.weight(ridge), ridge, error / max(float(tuning.power), torch.finfo(torch.float64).tiny))
