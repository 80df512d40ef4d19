"""All step detectors of a run, fed with one `StepSignals` a step; the objective decides which of them apply."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ....config.healing_config import HealingConfig
from ....failures.recipes import Symptom
from ....hf.objective import StepSignals
from ....system.files import KeepsState
from .divergence import DivergenceDetector
from .progress import (
    DeadLossDetector,
    NeverLearnedDetector,
    SlowRiseDetector,
    VanishingGradientDetector,
)
from .spikes import CO_SPIKE_Z, GRADIENT_SPIKE_Z, GradientSpikeDetector, LossSpikeDetector, co_spike
from .trend import LogTrend, Reading, UsualSpikes


# A gradient norm varies from step to step by at least 5 %, and at first, while the learning rate warms up, by 20 %.
_GRADIENT_FLOOR, _EARLY_GRADIENT_FLOOR = 0.05, 0.2
_FIRST_GRADIENTS = 20
# Where four in five gradient norms lie, in scales from their baseline.
_CLOSE = 1.3


class DetectorPanel(KeepsState):
    """
    The detectors of one run and the two baselines they share.

    A step is shown to it twice: [`alarming`] before anything is decided, which changes nothing, and [`observe`] once
    the step is as it will be applied. A step that is left out is never observed.

    Args:
        config ([`HealingConfig`], *optional*):
            Thresholds. Defaults to `HealingConfig()`.
        apply (`Collection[str]`, *optional*):
            Which detectors apply: names out of [`DETECTORS`]. Defaults to all of them.
        vocabulary (`int`, *optional*):
            Tokens the model knows, for `"above_chance"` and `"never_learned"`.

    Example, a training loop written by hand:

    ```python
    >>> panel = DetectorPanel()
    >>> for step, (loss, grad_norm) in enumerate([(2.1, 0.9), (2.0, 1.1)] * 30 + [(7.5, 1.0)]):
    ...     symptoms = panel.observe(StepSignals(step=step, loss=loss, grad_norm=grad_norm))
    >>> [symptom.name for symptom in symptoms]
    ['loss_spike']

    ```
    """

    DETECTORS = frozenset(
        {
            "loss_spike",
            "co_spike",
            "gradient_spike",
            "gradient_explosion",
            "vanishing_gradient",
            "divergence",
            "above_chance",
            "dead_loss",
            "never_learned",
            "slow_rise",
        }
    )

    _state = (
        *("loss_trend", "gradient_trend", "loss_spike", "usual_spikes", "divergence", "vanishing", "dead_loss"),
        *("slow_rise", "never_learned", "signed_loss"),
    )

    def __init__(
        self,
        config: HealingConfig | None = None,
        apply: Collection[str] = DETECTORS,
        vocabulary: int | None = None,
    ) -> None:
        config = config or HealingConfig()
        self.apply = frozenset(apply)
        self.loss_trend = LogTrend()
        self.reset_gradient_baseline()
        self.loss_spike = LossSpikeDetector(factor=config.loss_spike_factor)
        self.co_spike_z = CO_SPIKE_Z
        self.gradient_spike = GradientSpikeDetector(
            GRADIENT_SPIKE_Z if "gradient_spike" in self.apply else math.inf,
            config.grad_explosion_threshold if "gradient_explosion" in self.apply else 0.0,
        )
        self.divergence = DivergenceDetector(
            vocabulary=vocabulary if "above_chance" in self.apply else None,
            patience=config.divergence_patience,
        )
        self.vanishing = VanishingGradientDetector()
        self.dead_loss = DeadLossDetector()
        self.never_learned = NeverLearnedDetector(vocabulary)
        self.slow_rise = SlowRiseDetector()
        self.usual_spikes = UsualSpikes()
        self.signed_loss = False
        self.relearned = False
        self.loss_reading: Reading | None = None
        # A step is read several times before it is observed, which moves the baselines.
        self._read: tuple[StepSignals, tuple[Reading, Reading | None]] | None = None

    def reset_gradient_baseline(self) -> None:
        """Forgets what gradient norm was usual: that of other parameters."""
        self.gradient_trend = LogTrend(
            floor=_GRADIENT_FLOOR,
            early_floor=_EARLY_GRADIENT_FLOOR,
            reject_above=GRADIENT_SPIKE_Z,
            first=_FIRST_GRADIENTS,
            in_sums=False,
        )
        self._read = None

    @property
    def gradient_level(self) -> float | None:
        """Baseline of the gradient norm; `None` while there is none."""
        return self.gradient_trend.level if self.gradient_trend.ready else None

    @property
    def gradient_bound(self) -> float | None:
        """Gradient norm above which a step is looked into; `None` while there is no baseline, or no such bound."""
        return self.gradient_spike.bound(self.gradient_trend)

    def gradient_is_usual(self, signals: StepSignals) -> bool:
        """Whether the gradient norm of a step lies close to its baseline. Changes nothing."""
        gradient = self.read(signals)[1]
        return gradient is not None and gradient.z is not None and abs(gradient.z) <= _CLOSE

    @property
    def loss_is_usual(self) -> bool:
        """Whether the last loss was no spike, and there is no divergence."""
        reading = self.loss_reading
        spike = reading is not None and reading.z is not None and reading.z > self.loss_trend.reject_above
        return not spike and not self.divergence.alarmed

    def read(self, signals: StepSignals) -> tuple[Reading, Reading | None]:
        """Loss and gradient norm next to their baselines. Changes nothing."""
        if self._read is None or self._read[0] is not signals:
            loss = self.loss_trend.read(signals.step, signals.loss)
            norm = signals.grad_norm
            gradient = None if norm is None else self.gradient_trend.read(signals.step, norm)
            self._read = signals, (loss, gradient)
        return self._read[1]

    def alarming(self, signals: StepSignals) -> Symptom | None:
        """
        Returns why a step should not be applied as it is: explosion, co-spike, gradient spike; `None` where such
        spikes are usual. Changes nothing.
        """
        symptom = self.spike(signals)
        gradient = self.read(signals)[1]
        if symptom is None or gradient is None or gradient.z is None:
            return symptom
        return symptom if self.usual_spikes.stands_out(gradient) else None

    def spike(self, signals: StepSignals) -> Symptom | None:
        """Returns the same as [`alarming`], also where such spikes are usual."""
        loss, gradient = self.read(signals)
        if gradient is None:
            return None
        symptom = self.gradient_spike.observe(gradient, usual=self.gradient_trend.level)
        if symptom is not None and symptom.name == "gradient_explosion":
            return symptom
        if "co_spike" in self.apply and not self.signed_loss:
            symptom = co_spike(loss, gradient, self.co_spike_z) or symptom
        return symptom

    def remember_spike(self, signals: StepSignals) -> None:
        """Takes in how far the gradient of a step strays, applied or not, to know what is usual."""
        gradient = self.read(signals)[1]
        if gradient is not None and gradient.z is not None:
            self.usual_spikes.add(gradient, spike=self.spike(signals) is not None)

    def observe(self, signals: StepSignals) -> list[Symptom]:
        """Takes in a step that is applied, and returns its symptoms."""
        self.relearned = False
        loss, gradient = self.read(signals)
        self.loss_reading = loss
        symptoms = self._observe_loss(loss)
        if gradient is not None:
            symptoms += self._observe_gradient(gradient)
        self._read = None
        return symptoms

    def _observe_loss(self, reading: Reading) -> list[Symptom]:
        symptoms: list[Symptom | None] = []
        if "dead_loss" in self.apply:
            symptoms.append(self.dead_loss.observe(reading.step, reading.value))
        if "never_learned" in self.apply:
            symptoms.append(self.never_learned.observe(reading.step, reading.value))
        if reading.value < 0 and not self.signed_loss and self.apply & {"loss_spike", "divergence", "co_spike"}:
            # Its logarithm and its ratios mean nothing: an objective with a sign, or a bonus taken off the loss.
            self.signed_loss = True
            self.divergence.reset()
            symptoms.append(Symptom("signed_loss", reading.step, {"value": reading.value}, "info"))
        if self.signed_loss:
            return [symptom for symptom in symptoms if symptom is not None]
        if "loss_spike" in self.apply:
            symptoms.append(self.loss_spike.observe(reading))
        if "divergence" in self.apply:
            symptoms.append(self.divergence.observe(reading, usual_spike=self.loss_spike.usual))
            if self.divergence.overdue and self.loss_trend.relearn():
                self.divergence.accept_new_level()
                self.relearned = True
                self.slow_rise.reset()
        if self.divergence.alarmed and reading.z is not None:
            self.loss_trend.refuse(reading)
        else:
            self.loss_trend.accept(reading, hold=self.divergence.suspicious)
        if "slow_rise" in self.apply and not self.divergence.alarmed:
            symptoms.append(self.slow_rise.observe(reading.step, reading.value))
        return [symptom for symptom in symptoms if symptom is not None]

    def _observe_gradient(self, reading: Reading) -> list[Symptom]:
        if not self.gradient_trend.accept(reading) and self.gradient_trend.overdue:
            self.gradient_trend.relearn()
        if "vanishing_gradient" not in self.apply:
            return []
        symptom = self.vanishing.observe(reading.step, reading.value)
        return [] if symptom is None else [symptom]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._read = None
