"""The random states of a run: captured, shared where nothing was drawn, and set back."""

import random

import numpy as np
import pytest
import torch

from self_healing.random_state import RandomState


CPU = torch.device("cpu")


def draw() -> tuple[float, list[float], float]:
    return random.random(), np.random.standard_normal(3).tolist(), float(torch.rand(()))


def test_numpy_is_asked_once_while_nothing_is_drawn() -> None:
    first = RandomState.capture(CPU)

    assert RandomState.capture(CPU, since=first).numpy is first.numpy


@pytest.mark.parametrize(
    "change",
    [
        np.random.random,
        np.random.standard_normal,
        lambda: np.random.random(624),
        lambda: np.random.seed(7),
        lambda: np.random.shuffle([1, 2, 3]),
    ],
)
def test_what_numpy_draws_is_noticed(change) -> None:
    np.random.seed(0)
    before = RandomState.capture(CPU)
    change()
    after = RandomState.capture(CPU, since=before)
    expected = draw()
    draw()

    after.restore()

    assert draw() == expected
    assert after.numpy is not before.numpy


def test_the_second_of_a_pair_of_normal_numbers_is_noticed() -> None:
    np.random.seed(0)
    np.random.standard_normal()
    before = RandomState.capture(CPU)
    # Kept from the first pair: no word of the generator moves.
    np.random.standard_normal()
    after = RandomState.capture(CPU, since=before)
    expected = draw()

    after.restore()

    assert draw() == expected


def test_another_generator_of_numpy_is_not_looked_into(monkeypatch) -> None:
    monkeypatch.setattr("self_healing.random_state._bit_generator", lambda: np.random.PCG64(0))
    first = RandomState.capture(CPU)
    second = RandomState.capture(CPU, since=first)

    assert second.numpy is not first.numpy
