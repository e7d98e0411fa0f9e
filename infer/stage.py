"""A stage: one judge of a round, in numbers. A strategy is a list of them, the target's last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infer.branches import num_blocks_of_branch
from infer.lookahead import Lookahead
from infer.ngram import Lookup
from infer.sprinter import Classifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One judge of a round; what the stage below it proposes, it verifies.

    Args:
        tier: whose exit judges; the target's where none does.
        repeats: how often the stage acts while the stage above waits: γ for the drafting stage, R for the next, 0 for
            one that only looks up.
        window: the stage stops repeating for a row once this many of its tokens wait for the target.
        lookup: of the first stage: it looks for proposals in the row's text, and acts in rows without any.
        confidence_threshold: the stage also stops repeating for a row once its exit gave no id so much probability
            where it appended its own token; 0 is off. It looks at that exit's law and never at the token drawn from it,
            so that drafts stay samples of the law, as the rejection rule must have them.
        num_branches: of the first of two stages: most of its exit's other candidates that the target verifies beside
            what was drafted (`tree_round`), those of at least the probability `branch_threshold`.
        exits: of the first stage, tiers from its own upwards: every token comes from the lowest of their exits that
            gives some id the probability `confidence_threshold`, and where none does, the row is left to the stage
            above without a token. Empty: from its own tier's exit.
        lookahead: of a target that is the only stage: it looks ahead (`lookahead_round`).
        classifier: of the first stage: says which of its tokens the target need not verify, so all is lossy.
    """

    tier: int
    repeats: int
    window: int
    lookup: Lookup | None = None
    confidence_threshold: float = 0.0
    num_branches: int = 0
    branch_threshold: float = 0.0
    exits: tuple[int, ...] = ()
    lookahead: Lookahead | None = None
    classifier: Classifier | None = None


def num_scratch_blocks(stages: Sequence[Stage], block_size: int) -> int:
    """Blocks that a row needs beside those of its text while these stages run, for branches of it."""
    if (shape := stages[-1].lookahead) is not None:
        return shape.num_scratch_branches * num_blocks_of_branch(shape.longest, block_size)
    return stages[0].num_branches * num_blocks_of_branch(stages[0].repeats + 1, block_size)
