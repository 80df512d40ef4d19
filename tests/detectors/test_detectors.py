"""The step detectors by themselves: plain numbers in, symptoms out."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import cycle, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from self_healing import HealingConfig, StepSignals
from self_healing.failures.recipes import Symptom
from self_healing.healers.numerics.detectors.divergence import DivergenceDetector
from self_healing.healers.numerics.detectors.panel import DetectorPanel
from self_healing.healers.numerics.detectors.progress import (
    DeadLossDetector,
    NeverLearnedDetector,
    OverfittingDetector,
    PlateauDetector,
    SlowRiseDetector,
    VanishingGradientDetector,
    theil_sen,
)
from self_healing.healers.numerics.detectors.spikes import (
    CoSpikeDetector,
    GradientSpikeDetector,
    LossSpikeDetector,
    NonFiniteDetector,
)
from self_healing.healers.numerics.detectors.trend import LogTrend, Reading, SortedWindow, UsualSpikes


def noise(count: int, level: float = 2.0, spread: float = 0.05, seed: int = 0) -> list[float]:
    """A healthy loss: log-normal around a level."""
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, spread)) for _ in range(count)]


def settled(values: list[float] | None = None, **arguments: Any) -> LogTrend:
    trend = LogTrend(**arguments)
    for step, value in enumerate(values if values is not None else noise(100)):
        trend.accept(trend.read(step, value))
    return trend


def reading(z: float | None, value: float = 2.0, step: int = 0) -> Reading:
    return Reading(step, value, z, None if z is None else 2.0, None if z is None else 0.05, 50)


def names(symptoms: list[Symptom]) -> list[str]:
    return [symptom.name for symptom in symptoms]


class TestSortedWindow:
    @given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.integers(1, 20), st.floats(-1e3, 1e3))
    def test_order_statistics_are_those_of_the_last_values(
        self, values: list[float], size: int, centre: float
    ) -> None:
        window = SortedWindow(size)
        for value in values:
            window.add(value)
        last = values[-size:]
        assert len(window) == len(last)
        assert window.median() == statistics.median(last)
        assert window.median_distance(centre) == sorted(abs(value - centre) for value in last)[len(last) // 2]
        low, high = min(centre, 0.0), max(centre, 0.0)
        moved = [min(max(value, low), high) for value in last]
        assert window.winsorized_mean(low, high) == pytest.approx(statistics.fmean(moved), abs=1e-9)


class TestLogTrend:
    def test_level_and_scale_are_those_of_the_noise(self) -> None:
        trend = settled(noise(400, level=2.0, spread=0.05))
        assert trend.level == pytest.approx(2.0, rel=0.03)
        assert trend.scale == pytest.approx(0.05, rel=0.3)

    def test_there_is_no_z_before_twenty_values(self) -> None:
        trend = LogTrend()
        for step, value in enumerate(noise(25)):
            assert (trend.read(step, value).z is None) == (step < 20)
            trend.accept(trend.read(step, value))

    def test_a_scale_from_few_values_is_not_believed(self) -> None:
        trend = settled(noise(30, spread=0.001))
        assert trend.read(30, 2.2).z == pytest.approx(math.log(1.1) / 0.1, rel=0.1)

    def test_a_loss_that_repeats_itself_does_not_make_every_change_a_spike(self) -> None:
        trend = settled([2.0] * 100)
        assert trend.read(100, 2.02).z == pytest.approx(1.0, rel=0.05)

    def test_a_falling_loss_does_not_look_like_a_noisy_one(self) -> None:
        falling = [4.0 * math.exp(-0.01 * step) * value / 2 for step, value in enumerate(noise(200, spread=0.02))]
        assert settled(falling).scale < 0.05

    def test_a_spike_never_enters(self) -> None:
        trend = settled()
        before = trend.state_dict()["recent"]
        assert not trend.accept(trend.read(100, 20.0))
        assert trend.state_dict()["recent"] == before

    def test_held_values_enter_once_nothing_was_building_up(self) -> None:
        trend, plain = settled(), settled()
        for step, value in enumerate(noise(10, seed=1)):
            trend.accept(trend.read(step, value), hold=step < 9)
            plain.accept(plain.read(step, value))
        assert trend.state_dict() == plain.state_dict()

    def test_no_more_values_are_held_than_the_level_rests_on(self) -> None:
        trend = settled()
        for step, value in enumerate(noise(80, seed=1)):
            trend.accept(trend.read(step, value), hold=True)
        assert len(trend.state_dict()["held"]) == 50

    def test_a_steady_new_level_is_learned(self) -> None:
        trend = settled()
        for step, value in enumerate(noise(60, level=6.0, seed=2)):
            trend.refuse(trend.read(step, value))
        assert trend.relearn()
        assert trend.level == pytest.approx(6.0, rel=0.05)
        assert abs(trend.read(0, 6.0).z or 0.0) < 2

    def test_values_that_jump_about_are_not_a_level(self) -> None:
        trend = settled()
        before = trend.level
        for step, value in enumerate(islice(cycle([50.0, 5e6, 1e3]), 90)):
            trend.refuse(trend.read(step, value))
            assert not trend.relearn()
        assert trend.level == before

    @pytest.mark.parametrize("count", [49, 50, 51])
    def test_two_levels_that_alternate_are_not_one(self, count: int) -> None:
        trend = settled()
        for step, value in enumerate(islice(cycle([20.0, 2000.0]), count)):
            trend.refuse(trend.read(step, value))
            assert not trend.relearn()


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
    def test_batches_that_are_like_their_neighbours_stretch_the_sums(self) -> None:
        trend = settled(alike(1000, 0.8))
        assert trend.read(1000, 2.0).stretch == pytest.approx(3.0, rel=0.3)  # sqrt(1.8 / 0.2)

    def test_a_loss_that_falls_is_not_taken_for_one(self) -> None:
        falling = [value * (0.75 + 0.5 * math.exp(-step / 30)) for step, value in enumerate(noise(300, spread=0.03))]
        assert settled(falling).read(300, 1.5).stretch < 1.4

    @pytest.mark.parametrize("correlation", [0.4, 0.7, 0.9])
    def test_unshuffled_data_make_one_divergence_in_ten_thousand_steps(self, correlation: float) -> None:
        assert sum(len(divergences(alike(4000, correlation, seed=seed))) for seed in range(5)) <= 2

    def test_a_rise_is_seen_in_them_all_the_same(self) -> None:
        losses = alike(1000, 0.7)
        found = divergences(losses + [2 * value for value in alike(60, 0.7, seed=1)])
        assert len(found) == 1
        assert 1000 <= found[0] < 1015

    @pytest.mark.parametrize("seed", range(3))
    def test_batches_of_one_row_instead_of_eight_make_no_divergence(self, seed: int) -> None:
        wider = noise(1000, spread=0.05 * math.sqrt(8), seed=seed + 100)
        assert divergences(noise(1000, spread=0.05, seed=seed) + wider) == []

    @pytest.mark.parametrize("highest", [15, 25, 40])
    def test_a_bump_while_the_rate_warms_up_is_no_divergence(self, highest: int) -> None:
        bump = [0.3 * math.exp(-(((step - highest) / (0.5 * highest)) ** 2)) for step in range(300)]
        assert divergences([value * (1 + each) for value, each in zip(noise(300), bump, strict=True)]) == []

    def test_rises_that_proved_harmless_raise_the_limit(self) -> None:
        detector = DivergenceDetector()
        for _ in range(2):
            for z in [4.0] * 4 + [0.0] * 5:
                detector.observe(reading(z))
        assert detector.limit > 1.4 * 11.0

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

    def test_what_was_proved_harmless_is_kept_with_the_state(self) -> None:
        detector, other = DivergenceDetector(), DivergenceDetector()
        for _ in range(4):
            detector.observe(reading(8.0))
        detector.prove_harmless()
        other.load_state_dict(json.loads(json.dumps(detector.state_dict())))
        other.reset()
        assert [other.observe(reading(12.0)) for _ in range(10)] == [None] * 10
        assert any(other.observe(reading(17.0)) for _ in range(10))

    def test_late_in_a_long_run_chance_needs_more_and_a_doubled_loss_hardly_longer(self) -> None:
        def delay(z: float, begins: int) -> int:
            detector = DivergenceDetector()
            return next(step for step in range(200) if detector.observe(reading(z, step=begins + step))) + 1

        assert (delay(1.5, 0), delay(1.5, 100_000)) == (12, 40)
        assert (delay(14.0, 0), delay(14.0, 100_000)) == (4, 7)

    def test_a_rise_that_was_healed_does_not_count_as_harmless(self) -> None:
        detector = DivergenceDetector()
        for _ in range(4):
            detector.observe(reading(4.0))
        detector.reset()
        assert detector.limit == 11.0


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

    def test_what_is_usual_is_kept_with_the_state(self) -> None:
        panel, other = DetectorPanel(), DetectorPanel()
        self.rare(panel, range(1000))
        other.load_state_dict(json.loads(json.dumps(panel.state_dict())))
        assert self.rare(other, range(1000, 2000)) == []

    def test_of_heavy_tails_only_what_exceeds_the_tail_stands_out(self) -> None:
        usual, rng = UsualSpikes(), random.Random(0)
        stood_out = []
        for step in range(5000):
            z = rng.gauss(0, 1) / math.sqrt(rng.expovariate(1.0))  # Student's t, 2 degrees of freedom
            if z > 6 and usual.stands_out(reading(z, step=step)):
                stood_out.append(step)
            usual.add(reading(z, step=step), spike=z > 6)
        assert len(stood_out) <= 2
        assert usual.stands_out(reading(1e4, step=5000))

    def test_a_spike_that_is_usual_adds_nothing_to_a_drift(self) -> None:
        spikes, divergence = LossSpikeDetector(), DivergenceDetector()
        for step in range(0, 30, 10):
            spikes.observe(reading(10.0, step=step))
            spikes.observe(reading(0.0, step=step + 1))
        for step in range(30, 33):
            spikes.observe(reading(10.0, step=step))
            divergence.observe(reading(10.0, step=step), usual_spike=spikes.usual)
        # Three in a row are no chance any more.
        assert divergence.sum == 3.5

    def test_what_is_remembered_of_a_long_run_is_bounded(self) -> None:
        usual = UsualSpikes()
        for step in range(3000):
            usual.add(reading(10.0 + step % 7, step=step))
        assert len(usual.state_dict()["recent"]) <= 64


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
    @given(loss=st.one_of(not_finite, st.just(1e30)), norm=not_finite)
    def test_a_value_that_is_not_finite_never_enters_a_baseline(self, loss: float, norm: float) -> None:
        panel = healthy_panel()
        before = baselines(panel)
        panel.observe(StepSignals(120, loss, norm))
        assert baselines(panel) == before

    @settings(max_examples=25, deadline=None)
    @given(garbage=st.lists(st.one_of(not_finite, st.floats(min_value=1e4, max_value=1e300)), min_size=2, max_size=8))
    def test_a_thousand_alternating_garbage_values_never_enter_a_baseline(self, garbage: list[float]) -> None:
        # Garbage that keeps to one level is a level: relearning it is tested elsewhere, and takes 100 steps of it.
        panel = healthy_panel()
        panel.divergence.patience = 10**9
        panel.gradient_trend.relearn = lambda: False  # type: ignore[method-assign]
        before = baselines(panel)
        for step, value in enumerate(islice(cycle(garbage), 1000)):
            panel.observe(StepSignals(120 + step, value, value))
        assert baselines(panel) == before

    def test_a_thousand_garbage_values_that_jump_about_never_enter_a_baseline(self) -> None:
        panel = healthy_panel()
        before = baselines(panel)
        for step, value in enumerate(islice(cycle([math.nan, 1e30, math.inf, 1e4, -math.inf, 1e300]), 1000)):
            panel.observe(StepSignals(120 + step, value, value))
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

    def test_nonfinite_values_do_not_enter_the_trend_of_accepted_losses(self) -> None:
        detector = NonFiniteDetector()
        for step, loss in enumerate(noise(50)):
            detector.observe(StepSignals(step, loss, 1.0))
        before = detector.state_dict()["losses"]
        for value in (math.nan, math.inf):
            assert detector.observe(StepSignals(50, value, 1.0)) is not None
            assert detector.observe(StepSignals(50, 2.0, value)) is not None
        assert detector.state_dict()["losses"] == before


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
        config = HealingConfig(plateau_window=40, divergence_patience=20)
        whole = DetectorPanel(config, vocabulary=400)
        for signals in steps[:cut]:
            whole.observe(signals)
        other = DetectorPanel(config, vocabulary=400)
        other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        for number, signals in enumerate(steps[cut:]):
            assert other.alarming(signals) == whole.alarming(signals)
            assert other.observe(signals) == whole.observe(signals)
            if number % 40 == 0:
                evaluation = rng.uniform(1, 3)
                assert other.observe_evaluation(cut, evaluation) == whole.observe_evaluation(cut, evaluation)
        assert other.state_dict() == whole.state_dict()

    @pytest.mark.parametrize("cut", range(12))
    def test_a_divergence_round_trips_in_the_middle_of_its_recovery(self, cut: int) -> None:
        whole, other = DivergenceDetector(), DivergenceDetector()
        zs = [4.0] * 4 + [0.0] * 5 + [4.0] * 5
        for z in zs[:cut]:
            whole.observe(reading(z))
        other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        for z in zs[cut:]:
            assert other.observe(reading(z)) == whole.observe(reading(z))
            assert other.alarmed == whole.alarmed

    def test_a_state_of_another_configuration_is_loaded_as_far_as_it_goes(self) -> None:
        panel = DetectorPanel(HealingConfig(plateau_window=0))
        panel.load_state_dict(healthy_panel().state_dict())
        assert panel.loss_level is not None


class TestSecondRise:
    def rises(self, losses: list[float]) -> list[tuple[str, int]]:
        panel = DetectorPanel()
        found = [
            symptom for step, loss in enumerate(losses) for symptom in panel.observe(StepSignals(step, loss, 1.0))
        ]
        return [(symptom.name, symptom.step) for symptom in found if symptom.name in ("divergence", "second_rise")]

    def test_a_second_rise_is_seen_while_the_first_is_open(self) -> None:
        (first, _), (second, at) = self.rises(noise(100, 2.0) + noise(50, 2.8) + noise(40, 3.6))
        assert (first, second) == ("divergence", "second_rise")
        assert 150 <= at < 160

    def test_a_loss_that_stays_where_it_rose_to_has_no_second_rise(self) -> None:
        for seed in range(20):
            losses = noise(100, 2.0, seed=seed) + noise(95, 2.8, seed=seed + 100)
            assert [name for name, _ in self.rises(losses)] == ["divergence"], seed


class TestFirstNorms:
    @pytest.mark.parametrize("first", [1.0, 100.0, 1_000.0])
    def test_a_tenfold_gradient_is_a_spike_whatever_the_first_norm(self, first: float) -> None:
        panel = DetectorPanel()
        losses, norms = noise(100), [first, *noise(99, 1.0, 0.15, seed=1)]
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            assert panel.alarming(StepSignals(step, loss, norm)) is None
            panel.observe(StepSignals(step, loss, norm))
        symptom = panel.alarming(StepSignals(100, 2.0, 10.0))
        assert symptom is not None
        assert symptom.name == "gradient_spike"

    @pytest.mark.parametrize("cut", [1, 10, 19, 20, 21])
    def test_they_are_saved_while_they_are_collected(self, cut: int) -> None:
        norms = noise(60, 1.0, 0.15)
        whole, other = LogTrend(first=20), LogTrend(first=20)
        for step, norm in enumerate(norms[:cut]):
            whole.accept(whole.read(step, norm))
        other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        for step, norm in enumerate(norms[cut:]):
            for trend in (whole, other):
                trend.accept(trend.read(step, norm))
        assert other.state_dict() == whole.state_dict()


class TestTheFirstValues:
    @pytest.mark.parametrize("first", [1, 5])
    def test_say_what_is_small(self, first: int) -> None:
        trend = settled([2.0] * first + [1e-6] * 60, first=first, offset=0.01)
        reading = trend.read(99, 1e-5)
        assert reading.z is not None
        assert abs(reading.z) < 1.0


class TestRelearning:
    @pytest.mark.parametrize(("refused", "relearned"), [(19, False), (20, True)])
    def test_takes_twenty_values_at_one_level(self, refused: int, relearned: bool) -> None:
        trend = settled()
        for step, value in enumerate(noise(refused, 20.0)):
            trend.refuse(trend.read(100 + step, value))
        assert trend.relearn() is relearned
        assert trend.level == pytest.approx(20.0 if relearned else 2.0, rel=0.05)


class TestWhatIsCloseToTheBaseline:
    def test_is_asked_of_a_gradient_without_changing_anything(self) -> None:
        panel = healthy_panel()
        before = baselines(panel)
        assert panel.gradient_is_usual(StepSignals(120, 2.0, 1.0))
        for norm in (3.0, 0.3, math.nan, None):
            assert not panel.gradient_is_usual(StepSignals(120, 2.0, norm))
        assert baselines(panel) == before
        assert not DetectorPanel().gradient_is_usual(StepSignals(0, 2.0, 1.0))

    def test_is_told_of_the_last_loss(self) -> None:
        panel = healthy_panel()
        assert panel.loss_is_usual
        panel.observe(StepSignals(120, 9.0, 1.0))
        assert not panel.loss_is_usual
        panel.observe(StepSignals(121, 2.0, 1.0))
        assert panel.loss_is_usual

    def test_is_not_a_loss_that_has_diverged(self) -> None:
        panel = healthy_panel()
        for step in range(120, 160):
            panel.observe(StepSignals(step, 6.0, 1.0))
            if panel.divergence.alarmed:
                break
        panel.loss_reading = None
        assert panel.divergence.alarmed
        assert not panel.loss_is_usual


class TestLossSpike:
    def test_a_spike_is_reported_once_with_what_it_was_judged_by(self) -> None:
        trend, spikes = settled(), LossSpikeDetector()
        symptom = spikes.observe(trend.read(100, 6.0))
        assert symptom is not None
        assert (symptom.name, symptom.step, symptom.severity) == ("loss_spike", 100, "warning")
        assert symptom.evidence["value"] == 6.0
        assert symptom.evidence["baseline"] == pytest.approx(2.0, rel=0.05)
        assert symptom.evidence["z"] > symptom.evidence["threshold"] == 8.0
        assert symptom.evidence["window"] == 50
        again = spikes.observe(trend.read(101, 6.1))
        assert again is None

    def test_six_to_eight_is_worth_a_note(self) -> None:
        symptom = LossSpikeDetector().observe(reading(7.0))
        assert symptom is not None
        assert (symptom.name, symptom.severity) == ("loss_notice", "info")

    def test_a_factor_over_the_baseline_is_a_spike_whatever_its_z(self) -> None:
        assert LossSpikeDetector(factor=3.0).observe(reading(4.0, value=6.1)) is not None
        assert LossSpikeDetector().observe(reading(4.0, value=6.1)) is None

    def test_where_spikes_are_usual_only_one_that_stands_out_is_reported(self) -> None:
        spikes = LossSpikeDetector()
        reported = []
        for step in range(0, 100, 10):
            symptom = spikes.observe(reading(10.0, step=step))
            spikes.observe(reading(0.0, step=step + 1))
            reported.append(None if symptom is None else symptom.name)
        assert reported == ["loss_spike"] * 2 + ["loss_notice"] * 8
        taller = spikes.observe(reading(16.0, step=101))
        assert taller is not None
        assert taller.name == "loss_spike"

    def test_spikes_of_long_ago_are_not_usual(self) -> None:
        spikes = LossSpikeDetector()
        for step in (0, 10, 20, 2500):
            symptom = spikes.observe(reading(10.0, step=step))
            spikes.observe(reading(0.0, step=step + 1))
        assert symptom is not None
        assert symptom.name == "loss_spike"

    def test_without_a_baseline_nothing_is_a_spike(self) -> None:
        assert LossSpikeDetector().observe(reading(None, value=1e9)) is None


class TestGradient:
    def test_a_spike(self) -> None:
        symptom = GradientSpikeDetector().observe(reading(10.5))
        assert symptom is not None
        assert symptom.name == "gradient_spike"
        assert GradientSpikeDetector().observe(reading(9.9)) is None

    def test_an_explosion_needs_no_baseline(self) -> None:
        symptom = GradientSpikeDetector().observe(reading(None, value=2e4), usual=2.0)
        assert symptom is not None
        assert (symptom.name, symptom.severity) == ("gradient_explosion", "error")

    def test_the_first_norm_only_shows_the_unit(self) -> None:
        assert GradientSpikeDetector().observe(reading(None, value=2e4)) is None
        panel = DetectorPanel()
        for step in range(60):
            assert panel.alarming(StepSignals(step, 1e9, 2e6)) is None
            panel.observe(StepSignals(step, 1e9, 2e6))

    def test_norms_that_are_usual_are_no_explosion(self) -> None:
        usual = Reading(0, 2e4, 0.5, 1.5e4, 0.2, 50)
        assert GradientSpikeDetector().observe(usual) is None

    def test_both_at_once_need_less(self) -> None:
        assert CoSpikeDetector().observe(reading(6.1), reading(6.1)) is not None
        assert CoSpikeDetector().observe(reading(6.1), reading(5.9)) is None
        assert CoSpikeDetector().observe(reading(5.9), reading(60.0)) is None
        assert CoSpikeDetector().observe(reading(None), reading(60.0)) is None

    def test_a_norm_that_vanishes_is_reported_once(self) -> None:
        detector = VanishingGradientDetector(steps=3)
        found = [detector.observe(step, norm) for step, norm in enumerate([0, 0, 1, 0, 0, 1e-9, 0, 0])]
        assert [symptom is not None for symptom in found] == [False] * 5 + [True] + [False] * 2

    def test_a_gradient_that_settles_at_another_level_is_learned(self) -> None:
        panel = healthy_panel()
        for step, norm in enumerate(noise(200, 50.0, 0.2, seed=3)):
            alarm = panel.alarming(StepSignals(120 + step, 2.0, norm))
            panel.observe(StepSignals(120 + step, 2.0, norm))
        assert alarm is None


class TestDivergence:
    def drift(self, z: float, **arguments: Any) -> int | None:
        """Steps until a loss that stays at one z is a divergence."""
        detector = DivergenceDetector(**arguments)
        return next((step for step in range(1, 200) if detector.observe(reading(z)) is not None), None)

    def test_the_cusum_adds_up_what_is_not_forgiven(self) -> None:
        assert self.drift(4.0) == 4  # 3.5 a step, above 11
        assert self.drift(1.5) == 12
        assert self.drift(0.5) is None

    def test_one_step_alone_is_never_a_divergence(self) -> None:
        detector = DivergenceDetector()
        assert detector.observe(reading(1e9)) is None
        assert detector.sum == 3.5

    def test_it_is_reported_once_until_the_loss_has_been_back(self) -> None:
        detector = DivergenceDetector()
        found = [detector.observe(reading(4.0)) is not None for _ in range(10)]
        assert found.count(True) == 1
        for _ in range(5):
            detector.observe(reading(0.0))
        assert not detector.alarmed
        assert [detector.observe(reading(4.0)) is not None for _ in range(10)].count(True) == 1

    def test_worse_than_chance_after_having_been_better(self) -> None:
        detector = DivergenceDetector(vocabulary=400)
        chance = math.log(400)
        for _ in range(30):
            assert detector.observe(reading(0.0, value=chance + 2)) is None  # never below: how it began
        detector.observe(reading(0.0, value=chance - 1))
        found = [detector.observe(reading(0.0, value=chance + 1.5)) for _ in range(12)]
        (symptom,) = [each for each in found if each is not None]
        assert symptom.evidence["test"] == "above chance"
        assert found.index(symptom) == 9

    def test_early_in_the_run_it_takes_a_nat_over_the_first_losses(self) -> None:
        detector = DivergenceDetector(vocabulary=400)
        losses = [2.0] * 8 + [3.5, 2.0] * 5
        found = [detector.observe(reading(None, value=loss)) for loss in losses]
        (symptom,) = [each for each in found if each is not None]
        assert symptom.evidence["test"] == "early"

    def test_a_nat_means_nothing_for_another_loss(self) -> None:
        detector = DivergenceDetector()
        assert all(detector.observe(reading(None, value=10.0 + 5 * (step % 3))) is None for step in range(30))

    def test_a_loss_that_has_become_tiny_does_not_diverge_when_it_is_less_so(self) -> None:
        panel = DetectorPanel()
        rng = random.Random(0)
        for step in range(400):
            level = max(0.7 * math.exp(-0.05 * step), 1e-4)
            loss = level * math.exp(rng.gauss(0, 0.3)) + (0.02 if step > 300 and step % 7 == 0 else 0.0)
            assert names(panel.observe(StepSignals(step, loss, 1.0))) in ([], ["loss_notice"])

    def test_a_new_level_with_ordinary_noise_is_learned(self) -> None:
        panel = DetectorPanel()
        steps = noise(150, 2.0, 0.02) + noise(300, 3.0, 0.3, seed=1)
        for step, loss in enumerate(steps):
            panel.observe(StepSignals(step, loss, 1.0))
        assert not panel.divergence.alarmed
        assert panel.loss_level == pytest.approx(3.0, rel=0.15)

    def test_a_loss_that_becomes_negative_ends_the_alarm(self) -> None:
        panel = healthy_panel()
        for step in range(10):
            panel.observe(StepSignals(120 + step, 9.0, 1.0))
        assert panel.divergence.alarmed
        panel.observe(StepSignals(130, -1.0, 1.0))
        assert not panel.divergence.alarmed

    def test_noise_around_its_baseline_is_none(self) -> None:
        detector = DivergenceDetector()
        rng = random.Random(0)
        assert all(detector.observe(reading(rng.gauss(0, 1))) is None for _ in range(5000))

    def test_a_loss_that_stays_away_is_overdue(self) -> None:
        detector = DivergenceDetector(patience=10)
        for _ in range(15):
            detector.observe(reading(4.0))
        assert detector.overdue
        detector.accept_new_level()
        assert not detector.alarmed


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

    def test_a_slow_warm_up_is_no_standstill(self) -> None:
        detector = NeverLearnedDetector(vocabulary=32_000)
        losses = [11.0 - 0.5 * (step / 200) ** 1.5 + deviation for step, deviation in enumerate(noise(900, 0.1, 0.5))]
        assert losses[400] > detector.bound
        assert not [step for step, loss in enumerate(losses) if detector.observe(step, loss)]

    def test_what_was_learned_once_is_never_called_unlearned(self) -> None:
        detector = NeverLearnedDetector(vocabulary=32_000)
        losses = noise(50, 8.0) + noise(500, 10.4)
        assert not [step for step, loss in enumerate(losses) if detector.observe(step, loss)]

    def test_a_character_model_is_judged_by_its_vocabulary(self) -> None:
        """27 letters: bigrams alone are worth 0.85 nats, and are something learned."""
        detector = NeverLearnedDetector(vocabulary=27)
        assert not [step for step, loss in enumerate(noise(500, 2.45)) if detector.observe(step, loss)]

    def test_a_slow_rise_is_reported_when_it_is_a_fifth(self) -> None:
        panel = DetectorPanel()
        rises = [1.0] * 1_000 + [1 + 0.25 * step / 2_000 for step in range(2_000)]
        losses = [factor * loss for factor, loss in zip(rises, noise(3_000), strict=True)]
        found = [
            symptom for step, loss in enumerate(losses) for symptom in panel.observe(StepSignals(step, loss, 1.0))
        ]
        (slow,) = [symptom for symptom in found if symptom.name == "slow_rise"]
        assert 2_500 < slow.step < 2_950

    def test_a_rise_that_comes_again_and_again_is_told_once(self) -> None:
        """Sorted in each epoch of 1,000 steps."""
        detector = SlowRiseDetector()
        losses = [loss * (1 + 0.15 * math.sin(step / 159)) for step, loss in enumerate(noise(10_000))]
        assert len([step for step, loss in enumerate(losses) if detector.observe(step, loss)]) == 1

    def test_the_slow_rise_of_a_tiny_loss_is_none(self) -> None:
        detector = SlowRiseDetector()
        losses = noise(300, 2.0) + noise(500, 0.005) + noise(500, 0.01)
        assert not [step for step, loss in enumerate(losses) if detector.observe(step, loss)]

    def test_theil_sen_is_the_median_slope(self) -> None:
        assert theil_sen([0.0, 1.0, 2.0, 300.0, 4.0, 5.0]) == 1.0

    def test_a_plateau_is_reported_once(self) -> None:
        detector = PlateauDetector(window=100)
        falling = [4.0 * math.exp(-0.01 * step) for step in range(200)]
        flat = noise(300, level=falling[-1], spread=0.002)
        found = [step for step, loss in enumerate(falling + flat) if detector.observe(step, loss) is not None]
        assert len(found) == 1
        assert 200 < found[0] <= 330

    def test_a_loss_that_falls_is_no_plateau(self) -> None:
        detector = PlateauDetector(window=100)
        losses = [value * math.exp(-0.001 * step) for step, value in enumerate(noise(600, spread=0.02))]
        assert all(detector.observe(step, loss) is None for step, loss in enumerate(losses))

    def test_overfitting_is_an_evaluation_loss_that_rises_while_the_training_loss_falls(self) -> None:
        detector = OverfittingDetector()
        pairs = [(2.0, 2.0), (1.8, 1.7), (1.9, 1.5), (2.0, 1.3), (2.1, 1.1), (2.2, 1.0)]
        found = [detector.observe(step, *pair) for step, pair in enumerate(pairs)]
        (symptom,) = [each for each in found if each is not None]
        assert (symptom.name, symptom.step, symptom.severity) == ("overfitting", 4, "info")
        assert symptom.evidence["best"] == 1.8

    def test_both_losses_rising_is_not_overfitting(self) -> None:
        detector = OverfittingDetector()
        assert all(detector.observe(step, 2 + step, 2 + step) is None for step in range(6))


class TestPanel:
    def test_only_what_applies_is_judged(self) -> None:
        panel = DetectorPanel(apply=())
        for step in range(60):
            signals = StepSignals(step, 0.0 if step > 30 else -2.0, 0.0)
            assert panel.alarming(signals) is None
            assert panel.observe(signals) == []

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"There is no detector loss_spikes\. There are: .*loss_spike"):
            DetectorPanel(apply={"loss_spikes"})

    def test_alarming_changes_nothing(self) -> None:
        panel = healthy_panel()
        before = panel.state_dict()
        assert panel.alarming(StepSignals(120, 60.0, 60.0)) is not None
        assert panel.state_dict() == before

    def test_a_loss_with_a_sign_is_said_once_and_judged_no_more(self) -> None:
        panel = DetectorPanel()
        found = [names(panel.observe(StepSignals(step, (-1) ** step * 1.0, 1.0))) for step in range(100)]
        assert [each for each in found if each] == [["signed_loss"]]

    def test_an_exploding_gradient_is_worse_than_a_co_spike(self) -> None:
        symptom = healthy_panel().alarming(StepSignals(120, 60.0, 1e5))
        assert symptom is not None
        assert symptom.name == "gradient_explosion"

    def test_a_run_without_gradient_norms_is_judged_by_its_loss(self) -> None:
        panel = DetectorPanel()
        for step, loss in enumerate(noise(60)):
            assert panel.observe(StepSignals(step, loss)) == []
        assert panel.alarming(StepSignals(60, 20.0)) is None
        assert names(panel.observe(StepSignals(60, 20.0))) == ["loss_spike"]
