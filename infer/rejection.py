"""The rejection rule: accept as often as the two laws allow, and be exact in law, not token for token.

The draft stage samples its tokens. Every judge accepts a drafted token x with a chance that depends on its own law p
and on the law q that x was drawn from, and where it rejects draws from what p has left over q. What a judge puts out is
then distributed exactly as p alone would have it, so that p is the q of the next judge.

    lower judges    token by token: accept with min(1, p(x) / q(x)), else draw from norm(max(0, p − q))
                    (Leviathan, Kalman, Matias, arXiv 2211.17192, §2.3; Chen et al., arXiv 2302.01318)
    target          the block together: accept as long a part of it as the product of the ratios pays for
                    (block verification: Sun et al., arXiv 2403.10444, Algorithm 2), never fewer tokens on average

Both are exact as long as the decision to draft a further token looks at the tokens before it, at the laws up to the
last of these and at what became of them, never at the further token itself. Stages stop by counts, and with a
`confidence_threshold` by the judge's law at the place of its own token, which is there before anything is drafted
behind it; in AdaDecode the exit that proposes is chosen by the exits' laws, too, before the token is drawn. What is
looked up in a row's text follows from its committed tokens, so there q is 1 on the token x: it is kept with chance
p(x), and what is left over p is p without x. Randomness is drawn anew for every decision, from a stream of the row's
own, so that a row depends on its seed and strategy, but not on its neighbours.

All laws stand over the whole vocabulary, zero where a trimmed exit has no id: 8 bytes × vocabulary for each token that
waits for a judge. The mathematics (`token_chances` … `left_over`) is plain NumPy and runs over fractions as well, by
which the tests prove it.
"""

# Shape legend: K drafted tokens, N lines, V whole vocabulary; p [K + 1, V] the judge's laws, q [K, V] the proposer's

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from infer.judging import Ruling
from infer.lines import Lines
from infer.row import Row
from infer.sampler import probabilities
from infer.verify import Verdict

Law = NDArray[Any]  # [V], float64, or in tests fractions
Laws = NDArray[Any] | Sequence[Law]


def token_chances(p: Laws, q: Laws, drafted: Sequence[int]) -> list[Any]:
    """The chance of each drafted token to be accepted once those before it are."""
    return [min(p[i][x] / q[i][x], 1) for i, x in enumerate(drafted)]


def block_chances(p: Laws, q: Laws, drafted: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """The chance h_i that the block is kept at least up to its token i, and the weights w_0 … w_K of its prefixes.

    h_i is what stands at token i alone: the block is kept up to the last i whose draw succeeds.
    """
    weights, chances = [1], []
    for i, x in enumerate(drafted):
        weights.append(min(weights[-1] * p[i][x] / q[i][x], 1))
        if i + 1 == len(drafted):
            chances.append(weights[-1])
            continue
        owed = left_over(p[i + 1], q[i + 1], weights[-1]).sum()
        missing = 1 - weights[-1]
        chances.append(owed / (owed + missing) if owed + missing > 0 else 1)  # equal laws owe nothing: go on
    return chances, weights


def left_over(p: Law, q: Law, weight: Any = 1) -> Law:
    """[V] what the judge's law p has over the proposer's q: where its own token is drawn after a rejection."""
    return (weight * p - q).clip(min=0)


def num_in_sequence(outcomes: Sequence[bool]) -> int:
    """Tokens accepted one after the other, up to the first failure."""
    return next((i for i, has_passed in enumerate(outcomes) if not has_passed), len(outcomes))


def num_in_block(outcomes: Sequence[bool]) -> int:
    """Tokens accepted together, up to the last success."""
    return max((i + 1 for i, has_passed in enumerate(outcomes) if has_passed), default=0)


@dataclass(slots=True)
class _RowState:
    """One row in one round."""

    random: np.random.Generator
    laws: list[list[Law]]  # [stage]: of the tokens that it has put out and the next stage has not judged yet


class RejectionRule:
    """The rule over a list of stages; keeps each row's random stream and the laws of its waiting tokens for a round.

    Args:
        num_stages: length of the list of stages.
        vocab_size: V.
    """

    def __init__(self, num_stages: int, vocab_size: int) -> None:
        self._num_stages = num_stages
        self._vocab_size = vocab_size
        self._states: dict[Row, _RowState] = {}
        self.doubted: set[Row] = set()

    def begin(self, rows: Sequence[Row]) -> None:
        """Start the rows' streams, keyed by how far they have come: only a round that failed begins there again."""
        keys = {row: (row.seed % 2**64, row.choice, row.num_committed) for row in rows}
        self._states = {
            row: _RowState(np.random.Generator(np.random.Philox(key)), [[] for _ in range(self._num_stages)])
            for row, key in keys.items()
        }

    def note_proposal(self, row: Row, level: int, token_ids: Sequence[int]) -> None:
        """Each token was certain."""
        for token_id in token_ids:
            law = np.zeros(self._vocab_size)
            law[token_id] = 1.0
            self._states[row].laws[level].append(law)

    def judge(self, lines: Lines) -> Ruling:
        laws, is_broken = self._laws(lines)
        verdicts, first = [], 0
        for row, drafted, count in zip(lines.rows, lines.drafted, lines.counts, strict=True):
            here = slice(first, first + count)
            first += count
            if lines.is_target and any(is_broken[here]):  # no law to judge by from there on
                drafted = drafted[: is_broken[here].index(True)]
            verdicts.append(self._judge_row(self._states[row], drafted, laws[here], lines))
            if lines.is_target and is_broken[here][verdicts[-1].num_accepted]:
                verdicts[-1] = verdicts[-1]._replace(own_token=-1)
        return Ruling(verdicts, is_broken if any(is_broken) else None)

    def _judge_row(self, state: _RowState, drafted: Sequence[int], p: NDArray[np.float64], lines: Lines) -> Verdict:
        q = state.laws[lines.level - 1] if lines.level else []
        draws = state.random.random(len(drafted) + 1).tolist()
        if lines.is_target:
            chances, weights = block_chances(p, q, drafted)
            num_accepted = num_in_block([u < chance for u, chance in zip(draws, chances)])
        else:
            chances, weights = token_chances(p, q, drafted), [1] * len(drafted)
            num_accepted = num_in_sequence([u < chance for u, chance in zip(draws, chances)])
        own_law = p[num_accepted]
        if num_accepted < len(drafted):
            rest = left_over(own_law, q[num_accepted], weights[num_accepted])
            own_law = rest if rest.any() else own_law  # rounding alone rejects where nothing is left
        if lines.level:
            q.clear()
        if not lines.is_target:
            state.laws[lines.level] += [law.copy() for law in p[: num_accepted + 1]]  # not views, which hold all of p
        return Verdict(num_accepted, _draw(own_law, draws[-1]))

    def _laws(self, lines: Lines) -> tuple[NDArray[np.float64], list[bool]]:
        """What each line's token is drawn from, [N, V] float64, and whether the line says nothing at all. [N]

        Such a line stands for id 0: of a lower stage a bad guess that any judge can weigh."""
        is_broken = ~lines.logits.amax(dim=-1).isfinite()  # [N]; as in `pick`
        own = probabilities(lines.logits, lines.params())  # [N, V']
        laws = own.new_zeros(len(own), self._vocab_size)
        ids = torch.arange(own.shape[1], device=own.device) if lines.ids is None else lines.ids
        laws[:, ids] = own
        laws[is_broken] = 0.0
        laws[is_broken, 0] = 1.0
        return laws.cpu().numpy(), is_broken.tolist()


def _draw(weights: Law, uniform: float) -> int:
    """The id at which the running sum of the weights [V] passes its share `uniform` in [0, 1) of the total."""
    running = weights.cumsum()
    token_id = int(running.searchsorted(uniform * running[-1], side="right"))
    return min(token_id, int(weights.nonzero()[0][-1]))  # where the product was rounded up to the total
