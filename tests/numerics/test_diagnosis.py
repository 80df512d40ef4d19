"""Experiments with trusted states and older checkpoints, whose results are given by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_run import MadeUpWindow

from self_healing import FailureType
from self_healing.failures.recipes import Cause
from self_healing.healers.numerics.diagnosis import diagnose_rise, diagnose_stillness
from self_healing.healers.numerics.healer import ResumeTrial, try_older_checkpoints
from self_healing.hf.objective import StepSignals


class Window(MadeUpWindow):
    """A step whose loss and gradient norm follow from the state that is in place."""

    def __init__(self, results: Mapping[Any, tuple[float, float | None]]) -> None:
        super().__init__(50, *results["own"])
        self.results, self.state = results, "own"

    def experiment(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin_from_here(self) -> None: ...

    def reexecute(self) -> None:
        self.found = StepSignals(self.step, *self.results[self.state])


class Trials:
    """Trusted states of some steps, the newest first; the loss of batches that were kept, by state."""

    def __init__(self, window: Window, kept: Mapping[Any, float] | None = None) -> None:
        self.window, self.kept = window, kept or {}
        self.snapshots = [SimpleNamespace(step=step) for step in window.results if isinstance(step, int)]
        self.states = SimpleNamespace(generations=lambda: self.snapshots)
        self.preferred: list[int] = []

    def begin(self, step: int) -> bool:
        return True

    def begin_with_checkpoints(self, step: int, unmoved: bool) -> bool:
        return True

    def last_healthy(self) -> SimpleNamespace | None:
        return SimpleNamespace(loss=2.0) if self.kept else None

    def try_snapshot(self, snapshot: Any) -> SimpleNamespace | None:
        self.window.state = snapshot.step
        return SimpleNamespace(loss=2.0) if self.kept else None

    def try_checkpoint(self, checkpoint: str) -> bool:
        self.window.state = checkpoint
        return True

    def prefer(self, snapshot: Any) -> None:
        self.preferred.append(snapshot.step)

    def end(self) -> None:
        self.window.state = "own"

    def end_with_checkpoints(self, resumed: str) -> None:
        self.end()


@pytest.fixture
def kept_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a batch that was kept is what `Trials.kept` says for the state in place."""

    class EarlierSteps:
        def __init__(self, window: Any) -> None:
            self.window = window

        def loss_of(self, control: Any) -> float:
            return self.window.trials.kept[self.window.state]

    monkeypatch.setattr("self_healing.healers.numerics.diagnosis.EarlierSteps", EarlierSteps)


def rise(results: dict[Any, tuple[float, float]], kept: dict[Any, float] | None = None) -> tuple[Any, Window, Trials]:
    """A loss of 8.0 that was 2.0, with what it is in other states."""
    window: Any = Window({"own": (8.0, 1.0), **results})
    trials: Any = Trials(window, kept)
    window.trials = trials
    return diagnose_rise(window, trials, 8.0, 2.0, 0.05), window, trials


@pytest.mark.usefixtures("kept_batches")
class TestRise:
    def test_a_trusted_state_that_does_better_blames_the_weights(self) -> None:
        found, window, trials = rise({40: (7.9, 1.0), 20: (2.0, 1.0)})
        assert found.cause is Cause.WEIGHTS
        assert trials.preferred == [20]
        assert window.state == "own"
        assert window.accepted

    def test_half_of_the_rise_is_enough(self) -> None:
        assert rise({40: (3.9, 1.0)})[0].cause is Cause.WEIGHTS
        assert rise({40: (4.1, 1.0)})[0].cause is not Cause.WEIGHTS

    def test_where_an_earlier_batch_gives_what_it_gave_the_data_are_harder(self) -> None:
        found, _, trials = rise({40: (8.0, 1.0)}, {"own": 2.0, 40: 2.0})
        assert (found.failure, found.cause) == (FailureType.HARDER_DATA, Cause.HARDER_DATA)
        assert trials.preferred == []

    def test_where_it_does_not_the_computation_is_wrong(self) -> None:
        found, _, _ = rise({40: (8.0, 1.0)}, {"own": 8.0, 40: 8.0})
        assert (found.failure, found.cause) == (FailureType.DIVERGENCE, Cause.COMPUTATION)

    def test_without_a_batch_to_compare_with_it_is_unclear(self) -> None:
        assert rise({40: (8.0, 1.0)})[0].cause is Cause.UNCLEAR

    def test_data_that_take_turns_are_not_gone_back_for(self) -> None:
        # With the older weights this batch is better, and the last healthy one is as much worse.
        assert rise({40: (2.0, 1.0)}, {"own": 2.0, 40: 8.0})[0].cause is not Cause.WEIGHTS

    def test_weights_that_are_better_at_both_batches_are_gone_back_to(self) -> None:
        assert rise({40: (2.0, 1.0)}, {"own": 2.0, 40: 1.0})[0].cause is Cause.WEIGHTS
        assert rise({40: (2.0, 1.0)}, {"own": 2.0, 40: 2.0})[0].cause is Cause.WEIGHTS

    def test_where_an_earlier_batch_has_become_worse_too_it_is_the_weights(self) -> None:
        assert rise({40: (2.0, 1.0)}, {"own": 8.0, 40: 8.0})[0].cause is Cause.WEIGHTS

    def test_a_loss_with_a_sign_is_not_looked_into(self) -> None:
        window: Any = Window({"own": (-1.0, 1.0), 40: (2.0, 1.0)})
        assert diagnose_rise(window, Trials(window), -1.0, 2.0, 0.05).cause is Cause.NOT_LOOKED_FOR  # type: ignore[arg-type]


def stillness(then: tuple[float, float], first: float = 5.0, still: tuple[float, float] = (2.0, 0.0)) -> Any:
    window: Any = Window({"own": still, 40: then})
    trials: Any = Trials(window)
    return diagnose_stillness(window, trials, StepSignals(50, *still), first, 0.05).cause


class TestStillness:
    def test_a_state_with_a_gradient_and_a_lower_loss_blames_the_weights(self) -> None:
        assert stillness((1.0, 1.0)) is Cause.WEIGHTS

    def test_where_the_loss_is_no_lower_everything_is_learned(self) -> None:
        assert stillness((2.0, 1.0)) is Cause.UNCLEAR

    def test_unless_nothing_was_learned_at_all(self) -> None:
        assert stillness((2.0, 1.0), first=2.0) is Cause.WEIGHTS

    def test_a_state_with_no_gradient_either_is_no_better(self) -> None:
        assert stillness((1.0, 5e-5)) is Cause.UNCLEAR

    def test_the_gradient_has_to_be_a_thousand_times_as_large(self) -> None:
        assert stillness((1.0, 9.0), still=(2.0, 0.01)) is Cause.UNCLEAR
        assert stillness((1.0, 11.0), still=(2.0, 0.01)) is Cause.WEIGHTS


def older(results: dict[Any, tuple[float, float | None]], *checkpoints: str) -> ResumeTrial:
    window: Any = Window({"own": (2.0, 1.0), **results})
    trials: Any = Trials(window)
    return try_older_checkpoints(window, trials, "resumed", checkpoints, 1.0, rise=1.0, unmoved=True)


class TestOlderCheckpoints:
    def test_one_with_which_the_step_is_finite_shows_that_the_other_is_damaged(self) -> None:
        trial = older({"resumed": (float("nan"), 1.0), "older": (2.0, 1.0)}, "older")
        assert (trial.sound, trial.damaged) == ("older", ["resumed"])

    def test_what_fails_with_all_of_them_is_not_the_checkpoint(self) -> None:
        bad = float("nan"), 1.0
        trial = older({"resumed": bad, "older": bad, "oldest": bad}, "older", "oldest")
        assert (trial.sound, trial.damaged) == (None, [])
        assert list(trial.tried) == ["resumed", "older", "oldest"]

    def test_a_loss_that_is_a_little_higher_is_no_damage(self) -> None:
        assert older({"resumed": (2.7, 1.0), "older": (1.0, 1.0)}, "older").sound is None
        assert older({"resumed": (2.8, 1.0), "older": (1.0, 1.0)}, "older").sound == "older"

    @pytest.mark.parametrize("gradient", [0.0, None])
    def test_a_gradient_that_is_gone_is_damage_if_the_loss_is_higher(self, gradient: float | None) -> None:
        assert older({"resumed": (2.1, gradient), "older": (2.0, 1.0)}, "older").sound == "older"
        assert older({"resumed": (2.0, gradient), "older": (2.0, 1.0)}, "older").sound is None
