"""Chooses which state to go back to and what to change, the further the more often the same failure comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config.healing_config import HealingConfig
from ..failures.recipes import FAILURE_RECIPES, Action, FailureType
from ..healers.numerics.ladder import Decision
from ..rollback.rollback import Target
from ..run.run import RecoveryBudget


# Where a run goes back to when the same failure comes again and again, if its learning rate is not to blame.
_CORRUPTED = (Target.NEWEST, Target.OLDER, Target.DISK)


class RollbackLadder:
    """Which state to go back to, and what to change, given how often that was tried."""

    def __init__(self, config: HealingConfig, budget: RecoveryBudget) -> None:
        self.config = config
        self.budget = budget
        self._climbed: dict[str, int] = {}
        self._moments_reset = False
        self._overflows = False

    def next(self, failure: FailureType, step: int, early: bool, may_reduce: bool, rate: str) -> Decision:
        """The next rung."""
        if self.budget.refunds(step):
            self._climbed.clear()
            self._moments_reset = False
        self._overflows = failure is FailureType.NONFINITE_NUMERICAL
        attempt = self._climbed[failure] = self._climbed.get(failure, 0) + 1
        decision = self._rung(failure, attempt, early, may_reduce, rate)
        if not decision.stops and not self.budget.spend(step):
            budget = f"the budget of {self.config.max_recovery_attempts} attempts without progress is spent"
            decision = self._end(failure, f"{FAILURE_RECIPES[failure].diagnosis.rstrip('.')}; {budget}")
        return replace(decision, rung=attempt)

    def _rung(self, failure: FailureType, attempt: int, early: bool, may_reduce: bool, rate: str) -> Decision:
        if failure is FailureType.CORRUPTED_STATE:
            if attempt > len(_CORRUPTED):
                return self._end(failure, f"the weights turned NaN or Inf again after each of {attempt - 1} rollbacks")
            return self._back(_CORRUPTED[attempt - 1])
        if failure is FailureType.DIVERGENCE and attempt == 1 and not early:
            return self._back(Target.NEWEST)
        if self.config.max_lr_reductions == 0 and failure is not FailureType.DIVERGENCE and attempt <= len(_CORRUPTED):
            return self._back(_CORRUPTED[attempt - 1])
        if may_reduce:
            reductions = attempt - (failure is FailureType.DIVERGENCE and not early)
            if early:
                target = Target.INITIAL
            elif failure is FailureType.NONFINITE_NUMERICAL:
                target = _CORRUPTED[min(reductions, len(_CORRUPTED)) - 1]
            else:
                target = Target.OLDER if reductions == 2 else Target.NEWEST
            return self._back(target, Action.REDUCE_LEARNING_RATE)
        if failure is FailureType.DIVERGENCE and not early and not self._moments_reset:
            self._moments_reset = True
            return self._back(Target.NEWEST, Action.RESET_MOMENTS)
        return replace(
            self._end(FailureType.LEARNING_RATE, f"training still fails at a learning rate of {rate}"),
            failure=FailureType.LEARNING_RATE,
        )

    def _back(self, target: Target, *changes: Action) -> Decision:
        if target is Target.NEWEST and not changes:
            # If the steps since then can be applied again and all is well, none is lost.
            return Decision((Action.ROLL_BACK, Action.REPLAY_STEPS), target=target)
        return Decision((Action.ROLL_BACK, Action.SKIP_STEP, *changes), target=target)

    def _end(self, failure: FailureType, verdict: str) -> Decision:
        # What is saved is the trusted state, to be resumed once somebody knows better. Where the numbers overflow, the
        # steps were left out, and the weights are as good as they were.
        back = () if self._overflows else (Action.ROLL_BACK, Action.SKIP_STEP)
        ending = (*back, *FAILURE_RECIPES[failure].inspections, Action.EMERGENCY_CHECKPOINT, Action.STOP)
        return Decision(ending, verdict, target=Target.NEWEST)

    def healed(self, failure: FailureType | None) -> None:
        """The last rung has cost nothing: the next failure of the kind is a first one again (the budget is spent)."""
        if failure is not None and self._climbed.get(failure, 0) > 0:
            self._climbed[failure] -= 1

    def reset(self) -> None:
        """Forgets what was climbed: the run ends, and is resumed only to try again on purpose."""
        self._climbed.clear()
        self._moments_reset = False
        self.budget.used = 0

    def state_dict(self) -> dict[str, Any]:
        return {"climbed": dict(self._climbed), "moments_reset": self._moments_reset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._climbed = {str(failure): int(rungs) for failure, rungs in state["climbed"].items()}
        self._moments_reset = bool(state["moments_reset"])
