"""Which remedy next: ladders, patience and budgets. Given a diagnosis and the history, the actions to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import HealingConfig
from .detectors import Symptom
from .diagnosis import Diagnosis
from .failures import FAILURE_RECIPES, Action, FailureType


@dataclass(frozen=True, slots=True)
class Decision:
    """
    What to do about a failure.

    Args:
        actions (`tuple[Action, ...]`):
            In order.
        verdict (`str`, *optional*):
            If the last action is `STOP`: why the run ends.
    """

    actions: tuple[Action, ...]
    verdict: str = ""


class StepPolicy:
    """
    Decides about one step at a time and remembers how many were left out.

    Args:
        config ([`HealingConfig`]):
            Patience and fractions.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.config = config
        self.unhealed_in_a_row = 0
        self.recent: deque[tuple[bool, int, int]] = deque(maxlen=config.skip_window)
        self.spike_skips: deque[int] = deque(maxlen=max(config.max_spike_skips, 1))

    def decide(self, diagnosis: Diagnosis, acts: bool = True) -> Decision:
        """
        The actions for a step that is not finite.

        Args:
            diagnosis ([`Diagnosis`]):
                What was found out about it.
            acts (`bool`, *optional*, defaults to `True`):
                Whether anything may be done about it.
        """
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
            if self.config.drop_poison_rows:
                return Decision((Action.QUARANTINE_ROWS, Action.DROP_ROWS))
            return Decision((Action.QUARANTINE_ROWS, Action.SKIP_STEP))
        if diagnosis.failure is FailureType.CORRUPTED_STATE:
            return Decision((Action.STOP,), FAILURE_RECIPES[FailureType.CORRUPTED_STATE].diagnosis)
        return Decision((Action.SKIP_STEP,))

    def decide_spike(self, symptom: Symptom, transient: bool, finite: bool, may_clip: bool) -> Decision:
        """
        The actions for a step whose gradient is far outside of what is usual.

        Args:
            symptom ([`Symptom`]):
                What was seen.
            transient (`bool`):
                Whether it was gone when the step was computed again.
            finite (`bool`):
                Whether the step was finite when it was computed again.
            may_clip (`bool`):
                Whether there is a usual norm to clip the gradient to.
        """
        if transient:
            return Decision((Action.USE_REEXECUTED_STEP,))
        if not finite:
            return Decision((Action.SKIP_STEP,))
        recent = [skip for skip in self.spike_skips if skip > symptom.step - self.config.skip_window]
        spent = len(recent) >= self.config.max_spike_skips
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
        stops = {FailureType.DIVERGENCE: self.config.on_divergence, FailureType.DEAD_LOSS: self.config.on_dead_loss}
        if stops.get(failure) == "stop":
            # The weights are what is wrong: nothing is saved of them. Those of a dead loss have never moved.
            return Decision((Action.STOP,), FAILURE_RECIPES[failure].diagnosis)
        if failure in (FailureType.LOSS_SPIKE, FailureType.DIVERGENCE):
            return Decision((Action.HOLD_CHECKPOINTS,))
        return Decision(())

    def stops_for(self, action: str) -> bool:
        """Whether a metric rule whose action this is ends the run."""
        return action == "stop" and self.config.on_red_flag == "act"

    def note(self, skipped: bool, explained: bool, rows: int = 0, dropped: int = 0) -> str | None:
        """
        Takes in how a step ended.

        Args:
            skipped (`bool`):
                Whether it was left out.
            explained (`bool`):
                Whether a cause was found that lies outside the model (poison rows).
            rows (`int`), dropped (`int`):
                Rows the step had, and how many of them were dropped; 0 and 0 for a step nothing was wrong with.

        Returns:
            Why the run has to stop now, or `None`.
        """
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
        if skips > config.max_skipped_fraction * config.skip_window:
            return (
                f"{skips} of the last {config.skip_window} steps were skipped "
                f"(max_skipped_fraction={config.max_skipped_fraction})"
            )
        gone = sum(count for _, _, count in self.recent)
        per_step = max((count for _, count, _ in self.recent), default=0)
        if gone > max(config.max_quarantined_fraction * per_step * config.skip_window, per_step):
            return (
                f"{gone} rows of the last {config.skip_window} steps were dropped "
                f"(max_quarantined_fraction={config.max_quarantined_fraction})"
            )
        return None

    def start_anew(self) -> None:
        """The run ends on this policy's verdict: whoever resumes it has decided to try again."""
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
        self.recent = deque((tuple(entry) for entry in state["recent"]), maxlen=self.config.skip_window)
        self.spike_skips = deque(state.get("spike_skips", ()), maxlen=self.spike_skips.maxlen)


class RecoveryBudget:
    """
    How often `train()` may be entered again, tied to progress.

    Args:
        config ([`HealingConfig`]):
            `max_recovery_attempts` and `budget_refund_steps`.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.config = config
        self.used = 0
        self.failed_at = -1

    def spend(self, step: int) -> bool:
        """Takes one attempt for a failure at a step; `False` if none is left."""
        if self.failed_at >= 0 and step >= self.failed_at + self.config.budget_refund_steps:
            self.used = 0
        self.failed_at = max(step, self.failed_at)
        if self.used >= self.config.max_recovery_attempts:
            return False
        self.used += 1
        return True
