"""The random states of a run: captured and set back, whatever was drawn since the last capture."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from self_healing.system.random_state import RandomState


CPU = torch.device("cpu")


def draw() -> list[float]:
    return [
        random.gauss(0, 1),
        random.random(),
        np.random.standard_normal(),
        np.random.random(),
        float(torch.rand(())),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda: random.gauss(0, 1),
        np.random.random,
        # The second of a pair is kept, and no word of the generator moves for it.
        np.random.standard_normal,
        # Once through all words of the generator.
        lambda: np.random.random(624),
        lambda: np.random.seed(7),
        lambda: np.random.shuffle([1, 2, 3]),
        lambda: torch.rand(()),
        lambda: None,
    ],
)
@pytest.mark.parametrize("half_a_pair", [False, True])
def test_what_is_drawn_between_two_captures_is_noticed(change: Callable[[], object], half_a_pair: bool) -> None:
    random.seed(0)
    np.random.seed(0)
    if half_a_pair:
        random.gauss(0, 1)
        np.random.standard_normal()
    RandomState.capture(CPU)
    change()
    after = RandomState.capture(CPU)
    expected = draw()
    draw()
    after.restore()
    assert draw() == expected
