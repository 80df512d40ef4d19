"""The random states of a run: captured, shared where nothing was drawn, and set back."""

import importlib
import random

import numpy as np
import pytest
import torch

from self_healing.system import random_state
from self_healing.system.random_state import RandomState


CPU = torch.device("cpu")


def draw() -> tuple[float, list[float], float]:
    return random.random(), np.random.standard_normal(3).tolist(), float(torch.rand(()))


def test_python_and_numpy_are_asked_once_while_nothing_is_drawn() -> None:
    random.seed(0)
    first = RandomState.capture(CPU)
    again = RandomState.capture(CPU, since=first)

    assert again.numpy is first.numpy
    assert again.python is first.python


def once_through_the_words() -> None:
    for _ in range(312):
        random.random()


@pytest.mark.parametrize(
    "change",
    [
        random.random,
        once_through_the_words,
        lambda: random.seed(7),
        lambda: random.shuffle([1, 2, 3]),
        lambda: random.gauss(0, 1),
        lambda: random.setstate((*random.getstate()[:2], 0.5)),
    ],
)
def test_what_python_draws_is_noticed(change) -> None:
    random.seed(0)
    before = RandomState.capture(CPU)
    change()
    after = RandomState.capture(CPU, since=before)
    expected = [random.gauss(0, 1), *draw()]
    draw()

    after.restore()

    assert [random.gauss(0, 1), *draw()] == expected
    assert after.python is not before.python


def test_the_second_of_a_pair_of_normal_numbers_of_python_is_noticed() -> None:
    random.seed(0)
    random.gauss(0, 1)
    before = RandomState.capture(CPU)
    # Kept from the first pair: no word of the generator moves.
    random.gauss(0, 1)
    after = RandomState.capture(CPU, since=before)
    expected = random.gauss(0, 1)

    after.restore()

    assert random.gauss(0, 1) == expected


def test_the_words_of_python_are_read_where_they_are() -> None:
    place, *words = random_state._PLACE_AND_WORDS.unpack(random_state._python_words())

    assert (*words, place) == random.getstate()[1]


def test_a_module_that_was_loaded_again_draws_from_another_generator() -> None:
    before = RandomState.capture()
    importlib.reload(random)
    first = RandomState.capture(since=before)
    random.random()
    second = RandomState.capture(since=first)
    expected = random.random()
    second.restore()
    assert random.random() == expected


def test_another_generator_of_python_is_not_looked_into(monkeypatch) -> None:
    monkeypatch.setattr(random_state, "_HAS_PYTHON_WORDS", False)
    first = RandomState.capture(CPU)
    second = RandomState.capture(CPU, since=first)

    assert second.python == first.python
    assert second.python is not first.python


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


def test_the_second_of_a_pair_that_is_put_back_with_an_earlier_state_is_noticed() -> None:
    np.random.randn()
    with_second = RandomState.capture()
    np.random.randn()
    without = RandomState.capture(since=with_second)
    with_second.restore()
    again = RandomState.capture(since=without)
    expected = np.random.randn()
    np.random.rand()
    again.restore()
    assert np.random.randn() == expected


def test_another_generator_of_numpy_is_not_looked_into(monkeypatch) -> None:
    monkeypatch.setattr("self_healing.system.random_state._bit_generator", lambda: np.random.PCG64(0))
    first = RandomState.capture(CPU)
    second = RandomState.capture(CPU, since=first)

    assert second.numpy is not first.numpy
