"""Runs that do nothing: gradients that vanish, a loss that is exactly zero, or no better than chance."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from statistics import median
from typing import Any

from ..failures.recipes import Symptom


# Steps from one look at the loss to the next.
_LOOK_EVERY = 50
# A character model is no worse for being near chance: of a small vocabulary, a nat is a large part of ln(V).
_SHARE_OF_CHANCE = 0.15
# Nats from one half of the window to the other: a long warm-up is slow, but not still.
_STILL_FALLING = 0.1


class VanishingGradientDetector:
    """Reports a gradient norm below `threshold` for `steps` steps in a row, once."""

    def __init__(self, threshold: float = 1e-7, steps: int = 20) -> None:
        self.threshold = threshold
        self.steps = steps
        self._below = 0

    @property
    def below(self) -> bool:
        """Whether the last norm was below the threshold."""
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
    not a model that has learned everything, whose loss is small and never the same.
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


class NeverLearnedDetector:
    """
    Reports a cross-entropy that has never been a nat better than guessing (`ln(vocabulary)`) and does not fall any
    more: its median over the last `steps` is above that, and that of the newer half is less than 0.1 nats below that
    of the older.
    """

    def __init__(self, vocabulary: int, steps: int = 200) -> None:
        chance = math.log(vocabulary)
        self.chance = chance
        self.bound = chance - min(1.0, _SHARE_OF_CHANCE * chance)
        self._losses: deque[float] = deque(maxlen=steps)
        self._since_look = 0
        self._decided = False

    def observe(self, step: int, loss: float) -> Symptom | None:
        """Judges one loss; `"never_learned"`."""
        if self._decided or not math.isfinite(loss):
            return None
        self._losses.append(loss)
        self._since_look += 1
        if self._since_look < _LOOK_EVERY:
            return None
        self._since_look = 0
        count = len(self._losses)
        if median(islice(self._losses, count - _LOOK_EVERY, None)) <= self.bound:
            self._decide()
            return None
        if count < (self._losses.maxlen or 0):
            return None
        level = median(self._losses)
        older, newer = median(islice(self._losses, count // 2)), median(islice(self._losses, count // 2, None))
        if level <= self.bound or older - newer >= _STILL_FALLING:
            return None
        self._decide()
        evidence = {"value": level, "bound": self.bound, "chance": self.chance, "steps": count}
        return Symptom("never_learned", step, evidence, "error")

    def _decide(self) -> None:
        self._decided = True
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "since_look": self._since_look, "settled": self._decided}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self._losses.maxlen)
        self._since_look, self._decided = state["since_look"], state["settled"]
