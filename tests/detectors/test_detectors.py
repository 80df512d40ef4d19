"""The step detectors by themselves: plain numbers in, symptoms out."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from self_healing import HealingConfig, StepSignals
from self_healing.failures.recipes import Symptom
from self_healing.healers.numerics.detectors.bounds import bounds_of
from self_healing.healers.numerics.detectors.divergence import DivergenceDetector
from self_healing.healers.numerics.detectors.panel import DetectorPanel
from self_healing.healers.numerics.detectors.progress import (
    DeadLossDetector,
    NeverLearnedDetector,
    VanishingGradientDetector,
)
from self_healing.healers.numerics.detectors.spikes import LossSpikeDetector
from self_healing.healers.numerics.detectors.trend import LogTrend


def noise(count: int, level: float = 2.0, spread: float = 0.05, seed: int = 0) -> list[float]:
    """A healthy loss: log-normal around a level."""
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, spread)) for _ in range(count)]


def settled(values: list[float] | None = None, **arguments: Any) -> LogTrend:
    trend = LogTrend(**arguments)
    for value in values if values is not None else noise(100):
        trend.accept(value, trend.z(value))
    return trend


SETTLED, NEW = settled(), LogTrend()


def names(symptoms: list[Symptom]) -> list[str]:
    return [symptom.name for symptom in symptoms]


def alike(count: int, correlation: float, spread: float = 0.05, seed: int = 0) -> list[float]:
    """A healthy loss on data that are not shuffled: log-normal, each value like the one before."""
    rng = random.Random(seed)
    values, value = [], rng.gauss(0, 1)
    for _ in range(count):
        value = correlation * value + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
        values.append(2.0 * math.exp(spread * value))
    return values


def divergences(losses: list[float]) -> list[int]:
    """Steps at which a panel sees a divergence."""
    panel = DetectorPanel()
    observed = ((step, panel.observe(StepSignals(step, loss))) for step, loss in enumerate(losses))
    return [step for step, symptoms in observed if "divergence" in names(symptoms)]


class TestNoiseThatIsNotIndependent:
    @pytest.mark.parametrize("correlation", [0.7, 0.9])
    def test_unshuffled_data_make_one_divergence_in_ten_thousand_steps(self, correlation: float) -> None:
        assert sum(len(divergences(alike(4000, correlation, seed=seed))) for seed in range(5)) <= 2

    def test_a_rise_is_seen_in_them_all_the_same(self) -> None:
        losses = alike(1000, 0.7)
        found = divergences(losses + [2 * value for value in alike(60, 0.7, seed=1)])
        assert len(found) == 1
        assert 1000 <= found[0] < 1015

    def test_batches_of_one_row_instead_of_eight_make_no_divergence(self) -> None:
        wider = noise(1000, spread=0.05 * math.sqrt(8), seed=100)
        assert divergences(noise(1000, spread=0.05) + wider) == []

    @pytest.mark.parametrize("highest", [15, 25, 40])
    def test_a_bump_while_the_rate_warms_up_is_no_divergence(self, highest: int) -> None:
        bump = [0.3 * math.exp(-(((step - highest) / (0.5 * highest)) ** 2)) for step in range(300)]
        assert divergences([value * (1 + each) for value, each in zip(noise(300), bump, strict=True)]) == []

    def risen(self, *rises: float, harmless: bool = True) -> list[float]:
        """Which of the rises of a loss that stays up for 60 steps, and then comes back, are divergences."""
        panel, found, step = DetectorPanel(), [], 0
        for rise in rises:
            for value in noise(200, seed=step) + noise(60, 2.0 * math.exp(rise), seed=step + 1) + noise(140):
                symptoms = panel.observe(StepSignals(step, value))
                if "divergence" in names(symptoms):
                    found.append(rise)
                    if harmless:
                        panel.divergence.prove_harmless()
                step += 1
        return found

    def test_a_rise_that_was_proved_harmless_has_to_double_to_be_tried_again(self) -> None:
        assert self.risen(0.3, 0.3, 0.4, 0.65) == [0.3, 0.65]
        assert self.risen(0.3, 0.3, harmless=False) == [0.3, 0.3]

    def test_a_loss_that_has_doubled_is_always_tried(self) -> None:
        assert self.risen(0.5, 0.6, 0.8) == [0.5, 0.8]


class TestWhatIsUsual:
    def rare(self, panel: DetectorPanel, steps: range, share: float = 0.03) -> list[int]:
        """Steps that would be left out or clipped, where some batches have twice the loss and four times the norm."""
        rng, found = random.Random(0), []
        for step in steps:
            loss, norm = 2 * math.exp(rng.gauss(0, 0.05)), math.exp(rng.gauss(0, 0.15))
            factor = 2 if rng.random() < share else 1
            signals = StepSignals(step, factor * loss, factor * factor * norm)
            if panel.alarming(signals) is not None:
                found.append(step)
            panel.remember_spike(signals)
            panel.observe(signals)
        return found

    def test_batches_that_are_rare_but_real_are_left_out_twice_at_most(self) -> None:
        assert len(self.rare(DetectorPanel(), range(6000))) <= 2


def baselines(panel: DetectorPanel) -> Any:
    state = panel.state_dict()
    return {
        trend: {key: state[trend][key] for key in ("recent", "deviations", "level", "scale", "accepted")}
        for trend in ("loss_trend", "gradient_trend")
    }


def healthy_panel(steps: int = 120) -> DetectorPanel:
    panel = DetectorPanel(vocabulary=400)
    for step, (loss, norm) in enumerate(zip(noise(steps), noise(steps, 1.0, 0.2, seed=9), strict=True)):
        panel.observe(StepSignals(step, loss, norm))
    return panel


not_finite = st.sampled_from([math.nan, math.inf, -math.inf])


class TestTheBaselineStaysClean:
    @settings(deadline=None)
    @given(loss=st.one_of(not_finite, st.just(1e30)), norm=not_finite)
    def test_a_value_that_is_not_finite_never_enters_a_baseline(self, loss: float, norm: float) -> None:
        panel = healthy_panel()
        before = baselines(panel)
        panel.observe(StepSignals(120, loss, norm))
        assert baselines(panel) == before

    @given(garbage=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
    @settings(max_examples=50, deadline=None)
    def test_no_number_raises_and_the_state_is_always_json(self, garbage: list[float]) -> None:
        panel = DetectorPanel(vocabulary=400)
        for step, value in enumerate(garbage):
            signals = StepSignals(step, value, abs(value))
            panel.alarming(signals)
            panel.remember_spike(signals)
            panel.observe(signals)
        json.dumps(panel.state_dict(), allow_nan=False)


def healthy_and_faulty(step: int, rng: random.Random) -> StepSignals:
    loss = 2.0 * math.exp(rng.gauss(0, 0.1))
    if rng.random() < 0.05:
        loss = rng.choice([0.0, 30.0, math.nan, 9.0])
    return StepSignals(step, loss, math.exp(rng.gauss(0, 0.3)) * rng.choice([1, 1, 1, 1, 1, 40, 0]))


class TestState:
    @settings(max_examples=30, deadline=None)
    @given(seed=st.integers(0, 10**6), cut=st.integers(0, 150))
    def test_it_round_trips_exactly_at_any_point(self, seed: int, cut: int) -> None:
        rng = random.Random(seed)
        steps = [healthy_and_faulty(step, rng) for step in range(250)]
        config = HealingConfig(divergence_patience=20)
        whole = DetectorPanel(config, vocabulary=400)
        for signals in steps[:cut]:
            whole.observe(signals)
        other = DetectorPanel(config, vocabulary=400)
        other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        for signals in steps[cut:]:
            assert other.alarming(signals) == whole.alarming(signals)
            assert other.observe(signals) == whole.observe(signals)
        assert other.state_dict() == whole.state_dict()


def told(steps: list[StepSignals], rng: random.Random | None) -> tuple[Any, ...]:
    """
    What is told of each step that may be acted on, whether its loss is usual, and what is known at the end: each step
    observed at once, or, with a generator, later where that is allowed, which it takes back now and then.
    """
    panel, waiting, bounds = DetectorPanel(HealingConfig(divergence_patience=20), vocabulary=400), [], None
    found, usual = [], []
    for signals in steps:
        if rng is not None and bounds is not None and bounds.admit(signals):
            waiting.append(signals)
            bounds = None if rng.random() < 0.1 else bounds
            continue
        for earlier in waiting:
            assert panel.observe(earlier) == []
            assert not panel.divergence.suspicious
            usual.append(panel.loss_is_usual)
        waiting.clear()
        alarm = panel.alarming(signals)
        panel.remember_spike(signals)
        symptoms = panel.observe(signals)
        usual.append(panel.loss_is_usual)
        found += [alarm] * (alarm is not None) + symptoms
        bounds = bounds_of(panel)
    usual += [panel.observe(earlier) == [] and panel.loss_is_usual for earlier in waiting]
    return found, usual, panel.state_dict()


@st.composite
def runs(draw: st.DrawFn) -> list[StepSignals]:
    """Runs of all kinds: even, noisy, on unshuffled data; with faults, drifts, a step up, a loss with a sign."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    count, level, spread = (
        draw(st.sampled_from([80, 400])),
        rng.choice([2.0, 9.0, 0.01]),
        rng.choice([0.02, 0.05, 0.3]),
    )
    alike, faults, kind = rng.choice([0.0, 0.7]), rng.choice([0.0, 0.03]), rng.choice(["even", "drift", "up", "sign"])
    steps, value = [], 0.0
    for step in range(count):
        value = alike * value + math.sqrt(1 - alike**2) * rng.gauss(0, 1)
        loss, norm = level * math.exp(spread * value), math.exp(rng.gauss(0, 0.2))
        loss *= {"drift": math.exp(0.01 * max(0, step - 100)), "up": 1.5 if step > 200 else 1.0}.get(kind, 1.0)
        loss -= level if kind == "sign" and step > 120 else 0.0
        if rng.random() < faults:
            loss = rng.choice([0.0, 30.0, math.nan, 1e305, 2 * level, 9 * level])
        if rng.random() < faults:
            norm *= rng.choice([0.0, 3.0, 5.0, 40.0, 1e5, math.nan])
        steps.append(StepSignals(step, loss, norm))
    return steps


class TestStepsThatWait:
    @settings(max_examples=30, deadline=None)
    @given(steps=runs(), seed=st.integers(0, 10**6))
    def test_it_decides_nothing_when_a_step_is_observed(self, steps: list[StepSignals], seed: int) -> None:
        assert told(steps, random.Random(seed)) == told(steps, None)

    def test_of_a_healthy_run_most_may_wait(self) -> None:
        panel, bounds, waited = DetectorPanel(), None, 0
        for step, (loss, norm) in enumerate(zip(noise(600), noise(600, 1.0, 0.2, seed=9), strict=True)):
            signals = StepSignals(step, loss, norm)
            if bounds is None or not bounds.admit(signals):
                panel.observe(signals)
                bounds = bounds_of(panel)
                continue
            waited += 1
            panel.observe(signals)
        assert waited > 200


class TestLossSpike:
    def test_a_factor_over_the_baseline_is_a_spike_whatever_its_z(self) -> None:
        assert LossSpikeDetector(factor=3.0).observe(0, 6.1, 4.0, SETTLED) is not None
        assert LossSpikeDetector().observe(0, 6.1, 4.0, SETTLED) is None


class TestGradient:
    def test_both_at_once_need_less(self) -> None:
        panel = healthy_panel()
        loss, norm = (trend.value_at(6.1) or 0.0 for trend in (panel.loss_trend, panel.gradient_trend))
        symptom = panel.alarming(StepSignals(120, loss, norm))
        assert symptom is not None
        assert symptom.name == "co_spike"
        assert panel.alarming(StepSignals(120, 2.0, norm)) is None
        assert panel.alarming(StepSignals(120, loss, 1.0)) is None
        assert DetectorPanel().alarming(StepSignals(120, loss, norm)) is None

    def test_a_norm_that_vanishes_is_reported_once(self) -> None:
        detector = VanishingGradientDetector(steps=3)
        found = [detector.observe(step, norm) for step, norm in enumerate([0, 0, 1, 0, 0, 1e-9, 0, 0])]
        assert [symptom is not None for symptom in found] == [False] * 5 + [True] + [False] * 2


class TestDivergence:
    def test_it_is_reported_once_until_the_loss_has_been_back(self) -> None:
        detector = DivergenceDetector()
        found = [detector.observe(step, 2.0, 4.0, SETTLED) is not None for step in range(10)]
        assert found.count(True) == 1
        for _ in range(5):
            detector.observe(10, 2.0, 0.0, SETTLED)
        assert not detector.alarmed
        assert [detector.observe(20, 2.0, 4.0, SETTLED) is not None for _ in range(10)].count(True) == 1

    def test_worse_than_chance_after_having_been_better(self) -> None:
        detector = DivergenceDetector(vocabulary=400)
        chance = math.log(400)
        for _ in range(30):
            assert detector.observe(0, chance + 2, 0.0, SETTLED) is None  # never below: how it began
        detector.observe(0, chance - 1, 0.0, SETTLED)
        found = [detector.observe(0, chance + 1.5, 0.0, SETTLED) for _ in range(12)]
        (symptom,) = [each for each in found if each is not None]
        assert symptom.evidence["test"] == "above chance"
        assert found.index(symptom) == 9

    def test_early_in_the_run_it_takes_a_nat_over_the_first_losses(self) -> None:
        detector = DivergenceDetector(vocabulary=400)
        losses = [2.0] * 8 + [3.5, 2.0] * 5
        found = [detector.observe(0, loss, None, NEW) for loss in losses]
        (symptom,) = [each for each in found if each is not None]
        assert symptom.evidence["test"] == "early"

    def test_a_new_level_with_ordinary_noise_is_learned(self) -> None:
        panel = DetectorPanel()
        steps = noise(150, 2.0, 0.02) + noise(300, 3.0, 0.3, seed=1)
        for step, loss in enumerate(steps):
            panel.observe(StepSignals(step, loss, 1.0))
        assert not panel.divergence.alarmed
        assert panel.loss_trend.level == pytest.approx(3.0, rel=0.15)


class TestStillAndSlow:
    def test_a_loss_of_exactly_zero(self) -> None:
        detector = DeadLossDetector(steps=3)
        found = [detector.observe(step, loss) for step, loss in enumerate([0.0, 0.0, 1e-9, 0.0, -0.0, 0.0, 0.0])]
        assert [symptom is not None for symptom in found] == [False] * 5 + [True, False]

    @pytest.mark.parametrize("begin", [10.4, 12.0], ids=["at chance", "falls to chance"])
    def test_a_loss_that_stays_at_chance_is_reported_once(self, begin: float) -> None:
        detector = NeverLearnedDetector(vocabulary=32_000)
        losses = noise(30, begin, spread=0.02) + noise(970, 10.4, spread=0.02)
        found = [symptom for step, loss in enumerate(losses, 1) if (symptom := detector.observe(step, loss))]
        assert [(symptom.name, symptom.severity) for symptom in found] == [("never_learned", "error")]
        assert found[0].step <= 300

    def test_a_slow_rise_is_reported_when_it_is_a_fifth(self) -> None:
        panel = DetectorPanel()
        rises = [1.0] * 1_000 + [1 + 0.25 * step / 2_000 for step in range(2_000)]
        losses = [factor * loss for factor, loss in zip(rises, noise(3_000), strict=True)]
        found = [
            symptom for step, loss in enumerate(losses) for symptom in panel.observe(StepSignals(step, loss, 1.0))
        ]
        (slow,) = [symptom for symptom in found if symptom.name == "slow_rise"]
        assert 2_500 < slow.step < 2_950


class TestPanel:
    def test_only_what_applies_is_judged(self) -> None:
        panel = DetectorPanel(apply=())
        for step in range(60):
            signals = StepSignals(step, 0.0 if step > 30 else -2.0, 0.0)
            assert panel.alarming(signals) is None
            assert panel.observe(signals) == []

    def test_a_loss_with_a_sign_is_said_once_and_judged_no_more(self) -> None:
        panel = DetectorPanel()
        found = [names(panel.observe(StepSignals(step, (-1) ** step * 1.0, 1.0))) for step in range(100)]
        assert [each for each in found if each] == [["signed_loss"]]
