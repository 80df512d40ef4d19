"""Steps that are applied again after going back: noise of the kernels is told from steps that are other ones."""

from __future__ import annotations

import numpy as np
import pytest

from self_healing.rollback.replay import first_beyond_noise


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
