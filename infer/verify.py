"""What it means to accept a token. One rule for both judgements (intermediate and target), for greedy and sampling.

Knows only token ids: what the proposer drafted and what the judge picked at the same positions (`sampler.pick`).
`train` uses the same functions, so that the acceptance shown in training is the acceptance served.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Verdict(NamedTuple):
    num_accepted: int  # 0 <= num_accepted <= number of drafted tokens
    own_token: int  # the judge's token after the accepted ones: a correction, or the bonus token


def verify(drafted: Sequence[int], picks: Sequence[int]) -> Verdict:
    """Accept one row's drafted tokens as long as they are what the judge picks itself.

    `picks[j]` is the judge's token given the row and drafted[:j], so picks[0] judges drafted[0], and there is one more
    pick than tokens drafted. A drafted token is accepted iff it equals the judge's pick and all tokens before it are
    accepted, as later picks were made after a prefix that the judge did not choose (the prefix rule: Leviathan, Kalman,
    Matias, arXiv 2211.17192). As picks are a function of (seed, choice, position) and the judge's logits, the row ends
    up with the judge's own tokens whatever was drafted (Daliri, Musco, Suresh, arXiv 2408.07978).

    A pick of -1 (the judge's logits were broken) accepts nothing, so it always surfaces as `own_token`. Plain numbers,
    as for the few tokens of a round they are quicker than a dozen tensor operations.
    """
    for num_accepted, (token_id, picked) in enumerate(zip(drafted, picks)):
        if token_id != picked or picked < 0:
            return Verdict(num_accepted, picked)
    return Verdict(len(drafted), picks[len(drafted)])


def accepted_prefix_lengths(matches: Tensor) -> Tensor:
    """How many leading entries of each row of `matches` [N, K] bool are true: [N] int64."""
    return matches.long().cumprod(dim=1).sum(dim=1)


def mean_acceptance_length(num_accepted: int, num_drafts: int) -> float:
    """Tokens gained per drafting round, the judge's own included: 1 + accepted / drafts, as vLLM defines it."""
    return 1.0 + num_accepted / num_drafts if num_drafts else 1.0
