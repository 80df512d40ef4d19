"""A value far above its baseline in one step: loss spikes, gradient spikes, both at once."""

from __future__ import annotations

import math
from typing import Any

from .symptom import Symptom
from .trend import LogTrend, Reading
from .usual import UsualSpikes


# A usual spike may be followed by another by chance. More in a row are a rise.
_IN_A_ROW = 2


class LossSpikeDetector:
    """
    Reports a loss far above its baseline. A spike is a step whose robust z of log-loss is above `threshold`.

    Most spikes pass by themselves (one odd batch); one that lasts is a divergence and [`DivergenceDetector`]'s to
    report. A first reading above the threshold is reported, the ones that follow it without a break are not. Where
    spikes are usual (small batches of mixed length, rare rows, noise with heavy tails), only those that stand out are
    ([`UsualSpikes`]). Costs O(1), and O(64) where a value strays far.

    Args:
        threshold (`float`, *optional*, defaults to 8.0):
            z above which a loss is a spike. Healthy public fine-tuning curves stay below 5.5
            (`docs/detection-figures.md`).
        notice_threshold (`float`, *optional*, defaults to 6.0):
            z above which it is worth a note.
        factor (`float`, *optional*, defaults to 0.0):
            Multiple of the baseline above which a loss is a spike whatever its z; 0 for none. Off by default: the
            per-step losses of small batches reach several times their median in healthy runs.

    Example:

    ```python
    >>> trend, spikes = LogTrend(warmup=5), LossSpikeDetector()
    >>> for step, loss in enumerate([2.1, 2.0, 2.2, 2.1, 2.0, 2.1, 6.3]):
    ...     reading = trend.read(step, loss)
    ...     symptom = spikes.observe(reading)
    ...     _ = trend.accept(reading)
    >>> symptom.name, symptom.step
    ('loss_spike', 6)

    ```
    """

    def __init__(self, threshold: float = 8.0, notice_threshold: float = 6.0, factor: float = 0.0) -> None:
        self.threshold = threshold
        self.notice_threshold = notice_threshold
        self.factor = factor
        self._in_a_row = 0
        self._usual = UsualSpikes()
        self.usual = False
        """Whether the last loss was a spike of a kind that is usual, and so no part of a divergence."""

    def observe(self, reading: Reading) -> Symptom | None:
        """Judges one loss; `"loss_spike"` (warning) or `"loss_notice"` (info)."""
        self.usual = False
        if reading.z is None or reading.level is None:
            return None
        beyond_factor = self.factor > 0 and reading.value > self.factor * reading.level
        spike = reading.z > self.threshold or beyond_factor
        self._in_a_row = self._in_a_row + 1 if spike else 0
        first, stands_out = self._in_a_row == 1, spike and self._usual.stands_out(reading)
        self.usual = spike and not stands_out and self._in_a_row <= _IN_A_ROW
        if first or not spike:
            self._usual.add(reading, spike)
        if first and stands_out:
            limits = {"threshold": self.threshold} | ({"factor": self.factor} if beyond_factor else {})
            return Symptom("loss_spike", reading.step, reading.evidence() | limits)
        if (first or not spike) and reading.z > self.notice_threshold:
            evidence = reading.evidence() | {"threshold": self.notice_threshold}
            return Symptom("loss_notice", reading.step, evidence, "info")
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"above": self._in_a_row > 0, "in_a_row": self._in_a_row, "usual": self._usual.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_a_row = state.get("in_a_row", int(state["above"]))
        self._usual.load_state_dict(state["usual"])


class GradientSpikeDetector:
    """
    Reports a gradient norm far above its baseline, or above an absolute limit.

    Args:
        threshold (`float`, *optional*, defaults to 10.0):
            z of the log gradient norm above which it is a spike. Healthy runs reach 8.2.
        explosion (`float`, *optional*, defaults to 1e4):
            Norm above which a gradient has exploded, unless the norms before it are within a factor 10 of that; 0 for
            none. Counts from the second step on, when there is no baseline yet: a first norm only shows the unit.

    Example:

    ```python
    >>> GradientSpikeDetector().observe(LogTrend().read(1, 2e5), usual=1.5).name
    'gradient_explosion'

    ```
    """

    def __init__(self, threshold: float = 10.0, explosion: float = 1e4) -> None:
        self.threshold = threshold
        self.explosion = explosion

    def observe(self, reading: Reading, usual: float | None = None) -> Symptom | None:
        """
        Judges one norm; `"gradient_spike"` or `"gradient_explosion"`. Every step above is reported.

        Args:
            reading ([`Reading`]):
                The norm.
            usual (`float`, *optional*):
                Level of the norms so far, also of so few that there is no baseline yet. Defaults to the baseline.
        """
        if not math.isfinite(reading.value):
            return None
        level = reading.level if usual is None else usual
        if self.explosion < reading.value and self._may_explode(level):
            return Symptom(
                "gradient_explosion", reading.step, reading.evidence() | {"threshold": self.explosion}, "error"
            )
        if reading.z is not None and reading.z > self.threshold:
            return Symptom("gradient_spike", reading.step, reading.evidence() | {"threshold": self.threshold})
        return None

    def bound(self, trend: LogTrend) -> float | None:
        """Gives the norm above which a spike or an explosion is reported; `None` while there is none."""
        spike = trend.value_at(self.threshold) if math.isfinite(self.threshold) else None
        bounds = [] if spike is None else [spike]
        if self._may_explode(trend.level):
            bounds.append(self.explosion)
        return min(bounds, default=None)

    def _may_explode(self, level: float | None) -> bool:
        return self.explosion > 0 and level is not None and 10 * level <= self.explosion

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load: a norm is judged by its baseline alone."""


class CoSpikeDetector:
    """
    Reports loss and gradient norm far above their baselines in the same step: the batch or the computation is at
    fault, not the usual noise of one of them.

    Args:
        threshold (`float`, *optional*, defaults to 6.0):
            z that both must exceed.
    """

    def __init__(self, threshold: float = 6.0) -> None:
        self.threshold = threshold

    def observe(self, loss: Reading, gradient: Reading) -> Symptom | None:
        """Judges one step; `"co_spike"`."""
        if loss.z is None or gradient.z is None or min(loss.z, gradient.z) <= self.threshold:
            return None
        evidence = {"loss": loss.evidence(), "grad_norm": gradient.evidence(), "threshold": self.threshold}
        return Symptom("co_spike", loss.step, evidence)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load: a step is judged by the two baselines alone."""
