"""Steps that are applied again after going back: noise of the kernels is told from steps that are other ones."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from made_up_run import MadeUpWindow
from test_states import SmallRun

from self_healing.failures.recipes import TrainingFault
from self_healing.hf.objective import StepSignals
from self_healing.rollback.rollback import Replay, Replayed, Target, first_beyond_noise


STEPS = 20


def runs(noise: float, growth: float, seed: int) -> list[list[float]]:
    """Runs of the same steps from the same weights, whose noise makes them drift apart."""
    draws = np.random.default_rng(seed)
    usual = np.linspace(2.0, 1.5, STEPS)
    drift = np.zeros((4, STEPS))
    for step in range(STEPS):
        before = drift[:, step - 1] if step else np.zeros(4)
        drift[:, step] = growth * before + noise * draws.standard_normal(4)
    return [list(usual * (1 + each)) for each in drift]


@pytest.mark.parametrize(
    ("noise", "growth"), [(0.0, 1.0), (1e-6, 1.0), (1e-4, 1.0), (1e-3, 1.1), (1e-3, 1.3), (3e-3, 1.3), (1e-2, 1.0)]
)
def test_runs_that_drift_apart_are_the_same_run(noise: float, growth: float) -> None:
    beyond = 0
    for seed in range(300):
        recorded, *replays = runs(noise, growth, seed)
        beyond += first_beyond_noise(recorded, replays) is not None
    assert beyond <= 3


@pytest.mark.parametrize("noise", [0.0, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("begins", [0, 1, 10, 19])
def test_steps_that_are_others_are_refused_where_they_begin(noise: float, begins: int) -> None:
    for seed in range(50):
        recorded, *replays = runs(noise, 1.0, seed)
        recorded[begins:] = [loss * 0.8 for loss in recorded[begins:]]
        assert first_beyond_noise(recorded, replays) == begins


def test_what_was_clearly_worse_was_the_fault() -> None:
    recorded, *replays = runs(1e-5, 1.0, 0)
    recorded[12:] = [loss * 1.5 for loss in recorded[12:]]
    assert first_beyond_noise(recorded, replays) is None


def test_a_recorded_loss_that_is_not_finite_was_the_fault() -> None:
    recorded, *replays = runs(1e-5, 1.0, 0)
    recorded[12:] = [float("nan")] * (STEPS - 12)
    assert first_beyond_noise(recorded, replays) is None


def test_two_replays_that_agree_by_chance_in_one_step_explain_it_by_the_others() -> None:
    assert first_beyond_noise([2.0, 2.0, 2.0], [[2.01, 2.01, 1.98], [2.01, 2.02, 2.0]]) is None


class MadeUpReplay:
    """
    Steps that were kept, and their losses each time they are applied again.

    Args:
        recorded (`list[float]`):
            Their losses as they were.
        attempts (`list`):
            Losses of each attempt; an exception is raised in the place of a step.
    """

    def __init__(self, recorded: list[float], *attempts: list[Any], **options: Any) -> None:
        self.attempts, self.gone_back = [iter(each) for each in attempts], 0
        self.window: Any = MadeUpWindow(50)
        self.window.experiment = contextlib.nullcontext
        self.window.begin_from_here = lambda: None
        self.window.engine = SimpleNamespace(precision=torch.float32)
        self.window.replay = self.next
        recordings: Any = [
            SimpleNamespace(step=40 + at, control=SimpleNamespace(loss=loss)) for at, loss in enumerate(recorded)
        ]
        well = {"still_well": lambda signals: signals.loss < 3.0, "finished": True, "loss_in_question": True}
        self.replay = Replay(self.window, recordings, go_back=self.go_back, **{**well, **options})

    def go_back(self) -> None:
        self.gone_back += 1

    def next(self, recording: Any) -> StepSignals:
        loss = next(self.attempts[self.gone_back])
        if isinstance(loss, Exception):
            raise TrainingFault(loss)
        return StepSignals(recording.step, loss, 1.0)


@pytest.fixture
def _made_up_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("self_healing.rollback.rollback.EarlierSteps", lambda window: window)


NAN = float("nan")


@pytest.mark.usefixtures("_made_up_steps")
class TestReplay:
    def test_steps_that_come_out_as_they_were_are_kept(self) -> None:
        made = MadeUpReplay([2.0, 1.9, 1.8], [2.0, 1.9, 1.8])
        assert made.replay.run() == Replayed(3, 0.0)
        assert made.gone_back == 0
        assert made.window.computed == 1

    def test_the_step_that_is_judged_comes_after_them(self) -> None:
        made = MadeUpReplay([2.0], [2.0], finished=False)
        assert made.replay.run().steps == 1
        assert made.window.computed == 2

    @pytest.mark.parametrize("fault", [NAN, ValueError("no")])
    def test_a_fault_that_strikes_meanwhile_may_strike_once(self, fault: Any) -> None:
        made = MadeUpReplay([2.0, 1.9], [2.0, fault], [2.0, 1.9])
        assert made.replay.run().steps == 2
        assert made.gone_back == 1

    @pytest.mark.parametrize(("fault", "why"), [(NAN, "step 40 is not finite"), (ValueError("no"), "ValueError: no")])
    def test_one_that_strikes_twice_does_not_pass(self, fault: Any, why: str) -> None:
        made = MadeUpReplay([2.0, 1.9], [fault], [fault])
        replayed = made.replay.run()
        assert replayed.steps is None
        assert why in replayed.why
        assert made.gone_back == 2

    def test_steps_that_fail_again_are_where_training_leads(self) -> None:
        made = MadeUpReplay([2.0, 9.0], [2.0, 9.0])
        replayed = made.replay.run()
        assert replayed.steps is None
        assert "step 41 does not look as it should (loss 9)" in replayed.why
        assert made.gone_back == 1

    def test_unless_it_is_not_for_their_losses_that_the_run_went_back(self) -> None:
        made = MadeUpReplay([2.0, 9.0], [2.0, 9.0], loss_in_question=False)
        assert made.replay.run().steps == 2
        other = MadeUpReplay([2.0, 9.0], [2.0, 8.9], [2.0, 8.9], loss_in_question=False)
        assert other.replay.run().steps is None

    def test_a_step_that_is_another_one_in_the_middle_is_no_noise(self) -> None:
        made = MadeUpReplay([2.0, 1.9, 1.8], [2.0, 1.9, 2.5], [2.0, 1.9, 2.5])
        replayed = made.replay.run()
        assert replayed.steps is None
        assert "the loss of step 42 is 2.5 and was 1.8" in replayed.why

    def test_runs_that_drift_apart_are_held_against_each_other(self) -> None:
        first, second = [2.01, 1.91, 1.81], [2.01, 1.87, 1.76]
        made = MadeUpReplay([2.02, 1.89, 1.79], first, second)
        replayed = made.replay.run()
        assert replayed.steps == 3
        assert replayed.apart == pytest.approx(0.03 / 1.79)
        assert made.gone_back == 1

    def test_steps_that_are_others_in_each_of_them_are_refused(self) -> None:
        made = MadeUpReplay([1.5, 1.4], *[[2.0, 1.9]] * 3)
        replayed = made.replay.run()
        assert replayed.steps is None
        assert "the loss of step 40 is 2 and 2 and 2 and was 1.5" in replayed.why
        assert made.gone_back == 3

    def test_what_differs_from_the_same_weights_does_not_repeat(self) -> None:
        made = MadeUpReplay([1.5, 1.4], [1.8, 1.7], [1.9, 1.7], [2.0, 1.7])
        replayed = made.replay.run()
        assert replayed.steps is None
        assert "the loss of step 40 is 1.8 and 1.9 and 2: something keeps a state of its own" in replayed.why

    def test_a_recorded_loss_that_was_worse_is_not_compared(self) -> None:
        made = MadeUpReplay([2.0, 2.9, 2.8], [2.0, 1.9, 1.8])
        assert made.replay.run() == Replayed(3, 0.0)


def test_without_all_of_its_steps_a_run_is_not_replayed(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    run.enter()
    window: Any = MadeUpWindow(0)
    replayed = run.rollback.replay(window, lambda signals: True)
    assert (replayed.steps, "is a checkpoint" in replayed.why) == (None, True)
    run.train(12)
    run.rollback.batches.recorded = lambda steps: None  # type: ignore[method-assign]
    run.instrument.view.step = run.state.global_step
    run.rollback.go_back(Target.NEWEST, run.state.global_step, "incident")
    replayed = run.rollback.replay(window, lambda signals: True)
    assert (replayed.steps, "not all of the steps since then are kept" in replayed.why) == (None, True)
