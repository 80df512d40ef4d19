"""Streams some of whose samples cannot be read or mapped: they are left out, and no other one is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same_weights, quarantined, weights
from datasets import Dataset, IterableDataset
from test_data import BAD, Counted, known, rows_of, trainer_on
from torch.utils.data import DataLoader

from self_healing.failures.retry import RetryPolicy
from self_healing.healers.data.guard import DataSourceError, Guard
from self_healing.healers.data.streams import GuardedStream


def tokenized(example: dict[str, Any]) -> dict[str, Any]:
    if example["number"] in BAD:
        raise ValueError(f"cannot tokenise {example['number']}")
    return {"labels": example["input_ids"]}


def mapped_stream(rows: list[dict[str, Any]]) -> IterableDataset:
    numbered = [{"number": number, **row} for number, row in enumerate(rows)]
    stream = Dataset.from_list(numbered).to_iterable_dataset(num_shards=4)
    return stream.map(tokenized).remove_columns("number")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_leaves_out_what_its_function_raises_for(tmp_path: Path, tokenizer: Any, workers: int) -> None:
    stream = mapped_stream(rows_of(tokenizer, tmp_path))
    trainer = trainer_on(stream, tmp_path, tokenizer, max_steps=14, dataloader_num_workers=workers)
    trainer.train()
    assert trainer.state.global_step == 14
    found = {(row["shard"], row["stream_ordinal"], row["error"]) for row in quarantined(tmp_path)}
    # Counted by each worker, of the shards it reads.
    assert found == {(0, 5, "cannot tokenise 5"), (*((1, 1) if workers else (0, 17)), "cannot tokenise 17")}
    assert len(quarantined(tmp_path)) == 2


# ---- a healthy stream is what it would be without ----


def double(example: dict[str, Any]) -> dict[str, Any]:
    return {"twice": 2 * example["number"]}


def double_all(batch: dict[str, Any]) -> dict[str, Any]:
    return {"twice": [2 * number for number in batch["number"]]}


def even(example: dict[str, Any]) -> bool:
    return example["number"] % 2 == 0


def numbers_of(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"number": 8 * shard + position} for position in range(8))


def numbered() -> IterableDataset:
    return Dataset.from_list([{"number": number} for number in range(32)]).to_iterable_dataset(num_shards=4)


STREAMS: dict[str, Callable[[], IterableDataset]] = {
    "as it is": numbered,
    "mapped": lambda: numbered().map(double),
    "mapped in batches": lambda: numbered().map(double_all, batched=True, batch_size=5),
    "filtered": lambda: numbered().filter(even).map(double),
    "mapped, then shuffled": lambda: numbered().map(double).shuffle(seed=3, buffer_size=8),
    "shuffled, then mapped": lambda: numbered().shuffle(seed=3, buffer_size=8).map(double),
    "generated": lambda: IterableDataset.from_generator(numbers_of, gen_kwargs={"shards": [0, 1, 2, 3]}).map(double),
    "skipped and taken": lambda: numbered().map(double).skip(3).take(20),
    "formatted": lambda: numbered().map(double).with_format("torch"),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_healthy_stream_gives_the_same_samples_in_the_same_order(tmp_path: Path, kind: str, workers: int) -> None:
    stream = STREAMS[kind]()
    guard = Guard(known(tmp_path), seed=7)

    def epochs(dataset: Any) -> list[Any]:
        given = []
        for epoch in range(2):
            stream.set_epoch(epoch)
            given += list(DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=list))
        return [[{name: int(value) for name, value in sample.items()} for sample in batch] for batch in given]

    assert epochs(GuardedStream(stream, guard)) == epochs(stream)
    assert not guard.known.blocked


# ---- sources that raise ----


def dying(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for position in range(8):
            if 8 * shard + position == 17:
                raise ValueError("torn file")
            yield {"number": 8 * shard + position}


def test_a_source_that_cannot_be_read_on_is_named_by_shard_and_ordinal(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(dying, gen_kwargs={"shards": [0, 1, 2, 3]})
    guard = Guard(known(tmp_path), seed=7)
    with pytest.raises(DataSourceError, match=r"sample 1 of shard 2 \(ValueError: torn file\), twice"):
        list(GuardedStream(stream, guard))


def test_a_source_that_died_once_is_opened_anew(tmp_path: Path) -> None:
    fired: list[int] = []

    def flaky(shards: list[int]) -> Iterator[dict[str, int]]:
        for given in numbers_of(shards):
            if given["number"] == 17 and not fired:
                fired.append(17)
                raise ValueError("a glitch")
            yield given

    stream = IterableDataset.from_generator(flaky, gen_kwargs={"shards": [0, 1, 2, 3]})
    guard = Guard(known(tmp_path), seed=7)
    assert [sample["number"] for sample in GuardedStream(stream, guard)] == list(range(32))
    assert fired
    assert not guard.known.blocked


class SelfShuffled(torch.utils.data.IterableDataset):
    """A stream that draws its order each time it is opened, and fails once."""

    def __init__(self, error: Exception, draw: Callable[[int], Any] = torch.randperm) -> None:
        self.error, self.draw, self.failed = error, draw, False

    def __iter__(self) -> Iterator[int]:
        for position, number in enumerate(self.draw(32).tolist()):
            if position == 17 and not self.failed:
                self.failed = True
                raise self.error
            yield number


@pytest.mark.parametrize("error", [ValueError("a glitch"), ConnectionError("reset")])
def test_a_source_that_shuffles_by_itself_is_opened_anew_in_the_same_order(tmp_path: Path, error: Exception) -> None:
    guard = Guard(known(tmp_path), seed=7, retry=RetryPolicy(attempts=3, initial_seconds=0.0).call)
    torch.manual_seed(1)
    plain = torch.randperm(32).tolist()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert list(GuardedStream(SelfShuffled(error), guard)) == plain
    assert torch.equal(torch.get_rng_state(), after)


def test_a_source_that_is_not_the_same_again_is_not_read_on(tmp_path: Path) -> None:
    orders = itertools.count()
    stream = SelfShuffled(ValueError("a glitch"), lambda length: torch.arange(length).roll(next(orders)))
    with pytest.raises(DataSourceError, match="other samples than before"):
        list(GuardedStream(stream, Guard(known(tmp_path), seed=7)))


class Stumbling(torch.utils.data.IterableDataset):
    """A stream whose iterator lives on; it fails once, past the sample it raises for."""

    failed = False

    def load(self, number: int) -> dict[str, int]:
        if number == 17 and not self.failed:
            self.failed = True
            raise ValueError("a glitch")
        return {"number": number}

    def __iter__(self) -> Iterator[dict[str, int]]:
        return map(self.load, range(32))


def test_what_an_iterator_that_lives_on_raised_for_is_written_down(tmp_path: Path) -> None:
    given = [sample["number"] for sample in GuardedStream(Stumbling(), Guard(known(tmp_path), seed=7))]
    assert given == [number for number in range(32) if number != 17]
    assert [(row["stream_ordinal"], row["error"]) for row in quarantined(tmp_path)] == [(17, "a glitch")]


def test_the_last_sample_of_an_iterator_that_lives_on_is_left_out_as_any_other(tmp_path: Path) -> None:
    stream = Counted([{"number": number} for number in range(8)], bad={2, 7})
    given = [sample["number"] for sample in GuardedStream(stream, Guard(known(tmp_path), seed=7))]
    assert given == [0, 1, 3, 4, 5, 6]
    assert [row["stream_ordinal"] for row in quarantined(tmp_path)] == [2, 7]


# ---- functions that raise ----


def test_what_a_function_raises_for_is_counted_once_in_all_epochs(tmp_path: Path) -> None:
    def picky(example: dict[str, int]) -> dict[str, int]:
        if example["number"] in BAD:
            raise ValueError("no")
        return {}

    stream = numbered().map(picky)
    guard = Guard(known(tmp_path), seed=7)
    first, second = (list(GuardedStream(stream, guard)) for _ in range(2))
    assert first == second == [{"number": number} for number in range(32) if number not in BAD]
    assert len(quarantined(tmp_path)) == len(guard.known.blocked) == len(BAD)


def test_a_function_that_raises_once_is_called_again(tmp_path: Path) -> None:
    fired: list[int] = []

    def flaky(example: dict[str, int]) -> dict[str, int]:
        if example["number"] == 17 and not fired:
            fired.append(17)
            raise ValueError("a glitch")
        return example

    guard = Guard(known(tmp_path), seed=7)
    assert [sample["number"] for sample in GuardedStream(numbered().map(flaky), guard)] == list(range(32))
    assert len(guard.known.retried) == 1
    assert not quarantined(tmp_path)


def check(numbers: list[int]) -> None:
    if set(numbers) & set(BAD):
        raise ValueError("no")


def square(number: int, index: int) -> dict[str, int]:
    check([number])
    return {"square": number * number, "index": index}


def square_all(batch: dict[str, list[int]], indices: list[int]) -> dict[str, list[int]]:
    check(batch["number"])
    return {"square": [number * number for number in batch["number"]], "index": indices}


def doubled(batch: dict[str, list[int]]) -> dict[str, list[int]]:
    check(batch["number"])
    return {"number": [number for each in batch["number"] for number in (each, each)]}


def is_whole(example: dict[str, int]) -> bool:
    check([example["number"]])
    return True


def are_whole(numbers: list[int]) -> list[bool]:
    check(numbers)
    return [True] * len(numbers)


GOOD = [number for number in range(32) if number not in BAD]
SQUARES = [{"number": number, "square": number * number, "index": number} for number in GOOD]
RAISING: dict[str, tuple[Callable[[], IterableDataset], list[dict[str, int]]]] = {
    "columns and indices": (lambda: numbered().map(square, input_columns="number", with_indices=True), SQUARES),
    "batches": (lambda: numbered().map(square_all, batched=True, batch_size=5, with_indices=True), SQUARES),
    "all of a batch": (lambda: numbered().map(square_all, batched=True, batch_size=1, with_indices=True), SQUARES),
    "more rows than before": (
        lambda: numbered().map(doubled, batched=True, batch_size=5, remove_columns="number"),
        [{"number": number} for number in GOOD for _ in range(2)],
    ),
    "filter": (lambda: numbered().filter(is_whole), [{"number": number} for number in GOOD]),
    "filter of batches": (
        lambda: numbered().filter(are_whole, input_columns="number", batched=True, batch_size=5),
        [{"number": number} for number in GOOD],
    ),
}


@pytest.mark.parametrize("kind", RAISING)
@pytest.mark.parametrize("shuffled", [False, True])
def test_only_the_rows_that_a_function_raises_for_are_left_out(tmp_path: Path, kind: str, shuffled: bool) -> None:
    stream, expected = RAISING[kind][0](), RAISING[kind][1]
    guard = Guard(known(tmp_path), seed=7)
    given = list(GuardedStream(stream.shuffle(seed=3, buffer_size=8) if shuffled else stream, guard))
    if shuffled:
        # Indices count the rows as they come.
        given, expected = ([row | {"index": 0} for row in rows] for rows in (given, expected))
    assert sorted(given, key=lambda row: row["number"]) == expected
    assert {row["preview"] for row in quarantined(tmp_path)} == {f"{{'number': {number}}}" for number in BAD}


def test_a_function_that_raises_for_every_row_ends_the_run(tmp_path: Path) -> None:
    def broken(example: dict[str, int]) -> dict[str, int]:
        raise ValueError(f"no {example['number']}")

    with pytest.raises(DataSourceError, match=r"sample 0 of shard 0 \(ValueError: no 0\).*the code or the storage"):
        list(GuardedStream(numbered().map(broken), Guard(known(tmp_path), seed=7)))


def test_a_batch_that_raises_for_none_of_its_rows_alone_ends_the_run(tmp_path: Path) -> None:
    def ragged(batch: dict[str, list[int]]) -> dict[str, list[int]]:
        if len(batch["number"]) > 1:
            raise ValueError("ragged")
        return batch

    with pytest.raises(ValueError, match="ragged"):
        list(GuardedStream(numbered().map(ragged, batched=True), Guard(known(tmp_path), seed=7)))
    assert not quarantined(tmp_path)


# ---- a resume ----


@pytest.mark.parametrize("shuffled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stream_resumed_in_mid_epoch_gives_the_same(tmp_path: Path, tokenizer: Any, shuffled: bool) -> None:
    rows, result = rows_of(tokenizer, tmp_path), []
    for resume in (None, str(tmp_path / "checkpoint-4")):
        stream = mapped_stream(rows)
        stream = stream.shuffle(seed=3, buffer_size=8) if shuffled else stream
        trainer = trainer_on(stream, tmp_path, tokenizer, max_steps=7, save_strategy="steps", save_steps=4)
        trainer.train(resume_from_checkpoint=resume)
        result.append(weights(trainer))
    assert_same_weights(result[1], result[0])
