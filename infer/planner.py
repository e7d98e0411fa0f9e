"""What a strategy should bring, from what its calls cost and what judges made of drafts; and which one to take.

Pure arithmetic: nothing here runs a model or knows a file. `predict` walks one outer round as `round.Round` does and
takes expectations: tokens per second are tokens of a round ÷ seconds of a round (for one drafting exit that is
Leviathan, Kalman, Matias, arXiv 2211.17192, theorem 3.8, with measured chances and costs). It assumes that a judge's
chance to accept a proposal depends only on the proposal's place, and that rows are independent of each other.

A new strategy needs a line in `NUMBERS` and one in `GRID`, the settings that are tried; or in `UNPREDICTED`, whose
settings are measured alone, as what a lookup finds, or where an exit is sure of itself, depends on the text.
"""

# Shape legend: B rows of a batch

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from infer.manifest import Manifest
from infer.stage import Stage
from infer.strategy import LOSSY, Policy, Setting, stages_of

PLAIN = "autoregressive"

BRANCHES = ("num_branches", "branch_threshold")

# The numbers of a policy that a strategy looks at.
NUMBERS: Mapping[str, Sequence[str]] = {
    PLAIN: (),
    "layerskip": ("num_draft_tokens", "confidence_threshold", *BRANCHES),
    "hispec": ("num_draft_tokens", "window", "inner_rounds", "confidence_threshold"),
    "hispec_paper": (),
    "prompt_lookup": ("num_lookup_tokens",),
    "ngram_layerskip": ("num_lookup_tokens", "num_draft_tokens", "confidence_threshold", *BRANCHES),
    "lookahead": ("lookahead_window", "lookahead_ngram", "lookahead_guesses"),
    "adadecode": ("num_draft_tokens", "exit_threshold"),
    "sprinter": ("num_draft_tokens",),
}
# In the order of their numbers: the last setting that an artifact allows shows most of what its exits are worth.
GRID: Mapping[str, Sequence[Policy]] = {
    "layerskip": [Policy(num_draft_tokens=gamma) for gamma in range(1, 7)],
    "hispec": [
        Policy(num_draft_tokens=gamma, window=window, inner_rounds=rounds)
        for gamma in (1, 2, 3, 4)
        for window, rounds in ((1, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8))
    ],
    "hispec_paper": [Policy()],  # has numbers of its own
}

Distribution = Mapping[int, float]  # number → probability; they sum to 1


UNPREDICTED: Sequence[Setting] = [
    Setting("layerskip", Policy(num_draft_tokens=5, confidence_threshold=0.5)),
    *(Setting("layerskip", Policy(num_draft_tokens=gamma, num_branches=3)) for gamma in (1, 2, 3)),
    Setting("prompt_lookup", Policy(num_lookup_tokens=5)),
    Setting("ngram_layerskip", Policy(num_lookup_tokens=5, num_draft_tokens=2)),
    Setting("ngram_layerskip", Policy(num_lookup_tokens=5, num_draft_tokens=2, num_branches=3)),
    *(
        Setting("ngram_layerskip", Policy(num_lookup_tokens=10, num_draft_tokens=gamma, num_branches=3))
        for gamma in (1, 2, 3)
    ),
    Setting(
        "ngram_layerskip",
        Policy(num_lookup_tokens=10, num_draft_tokens=3, num_branches=5, branch_threshold=0.03),
    ),
    Setting("ngram_layerskip", Policy(num_lookup_tokens=5, num_draft_tokens=5, confidence_threshold=0.5)),
    Setting("lookahead", Policy(lookahead_window=4, lookahead_ngram=3, lookahead_guesses=3)),
    *(Setting("adadecode", Policy(num_draft_tokens=5, exit_threshold=least)) for least in (0.5, 0.8)),
    *(Setting("sprinter", Policy(num_draft_tokens=gamma)) for gamma in (2, 5)),  # lossy: tuned if allowed, never chosen
]


def settings(manifest: Manifest) -> dict[str, list[Setting]]:
    """Strategy → the settings of `GRID` that the artifact allows, for the strategies that have any."""
    allowed: dict[str, list[Setting]] = {}
    for strategy, policies in GRID.items():
        for policy in policies:
            with suppress(ValueError):  # too few tiers, or a query that is too long
                stages_of(strategy, policy, manifest)
                allowed.setdefault(strategy, []).append(Setting(strategy, policy))
    return allowed


# ---- what was measured ----


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a batch of B rows that all take part.

    Args:
        calls: tier → tokens per row that its exit scores → seconds, those on the host included.
        overhead: seconds of an outer round that belong to no call.
    """

    calls: Mapping[int, Mapping[int, float]]
    overhead: float = 0.0

    def of(self, tier: int, num_tokens: int) -> float:
        """Seconds of a call; between two measured widths on the line between them, beyond all on the last line."""
        known = sorted(self.calls[tier].items())
        if num_tokens <= known[0][0] or len(known) == 1:
            return known[0][1]
        for (low, low_cost), (high, high_cost) in pairwise(known):
            slope = (high_cost - low_cost) / (high - low)
            if num_tokens <= high:
                return low_cost + slope * (num_tokens - low)
        return high_cost + max(0.0, slope) * (num_tokens - high)


def chances(verdicts: Iterable[tuple[int, int]]) -> list[float]:
    """[j]: how often a judge accepted the proposal at place j when it had accepted all before it.

    Args:
        verdicts: (proposed, accepted) of each judgement. One with fewer proposals says nothing about later places, as
            in Kaplan and Meier's estimate (1958).
    """
    reached: dict[int, int] = defaultdict(int)
    accepted: dict[int, int] = defaultdict(int)
    for num_proposed, num_accepted in verdicts:
        for place in range(min(num_proposed, num_accepted + 1)):
            reached[place] += 1
            accepted[place] += place < num_accepted
    return [accepted[place] / reached[place] for place in range(len(reached))]


# ---- prediction ----


def predict(stages: Sequence[Stage], odds: Sequence[Sequence[float]], costs: Costs, batch_size: int) -> float:
    """Expected tokens per second of all rows together.

    Args:
        stages: of the strategy, the target's last.
        odds: for each stage its `chances`; the first only drafts and has none. Places beyond those known have the last
            one's chance.
    """
    outcome, seconds = _Expectation(stages, odds, costs, batch_size).act(len(stages) - 1, 0)
    num_tokens = sum(number * chance for number, chance in outcome.items())
    return batch_size * num_tokens / (seconds + costs.overhead)


class _Expectation:
    """One outer round in expectation; `act` mirrors `Round._run_stage` and `Round._judge`.

    Rows run in step: a stage is called as long as any row needs it, as wide as the widest row.
    """

    def __init__(self, stages: Sequence[Stage], odds: Sequence[Sequence[float]], costs: Costs, batch_size: int) -> None:
        self._stages, self._odds, self._costs, self._batch_size = stages, odds, costs, batch_size
        self._known: dict[tuple[int, int], tuple[Distribution, float]] = {}

    def act(self, level: int, waiting: int) -> tuple[Distribution, float]:
        """One act of a stage in rows in which `waiting` tokens wait → how many wait after it, and its seconds."""
        if (level, waiting) not in self._known:
            self._known[level, waiting] = self._act(level, waiting)
        return self._known[level, waiting]

    def _act(self, level: int, waiting: int) -> tuple[Distribution, float]:
        ends: Distribution = {waiting: 1.0}
        seconds = 0.0
        for _ in range(self._stages[level - 1].repeats if level > 0 else 0):
            more: dict[int, float] = defaultdict(float)
            share = spent = 0.0  # of a row: the chance to take part, and its seconds then
            for end, chance in ends.items():
                if end >= self._stages[level - 1].window:
                    more[end] += chance
                    continue
                outcome, cost = self.act(level - 1, end)
                share, spent = share + chance, spent + chance * cost
                for number, part in outcome.items():
                    more[number] += chance * part
            if share == 0:
                break
            seconds += spent / share * (1 - (1 - min(share, 1.0)) ** self._batch_size)
            ends = more
        tier = self._stages[level].tier
        widest = _largest_of({end - waiting + 1: chance for end, chance in ends.items()}, self._batch_size)
        seconds += sum(chance * self._costs.of(tier, width) for width, chance in widest.items())
        after: dict[int, float] = defaultdict(float)
        for end, chance in ends.items():
            for num_accepted, part in enumerate(_accepted(self._odds[level], end - waiting)):
                after[waiting + num_accepted + 1] += chance * part  # and the judge's own token
        return after, seconds


def _accepted(odds: Sequence[float], num_proposed: int) -> list[float]:
    """[a]: the chance that exactly the first `a` of so many proposals are accepted."""
    left, result = 1.0, []
    for place in range(num_proposed):
        chance = odds[min(place, len(odds) - 1)] if odds else 0.0
        result.append(left * (1 - chance))
        left *= chance
    return [*result, left]


def _largest_of(numbers: Distribution, count: int) -> Distribution:
    """The law of the largest of `count` independent numbers of the same law."""
    largest, below = {}, 0.0
    for number, chance in sorted(numbers.items()):
        largest[number] = min(below + chance, 1.0) ** count - below**count
        below = min(below + chance, 1.0)
    return largest


# ---- choice ----


def shortlist(predicted: Mapping[Setting, float], plain: float, num_settings: int, least: float) -> list[Setting]:
    """The fastest by prediction, best first: so many, if they reach `least` times plain decoding's speed, and each
    strategy's first, so that there is a figure to show."""
    best = sorted(predicted, key=lambda setting: -predicted[setting])
    fast = [setting for setting in best[:num_settings] if predicted[setting] >= least * plain]
    firsts = {setting.strategy: setting for setting in reversed(best)}
    return [setting for setting in best if setting in fast or firsts[setting.strategy] == setting]


def choose(ratios: Mapping[Setting, Sequence[float]], margin: float, lowest: float = 1.0) -> Setting:
    """The setting with the best `typical` of measured speeds relative to plain decoding, or plain decoding itself.

    A setting must be exact, and faster by more than the margin, so that noise does not choose it, and its lower quarter
    must reach `lowest`.
    """
    passed = {
        setting: speed
        for setting, values in ratios.items()
        if setting.strategy not in LOSSY and (speed := typical(values)) > 1 + margin and lower_quarter(values) >= lowest
    }
    return max(passed, key=lambda setting: passed[setting]) if passed else Setting(PLAIN)


def typical(values: Sequence[float]) -> float:
    """The mean of the middle half: neither a stall of the machine nor one lucky text decides it, and of a few texts of
    different kinds more than one does, unlike in the median."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def lower_quarter(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]
