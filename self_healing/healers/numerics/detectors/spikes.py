"""Steps that are not finite, and single values far above their baseline."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from ....failures.recipes import Symptom
from ....hf.objective import StepSignals
from ....system.files import KeepsState
from .trend import MAD_TO_SIGMA, TAIL_FROM, LogTrend, UsualSpikes


# ---- spikes: a value far above its baseline in one step ----


# A usual spike may be followed by another by chance. More in a row are a rise.
_IN_A_ROW = 2


# Robust z-scores of the log loss, and of the log gradient norm, above which they are spikes; of a loss, is noted.
LOSS_SPIKE_Z, GRADIENT_SPIKE_Z, NOTICE_Z = 8.0, 10.0, 6.0


class LossSpikeDetector(KeepsState):
    """Reports a loss far above its baseline."""

    _state = ("_in_a_row", "_usual")

    def __init__(self, threshold: float = LOSS_SPIKE_Z, factor: float = 0.0) -> None:
        self.threshold = threshold
        self.factor = factor
        self._in_a_row = 0
        self._usual = UsualSpikes()
        self.usual = False
        """Whether the last loss was a spike of a kind that is usual, and so no part of a divergence."""

    def observe(self, step: int, loss: float, z: float | None, trend: LogTrend) -> Symptom | None:
        """Judges one loss; `"loss_spike"` (warning) or `"loss_notice"` (info)."""
        self.usual = False
        if z is None:
            return None
        beyond_factor = self.factor > 0 and loss > self.factor * (trend.level or 0.0)
        spike = z > self.threshold or beyond_factor
        self._in_a_row = self._in_a_row + 1 if spike else 0
        first, stands_out = self._in_a_row == 1, spike and self._usual.stands_out(step, z * trend.scale)
        self.usual = spike and not stands_out and self._in_a_row <= _IN_A_ROW
        if first or (not spike and (z >= TAIL_FROM or self._usual.began is None)):
            self._usual.add(step, z, trend.scale, spike)
        if first and stands_out:
            limits = {"threshold": self.threshold} | ({"factor": self.factor} if beyond_factor else {})
            return Symptom("loss_spike", step, trend.evidence(loss, z) | limits)
        if (first or not spike) and z > NOTICE_Z:
            return Symptom("loss_notice", step, trend.evidence(loss, z) | {"threshold": NOTICE_Z}, "info")
        return None


class GradientSpikeDetector:
    """Reports a gradient norm far above its baseline, or above an absolute limit."""

    def __init__(self, threshold: float = GRADIENT_SPIKE_Z, explosion: float = 1e4) -> None:
        self.threshold = threshold
        # 0 switches it off.
        self.explosion = explosion or math.inf

    def observe(self, step: int, norm: float, z: float | None, trend: LogTrend) -> Symptom | None:
        """Judges one norm; `"gradient_spike"` or `"gradient_explosion"`."""
        if self.explosion < norm < math.inf and self._may_explode(trend.level):
            evidence = trend.evidence(norm, z) | {"threshold": self.explosion}
            return Symptom("gradient_explosion", step, evidence, "error")
        if z is not None and z > self.threshold:
            return Symptom("gradient_spike", step, trend.evidence(norm, z) | {"threshold": self.threshold})
        return None

    def bound(self, trend: LogTrend) -> float | None:
        """Gives the norm above which a spike or an explosion is reported; `None` while there is none."""
        spike = trend.value_at(self.threshold)
        explosion = self.explosion if self._may_explode(trend.level) else None
        return min((bound for bound in (spike, explosion) if bound is not None and bound < math.inf), default=None)

    def _may_explode(self, level: float | None) -> bool:
        return level is not None and 10 * level <= self.explosion


# ---- nonfinite: loss or gradient norm that is not a finite number ----


# float32 has 127 powers of two above 1: a scaler that has not found its scale by then never will.
_OVERFLOWS_BEFORE_FIRST_STEP = 128


class NonFiniteDetector(KeepsState):
    """
    Reports a step whose loss or gradient norm is NaN or infinite, and keeps the trend of the steps that are finite.

    A non-finite value never enters the trend. Gradients that overflow while a GradScaler looks for its scale are
    normal: with `scaler_active`, `scaler_patience - 1` of them in a row are left to the scaler, and as many as it
    needs before the first finite step (from its default of 2**16 it may halve the scale many times).

    Args:
        window (`int`, *optional*, defaults to 100):
            Accepted losses the trend is computed from, in steps.
        scaler_patience (`int`, *optional*, defaults to 3):
            Overflows in a row under a GradScaler that count as a symptom.
    """

    _state = ("losses", "overflows")

    def __init__(self, window: int = 100, scaler_patience: int = 3) -> None:
        self.scaler_patience = scaler_patience
        self.losses: deque[float] = deque(maxlen=window)
        self.overflows = 0

    def observe(self, signals: StepSignals, scaler_active: bool = False) -> Symptom | None:
        """Judges one step; a finite one is taken into the trend."""
        symptom = self.judge(signals, scaler_active)
        if signals.finite:
            self.losses.append(signals.loss)
        return symptom

    def judge(self, signals: StepSignals, scaler_active: bool = False) -> Symptom | None:
        """Judges one step, and leaves the trend as it is."""
        if signals.finite:
            self.overflows = 0
            return None
        loss_is_finite = math.isfinite(signals.loss)
        if loss_is_finite and scaler_active:
            self.overflows += 1
            patience = self.scaler_patience if self.losses else _OVERFLOWS_BEFORE_FIRST_STEP
            if self.overflows < patience:
                return None
        return Symptom(
            name="nonfinite_gradient" if loss_is_finite else "nonfinite_loss",
            step=signals.step,
            evidence={"loss": signals.loss, "grad_norm": signals.grad_norm},
        )

    def trend(self) -> tuple[float, float] | None:
        """Returns median and scale of the accepted losses."""
        if not self.losses:
            return None
        centre = median(self.losses)
        return centre, MAD_TO_SIGMA * median(abs(loss - centre) for loss in self.losses)
