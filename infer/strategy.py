"""Strategies as lists of stages: the only place that knows them by name.

autoregressive    the target alone
layerskip         one lower exit drafts γ tokens, the target verifies them (LayerSkip, arXiv 2404.16710)
hispec            all exits: drafts are verified early, and rarely by the target (arXiv 2510.01336)
prompt_lookup     no exit: up to k tokens are looked up in the row's own text (`ngram`), the target verifies them
ngram_layerskip   the same, and layerskip in rows whose text has nothing to propose
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields

from infer.hispec import Stage
from infer.judging import IdentityRule, Rule
from infer.manifest import Manifest
from infer.ngram import Lookup
from infer.rejection import RejectionRule

STRATEGIES = ("autoregressive", "layerskip", "hispec", "prompt_lookup", "ngram_layerskip")
VERIFICATIONS = ("identity", "rejection")


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The numbers of a speculating strategy.

    Args:
        num_draft_tokens: γ, tokens drafted before each judgement.
        window: N_i, tentative tokens after which the target verifies.
        inner_rounds: R, early verifications after which the target verifies at the latest.
        num_lookup_tokens: k, most tokens that are looked up in the row's own text before the target verifies them.
        max_ngram, min_ngram: the row's last tokens are looked for, first as many as `max_ngram`, at least `min_ngram`.
        confidence_threshold: an exit that gives no id this probability, for the token that it has just appended, leaves
            the row to the judge above it at once (as transformers' `assistant_confidence_threshold`); 0 is off.
    """

    num_draft_tokens: int = 2
    window: int = 4
    inner_rounds: int = 4
    num_lookup_tokens: int = 8
    max_ngram: int = 4
    min_ngram: int = 2
    confidence_threshold: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "confidence_threshold":
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                    raise ValueError(f"{name}={value!r} must be a number of at least 0 and below 1")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram={self.max_ngram} must be at least min_ngram={self.min_ngram}")


def stages_of(strategy: str, policy: Policy, manifest: Manifest) -> list[Stage]:
    """The stages that `strategy` runs on this artifact's tiers.

    Raises:
        ValueError: unknown strategy, too few exits, or a query longer than the artifact's programs were checked for.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not one of {', '.join(STRATEGIES)}")
    target = len(manifest.tiers) - 1
    plain = Stage(tier=target, repeats=1, window=0)
    if strategy == "autoregressive":
        return [plain]
    needed = {"prompt_lookup": 1, "hispec": 3}.get(strategy, 2)
    if target + 1 < needed:
        raise ValueError(f"strategy={strategy!r} needs {needed} tiers, the artifact has {target + 1}: train more exits")
    gamma, num_found = policy.num_draft_tokens, policy.num_lookup_tokens
    # The lowest judgement leaves at most N_i − 1 + γ + 1 tokens waiting, each higher one adds its own; the query adds
    # the last committed one.
    longest, names = {
        "layerskip": (gamma + 1, ["num_draft_tokens"]),
        "hispec": (policy.window + gamma + target - 1, ["num_draft_tokens", "window"]),
        "prompt_lookup": (num_found + 1, ["num_lookup_tokens"]),
        "ngram_layerskip": (max(gamma, num_found) + 1, ["num_draft_tokens", "num_lookup_tokens"]),
    }[strategy]
    if longest > manifest.limits.max_query_len:
        numbers = ", ".join(f"{name}={getattr(policy, name)}" for name in names)
        raise ValueError(
            f"{numbers} make a query of {longest} tokens, the artifact was checked up to "
            f"{manifest.limits.max_query_len}: choose lower numbers"
        )
    lookup = Lookup(num_tokens=num_found, max_ngram=policy.max_ngram, min_ngram=policy.min_ngram)
    if strategy == "prompt_lookup":
        return [Stage(tier=target, repeats=0, window=longest, lookup=lookup), plain]
    least = policy.confidence_threshold
    found_first = lookup if strategy == "ngram_layerskip" else None
    draft = Stage(tier=0, repeats=gamma, window=longest, lookup=found_first, confidence_threshold=least)
    if strategy != "hispec":
        return [draft, plain]
    inner = [
        Stage(tier=tier, repeats=policy.inner_rounds, window=policy.window, confidence_threshold=least)
        for tier in range(1, target)
    ]
    return [draft, *inner, plain]


def most_scored(policy: Policy, manifest: Manifest) -> int:
    """Most tokens of one row that a judge scores at once, whichever strategy is chosen later."""
    windows = [1]
    for strategy in STRATEGIES:
        with suppress(ValueError):  # this artifact or policy can't have it
            windows += [stage.window for stage in stages_of(strategy, policy, manifest)]
    return max(windows)


def rule_of(verification: str, stages: Sequence[Stage], manifest: Manifest) -> Rule:
    """How the stages accept: `identity` gives plain decoding's tokens, `rejection` their law at most acceptance.

    Raises:
        ValueError: unknown name.
    """
    if verification not in VERIFICATIONS:
        raise ValueError(f"verification={verification!r} is not one of {', '.join(VERIFICATIONS)}")
    if verification == "identity":
        return IdentityRule()
    return RejectionRule(len(stages), manifest.base.vocab_size)
