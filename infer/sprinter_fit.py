"""Fits SPRINTER's classifier to an artifact: drafts with the target's verdicts on them, and a logistic regression."""

# Shape legend: N drafted tokens, F features

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infer.judging import IdentityRule, Ruling
from infer.lines import Lines
from infer.llm import LLM
from infer.output import check_whole
from infer.params import SamplingParams
from infer.row import Row
from infer.sprinter import FEATURES, Classifier, Setting, features
from infer.strategy import Policy

THRESHOLDS = [n / 20 for n in range(1, 20)]
HELD_OUT = 5  # every so many prompts one is kept from the fit
_RIDGE = 1e-4  # of the weights, so that separable classes have a finite best fit
_NUM_STEPS = 30


class CollectingRule(IdentityRule):
    """The identity rule, which writes down each drafted token's features and whether the target accepted it."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[Tensor, bool]] = []
        self._waiting: dict[Row, list[Tensor]] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        self._waiting = {row: [] for row in rows}

    def judge(self, lines: Lines) -> Ruling:
        ruling = super().judge(lines)
        if not lines.is_target:
            values = features(lines.logits, [max(v.own_token, 0) for v in ruling.verdicts], lines.ids).cpu()
            for row, value in zip(lines.rows, values, strict=True):
                self._waiting[row].append(value)
            return ruling
        for row, drafted, verdict in zip(lines.rows, lines.drafted, ruling.verdicts, strict=True):
            # What follows the first rejection was drafted after a token that is not the target's
            judged = self._waiting[row][: min(len(drafted), verdict.num_accepted + 1)]
            self.samples += [
                (value, j < verdict.num_accepted) for j, value in enumerate(judged) if value.isfinite().all()
            ]
        return ruling


def collect(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_draft_tokens: int,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[list[tuple[Tensor, bool]]]:
    """For every prompt its drafted tokens: features [F] and whether the target accepted them."""
    found = []
    llm.use("layerskip", Policy(num_draft_tokens=num_draft_tokens))
    for number, prompt in enumerate(prompts):
        rule = llm.engine.round.rule = CollectingRule()
        check_whole(llm.generate([list(prompt)], params))
        found.append(rule.samples)
        on_progress(f"drafting for prompt {number + 1} of {len(prompts)}")
    llm.use("autoregressive")
    return found


def fit(llm: LLM, found: Sequence[Sequence[tuple[Tensor, bool]]], least_right: float) -> Classifier:
    """The classifier that the samples give, with the lowest threshold that keeps few wrong tokens.

    Args:
        found: as from `collect`. Every fifth prompt is kept from the fit; its tokens choose the threshold.
        least_right: share of the tokens kept that the target would have accepted. Where no threshold reaches it, the
            highest is taken.

    Raises:
        ValueError: too little was drafted.
    """
    held = [sample for number, samples in enumerate(found) if number % HELD_OUT == HELD_OUT - 1 for sample in samples]
    seen = [sample for number, samples in enumerate(found) if number % HELD_OUT < HELD_OUT - 1 for sample in samples]
    if len(held) < 20 or len(seen) < 50:
        raise ValueError(
            f"{len(seen)} drafted tokens to fit and {len(held)} to try are too few (50 and 20 are needed): give more "
            "prompts by --prompts, or raise --max-tokens"
        )
    values, accepted = _tensors(seen)
    means, scales = values.mean(dim=0), values.std(dim=0).clamp(min=1e-6)
    solution = logistic_regression((values - means) / scales, accepted)
    classifier = Classifier(
        artifact_sha256=llm.artifact.manifest_sha256,
        feature_names=list(FEATURES),
        means=means.tolist(),
        scales=scales.tolist(),
        weights=solution[:-1].tolist(),
        bias=float(solution[-1]),
        threshold=THRESHOLDS[-1],
        num_samples=len(seen) + len(held),
        settings=[],
    )
    values, accepted = _tensors(held)
    settings = [_setting(classifier.chances(values) >= threshold, accepted, threshold) for threshold in THRESHOLDS]
    enough = [one.threshold for one in settings if one.right >= least_right]
    threshold = min(enough, default=THRESHOLDS[-1])
    return Classifier(**{name: getattr(classifier, name) for name in _KEPT}, threshold=threshold, settings=settings)


_KEPT = ("artifact_sha256", "feature_names", "means", "scales", "weights", "bias", "num_samples")


def logistic_regression(values: Tensor, accepted: Tensor) -> Tensor:
    """Weights and bias [F + 1] of the best fit to features [N, F] and labels [N] in {0, 1}, by Newton's method."""
    inputs = torch.cat([values, values.new_ones(len(values), 1)], dim=1)  # [N, F + 1]
    ridge = torch.full((inputs.shape[1],), _RIDGE * len(values), dtype=values.dtype).diag()
    ridge[-1, -1] = 1e-6  # the bias is free
    solution = inputs.new_zeros(inputs.shape[1])
    for _ in range(_NUM_STEPS):
        chances = (inputs @ solution).sigmoid()
        slope = inputs.T @ (chances - accepted) + ridge @ solution
        curve = (inputs * (chances * (1 - chances)).unsqueeze(1)).T @ inputs + ridge
        step = torch.linalg.solve(curve, slope)
        solution = solution - step * (5 / step.norm().clamp(min=5))  # a bias that runs away comes in bounded steps
    return solution


def _tensors(samples: Sequence[tuple[Tensor, bool]]) -> tuple[Tensor, Tensor]:
    return torch.stack([value for value, _ in samples]), torch.tensor([float(label) for _, label in samples]).double()


def _setting(is_kept: Tensor, accepted: Tensor, threshold: float) -> Setting:
    kept = int(is_kept.sum())
    right = float(accepted[is_kept].mean()) if kept else 1.0
    return Setting(threshold=threshold, kept=round(kept / len(accepted), 4), right=round(right, 4))
