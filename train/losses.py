"""What an exit's law is worth to the target's: the terms of its loss, as values and slopes on logits.

P is the target's law over the whole vocabulary, q the exit's over the ids S that it can propose; outside S, q is 0.
`kept` = P(S), and p̃ = P / kept is the target renormalised on S. What the lost mass 1 − kept does, term by term:

kl          kept · KL(p̃ ‖ q). KL(P ‖ q) itself is infinite; but with any share ε of q outside S, all in it that depends
            on q is Σ_S P log(P / q), which is this up to a constant. So a token weighs less where the target wants an
            id that the exit can't say, and the best q is p̃.
topk_kl     the same over the target's k most likely ids of S and the rest of S as one cell
reverse_kl  Σ_S q log(q / P) = KL(q ‖ p̃) − log kept, exact: the lost mass is a constant
jsd         exact: outside S each id gives ½ P log 2, another constant
tv          ½ Σ |P − q| = 1 − Σ_S min(P, q), exact: lost mass counts fully, since no draft is accepted there
ce          −log q(label); a label outside S can't be learnt and gives 0

1 − tv is the chance that a draft is accepted in sampling (Leviathan, Kalman, Matias, arXiv 2211.17192).
This file knows nothing of batches, chunks or models.
"""

# Shape legend: n tokens, V' ids that the exit can propose (S)

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TERMS = ("kl", "reverse_kl", "jsd", "topk_kl", "tv", "ce")


@dataclass(frozen=True, kw_only=True)
class ExitLoss:
    """The loss of one exit: a weighted sum of terms, per token.

    Args:
        kl: weight of KL(target ‖ exit).
        reverse_kl: weight of KL(exit ‖ target), which lets the exit leave out what the target finds unlikely.
        jsd: weight of the Jensen-Shannon divergence.
        topk_kl: weight of the KL over the target's `top_k` most likely ids, all others as one.
        tv: weight of the total variation distance: the chance that a draft is rejected.
        ce: weight of the cross-entropy of the text's own tokens.
        temperature: the laws that the terms compare are those of sampling at this temperature.
        top_k: ids that topk_kl tells apart.
    """

    kl: float = 0.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    topk_kl: float = 0.0
    tv: float = 0.0
    ce: float = 0.0
    temperature: float = 1.0
    top_k: int = 64

    def check(self, where: str) -> None:
        """Raise ValueError naming the field, which is found at `where` in the config."""
        for name in TERMS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{where}.{name}={getattr(self, name)} must be a weight of at least 0")
        if not self.weights:
            raise ValueError(f"{where}: no term has a weight; give at least one of {', '.join(TERMS)}, e.g. kl: 1.0")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"{where}.temperature={self.temperature} must be greater than 0")
        if self.top_k < 1:
            raise ValueError(f"{where}.top_k={self.top_k} must be at least 1")

    @property
    def weights(self) -> dict[str, float]:
        """The terms that count, in the order of TERMS."""
        return {name: getattr(self, name) for name in TERMS if getattr(self, name)}


KL = ExitLoss(kl=1.0)


class TargetLaw:
    """The target on the ids that an exit can propose, at the loss's temperature; one serves all exits with these.

    What not every term needs is made when it is asked for: on a CPU each pass over [n, V'] costs as much as a matrix
    product.

    Args:
        logits: [n, V'] at the loss's temperature.
        log_partition: [n], the logsumexp over the whole vocabulary; None where nothing is trimmed.
    """

    def __init__(self, logits: Tensor, log_partition: Tensor | None) -> None:
        self.logits = logits
        self.p = logits.softmax(dim=-1)  # [n, V']; sums to `kept`, as of below
        log_sum = _log_partition(logits, self.p)
        self.log_kept = torch.zeros_like(log_sum) if log_partition is None else log_sum - log_partition  # [n]
        self.kept = self.log_kept.exp()  # [n]
        self.log_partition = log_sum if log_partition is None else log_partition  # [n]
        if log_partition is not None:
            self.p.mul_(self.kept.unsqueeze(-1))

    @cached_property
    def log_p(self) -> Tensor:
        """[n, V']"""
        return self.logits - self.log_partition.unsqueeze(-1)

    @cached_property
    def mean_log_p(self) -> Tensor:
        """Σ p log p: [n]"""
        return _dot(self.p, self.logits) - self.kept * self.log_partition


class Laws:
    """Target and exit on the ids that the exit can propose, at the loss's temperature.

    Args:
        exit_logits: [n, V'] at the loss's temperature.
        label_rows: [n] int64 where each token's label stands among the V' ids, −1 if nowhere.
    """

    def __init__(self, target: TargetLaw, exit_logits: Tensor, label_rows: Tensor) -> None:
        self.target, self.logits, self.label_rows = target, exit_logits, label_rows
        self.p, self.kept, self.log_kept = target.p, target.kept, target.log_kept
        self.q = exit_logits.softmax(dim=-1)  # [n, V']; sums to 1
        self.log_sum = _log_partition(exit_logits, self.q)  # [n]

    @property
    def log_p(self) -> Tensor:
        return self.target.log_p

    @cached_property
    def log_q(self) -> Tensor:
        """[n, V']"""
        return self.logits - self.log_sum.unsqueeze(-1)


def evaluate(loss: ExitLoss, laws: Laws) -> tuple[Tensor, Tensor]:
    """Each term of `loss.weights`, unweighted, summed over n: [terms]; and the weighted sum's slope in the exit's
    logits at temperature 1 [n, V']."""
    values, slope = [], None
    for name, weight in loss.weights.items():
        value, own_slope = _TERM[name](laws, loss)
        values.append(value.sum())
        if (factor := weight / loss.temperature) != 1:
            own_slope.mul_(factor)
        slope = own_slope if slope is None else slope.add_(own_slope)
    assert slope is not None, "a loss without terms: check() refuses it"
    return torch.stack(values), slope


# ---- terms: value [n] and slope in the exit's logits [n, V'] ----


def _kl(laws: Laws, _: ExitLoss) -> tuple[Tensor, Tensor]:
    mean_log_q = _dot(laws.p, laws.logits) - laws.kept * laws.log_sum  # Σ p log q
    return laws.target.mean_log_p - mean_log_q - laws.kept * laws.log_kept, _kl_slope(laws, laws.p)


def _kl_slope(laws: Laws, p: Tensor) -> Tensor:
    """Of the KL of a law p [n, V'] that sums to `kept`."""
    return (laws.kept.unsqueeze(-1) * laws.q).sub_(p)


def _topk_kl(laws: Laws, loss: ExitLoss) -> tuple[Tensor, Tensor]:
    if loss.top_k >= laws.p.shape[-1]:
        return _kl(laws, loss)
    kept = laws.kept
    log_p, top = laws.log_p.topk(loss.top_k, dim=-1)  # [n, k]
    log_q = laws.log_q.gather(-1, top)
    log_p_rest = laws.log_p.scatter(-1, top, -math.inf).logsumexp(dim=-1)  # [n]
    log_q_rest = laws.log_q.scatter(-1, top, -math.inf).logsumexp(dim=-1)
    value = _dot(log_p.exp(), log_p - log_q) + log_p_rest.exp() * (log_p_rest - log_q_rest) - kept * laws.log_kept
    # Inside a cell the slope can't tell ids apart: the target's share of the rest is spread as the exit spreads its own
    share = (laws.log_q + (log_p_rest - log_q_rest).unsqueeze(-1)).exp().scatter_(-1, top, log_p.exp())
    return value, _kl_slope(laws, share)


def _reverse_kl(laws: Laws, _: ExitLoss) -> tuple[Tensor, Tensor]:
    ratio = laws.log_q - laws.log_p
    return _dot(laws.q, ratio), _through_softmax(laws.q, ratio)


def _jsd(laws: Laws, _: ExitLoss) -> tuple[Tensor, Tensor]:
    log_mean = torch.logaddexp(laws.log_p, laws.log_q) - math.log(2)
    ratio = laws.log_q - log_mean
    lost = -torch.expm1(laws.log_kept)
    value = 0.5 * (_dot(laws.p, laws.log_p - log_mean) + _dot(laws.q, ratio) + lost * math.log(2))
    return value, _through_softmax(laws.q, 0.5 * ratio)


def _tv(laws: Laws, _: ExitLoss) -> tuple[Tensor, Tensor]:
    accepted = torch.minimum(laws.p, laws.q).sum(dim=-1)
    return 1 - accepted, _through_softmax(laws.q, (laws.q < laws.p).to(laws.q.dtype).neg_())


def _ce(laws: Laws, _: ExitLoss) -> tuple[Tensor, Tensor]:
    known = (laws.label_rows >= 0).to(laws.q.dtype)  # [n]
    rows = laws.label_rows.clamp(min=0).unsqueeze(-1)  # [n, 1]
    slope = laws.q * known.unsqueeze(-1)
    slope.scatter_add_(-1, rows, -known.unsqueeze(-1))
    return -laws.log_q.gather(-1, rows).squeeze(-1) * known, slope


_TERM: dict[str, Callable[[Laws, ExitLoss], tuple[Tensor, Tensor]]] = {
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "topk_kl": _topk_kl,
    "tv": _tv,
    "ce": _ce,
}


def _log_partition(logits: Tensor, probs: Tensor) -> Tensor:
    """logsumexp [n], read off the most likely id: log p = logit − lse."""
    return logits.amax(dim=-1) - probs.amax(dim=-1).log()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """[n, V'] each → row by row [n]."""
    return (a * b).sum(dim=-1)


def _through_softmax(q: Tensor, slope: Tensor) -> Tensor:
    """From the slope in q to the one in the logits that q is the softmax of."""
    return q * (slope - _dot(q, slope).unsqueeze(-1))
