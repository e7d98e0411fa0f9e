"""Which round runs a list of stages."""

from __future__ import annotations

from collections.abc import Sequence

from infer.judging import Rule
from infer.lookahead_round import LookaheadRound
from infer.round import Round
from infer.runner import Runner
from infer.stage import Stage
from infer.tree_round import TreeRound


def make_round(runner: Runner, stages: Sequence[Stage], rule: Rule | None = None) -> Round:
    """The round that runs these stages."""
    if (shape := stages[-1].lookahead) is not None:
        return LookaheadRound(runner, stages, shape, rule)
    return (TreeRound if stages[0].num_branches else Round)(runner, stages, rule)
