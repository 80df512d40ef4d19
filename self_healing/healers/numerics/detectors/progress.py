"""A run that learns nothing: plateau, overfitting, vanishing gradients, a loss of zero."""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations, islice, pairwise
from statistics import median
from typing import Any

from ....failures.recipes import Symptom


# ---- progress: reports about the course of a run that need not be wrong: plateau, slow rise, overfitting ----


_BLOCKS = 20
# Steps from one look at a slow rise to the next, and what is added to each level, as a share of the first one: of a
# loss that has become tiny, a fifth is nothing.
_LOOK_EVERY, _OFFSET = 50, 0.02


def theil_sen(values: list[float]) -> float:
    """Median slope over all pairs of equally spaced values (Sen 1968), per step from one to the next."""
    return median((later - earlier) / (j - i) for (i, earlier), (j, later) in combinations(enumerate(values), 2))


class PlateauDetector:
    """
    Reports that a loss has stopped falling: over the last `window` steps its trend, the Theil–Sen slope of the medians
    of 20 blocks of log-loss, amounts to less than `improvement`.
    """

    def __init__(self, window: int = 500, improvement: float = 0.01) -> None:
        self.window = window
        self.improvement = improvement
        self._block: list[float] = []
        self._medians: deque[float] = deque(maxlen=_BLOCKS)
        self._flat = False

    def observe(self, step: int, loss: float) -> Symptom | None:
        """Judges the trend when a block is full; `"plateau"` (info)."""
        if not math.isfinite(loss) or loss <= 0:
            return None
        self._block.append(math.log(loss))
        if len(self._block) < max(self.window // _BLOCKS, 1):
            return None
        self._medians.append(median(self._block))
        self._block.clear()
        if len(self._medians) < _BLOCKS:
            return None
        change = theil_sen(list(self._medians)) * _BLOCKS
        was_flat, self._flat = self._flat, change > -self.improvement
        if was_flat or not self._flat:
            return None
        evidence = {"change": change, "improvement": self.improvement, "window": self.window, "value": loss}
        return Symptom("plateau", step, evidence, "info")

    def state_dict(self) -> dict[str, Any]:
        return {"block": list(self._block), "medians": list(self._medians), "flat": self._flat}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._block = list(state["block"])
        self._medians = deque(state["medians"], maxlen=_BLOCKS)
        self._flat = state["flat"]


class SlowRiseDetector:
    """
    Reports a loss that has risen so slowly that every baseline went along: its median over the last `window` steps is
    more than a share of `rise` above the lowest it has been.
    """

    def __init__(self, rise: float = 0.2, window: int = 200) -> None:
        self.rise = rise
        self.limit = 1 + rise
        """Multiple of its lowest that a level has to exceed now."""
        self._losses: deque[float] = deque(maxlen=window)
        self._since_look = 0
        self._lowest: float | None = None
        self._lowest_at = 0
        self._added: float | None = None

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
        self.limit = (1 + self.rise) * times
        return Symptom("slow_rise", step, evidence)

    def reset(self) -> None:
        """Forgets how low the loss was: it has found another level, and that has been reported."""
        self._losses.clear()
        self._since_look = 0
        self._lowest = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self._losses),
            "since_look": self._since_look,
            "limit": self.limit,
            "lowest": self._lowest,
            "lowest_at": self._lowest_at,
            "added": self._added,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self._losses.maxlen)
        self._since_look, self.limit = state["since_look"], state["limit"]
        self._lowest, self._lowest_at, self._added = state["lowest"], state["lowest_at"], state["added"]


class OverfittingDetector:
    """Reports an evaluation loss that has risen `evaluations` times in a row while the training loss fell."""

    def __init__(self, evaluations: int = 3) -> None:
        self.evaluations = evaluations
        self._recent: deque[tuple[float, float]] = deque(maxlen=evaluations + 1)
        self._best = math.inf
        self._reported = False

    def observe(self, step: int, evaluation_loss: float, training_loss: float) -> Symptom | None:
        """Judges one evaluation; `"overfitting"` (info)."""
        if not (math.isfinite(evaluation_loss) and math.isfinite(training_loss)):
            return None
        self._recent.append((evaluation_loss, training_loss))
        if evaluation_loss < self._best:
            self._best, self._reported = evaluation_loss, False
        evaluated = [evaluation for evaluation, _ in self._recent]
        rising = len(evaluated) > self.evaluations and all(a < b for a, b in pairwise(evaluated))
        falling = self._recent[-1][1] < self._recent[0][1]
        if self._reported or not (rising and falling):
            return None
        self._reported = True
        evidence = {
            "value": evaluation_loss,
            "best": self._best,
            "evaluations": evaluated,
            "training_loss": [training for _, training in self._recent],
        }
        return Symptom("overfitting", step, evidence, "info")

    def state_dict(self) -> dict[str, Any]:
        return {
            "recent": [list(pair) for pair in self._recent],
            # JSON has no infinity.
            "best": None if math.isinf(self._best) else self._best,
            "reported": self._reported,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = deque(((pair[0], pair[1]) for pair in state["recent"]), maxlen=self.evaluations + 1)
        self._best = math.inf if state["best"] is None else state["best"]
        self._reported = state["reported"]


# ---- stillness ----


# Steps from one look at the loss to the next.
_LOOK_AT_LOSS_EVERY = 50
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
        self._decided = True
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "since_look": self._since_look, "settled": self._decided}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self._losses.maxlen)
        self._since_look, self._decided = state["since_look"], state["settled"]
