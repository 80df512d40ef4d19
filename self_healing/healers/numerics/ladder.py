"""The next action, given a diagnosis and how often it was tried."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...config.healing_config import HealingConfig
from ...failures.recipes import FAILURE_RECIPES, Action, FailureType, Symptom
from ...rollback.rollback import Target
from ...run.incidents import Diagnosis
from ...run.run import RecoveryBudget


# ---- policy ----


# Steps over which the limits of skipped steps and dropped rows are counted.
SKIP_WINDOW = 100
# How many of them may be skipped for a spike. Further spikes are clipped to the usual norm.
MAX_SPIKE_SKIPS = 3


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a failure."""

    actions: tuple[Action, ...]
    verdict: str = ""
    target: Target | None = None
    failure: FailureType | None = None
    rung: int = 0

    @property
    def stops(self) -> bool:
        return Action.STOP in self.actions


class StepPolicy:
    """Decides about one step at a time and remembers how many were left out."""

    def __init__(self, config: HealingConfig) -> None:
        self.config = config
        self.unhealed_in_a_row = 0
        self.recent: deque[tuple[bool, int, int]] = deque(maxlen=SKIP_WINDOW)
        self.spike_skips: deque[int] = deque(maxlen=MAX_SPIKE_SKIPS)

    def decide(self, diagnosis: Diagnosis, acts: bool = True) -> Decision:
        """The actions for a step that is not finite."""
        if not acts:
            return Decision(())
        if self.config.on_nonfinite == "raise":
            return Decision(
                (Action.EMERGENCY_CHECKPOINT, Action.STOP),
                "loss or gradient norm is not finite (on_nonfinite='raise')",
            )
        if self.config.on_nonfinite == "skip":
            return Decision((Action.SKIP_STEP,))
        if diagnosis.failure is FailureType.NONFINITE_TRANSIENT:
            return Decision((Action.USE_REEXECUTED_STEP,))
        if diagnosis.failure is FailureType.NONFINITE_POISON_ROWS:
            return Decision((Action.QUARANTINE_ROWS, Action.DROP_ROWS))
        return Decision((Action.SKIP_STEP,))

    def decide_spike(self, symptom: Symptom, transient: bool, finite: bool, may_clip: bool) -> Decision:
        """The actions for a step whose gradient is far outside of what is usual."""
        if transient:
            return Decision((Action.USE_REEXECUTED_STEP,))
        if not finite:
            return Decision((Action.SKIP_STEP,))
        recent = [skip for skip in self.spike_skips if skip > symptom.step - SKIP_WINDOW]
        spent = len(recent) >= MAX_SPIKE_SKIPS
        # A spike of the gradient alone is cut to size. With the loss, the batch had better be left out, but not often:
        # where such batches come again and again, they are part of the data.
        if may_clip and (symptom.name == "gradient_spike" or spent):
            return Decision((Action.CLIP_GRADIENT,))
        if spent:
            return Decision((Action.USE_REEXECUTED_STEP,))
        self.spike_skips.append(symptom.step)
        return Decision((Action.SKIP_STEP,))

    def decide_watched(self, failure: FailureType) -> Decision:
        """The actions for what was seen in steps that have been applied."""
        if failure is FailureType.DIVERGENCE and self.config.on_divergence == "stop":
            # The weights are what is wrong: nothing is saved of them.
            return Decision((Action.STOP,), FAILURE_RECIPES[failure].diagnosis)
        if failure is FailureType.DEAD_LOSS and self.config.on_red_flag == "warn":
            return Decision(())
        if failure is FailureType.DEAD_LOSS:
            return Decision(FAILURE_RECIPES[failure].ladder, FAILURE_RECIPES[failure].diagnosis)
        if failure is FailureType.DIVERGENCE:
            return Decision((Action.HOLD_CHECKPOINTS,))
        # All at once: none of them changes what has been seen.
        return Decision(FAILURE_RECIPES[failure].ladder)

    def acts_on(self, action: str) -> bool:
        """Whether anything is done when a metric rule fires whose action this is."""
        return action in ("stop", "rollback") and self.config.on_red_flag == "act"

    def note(self, skipped: bool, explained: bool, rows: int = 0, dropped: int = 0) -> str | None:
        """Takes in how a step ended."""
        config = self.config
        self.recent.append((skipped, rows, dropped))
        self.unhealed_in_a_row = self.unhealed_in_a_row + 1 if skipped and not explained else 0
        if not skipped and not dropped:
            # A step with nothing wrong brings no limit nearer, and comes by the million.
            return None
        if self.unhealed_in_a_row >= config.nan_patience:
            return (
                f"{self.unhealed_in_a_row} steps in a row were not finite and could not be healed "
                f"(nan_patience={config.nan_patience})"
            )
        skips = sum(was_skipped for was_skipped, _, _ in self.recent)
        if skips > config.max_skipped_fraction * SKIP_WINDOW:
            return (
                f"{skips} of the last {SKIP_WINDOW} steps were skipped "
                f"(max_skipped_fraction={config.max_skipped_fraction})"
            )
        gone = sum(count for _, _, count in self.recent)
        per_step = max((count for _, count, _ in self.recent), default=0)
        if gone > max(config.max_bad_fraction * per_step * SKIP_WINDOW, per_step):
            return (
                f"{gone} rows of the last {SKIP_WINDOW} steps were dropped "
                f"(max_bad_fraction={config.max_bad_fraction})"
            )
        return None

    @property
    def out_of_patience(self) -> bool:
        """Whether too many steps in a row were left out without an explanation."""
        return self.unhealed_in_a_row >= self.config.nan_patience

    def reset(self) -> None:
        """Forgets what was left out until now: the run has gone back, or ends and is resumed on purpose."""
        self.unhealed_in_a_row = 0
        self.recent.clear()
        self.spike_skips.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "unhealed_in_a_row": self.unhealed_in_a_row,
            "recent": [list(entry) for entry in self.recent],
            "spike_skips": list(self.spike_skips),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.unhealed_in_a_row = state["unhealed_in_a_row"]
        self.recent = deque((tuple(entry) for entry in state["recent"]), maxlen=SKIP_WINDOW)
        self.spike_skips = deque(state.get("spike_skips", ()), maxlen=self.spike_skips.maxlen)


# ---- ladder ----


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
