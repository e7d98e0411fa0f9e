"""Which token a tier picks: argmax over ids of (logit / temperature + noise), after min_p, top-k and top-p.

The noise is keyed by (seed, choice, position, id) (`noise`), so two tiers that agree about the probabilities pick the
same token, and the target's picks are the same tokens whatever was drafted. Greedy is the case without noise.
Knows nothing of tiers, rows or drafting. A row's pick depends on that row alone.

    temperature   below GREEDY_BELOW: the most probable id, the first one on ties
    min_p         after temperature: keeps every id whose probability is >= min_p times the largest
    top-k         keeps every id whose logit is >= the k-th largest (ties are kept)
    top-p         after all these: the smallest set {logit >= cutoff} that holds this mass (ties are kept)

All filters are a cutoff on the logits, so the kept set cannot depend on how a sort orders equal values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from infer.noise import gumbel_of, stream_keys
from infer.params import GREEDY_BELOW, SamplingParams

# Shape legend: N rows (one per token to pick), V vocabulary (perhaps trimmed), C candidates (largest logits, sorted)

NUM_CANDIDATES = 1024  # a nucleus is nearly always smaller; the rows where it is not are sorted in full

_NO_CUTOFF = -torch.inf
_MOST = 2**62  # more than any vocabulary, and within int64 with room for arithmetic


@dataclass(frozen=True, slots=True)
class PickParams:
    """One entry per token to pick. The flags may say True too often, never False wrongly."""

    temperature: Tensor  # [N] float64
    top_k: Tensor  # [N] int64, 0 is off
    top_p: Tensor  # [N] float64, 1 is off
    min_p: Tensor  # [N] float64, 0 is off
    seed: Tensor  # [N] int64
    choice: Tensor  # [N] int64, which of a request's n completions
    position: Tensor  # [N] int64, that the picked token will have
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
        choices: Sequence[int] | None = None,
    ) -> Self:
        """`seeds` are given apart, as params.seed may be None and the engine then draws one; `choices` default to 0."""

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        sampled = [p for p in params if not p.is_greedy]
        return cls(
            temperature=column([p.temperature for p in params], torch.float64),
            top_k=column([min(max(p.top_k, 0), _MOST) for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float64),
            min_p=column([p.min_p for p in params], torch.float64),
            seed=column(seeds, torch.int64),
            choice=column(choices or [0] * len(params), torch.int64),
            position=column(positions, torch.int64),
            all_greedy=not sampled,
            any_top_k=any(p.top_k > 0 for p in sampled),
            any_top_p=any(p.top_p < 1 for p in sampled),
            any_min_p=any(p.min_p > 0 for p in sampled),
        )

    def at(self, rows: Tensor, positions: Tensor) -> Self:
        """The entries `rows` [M] int64 for tokens at `positions` [M]: a row is repeated for every token it picks."""
        return type(self)(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.choice[rows],
            positions,
            self.all_greedy,
            self.any_top_k,
            self.any_top_p,
            self.any_min_p,
        )

    @property
    def is_greedy(self) -> Tensor:
        return self.temperature < GREEDY_BELOW  # [N] bool


def pick(logits: Tensor, params: PickParams, ids: Tensor | None = None) -> Tensor:
    """The picked token ids [N] int64; -1 where a row's logits hold NaN, +inf or nothing but -inf (neighbours go on).

    logits: [N, V] any floating dtype
    ids:    [V] int64, the real ids of a trimmed vocabulary, sorted; None: 0..V-1. Noise is keyed by the real id.
    """
    largest, columns = logits.max(dim=-1)  # [N]; max hands a NaN through
    if not params.all_greedy:
        columns = _scores(logits, params, ids).argmax(dim=-1)
    picked = columns if ids is None else ids[columns]
    return torch.where(largest.isfinite(), picked, -1)


def probabilities(logits: Tensor, params: PickParams) -> Tensor:
    """The exact law [N, V] float64 of `pick`, column by column."""
    scaled = logits.double() / _safe_temperature(params)
    law = scaled.masked_fill(logits < cutoffs(logits, params), -torch.inf).softmax(dim=-1)
    greedy = torch.zeros_like(law).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(params.is_greedy.unsqueeze(1), greedy, law)


def _scores(logits: Tensor, params: PickParams, ids: Tensor | None) -> Tensor:
    """[N, V] float64: logit / temperature + noise, -inf for ids that a filter has dropped."""
    ids = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    keys = stream_keys(params.seed, params.choice, params.position)  # [N]
    scale = _safe_temperature(params)  # [N, 1]
    is_noisy = ~params.is_greedy.unsqueeze(1)  # [N, 1]
    if not (params.any_top_k or params.any_top_p or params.any_min_p):
        return logits.double() / scale + gumbel_of(keys.unsqueeze(1), ids) * is_noisy
    # Few ids are left: the noise, which costs most, is computed for these only.
    rows, columns = (logits >= cutoffs(logits, params)).nonzero(as_tuple=True)  # host synchronisation on CUDA
    noise = gumbel_of(keys[rows], ids[columns]) * is_noisy[rows, 0]
    scores = torch.full(logits.shape, -torch.inf, dtype=torch.float64, device=logits.device)
    scores[rows, columns] = logits[rows, columns].double() / scale[rows, 0] + noise
    return scores


def cutoffs(logits: Tensor, params: PickParams, num_candidates: int = NUM_CANDIDATES) -> Tensor:
    """The smallest logit [N, 1] that min_p, top-k and top-p keep; -inf keeps all.

    Looks at the `num_candidates` largest logits first and sorts whole rows only where these do not decide it.
    """
    candidates = logits.topk(min(num_candidates, logits.shape[1])).values  # [N, C]
    cutoff, is_decided = _cutoffs_among(candidates, logits, params)
    if not is_decided.all():  # host synchronisation on CUDA
        rows = (~is_decided).nonzero().squeeze(1)
        sorted_logits = logits[rows].sort(dim=-1, descending=True).values
        cutoff[rows] = _cutoffs_among(sorted_logits, logits[rows], params.at(rows, params.position[rows]))[0]
    return cutoff


def _cutoffs_among(candidates: Tensor, logits: Tensor, params: PickParams) -> tuple[Tensor, Tensor]:
    """Cutoffs [N, 1] if they lie among the `candidates` [N, C], and whether they do [N]. With C = V they always do."""
    last = candidates.shape[1] - 1
    top_k = params.top_k.masked_fill(params.is_greedy, 1).unsqueeze(1)  # greedy is top-1 without noise
    cutoff = candidates.gather(1, (top_k - 1).clamp(0, last)).masked_fill(top_k == 0, _NO_CUTOFF)
    is_decided = top_k.squeeze(1) <= last + 1
    scale = _safe_temperature(params)
    if params.any_min_p:  # p >= min_p · max p, said of logits; a greedy row has its top-1
        cutoff = torch.maximum(cutoff, candidates[:, :1].double() + scale * params.min_p.log().unsqueeze(1))
    if not params.any_top_p:
        return cutoff, is_decided

    kept = (logits.double() / scale).masked_fill(logits < cutoff, -torch.inf)
    mass = (candidates.double() / scale).masked_fill(candidates < cutoff, -torch.inf)
    mass = (mass - kept.logsumexp(dim=-1, keepdim=True)).exp().cumsum(dim=-1)  # [N, C] of candidates 0..c together
    index = (mass < params.top_p.unsqueeze(1)).sum(dim=-1, keepdim=True)  # the first candidate that fills the nucleus
    has_top_p = (params.top_p < 1).unsqueeze(1) & ~params.is_greedy.unsqueeze(1)
    nucleus = candidates.gather(1, index.clamp(max=last)).masked_fill(~has_top_p, _NO_CUTOFF)
    is_decided &= (index <= last).squeeze(1) | ~has_top_p.squeeze(1)
    return torch.maximum(cutoff, nucleus), is_decided


def _safe_temperature(params: PickParams) -> Tensor:
    return params.temperature.masked_fill(params.is_greedy, 1.0).unsqueeze(1)  # [N, 1]
