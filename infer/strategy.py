"""Strategies as lists of stages: the only place that knows them by name.

autoregressive    the target alone
layerskip         one lower exit drafts γ tokens, the target verifies them (LayerSkip, arXiv 2404.16710)
hispec            all exits: drafts are verified early, and rarely by the target (arXiv 2510.01336)
hispec_paper      the same with the paper's own numbers: exits at 1/8 and 1/4 of the layers, γ = 2, N_i = 4
prompt_lookup     no exit: up to k tokens are looked up in the row's own text (`ngram`), the target verifies them
ngram_layerskip   the same, and layerskip in rows whose text has nothing to propose
lookahead         no exit: n-grams out of a window that runs ahead of the text (`lookahead`, arXiv 2402.02057)
adadecode         each token from the lowest exit that is sure of it, the target where none is (arXiv 2506.03700)
sprinter          LOSSY: one lower exit drafts, a classifier says when to call the target (`sprinter`, arXiv 2502.04557)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from infer.judging import IdentityRule, Rule
from infer.lookahead import Lookahead
from infer.manifest import Manifest
from infer.ngram import Lookup
from infer.rejection import RejectionRule
from infer.sprinter import FIT_AGAIN, Classifier, SprinterRule
from infer.stage import Stage

STRATEGIES = (
    "autoregressive",
    "layerskip",
    "hispec",
    "hispec_paper",
    "prompt_lookup",
    "ngram_layerskip",
    "lookahead",
    "adadecode",
    "sprinter",
)
LOSSY = frozenset({"sprinter"})
VERIFICATIONS = ("identity", "rejection")
PAPER_DEPTHS = (1 / 8, 1 / 4)  # of draft and intermediate exit, in shares of the layers (arXiv 2510.01336)


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
        exit_threshold: of `adadecode`: an exit that gives no id this probability lets the next deeper one propose.
        lookahead_window, lookahead_ngram, lookahead_guesses: of `lookahead`, W, N and G: columns of its window, length
            of its n-grams, and how many of these are verified at once.
        num_branches: of `layerskip` and `ngram_layerskip`: most of the exit's other candidates that are verified beside
            its draft, for places where its first choice is wrong but not its second or third (`tree_round`); 0 is off.
        branch_threshold: a candidate is worth a branch from this probability on, the draft's before it included.
    """

    num_draft_tokens: int = 2
    window: int = 4
    inner_rounds: int = 4
    num_lookup_tokens: int = 8
    max_ngram: int = 4
    min_ngram: int = 2
    confidence_threshold: float = 0.0
    exit_threshold: float = 0.8
    lookahead_window: int = 4
    lookahead_ngram: int = 4
    lookahead_guesses: int = 4
    num_branches: int = 0
    branch_threshold: float = 0.05

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in ("confidence_threshold", "exit_threshold", "branch_threshold"):
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                    raise ValueError(f"{name}={value!r} must be a number of at least 0 and below 1")
                continue
            least = 0 if name == "num_branches" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        if self.lookahead_ngram < 2:
            raise ValueError(
                f"lookahead_ngram={self.lookahead_ngram} must be at least 2: a token and one that follows it"
            )
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram={self.max_ngram} must be at least min_ngram={self.min_ngram}")


class Setting(NamedTuple):
    """A strategy and its numbers, which plain decoding does not look at."""

    strategy: str
    policy: Policy = Policy()


# N_d and N_i of the paper; every inner round leaves a token at least, so four fill the window
PAPER_POLICY = Policy(num_draft_tokens=2, window=4, inner_rounds=4)


def stages_of(strategy: str, policy: Policy, manifest: Manifest, classifier: Classifier | None = None) -> list[Stage]:
    """The stages that `strategy` runs on this artifact's tiers; `sprinter` needs a classifier, nobody else looks at it.

    Raises:
        ValueError: unknown strategy, too few exits, or a query longer than the artifact's programs were checked for.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not one of {', '.join(STRATEGIES)}")
    target = len(manifest.tiers) - 1
    plain = Stage(tier=target, repeats=1, window=0)
    if strategy == "autoregressive":
        return [plain]
    needed = {"prompt_lookup": 1, "lookahead": 1, "hispec": 3, "hispec_paper": 3}.get(strategy, 2)
    if target + 1 < needed:
        raise ValueError(f"strategy={strategy!r} needs {needed} tiers, the artifact has {target + 1}: train more exits")
    tiers = list(range(target))  # of the lower exits that are used
    if strategy == "hispec_paper":
        tiers, policy = _nearest_to_paper(manifest), PAPER_POLICY
    gamma, num_found = policy.num_draft_tokens, policy.num_lookup_tokens
    ahead = Lookahead(
        window=policy.lookahead_window, ngram=policy.lookahead_ngram, num_guesses=policy.lookahead_guesses
    )
    # The lowest judgement leaves at most N_i − 1 + γ + 1 tokens waiting, each higher one adds its own; the query adds
    # the last committed one.
    longest, names = {
        "layerskip": (gamma + 1, ["num_draft_tokens"]),
        "adadecode": (gamma + 1, ["num_draft_tokens"]),
        "sprinter": (gamma + 1, ["num_draft_tokens"]),
        "hispec": (policy.window + gamma + len(tiers) - 1, ["num_draft_tokens", "window"]),
        "hispec_paper": (policy.window + gamma + len(tiers) - 1, ["num_draft_tokens", "window"]),
        "prompt_lookup": (num_found + 1, ["num_lookup_tokens"]),
        "lookahead": (ahead.longest, ["lookahead_window", "lookahead_ngram"]),
        "ngram_layerskip": (max(gamma, num_found) + 1, ["num_draft_tokens", "num_lookup_tokens"]),
    }[strategy]
    if longest > manifest.limits.max_query_len:
        numbers = ", ".join(f"{name}={getattr(policy, name)}" for name in names)
        raise ValueError(
            f"{numbers} make a query of {longest} tokens, the artifact was checked up to "
            f"{manifest.limits.max_query_len}: choose lower numbers"
        )
    if strategy == "lookahead":
        return [replace(plain, window=ahead.ngram, lookahead=ahead)]
    lookup = Lookup(num_tokens=num_found, max_ngram=policy.max_ngram, min_ngram=policy.min_ngram)
    if strategy == "prompt_lookup":
        return [Stage(tier=target, repeats=0, window=longest, lookup=lookup), plain]
    if strategy == "adadecode":
        least, exits = policy.exit_threshold, tuple(tiers)
        return [Stage(tier=0, repeats=gamma, window=longest, exits=exits, confidence_threshold=least), plain]
    if strategy == "sprinter":
        if classifier is None:
            raise ValueError(f"strategy={strategy!r} needs a classifier; {FIT_AGAIN}")
        return [Stage(tier=0, repeats=gamma, window=longest, classifier=classifier), plain]
    least = policy.confidence_threshold
    found_first = lookup if strategy == "ngram_layerskip" else None
    draft = Stage(tier=tiers[0], repeats=gamma, window=longest, lookup=found_first, confidence_threshold=least)
    if strategy not in ("hispec", "hispec_paper"):
        return [replace(draft, num_branches=policy.num_branches, branch_threshold=policy.branch_threshold), plain]
    inner = [
        Stage(tier=tier, repeats=policy.inner_rounds, window=policy.window, confidence_threshold=least)
        for tier in tiers[1:]
    ]
    return [draft, *inner, plain]


def _nearest_to_paper(manifest: Manifest) -> list[int]:
    """The two tiers below the target whose exits lie nearest to the paper's depths, 1/8 and 1/4 of the layers."""
    depths, num_layers = [tier.stop for tier in manifest.tiers[:-1]], manifest.base.num_layers
    pairs = itertools.combinations(range(len(depths)), 2)
    return list(min(pairs, key=lambda two: sum(abs(depths[t] - p * num_layers) for t, p in zip(two, PAPER_DEPTHS))))


def paper_depths(manifest: Manifest) -> str | None:
    """In words, how far `hispec_paper` is from the paper here; None if its exits are the paper's, or there are none."""
    if len(manifest.tiers) < 3:
        return None
    have, num_layers = [manifest.tiers[tier].stop for tier in _nearest_to_paper(manifest)], manifest.base.num_layers
    if all(abs(depth - share * num_layers) < 1 for depth, share in zip(have, PAPER_DEPTHS, strict=True)):
        return None
    want = " and ".join(f"{share * num_layers:g}" for share in PAPER_DEPTHS)
    return (
        f"hispec_paper: this artifact's exits nearest to the paper's depths stand after {have[0]} and {have[1]} of "
        f"{num_layers} layers, the paper's would stand after {want}"
    )


def most_scored(policy: Policy, manifest: Manifest) -> int:
    """Most tokens of one row that a judge scores at once, whichever strategy is chosen later."""
    windows = [1]
    for strategy in STRATEGIES:
        with suppress(ValueError):  # this artifact or policy can't have it
            stages = stages_of(strategy, policy, manifest)
            windows += [_scored_by(stage) for stage in stages]
    return max(windows)


def _scored_by(stage: Stage) -> int:
    """Most tokens of one row that are scored for what the stage proposes."""
    return stage.lookahead.num_scored if stage.lookahead else stage.window * (1 + stage.num_branches)


def rule_of(verification: str, stages: Sequence[Stage], manifest: Manifest) -> Rule:
    """How the stages accept: `identity` gives plain decoding's tokens, `rejection` their law at most acceptance.

    Raises:
        ValueError: unknown name, or one that these stages can't have.
    """
    if verification not in VERIFICATIONS:
        raise ValueError(f"verification={verification!r} is not one of {', '.join(VERIFICATIONS)}")
    if (classifier := stages[0].classifier) is not None:
        if verification != "identity":
            raise ValueError(
                f"verification={verification!r}: sprinter is lossy, so there is no law to keep: leave it out"
            )
        return SprinterRule(classifier)
    if verification == "identity":
        return IdentityRule()
    if stages[0].lookahead is not None:
        raise ValueError(
            f"verification={verification!r}: lookahead verifies several guesses for one place, for which this rule is "
            "not made: leave it out, or take prompt_lookup"
        )
    if (number := stages[0].num_branches) > 0:
        raise ValueError(
            f"verification={verification!r}: num_branches={number} verifies several candidates for one place, for "
            "which this rule is not made: leave it out, or set num_branches=0"
        )
    return RejectionRule(len(stages), manifest.base.vocab_size)
