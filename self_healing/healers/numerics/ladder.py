"""Climbs the ladders that the recipes hold, and counts what a run leaves out against its limits."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from ...config.healing_config import HealingConfig
from ...failures.recipes import FAILURE_RECIPES, Action, FailureType, Given, Rung
from ...run.run import RecoveryBudget
from ...system.files import KeepsState


# ---- ladder ----


@dataclass
class LadderRunner:
    """Says which rung of a failure's ladder comes next, by what holds now and what was tried before."""

    config: HealingConfig
    budget: RecoveryBudget
    # By failure: where the ladder goes on, of the rungs that are taken once.
    _climbed: dict[str, int] = field(default_factory=dict)

    def next(self, failure: FailureType, given: AbstractSet[Given]) -> Rung:
        """The first rung that was not taken yet and for which all holds; an empty one where there is nothing to do."""
        for place, rung in enumerate(FAILURE_RECIPES[failure].rungs):
            taken = rung.once and place < self._climbed.get(failure, 0)
            if not taken and given >= set(rung.given):
                if rung.once:
                    self._climbed[failure] = place + 1
                return rung
        return Rung(())

    def climb(self, failure: FailureType, step: int, given: AbstractSet[Given]) -> tuple[Rung, str]:
        """The next rung of a ladder that goes back, paid for; or the last one, and why no other can be paid for."""
        if self.budget.refunds(step):
            self._climbed.clear()
        rung = self.next(failure, given)
        spent = "" if Action.STOP in rung.actions else self.pay(step)
        if spent:
            rung = replace(FAILURE_RECIPES[failure].rungs[-1], failure=None)
        return rung, spent

    def pay(self, step: int) -> str:
        """Takes an attempt from the budget; says so if none is left."""
        if self.budget.spend(step):
            return ""
        return f"the budget of {self.config.max_recovery_attempts} attempts without progress is spent"

    def healed(self, failure: FailureType | None) -> None:
        """The last rung lost no step, and is there for the next failure of the kind; its attempt stays counted."""
        if failure is not None and self._climbed.get(failure, 0) > 0:
            self._climbed[failure] -= 1

    def reset(self) -> None:
        """Forgets what was climbed: the run ends, and is resumed only to try again on purpose."""
        self._climbed.clear()
        self.budget.used = 0

    def state_dict(self) -> dict[str, Any]:
        return {"climbed": dict(self._climbed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._climbed = {str(failure): int(rungs) for failure, rungs in state["climbed"].items()}


# ---- limits ----


# Steps over which the limits of skipped steps and dropped rows are counted.
SKIP_WINDOW = 100
# How many of them may be skipped for a spike. Further spikes are clipped to the usual norm.
MAX_SPIKE_SKIPS = 3


# Of a step with nothing wrong, of which there are millions, as [`StepLimits`] counts it.
UNHARMED = False, 0, 0


class StepLimits(KeepsState):
    """Counts the steps and rows that are left out, up to what a run may lose."""

    _state = ("unhealed_in_a_row", "recent", "spike_skips")

    def __init__(self, config: HealingConfig) -> None:
        self.config = config
        self.unhealed_in_a_row = 0
        # Of each step: whether it was skipped, its rows if they were counted, and how many of them were dropped.
        self.recent: deque[tuple[bool, int, int]] = deque(maxlen=SKIP_WINDOW)
        self.spike_skips: deque[int] = deque(maxlen=MAX_SPIKE_SKIPS)

    def note(self, skipped: bool, explained: bool, rows: int = 0, dropped: int = 0) -> str:
        """Takes in how a step ended; says which limit it has exceeded, if any."""
        config = self.config
        self.recent.append((skipped, rows, dropped))
        self.unhealed_in_a_row = self.unhealed_in_a_row + 1 if skipped and not explained else 0
        if not skipped and not dropped:
            # A step with nothing wrong brings no limit nearer, and comes by the million.
            return ""
        if self.out_of_patience:
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
        per_step = max(count for _, count, _ in self.recent)
        if gone > max(config.max_bad_fraction * per_step * SKIP_WINDOW, per_step):
            return (
                f"{gone} rows of the last {SKIP_WINDOW} steps were dropped "
                f"(max_bad_fraction={config.max_bad_fraction})"
            )
        return ""

    @property
    def out_of_patience(self) -> bool:
        """Whether too many steps in a row were left out without an explanation."""
        return self.unhealed_in_a_row >= self.config.nan_patience

    def reset(self) -> None:
        """Forgets what was left out until now: the run has gone back, or ends and is resumed on purpose."""
        self.unhealed_in_a_row = 0
        self.recent.clear()
        self.spike_skips.clear()
