"""Runs that do nothing: gradients that vanish, a loss that is exactly zero."""

from __future__ import annotations

import math
from typing import Any

from .symptom import Symptom


class VanishingGradientDetector:
    """
    Reports a gradient norm below `threshold` for `steps` steps in a row, once. Costs O(1).

    Args:
        threshold (`float`, *optional*, defaults to 1e-7):
            Norm below which nothing is learned: float32 weights of order 1 do not move by updates smaller than that.
        steps (`int`, *optional*, defaults to 20):
            Steps in a row.

    Example:

    ```python
    >>> vanishing = VanishingGradientDetector(steps=2)
    >>> [vanishing.observe(step, 0.0) is not None for step in range(4)]
    [False, True, False, False]

    ```
    """

    def __init__(self, threshold: float = 1e-7, steps: int = 20) -> None:
        self.threshold = threshold
        self.steps = steps
        self._below = 0

    @property
    def below(self) -> bool:
        """Whether the last norm was that small."""
        return self._below > 0

    def observe(self, step: int, grad_norm: float) -> Symptom | None:
        """Judges one norm; `"vanishing_gradient"`."""
        if not math.isfinite(grad_norm):
            return None
        self._below = self._below + 1 if grad_norm < self.threshold else 0
        if self._below != self.steps:
            return None
        evidence = {"value": grad_norm, "threshold": self.threshold, "steps": self._below}
        return Symptom("vanishing_gradient", step, evidence)

    def state_dict(self) -> dict[str, Any]:
        return {"below": self._below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._below = state["below"]


class DeadLossDetector:
    """
    Reports a loss of exactly 0.0 for `steps` steps in a row, once: a wiring bug (all labels masked, a detached loss),
    not a model that has learned everything, whose loss is small and never the same. Costs O(1).

    Args:
        steps (`int`, *optional*, defaults to 20):
            Steps in a row.
    """

    def __init__(self, steps: int = 20) -> None:
        self.steps = steps
        self._dead = 0

    def observe(self, step: int, loss: float) -> Symptom | None:
        """Judges one loss; `"dead_loss"`."""
        if not math.isfinite(loss):
            return None
        self._dead = self._dead + 1 if loss == 0 else 0
        if self._dead != self.steps:
            return None
        return Symptom("dead_loss", step, {"value": loss, "steps": self._dead}, "error")

    def state_dict(self) -> dict[str, Any]:
        return {"dead": self._dead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dead = state["dead"]
