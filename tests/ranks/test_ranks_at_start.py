"""Before the first step all ranks sum up numbers that each of them knows, within a limit of time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import build_tokenizer, journal, sft_trainer
from forked_pairs import run_pair
from transformers import set_seed
from two_processes import digest

from self_healing import HealingConfig, SelfHealingCallback, UnrecoverableTrainingError
from self_healing.config import schema


def trainer_of(directory: Path, **settings: Any) -> Any:
    set_seed(1234)
    callback = SelfHealingCallback(HealingConfig(**settings))
    return sft_trainer(directory, build_tokenizer(), callbacks=[callback], ddp_backend="gloo", max_steps=2)


def reducing(strike: Callable[[torch.Tensor], None]) -> Any:
    """What is struck is what all ranks know, once it is summed up."""
    reduce = torch.distributed.all_reduce

    def reduce_struck(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = reduce(tensor, *args, **kwargs)
        if tensor.dim() == 2 and tensor.shape[1] > 100:
            work.wait()
            strike(tensor)
        return work

    return mock.patch.object(torch.distributed, "all_reduce", reduce_struck)


def looked_at(directory: Path, rank: int) -> dict[str, Any]:
    """Runs of two steps: healthy, without the check, and with numbers of the second rank that are changed."""
    results = dict[str, Any]()

    def change(tensor: torch.Tensor) -> None:
        tensor[1, 200] += 1

    def train(name: str, struck: Any = None, **settings: Any) -> None:
        trainer = trainer_of(directory / name, **settings)
        with struck or contextlib.nullcontext():
            try:
                trainer.train()
                results[name] = {"weights": digest(trainer)}
            except UnrecoverableTrainingError as error:
                results[name] = {"ended": str(error), "failure": error.failure}
        results[name] |= {"steps": trainer.state.global_step}

    train("healthy")
    train("unchecked", collective_timeout_check_seconds=0)
    train("changed", reducing(change))
    train("changed on one", reducing(change) if rank == 1 else None)
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
    assert journal(directory / "unchecked", "ranks_checked") == []


def test_a_rank_whose_numbers_are_changed_on_their_way_ends_the_run_on_all_before_the_first_step(pair: Any) -> None:
    directory, ranks = pair
    for each in ranks:
        assert each["changed"]["steps"] == 0
        assert each["changed"]["failure"] == "wrong_results"
        assert "(rank 1: what it sends arrives changed)" in each["changed"]["ended"]
    assert [event["outcome"] for event in journal(directory / "changed", "outcome")] == ["fatal"]


def test_what_one_rank_alone_has_seen_ends_the_run_on_all(pair: Any) -> None:
    _, ranks = pair
    ended = [each["changed on one"]["ended"] for each in ranks]
    assert "(seen by another rank)" in ended[0]
    assert "(rank 1: what it sends arrives changed)" in ended[1]


def waited_for_in_vain(directory: Path, rank: int) -> dict[str, Any]:
    vars(schema)["_SHORTEST_CHECK"] = 0
    trainer = trainer_of(directory / "run", collective_timeout_check_seconds=2.0)
    reduce = torch.distributed.all_reduce

    def hang(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dim() != 2:
            return reduce(tensor, *args, **kwargs)
        # Until the other rank has given up.
        while not (directory / "results.0.json").exists():
            time.sleep(0.05)
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(torch.distributed, "all_reduce", hang) if rank == 1 else contextlib.nullcontext():
        trainer.train()
    return {}


def test_a_sum_that_does_not_come_ends_the_job_before_the_first_step(tmp_path: Path) -> None:
    found = run_pair(tmp_path / "pair", waited_for_in_vain)
    assert found["hung"] == []
    told = "UnrecoverableTrainingError: The ranks have not summed up known numbers within 2 s, so nothing is trained."
    assert [each["error"].startswith(told) for each in found["ranks"]] == [True, True]
    assert [event["failure"] for event in journal(tmp_path / "pair" / "run", "diagnosed")] == ["hang"]
