"""Limits how often a run is brought back without progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.healing_config import HealingConfig


class RecoveryBudget:
    """
    Counts how often a run was brought back, in memory or by entering `train()` again, since it last made progress.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.config = config
        self.used = 0
        self.failed_at = -1

    def refunds(self, step: int) -> bool:
        """Whether the run has got far enough beyond the last failure for its attempts to be given back."""
        return self.failed_at >= 0 and step >= self.failed_at + self.config.budget_refund_steps

    def spend(self, step: int) -> bool:
        """Takes one attempt for a failure at a step; `False` if none is left."""
        if self.refunds(step):
            self.used = 0
        self.failed_at = max(step, self.failed_at)
        if self.used >= self.config.max_recovery_attempts:
            return False
        self.used += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used, "failed_at": self.failed_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.used, self.failed_at = int(state["used"]), int(state["failed_at"])
