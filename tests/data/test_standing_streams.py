"""Streams that go on where they stand when `train()` is entered again: no row is skipped twice, none is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RaisingForward, assert_same_weights, encoded_rows, logged, lost_connection, plain_trainer, weights
from torch.utils.data import IterableDataset

from self_healing import SelfHealingTrainer


class Itself(IterableDataset[Any]):
    """Is its own iterator, as a queue is."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = iter(rows)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.rows)


class Kept(Itself):
    """Gives out the one iterator that it has."""

    def __iter__(self) -> Any:
        return self.rows


class PassedOn(Itself):
    """Reads it in a generator."""

    def __iter__(self) -> Any:
        yield from self.rows


class BeginsAgain(Itself):
    """Is its own iterator, and begins again."""

    def __init__(self, rows: list[Any]) -> None:
        self.all = rows

    def __iter__(self) -> Any:
        self.rows = iter(self.all)
        return self


def train(
    kind: Callable[[list[Any]], Any],
    output_dir: Path,
    tokenizer: Any,
    *forwards: int,
    rows: int = 192,
    error: Callable[[], Exception] = lost_connection,
    **arguments: Any,
) -> Any:
    stream = kind((list(encoded_rows(tokenizer)) * 3)[:rows])
    trainer = plain_trainer(output_dir, tokenizer, trainer_kwargs={"train_dataset": stream}, **arguments)
    fault = RaisingForward(trainer.model, lambda forward: forward in forwards, error)
    SelfHealingTrainer(trainer, sleep=lambda _: None).train()
    assert fault.fired == len(forwards)
    return trainer


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    return train(Itself, tmp_path_factory.mktemp("undisturbed"), tokenizer)


# In the first micro-batch of a step, in its last, in the first step of the run, several times.
@pytest.mark.parametrize(
    ("kind", "forwards"),
    [(Itself, (7,)), (Itself, (2, 8, 13)), (Kept, (8,)), (PassedOn, (8,)), (BeginsAgain, (8,))],
    ids=["itself", "several times", "kept", "passed on", "begins again"],
)
def test_the_run_is_the_one_without_the_fault(
    tmp_path: Path, tokenizer: Any, undisturbed: Any, kind: Any, forwards: tuple[int, ...]
) -> None:
    trainer = train(kind, tmp_path, tokenizer, *forwards)
    assert_same_weights(weights(trainer), weights(undisturbed))
    assert logged(trainer) == logged(undisturbed)


def test_rows_that_had_been_fetched_when_the_stream_ended_are_trained_on(
    tmp_path: Path, tokenizer: Any, undisturbed: Any
) -> None:
    # The last step has begun, and there is nothing left to read.
    trainer = train(Itself, tmp_path, tokenizer, 11, rows=48)
    assert_same_weights(weights(trainer), weights(undisturbed))


class Shuffled(Itself):
    """Draws another order each time."""

    def __init__(self, rows: list[Any]) -> None:
        self.all, self.times = rows, 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        yield from self.all[-self.times :] + self.all[: -self.times]


def test_a_stream_in_another_order_is_trained_to_the_end(tmp_path: Path, tokenizer: Any) -> None:
    assert train(Shuffled, tmp_path, tokenizer, 8).state.global_step == 6
