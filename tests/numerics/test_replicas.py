"""Replicas are compared by the bits of their weights, and the rank that differs from most is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from self_healing.instrument import Replicas
from self_healing.numerics.replicas import odd_ranks, odd_ranks_by_place


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]


def replicas_of(*parameters: nn.Parameter) -> Replicas:
    model = nn.Module()
    for number, parameter in enumerate(parameters):
        model.register_parameter(f"p{number}", parameter)
    accelerator = SimpleNamespace(device=torch.device("cpu"), scaler=None)
    trainer: Any = SimpleNamespace(model=model, optimizer=None, accelerator=accelerator, args=SimpleNamespace())
    return Replicas(trainer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_a_weight_counts(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(3, 5).to(dtype))
    replicas = replicas_of(weight, nn.Parameter(torch.zeros(2)))
    before = replicas.sums()
    raw = weight.detach().view(-1).view(torch.uint8)
    for at in (0, raw.numel() // 2, raw.numel() - 1):
        for bit in range(8):
            raw[at] ^= 1 << bit
            after = replicas.sums()
            assert (after != before).tolist() == [True, False]
            raw[at] ^= 1 << bit
    assert torch.equal(replicas.sums(), before)


def test_what_is_not_trained_and_what_has_no_elements_is_no_trouble() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    assert replicas_of(frozen, nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(4, 6).t())).sums().shape == (2,)


@pytest.mark.parametrize(
    ("sums", "odd"),
    [
        ([(1,), (1,), (2,)], [2]),
        ([(2,), (1,), (1,), (1,)], [0]),
        ([(1,), (2,), (3,), (1,), (1,)], [1, 2]),
        ([(1,), (2,)], None),
        ([(1,), (1,), (2,), (2,)], None),
        ([(1,), (2,), (3,)], None),
    ],
)
def test_the_odd_ones_are_those_that_differ_from_more_than_half(
    sums: list[tuple[int, ...]], odd: list[int] | None
) -> None:
    assert odd_ranks(sums) == odd


@pytest.mark.parametrize(
    ("sums", "odd"),
    [
        # Of six ranks, every other one has the same shard.
        ([(1,), (2,), (1,), (2,), (1,), (2,)], []),
        ([(1,), (2,), (1,), (9,), (1,), (2,)], [3]),
        ([(9,), (2,), (1,), (8,), (1,), (2,)], [0, 3]),
        ([(7,), (2,), (8,), (2,), (9,), (2,)], None),
    ],
)
def test_the_odd_ones_are_found_among_those_that_have_the_same_shard(
    sums: list[tuple[int, ...]], odd: list[int] | None
) -> None:
    assert odd_ranks_by_place([(0,), (1,)] * 3, sums) == odd
