"""Ridge regression from sums over tokens, each of which is seen once and not kept.

W minimises Σ |r − W x|² + λ |W|². A linear head `h + W h` (DESIGN §4) that is to give y, the target's hidden state, has
x = h and r = y − h, so a large λ leaves it native; with a context f behind, x is (h, norm(f)). Sums are float64: some
dimensions of a decoder's hidden states are hundreds of times larger than others, and their squares would drown the rest
in float32.
"""

# Shape legend: N tokens, X size of the features, D hidden size

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# λ, in units of the mean over a feature's dimensions of Σ x². The squared error chooses, as agreement can't be told
# from sums; on SmolLM2-135M it likes 0.1, where agreement is within two points of its best
RIDGES = (1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


class Fit(NamedTuple):
    """A matrix and how it was chosen."""

    weight: Tensor  # [D, X] float64, as an `nn.Linear` holds it
    ridge: float  # of RIDGES
    unexplained: float | None  # share of Σ |r|² that it leaves on tokens that it was not fitted on; None without such

    def __str__(self) -> str:
        left = "" if self.unexplained is None else f"; {self.unexplained:.0%} of the way to the target is left"
        return f"ridge {self.ridge:g}{left}"


class Moments:
    """Sums over tokens: all that a fit, and the error of any W, need to know of them.

    Args:
        sizes: of the features, which stand one behind the other in x; each has a λ of its own scale.
        size: D.
    """

    def __init__(self, sizes: Sequence[int], size: int, device: torch.device | str = "cpu") -> None:
        self.sizes = list(sizes)
        num = sum(sizes)
        self.gram = torch.zeros(num, num, dtype=torch.float64, device=device)  # Σ x xᵀ
        self.cross = torch.zeros(num, size, dtype=torch.float64, device=device)  # Σ x rᵀ
        self.power = torch.zeros((), dtype=torch.float64, device=device)  # Σ |r|²

    def add(self, features: Tensor, rest: Tensor) -> None:
        """x [N, X] and r [N, D] of more tokens."""
        features, rest = features.double(), rest.double()
        self.gram.addmm_(features.T, features)
        self.cross.addmm_(features.T, rest)
        self.power += rest.square().sum()

    def join(self, other: Moments) -> None:
        """Take in the tokens of `other`."""
        self.gram += other.gram
        self.cross += other.cross
        self.power += other.power

    def weight(self, ridge: float) -> Tensor:
        """The best W [D, X]; λ is `ridge` × the mean of the Gram matrix's diagonal, feature by feature."""
        damped, diagonal = self.gram.clone(), self.gram.diagonal()
        scales = [part.mean().clamp(min=self._tiny).expand(len(part)) for part in diagonal.split(self.sizes)]
        damped.diagonal().add_(ridge * torch.cat(scales))
        return torch.cholesky_solve(self.cross, torch.linalg.cholesky(damped)).T

    def error(self, weight: Tensor) -> float:
        """Σ |r − W x|² over these tokens."""
        transposed = weight.T
        return float(self.power + (transposed * (self.gram @ transposed - 2 * self.cross)).sum())

    @property
    def _tiny(self) -> float:
        return torch.finfo(self.gram.dtype).tiny


def fit_linear(fitted: Moments, tuning: Moments) -> Fit:
    """W on the tokens of both, with the λ that does best on `tuning` when fitted on the others alone.

    `fitted` takes in `tuning`.

    Raises:
        ValueError: hidden states were not finite.
    """
    if not bool(torch.isfinite(fitted.power + tuning.power + fitted.gram.sum() + tuning.gram.sum())):
        raise ValueError("the base's hidden states are not finite; set model.dtype to float32 or bfloat16")
    # of equals the largest: with no tokens to tune on, the most careful one
    tried = [(tuning.error(fitted.weight(ridge)), ridge) for ridge in sorted(RIDGES, reverse=True)]
    error, ridge = min(tried, key=lambda pair: pair[0])
    power = float(tuning.power)
    fitted.join(tuning)
    return Fit(fitted.weight(ridge), ridge, error / power if power else None)
