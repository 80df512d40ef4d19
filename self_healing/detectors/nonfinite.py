"""Loss or gradient norm that is not a finite number."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from ..failures.recipes import Symptom
from ..hf.objective import StepSignals


# float32 has 127 powers of two above 1: a scaler that has not found its scale by then never will.
_OVERFLOWS_BEFORE_FIRST_STEP = 128


class NonFiniteDetector:
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

    def __init__(self, window: int = 100, scaler_patience: int = 3) -> None:
        self.scaler_patience = scaler_patience
        self.losses: deque[float] = deque(maxlen=window)
        self.overflows = 0

    def observe(self, signals: StepSignals, scaler_active: bool = False) -> Symptom | None:
        """Judges one step; a finite one is taken into the trend."""
        symptom = self.judge(signals, scaler_active)
        if signals.finite:
            self.accept(signals.loss)
        return symptom

    def accept(self, loss: float) -> None:
        """Takes a finite loss into the trend."""
        self.losses.append(loss)

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

    @property
    def last_loss(self) -> float | None:
        """Loss of the last accepted step."""
        return self.losses[-1] if self.losses else None

    def trend(self) -> tuple[float, float] | None:
        """Returns median and scale (1.4826 times the median absolute deviation) of the accepted losses."""
        if not self.losses:
            return None
        centre = median(self.losses)
        return centre, 1.4826 * median(abs(loss - centre) for loss in self.losses)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=self.losses.maxlen)
        self.overflows = state["overflows"]
