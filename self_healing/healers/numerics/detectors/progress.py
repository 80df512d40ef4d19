"""A run that learns nothing: a slow rise, vanishing gradients, a loss of zero, or at chance."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from statistics import median

from ....failures.recipes import Symptom
from ....system.files import KeepsState


# ---- slow rise ----


_RISE, _LEVEL_WINDOW = 0.2, 200
# Steps from one look at a slow rise to the next, and what is added to each level, as a share of the first one: of a
# loss that has become tiny, a fifth is nothing.
_LOOK_EVERY, _OFFSET = 50, 0.02


class SlowRiseDetector(KeepsState):
    """
    Reports a loss that has risen so slowly that every baseline went along: its median over the last 200 steps is
    more than a fifth above the lowest it has been.
    """

    _state = ("_losses", "_since_look", "limit", "_lowest", "_lowest_at", "_added")

    def __init__(self) -> None:
        self.limit = 1 + _RISE
        """Multiple of its lowest that a level has to exceed now."""
        self._losses: deque[float] = deque(maxlen=_LEVEL_WINDOW)
        self._since_look = 0
        self._lowest: float | None = None
        self._lowest_at = 0
        self._added: float | None = None

    @property
    def until_look(self) -> int:
        """Losses until the next look at them."""
        return max(_LOOK_EVERY - self._since_look, _LEVEL_WINDOW - len(self._losses))

    def observe(self, step: int, loss: float) -> Symptom | None:
        """Judges one loss; `"slow_rise"`."""
        if not (math.isfinite(loss) and loss >= 0):
            return None
        self._losses.append(loss)
        self._since_look += 1
        if self._since_look < _LOOK_EVERY or len(self._losses) < (self._losses.maxlen or 0):
            return None
        self._since_look = 0
        level = median(self._losses)
        if self._added is None:
            self._added = _OFFSET * level
        if self._lowest is None or level < self._lowest:
            self._lowest, self._lowest_at = level, step
            return None
        lowest = self._lowest + self._added
        times = (level + self._added) / lowest if lowest > 0 else 1.0
        if times <= self.limit:
            return None
        evidence = {"value": level, "baseline": self._lowest, "since_step": self._lowest_at, "limit": self.limit}
        self.limit = (1 + _RISE) * times
        return Symptom("slow_rise", step, evidence)

    def reset(self) -> None:
        """Forgets how low the loss was: it has found another level, and that has been reported."""
        self._losses.clear()
        self._since_look = 0
        self._lowest = None


# ---- stillness ----


# Steps from one look at the loss to the next.
_LOOK_AT_LOSS_EVERY = 50
# A character model is no worse for being near chance: of a small vocabulary, a nat is a large part of ln(V).
_SHARE_OF_CHANCE = 0.15
# Nats from one half of the window to the other: a long warm-up is slow, but not still.
_STILL_FALLING = 0.1


PRACTICALLY_ZERO = 1e-7


class VanishingGradientDetector(KeepsState):
    """Reports a gradient norm below 1e-7 for `steps` steps in a row, once."""

    _state = ("below",)

    def __init__(self, steps: int = 20) -> None:
        self.steps = steps
        self.below = 0

    def observe(self, step: int, grad_norm: float) -> Symptom | None:
        """Judges one norm; `"vanishing_gradient"`."""
        if not math.isfinite(grad_norm):
            return None
        self.below = self.below + 1 if grad_norm < PRACTICALLY_ZERO else 0
        if self.below != self.steps:
            return None
        evidence = {"value": grad_norm, "threshold": PRACTICALLY_ZERO, "steps": self.below}
        return Symptom("vanishing_gradient", step, evidence)


class DeadLossDetector(KeepsState):
    """
    Reports a loss of exactly 0.0 for `steps` steps in a row, once: a wiring bug (all labels masked, a detached loss),
    not a model that has learned everything, whose loss is small and never the same.
    """

    _state = ("dead",)

    def __init__(self, steps: int = 20) -> None:
        self.steps = steps
        self.dead = 0

    def observe(self, step: int, loss: float) -> Symptom | None:
        """Judges one loss; `"dead_loss"`."""
        if not math.isfinite(loss):
            return None
        self.dead = self.dead + 1 if loss == 0 else 0
        if self.dead != self.steps:
            return None
        return Symptom("dead_loss", step, {"value": loss, "steps": self.dead}, "error")


class NeverLearnedDetector(KeepsState):
    """
    Reports a cross-entropy that has never been a nat better than guessing (`ln(vocabulary)`) and does not fall any
    more: its median over the last `steps` is above that, and that of the newer half is less than 0.1 nats below that
    of the older.
    """

    _state = ("_losses", "_since_look", "decided")

    def __init__(self, vocabulary: int | None, steps: int = 200) -> None:
        chance = math.log(vocabulary or 1)
        self.chance = chance
        self.bound = chance - min(1.0, _SHARE_OF_CHANCE * chance)
        self._losses: deque[float] = deque(maxlen=steps)
        self._since_look = 0
        # Without a vocabulary it is not known what guessing is.
        self.decided = vocabulary is None

    @property
    def until_look(self) -> int:
        """Losses until the next look at them."""
        return _LOOK_AT_LOSS_EVERY - self._since_look

    def observe(self, step: int, loss: float) -> Symptom | None:
        """Judges one loss; `"never_learned"`."""
        if self.decided or not math.isfinite(loss):
            return None
        self._losses.append(loss)
        self._since_look += 1
        if self._since_look < _LOOK_AT_LOSS_EVERY:
            return None
        self._since_look = 0
        count = len(self._losses)
        if median(islice(self._losses, count - _LOOK_AT_LOSS_EVERY, None)) <= self.bound:
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
        self.decided = True
        self._losses.clear()
