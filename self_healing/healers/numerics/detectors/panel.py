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
    PRACTICALLY_ZERO,
    DeadLossDetector,
    NeverLearnedDetector,
    SlowRiseDetector,
    VanishingGradientDetector,
)
from .spikes import GRADIENT_SPIKE_Z, GradientSpikeDetector, LossSpikeDetector
from .trend import TAIL_FROM, LogTrend, UsualSpikes


# A gradient norm varies from step to step by at least 5 %, and at first, while the learning rate warms up, by 20 %.
_GRADIENT_FLOOR, _EARLY_GRADIENT_FLOOR = 0.05, 0.2
_FIRST_GRADIENTS = 20
# Where four in five gradient norms lie, in scales from their baseline.
_CLOSE = 1.3
# z of the loss and of the gradient norm above which both together are a co-spike.
CO_SPIKE_Z = 6.0
# What judges a logarithm or a ratio of the loss.
OF_ITS_LOGARITHM = {"loss_spike", "divergence", "co_spike"}


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
        self._read_of: StepSignals | None = None
        self.loss_trend = LogTrend()
        self.reset_gradient_baseline()
        self.loss_spike = LossSpikeDetector(factor=config.loss_spike_factor)
        self.co_spike_z = CO_SPIKE_Z
        self.gradient_spike = GradientSpikeDetector(
            GRADIENT_SPIKE_Z if "gradient_spike" in self.apply else math.inf,
            config.grad_explosion_threshold if "gradient_explosion" in self.apply else math.inf,
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
        # ---- of the step that was observed last ----
        self.relearned = False
        """Whether the loss has found another level with it."""
        self.loss_is_usual = True
        """Whether its loss was no spike, and there is no divergence."""
        self.loss: tuple[float, float | None, float | None] = math.nan, None, None
        """Its loss, with z and baseline that this had."""
        # A step is read several times before it is observed, which moves the baselines.
        self._remembered: StepSignals | None = None
        self._loss_z: float | None = None
        self._gradient_z: float | None = None
        # Whether its gradient is far enough from its baseline to be looked at.
        self._strays = False

    def reset_gradient_baseline(self) -> None:
        """Forgets what gradient norm was usual: that of other parameters."""
        self.gradient_trend = LogTrend(
            floor=_GRADIENT_FLOOR,
            early_floor=_EARLY_GRADIENT_FLOOR,
            reject_above=GRADIENT_SPIKE_Z,
            first=_FIRST_GRADIENTS,
            in_sums=False,
        )
        self._read_of = None

    @property
    def gradient_level(self) -> float | None:
        """Baseline of the gradient norm; `None` while there is none."""
        return self.gradient_trend.level if self.gradient_trend.ready else None

    def gradient_is_usual(self, signals: StepSignals) -> bool:
        """Whether the gradient norm of a step lies close to its baseline. Changes nothing."""
        if self._read_of is not signals:
            self._read(signals)
        return self._gradient_z is not None and abs(self._gradient_z) <= _CLOSE

    def _read(self, signals: StepSignals) -> None:
        """Sets loss and gradient norm next to their baselines. Changes nothing."""
        norm, spikes = signals.grad_norm, self.gradient_spike
        self._read_of = signals
        self._loss_z = self.loss_trend.z(signals.loss)
        z = self._gradient_z = None if norm is None else self.gradient_trend.z(norm)
        near = z is None or z < min(TAIL_FROM, self.co_spike_z, spikes.threshold)
        self._strays = norm is not None and not (near and norm <= spikes.explosion)

    def alarming(self, signals: StepSignals) -> Symptom | None:
        """
        Returns why a step should not be applied as it is: explosion, co-spike, gradient spike; `None` where such
        spikes are usual. Changes nothing.
        """
        if self._read_of is not signals:
            self._read(signals)
        symptom, z = self.spike(signals) if self._strays else None, self._gradient_z
        if symptom is None or z is None:
            return symptom
        return symptom if self.usual_spikes.stands_out(signals.step, z * self.gradient_trend.scale) else None

    def spike(self, signals: StepSignals) -> Symptom | None:
        """Returns the same as [`alarming`], also where such spikes are usual."""
        if self._read_of is not signals:
            self._read(signals)
        step, norm, loss_z, z = signals.step, signals.grad_norm, self._loss_z, self._gradient_z
        if norm is None:
            return None
        symptom = self.gradient_spike.observe(step, norm, z, self.gradient_trend)
        both = loss_z is not None and z is not None and min(loss_z, z) > self.co_spike_z
        if not both or "co_spike" not in self.apply or self.signed_loss:
            return symptom
        if symptom is not None and symptom.name == "gradient_explosion":
            return symptom
        # The batch or the computation is at fault, not the usual noise of one of them.
        loss, gradient = self.loss_trend.evidence(signals.loss, loss_z), self.gradient_trend.evidence(norm, z)
        return Symptom("co_spike", step, {"loss": loss, "grad_norm": gradient, "threshold": self.co_spike_z})

    def remember_spike(self, signals: StepSignals) -> None:
        """Takes in how far the gradient of a step strays that may be left out; of one that is observed, once."""
        if self._read_of is not signals:
            self._read(signals)
        z = self._gradient_z
        if z is not None and self._remembered is not signals:
            self._remembered = signals
            spike = self._strays and self.spike(signals) is not None
            self.usual_spikes.add(signals.step, z, self.gradient_trend.scale, spike)

    def observe(self, signals: StepSignals) -> list[Symptom]:
        """Takes in a step that is applied, and returns its symptoms."""
        if self._read_of is not signals:
            self._read(signals)
        if self._strays or self.usual_spikes.began is None:
            self.remember_spike(signals)
        step, loss, norm, z = signals.step, signals.loss, signals.grad_norm, self._loss_z
        trend, divergence, applies = self.loss_trend, self.divergence, self.apply
        self._read_of, self.relearned = None, False
        self.loss = loss, z, trend.level if trend.ready else None
        symptoms: list[Symptom | None] = []
        if "dead_loss" in applies and (loss == 0 or self.dead_loss.dead):
            symptoms.append(self.dead_loss.observe(step, loss))
        if "never_learned" in applies and not self.never_learned.decided:
            symptoms.append(self.never_learned.observe(step, loss))
        if loss < 0 and not self.signed_loss and applies & OF_ITS_LOGARITHM:
            # Its logarithm and its ratios mean nothing: an objective with a sign, or a bonus taken off the loss.
            self.signed_loss = True
            divergence.reset()
            symptoms.append(Symptom("signed_loss", step, {"value": loss}, "info"))
        if not self.signed_loss:
            symptoms += self._observe_logarithm(step, loss, z)
        self.loss_is_usual = not divergence.alarmed and (z is None or z <= trend.reject_above)
        if norm is not None:
            if not self.gradient_trend.accept(norm, self._gradient_z) and self.gradient_trend.overdue:
                self.gradient_trend.relearn()
            if "vanishing_gradient" in applies and (norm < PRACTICALLY_ZERO or self.vanishing.below):
                symptoms.append(self.vanishing.observe(step, norm))
        return list(filter(None, symptoms))

    def _observe_logarithm(self, step: int, loss: float, z: float | None) -> list[Symptom | None]:
        trend, divergence, applies = self.loss_trend, self.divergence, self.apply
        symptoms: list[Symptom | None] = []
        if "loss_spike" in applies:
            symptoms.append(self.loss_spike.observe(step, loss, z, trend))
        if "divergence" in applies:
            symptoms.append(divergence.observe(step, loss, z, trend, usual_spike=self.loss_spike.usual))
            if divergence.alarmed and divergence.overdue and trend.relearn():
                divergence.accept_new_level()
                self.relearned = True
                self.slow_rise.reset()
        if divergence.alarmed and z is not None:
            trend.refuse(loss)
        else:
            trend.accept(loss, z, hold=divergence.suspicious)
        if "slow_rise" in applies and not divergence.alarmed:
            symptoms.append(self.slow_rise.observe(step, loss))
        return symptoms

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._read_of = None
