"""Whether a device computes what is exact on every device; and what is made of sums of known numbers."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from wrong_product import WrongProduct

from self_healing.doctor.device_check import check_device
from self_healing.doctor.ranks import changed_on_the_way


CPU = torch.device("cpu")


# ---- a device ----


def test_a_device_that_computes_right_draws_nothing_and_takes_little_time() -> None:
    before = torch.random.get_rng_state()
    began = time.process_time()
    found = check_device(CPU)
    assert (found.wrong, found.error) == (False, None)
    assert 0 < found.seconds < 1
    assert time.process_time() - began < 1
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("after", [0, 2])
def test_one_element_that_is_wrong_is_found_and_one_that_is_wrong_now_and_then(after: int) -> None:
    with WrongProduct(after):
        assert check_device(CPU, seconds=0.0).wrong


def test_a_device_that_raises_is_not_called_wrong() -> None:
    with mock.patch.object(torch.Tensor, "__matmul__", side_effect=RuntimeError("CUDA out of memory\nand more")):
        found = check_device(CPU)
    assert (found.wrong, found.error) == (False, "RuntimeError: CUDA out of memory")


# ---- what is made of what ranks have seen ----


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ([], []),
        ([(0, 1), (1, 1)], [1]),
        # What rank 1 sends arrives changed at three of four, or all that it receives is.
        ([(0, 1), (2, 1), (3, 1)], [1]),
        ([(1, 0), (1, 1), (1, 2), (1, 3)], [1]),
        # Between two of four.
        ([(0, 1)], [0, 1]),
    ],
)
def test_the_rank_whose_numbers_are_changed_is_named(changed: list[tuple[int, int]], named: list[int]) -> None:
    seen: list[list[int]] = [[] for _ in range(2 if changed == [(0, 1), (1, 1)] else 4)]
    for by, whose in changed:
        seen[by].append(whose)
    assert sorted(changed_on_the_way(seen)) == named
