"""Every rank is looked at before the first step: its device, and what reductions make of its numbers."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import build_tokenizer, journal, sft_trainer
from forked_pairs import run_pair
from transformers import set_seed
from two_processes import digest
from wrong_product import WrongProduct

from self_healing import HealingConfig, SelfHealingCallback, UnrecoverableTrainingError
from self_healing.health import start
from self_healing.health.device_check import DeviceCheck, check_device
from self_healing.health.ranks_check import RanksCheck, _changed_on_the_way


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
    seen = torch.zeros(2 if changed == [(0, 1), (1, 1)] else 4, 2 if changed == [(0, 1), (1, 1)] else 4)
    for by, whose in changed:
        seen[by, whose] = 1
    assert sorted(_changed_on_the_way(seen)) == named


def test_a_rank_is_slow_beside_the_others_alone() -> None:
    assert RanksCheck({}, [], [1.0, 1.2, 0.9, 3.0], 0.0).slow == {}
    assert RanksCheck({}, [], [1.0, 1.2, 1.0, 5.0], 0.0).slow == {3: 5.0}
    assert RanksCheck({}, [], [0.0, 1.0], 0.0).slow == {}


# ---- two ranks ----


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger, level = logging.getLogger("self_healing"), logging.getLogger("self_healing").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def looked_at(directory: Path, rank: int) -> dict[str, Any]:
    """Runs of two steps: healthy, without the check, and with what may be wrong with the second rank."""
    tokenizer, results = build_tokenizer(), dict[str, Any]()
    reduce = torch.distributed.all_reduce

    def reduce_wrong(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = reduce(tensor, *args, **kwargs)
        if tensor.dim() == 2 and tensor.shape[1] > 100:
            tensor[1, 200] += 1
        return work

    def slow(device: torch.device) -> DeviceCheck:
        return DeviceCheck(False, 0.01 if rank == 0 else 0.08, 1.0)

    def train(name: str, struck: Callable[[], Any] = contextlib.nullcontext, **settings: Any) -> None:
        set_seed(1234)
        trainer = sft_trainer(
            directory / name,
            tokenizer,
            callbacks=[SelfHealingCallback(HealingConfig(**settings))],
            ddp_backend="gloo",
            max_steps=2,
        )
        with logged() as told, struck():
            try:
                trainer.train()
                results[name] = {"weights": digest(trainer)}
            except UnrecoverableTrainingError as error:
                results[name] = {"ended": str(error), "failure": error.failure}
        results[name] |= {"told": told, "steps": trainer.state.global_step}

    train("healthy")
    train("unchecked", collective_timeout_check_seconds=0)
    train("wrong", lambda: WrongProduct() if rank == 1 else contextlib.nullcontext())
    train("changed", lambda: mock.patch.object(torch.distributed, "all_reduce", reduce_wrong))
    train("slow", lambda: mock.patch.object(start, "check_device", slow))
    train("afterwards")
    return results


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("start") / "pair"
    found = run_pair(directory, looked_at)
    assert found["hung"] == []
    assert [each.get("error") for each in found["ranks"]] == [None, None]
    return directory, found["ranks"]


def test_a_healthy_run_is_bitwise_the_same_and_writes_down_what_was_checked(pair: Any) -> None:
    directory, ranks = pair
    assert len({each[name]["weights"] for each in ranks for name in ("healthy", "unchecked", "afterwards")}) == 1
    (checked,) = journal(directory / "healthy", "ranks_checked")
    assert checked["ranks"] == 2
    assert 0 < checked["matmul_ms"][0] <= checked["matmul_ms"][1]
    assert journal(directory / "unchecked", "ranks_checked") == []


def test_a_rank_whose_device_is_wrong_ends_the_run_on_all_ranks_before_the_first_step(pair: Any) -> None:
    directory, ranks = pair
    for each in ranks:
        assert each["wrong"]["steps"] == 0
        assert each["wrong"]["failure"] == "wrong_results"
        assert "(rank 1: its device computes wrong results)" in each["wrong"]["ended"]
    assert any("of rank 1 on" in line for line in ranks[1]["wrong"]["told"])
    assert [event["outcome"] for event in journal(directory / "wrong", "outcome")] == ["fatal"]


def test_a_rank_whose_numbers_are_changed_on_their_way_ends_it_as_well(pair: Any) -> None:
    _, ranks = pair
    for each in ranks:
        assert "(rank 1: what it sends arrives changed)" in each["changed"]["ended"]


def test_a_slow_rank_is_told_of_once_by_the_first_rank_and_training_goes_on(pair: Any) -> None:
    _, ranks = pair
    told = [[line for line in each["slow"]["told"] if "times slower" in line] for each in ranks]
    assert [len(each) for each in told] == [1, 0]
    assert told[0][0].startswith("Rank 1 multiplies matrices 8.0 times slower")
    assert [each["slow"]["steps"] for each in ranks] == [2, 2]
