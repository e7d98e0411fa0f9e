"""The strategy that an engine runs now: chosen by hand, or by a plan for the number of rows.

`repertoire` says what may be chosen. Knows neither prompts nor how programs are loaded.
"""

from __future__ import annotations

from infer.engine import Engine
from infer.payoff import Payoff
from infer.plan import Plan
from infer.repertoire import Repertoire, check_adaptive
from infer.round_maker import make_round
from infer.strategy import Setting


class StrategyChooser:
    """Switches strategies over the same programs and pages, while no request is running.

    Args:
        engine: with a round that runs `setting` under the rule `verification`.
        plan: followed until a strategy is chosen by hand; None: there is none to follow.
        workload: the kind of text that the plan is asked about.
        adaptive: as `LLM` has it; None: the plan's strategies are, where no text depends on it.
    """

    def __init__(
        self,
        engine: Engine,
        repertoire: Repertoire,
        setting: Setting,
        verification: str,
        *,
        plan: Plan | None = None,
        workload: str = "",
        adaptive: bool | None = None,
    ) -> None:
        self.plan, self._workload = plan, workload
        self._engine, self._repertoire = engine, repertoire
        self._payoffs: dict[Setting, Payoff] = {}  # what was learnt of each
        self._follows_adaptively = adaptive is not False and verification == "identity"
        self._set(setting, verification, adaptive=bool(adaptive))

    def use(self, setting: Setting, verification: str, *, adaptive: bool) -> None:
        """Take this one, and follow no plan from now on.

        Raises:
            ValueError: it is not in the repertoire, its texts would depend on the clock, or a request is running.
        """
        self._switch(setting, verification, adaptive=adaptive)
        self.plan = None

    def follow_plan(self, num_rows: int) -> None:
        """Take the plan's strategy for so many rows at once, if there is a plan and no request is running."""
        if self.plan is None or self._engine.has_unfinished:
            return
        setting = self.plan.entry_for(num_rows).figure_for(self._workload).setting
        if setting != self.setting:
            self._switch(setting, self.verification, adaptive=self._follows_adaptively)

    def forget_payoffs(self) -> None:
        """Learn anew whether speculation pays: calls take other times from now on."""
        self._payoffs.clear()
        self._set(self.setting, self.verification, adaptive=self._engine.payoff is not None)

    def _switch(self, setting: Setting, verification: str, *, adaptive: bool) -> None:
        stages, rule = self._repertoire.parts(setting, verification)
        if self._engine.has_unfinished:
            raise ValueError("requests are running: finish or close their stream before choosing another strategy")
        if adaptive:
            check_adaptive(setting.strategy, verification)
        self._engine.round = make_round(self._engine.runner, stages, rule)
        self._set(setting, verification, adaptive=adaptive)

    def _set(self, setting: Setting, verification: str, *, adaptive: bool) -> None:
        self.setting, self.verification = setting, verification
        has_choice = adaptive and setting.strategy != "autoregressive"
        self._engine.payoff = self._payoffs.setdefault(setting, Payoff()) if has_choice else None
