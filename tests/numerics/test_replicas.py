"""Replicas are compared by the bits of their weights, and the rank that differs from most is named."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from self_healing.healers.numerics.replicas import odd_by_majority, outlier_by_distance
from self_healing.hf import replicas
from self_healing.hf.replicas import (
    DIGEST_PARTS,
    Group,
    are_apart,
    digest_of,
    distance_between,
    factors_of,
    sum_of_all,
    sum_of_bits,
    unlike,
)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
# Four ranks: of a mesh of two replicas of two shards, one tensor; another one is on all of them, and one on three.
KEPT: dict[int, list[tuple[str, Group]]] = {
    0: [("sharded", (0, 2)), ("whole", (0, 1, 2, 3)), ("odd", (0, 1, 3))],
    1: [("sharded", (1, 3)), ("whole", (0, 1, 2, 3)), ("odd", (0, 1, 3))],
    2: [("sharded", (0, 2)), ("whole", (0, 1, 2, 3))],
    3: [("sharded", (1, 3)), ("whole", (0, 1, 2, 3)), ("odd", (0, 1, 3))],
}
SUMS = {("sharded", (0, 2)): 5, ("sharded", (1, 3)): -(2**63), ("whole", (0, 1, 2, 3)): 2**62, ("odd", (0, 1, 3)): 0}


@pytest.mark.parametrize("at", [0, 4, 9])
def test_a_weight_in_any_piece_of_a_tensor_tells_how_far_it_is_off(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_PIECE", 4)
    was = {"same": torch.ones(3, 3), "struck": torch.zeros(2, 5)}
    now = {name: each.clone() for name, each in was.items()}
    now["struck"].view(-1)[at] = -0.5
    assert distance_between(was, now) == 0.5
    now["struck"].view(-1)[at] = math.nan
    assert distance_between(was, now) == math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_a_weight_counts(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 5).to(dtype)
    before = sum_of_bits(weight)
    raw = weight.view(-1).view(torch.uint8)
    for at in (0, raw.numel() // 2, raw.numel() - 1):
        for bit in range(8):
            raw[at] ^= 1 << bit
            assert sum_of_bits(weight) != before
            raw[at] ^= 1 << bit
    assert sum_of_bits(weight) == before


def test_the_sum_of_all_tells_which_tensor_is_which_and_which_part_of_one() -> None:
    one, other = torch.ones(3, 2), torch.full((3, 2), 2.0)
    tensors = (
        {"a": one, "b": other},
        {"a": other, "b": one},
        {"a": one, "c": other},
        {"a": one},
        # Quantised ones are made of several.
        {"a": TwoTensor(one, other)},
        {"a": TwoTensor(other, one)},
        {"a": TwoTensor(one, one)},
    )
    assert len({int(sum_of_all(each, torch.device("cpu"))) for each in tensors}) == len(tensors)


def sums_of_ranks() -> dict[int, torch.Tensor]:
    return {rank: torch.tensor([SUMS[each] for each in kept]) for rank, kept in KEPT.items()}


def apart_over_ranks(sums: dict[int, torch.Tensor]) -> bool:
    """As the ballots of all ranks add up, in single precision."""
    digests = [digest_of(each, factors_of(KEPT[rank], rank)) for rank, each in sums.items()]
    assert {each.dtype for each in digests} == {torch.float32}
    return are_apart(torch.stack(digests).sum(0).tolist())


def test_replicas_that_are_the_same_add_up_to_nothing() -> None:
    assert not apart_over_ranks(sums_of_ranks())
    assert not are_apart([0.0] * DIGEST_PARTS)


@pytest.mark.parametrize("rank", KEPT)
def test_any_bit_of_any_sum_of_any_rank_is_seen_in_the_digest(rank: int) -> None:
    for at in range(len(KEPT[rank])):
        for bit in range(64):
            sums = sums_of_ranks()
            sums[rank][at] ^= -(2**63) if bit == 63 else 1 << bit
            assert apart_over_ranks(sums), (at, bit)


@pytest.mark.slow
def test_the_digests_of_many_ranks_add_up_exactly() -> None:
    group = tuple(range(4096))
    sums = torch.arange(3) << 40
    total = torch.zeros(DIGEST_PARTS)
    for rank in group:
        total += digest_of(sums, factors_of([(name, group) for name in "abc"], rank))
    assert not are_apart(total.tolist())


@pytest.mark.parametrize(
    ("sums", "odd"),
    [
        ([1, 1, 2], [2]),
        ([2, 1, 1, 1], [0]),
        ([1, 2, 3, 1, 1], [1, 2]),
        ([1, 2], None),
        ([1, 1, 2, 2], None),
        ([1, 2, 3], None),
    ],
)
def test_the_odd_ones_are_those_that_differ_from_more_than_half(sums: list[int], odd: list[int] | None) -> None:
    group = tuple(range(len(sums)))
    of_ranks = [{group: {"a": each, "b": 7}} for each in sums]
    assert odd_by_majority(of_ranks, unlike(of_ranks)) == odd


# Of a mesh of two replicas of two shards, ranks 1 and 3 differ; what they should be is 5.
PAIRS = (0, 2), (1, 3)


@pytest.mark.parametrize(
    ("of_1", "of_3", "distances", "odd"),
    [
        # Found before the next update: the other one is as it should be.
        (6, 5, [0.0, 1.0, 0.0, 0.0], [1]),
        (5, 6, [0.0, 0.0, 0.0, 1.0], [3]),
        # Both were moved since, the one that was hit farther; what moved ranks of other shards says nothing.
        (6, 7, [9.0, 1.0, 9.0, 0.1], [1]),
        (6, 7, [9.0, 0.1, 9.0, float("inf")], [3]),
        (6, 7, [9.0, 0.1, 9.0, 0.15], None),
    ],
)
def test_of_two_replicas_the_odd_one_is_told_by_the_weights_as_they_should_have_been(
    of_1: int, of_3: int, distances: list[float], odd: list[int] | None
) -> None:
    even, uneven = PAIRS
    of_ranks = [{even: {"a": 1}}, {uneven: {"a": of_1}}, {even: {"a": 1}}, {uneven: {"a": of_3}}]
    after = [{even: {"a": 2}}, {uneven: {"a": 5}}, {even: {"a": 2}}, {uneven: {"a": 5}}]
    apart = unlike(of_ranks)
    assert odd_by_majority(of_ranks, apart) is None
    assert outlier_by_distance(of_ranks, after, distances, apart) == odd
