"""Which strategies may run on an artifact: those that it has the exits for, lossy ones only where they are allowed.

`strategy` knows them by name, `chooser` the one that runs now.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from infer.artifact import Artifact
from infer.judging import Rule
from infer.sprinter import read_classifier
from infer.stage import Stage, num_scratch_blocks
from infer.strategy import LOSSY, STRATEGIES, Policy, Setting, most_scored, rule_of, stages_of


class Repertoire:
    """
    Args:
        allow_lossy: strategies may be chosen that do not give the target's own texts.
    """

    def __init__(self, artifact: Artifact, *, allow_lossy: bool = False) -> None:
        self._artifact, self._manifest = artifact, artifact.manifest
        self._allow_lossy = allow_lossy

    def stages(self, setting: Setting) -> list[Stage]:
        """What the strategy runs. ValueError: unknown, lossy, or numbers that the artifact does not allow."""
        strategy, policy = setting
        if strategy in LOSSY and not self._allow_lossy:
            raise ValueError(
                f"strategy={strategy!r} is lossy: it keeps tokens that the target has not verified; give "
                "allow_lossy=True (--allow-lossy) if you want that, or take another strategy: all others are exact"
            )
        classifier = read_classifier(self._artifact) if strategy == "sprinter" else None
        return stages_of(strategy, policy, self._manifest, classifier)

    def parts(self, setting: Setting, verification: str) -> tuple[list[Stage], Rule]:
        """Of a round. ValueError as `stages`, and for a rule that these can't have."""
        stages = self.stages(setting)
        return stages, rule_of(verification, stages, self._manifest)

    def supported(self, policy: Policy, verifications: Sequence[str]) -> list[str]:
        """The strategies that can run with these numbers under all these rules."""
        names = []
        for name in STRATEGIES:
            with suppress(ValueError):
                stages = self.stages(Setting(name, policy))
                for verification in verifications:
                    rule_of(verification, stages, self._manifest)
                names.append(name)
        return names

    def row_needs(self, settings: Sequence[Setting]) -> tuple[int, int]:
        """Over these strategies with their numbers: most tokens of a row that a round scores, whichever strategy is
        chosen later, and most scratch blocks that a row needs beside its text's."""
        num_scored = max(most_scored(policy, self._manifest) for _, policy in settings)
        rounds = [self.stages(setting) for setting in settings]
        return num_scored, max(num_scratch_blocks(stages, self._manifest.block_size) for stages in rounds)


def check_adaptive(strategy: str, verification: str) -> None:
    """ValueError where texts depend on what is drafted, so that `adaptive` must not decide that by the clock."""
    if verification != "identity" or strategy in LOSSY:
        what = f"strategy={strategy!r}" if strategy in LOSSY else f"verification={verification!r}"
        raise ValueError(
            f"adaptive=True with {what}: its texts depend on what is drafted, so they would hang on how long calls "
            "take: leave it out, or take an exact strategy under the rule of identity"
        )
