"""Decides about one step: given a diagnosis and how many steps were left out lately, the actions to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config.healing_config import HealingConfig
from ...failures.recipes import FAILURE_RECIPES, Action, FailureType, Symptom
from ...rollback.rollback import Target
from ...run.incidents import Diagnosis


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
        self.recent: deque[tuple[bool, int, int]] = deque(maxlen=config.skip_window)
        self.spike_skips: deque[int] = deque(maxlen=max(config.max_spike_skips, 1))

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
            if self.config.drop_poison_rows:
                return Decision((Action.QUARANTINE_ROWS, Action.DROP_ROWS))
            return Decision((Action.QUARANTINE_ROWS, Action.SKIP_STEP))
        return Decision((Action.SKIP_STEP,))

    def decide_spike(self, symptom: Symptom, transient: bool, finite: bool, may_clip: bool) -> Decision:
        """The actions for a step whose gradient is far outside of what is usual."""
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
        if failure is FailureType.DIVERGENCE and self.config.on_divergence == "stop":
            # The weights are what is wrong: nothing is saved of them.
            return Decision((Action.STOP,), FAILURE_RECIPES[failure].diagnosis)
        if failure is FailureType.DEAD_LOSS and self.config.on_dead_loss == "stop":
            return Decision(FAILURE_RECIPES[failure].ladder, FAILURE_RECIPES[failure].diagnosis)
        if failure is FailureType.DEAD_LOSS:
            return Decision(())
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
        self.recent = deque((tuple(entry) for entry in state["recent"]), maxlen=self.config.skip_window)
        self.spike_skips = deque(state.get("spike_skips", ()), maxlen=self.spike_skips.maxlen)
