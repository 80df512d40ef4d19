"""Samples that cannot be used: found, tried once more, quarantined and replaced, wherever the data come from."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    PanicException,
    PoisonToken,
    RaisingAt,
    Unspeakable,
    assert_same_weights,
    grpo_trainer,
    journal,
    plain_trainer,
    quarantined,
    sft_trainer,
    weights,
)
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, default_data_collator, set_seed

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
)
from self_healing.classify import classify_exception
from self_healing.data.bad_sample import BadSample
from self_healing.data.collator import GuardedCollator
from self_healing.data.dataset import GuardedDataset
from self_healing.data.guard import DataSourceError, Guard
from self_healing.data.known_bad_samples import POISON, KnownBadSamples
from self_healing.data.quarantine import Quarantine, QuarantinedRow, why_not_appendable
from self_healing.data.stream import GuardedStream
from self_healing.data.substitutes import candidates
from self_healing.failures import FailureType
from self_healing.instrument.loader_workers import end_workers_that_failed
from self_healing.instrument.loading import TrainingLoader
from self_healing.retry import RetryPolicy


BAD = (5, 17)
EPOCH = 8  # optimizer steps, of 64 samples in batches of 4 and windows of 2


class Rows(torch.utils.data.Dataset):
    """Rows of which some raise, with a list of those that were asked for (in this process)."""

    def __init__(self, rows: Any, bad: Any = (), error: type[Exception] = ValueError, times: int = 10**9) -> None:
        self.rows, self.bad, self.error, self.times = list(rows), frozenset(bad), error, times
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        if index in self.bad and self.asked.count(index) <= self.times:
            raise self.error(f"cannot decode {index}")
        return dict(self.rows[index])


class KilledOnce(Rows):
    """One sample kills the worker that loads it, once."""

    def __init__(self, rows: Any, index: int, flag: Path) -> None:
        super().__init__(rows)
        self.index, self.flag = index, flag

    def __getitem__(self, index: int) -> Any:
        if index == self.index and not self.flag.exists() and torch.utils.data.get_worker_info() is not None:
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Counted(torch.utils.data.IterableDataset):
    """A stream whose iterator lives on after it has raised."""

    def __init__(self, rows: Any, bad: Any) -> None:
        self.rows, self.bad = list(rows), frozenset(bad)

    def load(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"cannot decode {index}")
        return dict(self.rows[index])

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return map(self.load, range(first, len(self.rows), step))


def rows_of(tokenizer: Any, tmp_path: Path) -> list[dict[str, Any]]:
    return list(plain_trainer(tmp_path / "rows", tokenizer).train_dataset)


def trainer_on(dataset: Any, tmp_path: Path, tokenizer: Any, config: Any = None, **arguments: Any) -> Trainer:
    callbacks = arguments.pop("callbacks", None) or [SelfHealingCallback(config)]
    trainer = plain_trainer(tmp_path, tokenizer, callbacks=callbacks, **arguments)
    trainer.train_dataset = dataset
    return trainer


def names(output_dir: Path) -> list[Any]:
    return sorted(row["dataset_index"] for row in quarantined(output_dir))


def known(tmp_path: Path) -> KnownBadSamples:
    return Quarantine(tmp_path).watch("a run", "some data")


def guarded(rows: Any, tmp_path: Path, **options: Any) -> GuardedDataset:
    return GuardedDataset(rows, Guard(known(tmp_path), seed=7, **options))


# ---- always-raising samples: the run is completed, both are named, later epochs do not touch them ----


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_samples_that_always_raise_are_named_and_replaced(tmp_path: Path, tokenizer: Any, workers: int) -> None:
    rows = Rows(rows_of(tokenizer, tmp_path), BAD)
    trainer = trainer_on(rows, tmp_path, tokenizer, max_steps=-1, num_train_epochs=2, dataloader_num_workers=workers)
    trainer.train()

    assert trainer.state.global_step == 2 * EPOCH
    assert names(tmp_path) == list(BAD)
    for row in quarantined(tmp_path):
        assert row["error_type"] == "ValueError"
        assert row["error"] == f"cannot decode {row['dataset_index']}"
        assert "test_data.py:" in row["raised_at"]
        assert row["replaced_by"] not in BAD
    if workers == 0:
        # In the batch, alone, and once more; and not at all in the second epoch.
        assert [rows.asked.count(index) for index in BAD] == [3, 3]
    incidents = journal(tmp_path, "diagnosed")
    assert {event["failure"] for event in incidents} == {"bad_data"}
    assert all(str(index) in " ".join(event["cause"] for event in incidents) for index in BAD)
    done = {event["action"] for event in journal(tmp_path, "action")}
    assert done == {"retry_call", "quarantine_sample", "replace_sample"}
    assert {event["outcome"] for event in journal(tmp_path, "outcome")} == {"resolved"}


@pytest.mark.slow
def test_workers_and_the_training_process_choose_the_same_substitutes(tmp_path: Path, tokenizer: Any) -> None:
    rows, found = rows_of(tokenizer, tmp_path), []
    for workers in (0, 2):
        output_dir = tmp_path / str(workers)
        trainer = trainer_on(Rows(rows, BAD), output_dir, tokenizer, max_steps=8, dataloader_num_workers=workers)
        trainer.train()
        found.append((weights(trainer), {row["dataset_index"]: row["replaced_by"] for row in quarantined(output_dir)}))
    assert found[0][1] == found[1][1]
    assert_same_weights(found[0][0], found[1][0])


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
    assert found == {(0, 5, "cannot tokenise 5"), (1, 1, "cannot tokenise 17")}
    assert len(quarantined(tmp_path)) == 2


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_torch_stream_that_lives_on_is_read_past_its_bad_samples(
    tmp_path: Path, tokenizer: Any, workers: int
) -> None:
    stream = Counted(rows_of(tokenizer, tmp_path), BAD)
    trainer = trainer_on(stream, tmp_path, tokenizer, max_steps=10, dataloader_num_workers=workers)
    trainer.train()
    assert trainer.state.global_step == 10
    assert {row["error"] for row in quarantined(tmp_path)} == {f"cannot decode {index}" for index in BAD}
    assert all(row["stream_ordinal"] is not None for row in quarantined(tmp_path))


# ---- a healthy run is what it would be without ----


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_a_healthy_run_is_bitwise_the_same(tmp_path: Path, tokenizer: Any, kind: str, workers: int) -> None:
    rows, result = rows_of(tokenizer, tmp_path), []
    for healed in (False, True):
        data = Dataset.from_list(rows)
        output_dir = tmp_path / str(healed)
        trainer = trainer_on(
            data if kind == "indexed" else data.to_iterable_dataset(num_shards=2).map(dict).shuffle(seed=1),
            output_dir,
            tokenizer,
            callbacks=[SelfHealingCallback()] if healed else [TrainerCallback()],
            max_steps=10,
            dataloader_num_workers=workers,
        )
        trainer.train()
        result.append(weights(trainer))
    assert_same_weights(result[1], result[0])
    assert not quarantined(tmp_path / "True")
    assert not (tmp_path / "True" / "quarantine.jsonl").exists()


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


# ---- substitutes ----


def test_the_substitutes_of_a_sample_depend_on_nothing_but_index_and_seed() -> None:
    torch.manual_seed(1)
    first = list(itertools.islice(candidates(5, 64, seed=7), 12))
    torch.manual_seed(2)
    assert list(itertools.islice(candidates(5, 64, seed=7), 12)) == first
    assert list(itertools.islice(candidates(5, 64, seed=8), 12)) != first
    assert sorted(candidates(5, 20, seed=7)) == [index for index in range(20) if index != 5]


def test_finding_a_substitute_draws_from_no_global_generator(tmp_path: Path) -> None:
    data = guarded(Rows([{"number": number} for number in range(32)], BAD), tmp_path)
    before = torch.get_rng_state()
    data.__getitems__([4, 5, 6])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_substitute_that_raises_is_passed_over(tmp_path: Path) -> None:
    first, second = itertools.islice(candidates(5, 32, seed=7), 2)
    data = guarded(Rows([{"number": number} for number in range(32)], {5, first}), tmp_path)
    assert data[5] == {"number": second}
    assert {row["dataset_index"]: row["replaced_by"] for row in quarantined(tmp_path)} == {5: second, first: second}


def test_where_nothing_can_be_loaded_it_is_not_the_samples(tmp_path: Path) -> None:
    data = guarded(Rows([{}] * 32, range(32)), tmp_path)
    with pytest.raises(DataSourceError, match=r"sample 5 \(ValueError.*not the samples but the code or the storage"):
        data.__getitems__([5])


@pytest.mark.slow
def test_a_group_of_grpo_gets_one_substitute(tmp_path: Path, tokenizer: Any) -> None:
    groups: list[list[str]] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        groups.extend(prompts[first : first + 4] for first in range(0, len(prompts), 4))
        return [float(len(text)) for text in completions]

    trainer = grpo_trainer(tmp_path, tokenizer, reward_funcs=reward, max_steps=16, callbacks=[SelfHealingCallback()])
    trainer.train_dataset = Rows(trainer.train_dataset, BAD)
    trainer.train()
    assert set(names(tmp_path)) <= set(BAD)
    assert names(tmp_path)
    assert all(len(set(group)) == 1 for group in groups)


# ---- what counts as bad ----


def test_a_sample_that_loads_at_the_second_attempt_is_kept(tmp_path: Path, tokenizer: Any) -> None:
    rows = Rows(rows_of(tokenizer, tmp_path), {5}, times=1)
    trainer = trainer_on(rows, tmp_path, tokenizer, max_steps=EPOCH)
    trainer.train()
    assert not quarantined(tmp_path)
    assert [event["action"] for event in journal(tmp_path, "action")] == ["retry_call"]


@pytest.mark.parametrize("error", [OSError(28, "no space"), MemoryError("host"), ConnectionError("gone")])
def test_what_says_nothing_about_the_sample_passes(tmp_path: Path, error: Exception) -> None:
    class Failing(Rows):
        def __getitem__(self, index: int) -> Any:
            raise error

    with pytest.raises(type(error)):
        guarded(Failing([{}] * 8), tmp_path)[3]
    assert not quarantined(tmp_path)


@pytest.mark.parametrize("error", [OSError(5, "bad sector"), MemoryError("8 TiB"), ConnectionError("dead link")])
def test_what_fails_for_one_sample_alone_is_that_of_the_sample(tmp_path: Path, error: Exception) -> None:
    class DeadLink(Rows):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                self.asked.append(index)
                raise error
            return super().__getitem__(index)

    retry = RetryPolicy(attempts=3, initial_seconds=0.0).call
    data = guarded(DeadLink([{"number": number} for number in range(32)]), tmp_path, retry=retry)
    instead = next(candidates(5, 32, seed=7))
    assert [sample["number"] for sample in data.__getitems__([4, 5, 6])] == [4, instead, 6]
    (row,) = quarantined(tmp_path)
    assert (row["dataset_index"], row["error_type"]) == (5, type(error).__name__)
    # Waited for in the batch, and not once more.
    assert data.wrapped.asked.count(5) == (5 if isinstance(error, ConnectionError) else 3)
    assert data.wrapped.asked.count(instead) == 1


def test_a_lost_connection_is_tried_again_where_nothing_is_replaced(tmp_path: Path, tokenizer: Any) -> None:
    rows = Rows(rows_of(tokenizer, tmp_path), {5}, error=ConnectionError, times=2)
    config = HealingConfig.conservative(retry_initial_seconds=0.0)
    trainer = trainer_on(rows, tmp_path, tokenizer, config, max_steps=EPOCH)
    trainer.train()
    assert trainer.state.global_step == EPOCH


def test_a_stream_that_only_names_is_opened_anew_for_a_lost_connection(tmp_path: Path) -> None:
    retry = RetryPolicy(attempts=3, initial_seconds=0.0).call
    guard = Guard(known(tmp_path), seed=7, retry=retry, names_only=True)
    stream = SelfShuffled(ConnectionError("reset"))
    assert sorted(GuardedStream(stream, guard)) == list(range(32))


def test_a_lost_connection_is_tried_again_in_place(tmp_path: Path, tokenizer: Any) -> None:
    rows = Rows(rows_of(tokenizer, tmp_path), {5}, error=ConnectionError, times=2)
    config = HealingConfig(retry_initial_seconds=0.0)
    trainer = trainer_on(rows, tmp_path, tokenizer, config, max_steps=EPOCH)
    trainer.train()
    assert not quarantined(tmp_path)
    assert [event["failure"] for event in journal(tmp_path, "diagnosed")] == ["network"]


def test_an_empty_sequence_is_replaced(tmp_path: Path, tokenizer: Any) -> None:
    rows = rows_of(tokenizer, tmp_path)
    rows[5] = {name: [] for name in rows[5]}
    trainer = trainer_on(Rows(rows), tmp_path, tokenizer, max_steps=EPOCH)
    trainer.train()
    assert [(row["dataset_index"], row["problem"]) for row in quarantined(tmp_path)] == [(5, "empty")]


def test_a_batch_in_which_nothing_counts_gets_other_samples(tmp_path: Path, tokenizer: Any) -> None:
    rows = rows_of(tokenizer, tmp_path)
    rows[5]["labels"] = [-100] * len(rows[5]["labels"])
    trainer = trainer_on(Rows(rows), tmp_path, tokenizer, max_steps=32, per_device_train_batch_size=1)
    trainer.train()
    assert [(row["dataset_index"], row["problem"]) for row in quarantined(tmp_path)] == [(5, "no_labels")]
    assert not any(event["failure"].startswith("nonfinite") for event in journal(tmp_path, "diagnosed"))


def test_a_batch_in_which_some_tokens_count_is_left_alone(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "labels": [-100, -100] if index == 1 else [1, 2]} for index in range(8)]
    data = guarded(Rows(rows), tmp_path)
    collate = GuardedCollator(default_data_collator, data.guard, data)
    batch = collate(data.__getitems__([0, 1]))
    assert batch["labels"].tolist() == [[1, 2], [-100, -100]]
    assert not quarantined(tmp_path)


def test_where_nothing_counts_anywhere_the_batch_passes_as_it_is(tmp_path: Path) -> None:
    data = guarded(Rows([{"input_ids": [1, 2], "labels": [-100, -100]}] * 32), tmp_path)
    collate = GuardedCollator(default_data_collator, data.guard, data)
    for first in range(0, 32, 2):
        assert collate(data.__getitems__([first, first + 1]))["input_ids"].shape == (2, 2)
    assert not quarantined(tmp_path)
    assert len(data.wrapped.asked) < 64, "it gives up looking"


def test_a_batch_in_which_by_chance_nothing_counts_is_left_alone(tmp_path: Path) -> None:
    def masked(samples: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.tensor([sample["input_ids"] for sample in samples])
        return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < 0.3, ids, -100)}

    data = guarded(Rows([{"input_ids": [1, 2]} for _ in range(32)]), tmp_path)
    collate = GuardedCollator(masked, data.guard, data)
    torch.manual_seed(3)
    plain = [masked(data.wrapped[index] for index in [number])["labels"] for number in range(32)]
    torch.manual_seed(3)
    assert all(torch.equal(collate(data.__getitems__([number]))["labels"], plain[number]) for number in range(32))
    assert any(bool((labels == -100).all()) for labels in plain)
    assert not quarantined(tmp_path)


# ---- the collator ----


class Popping:
    """A collator that takes its samples apart, and raises for some of them."""

    def __init__(self, bad: Any, times: int = 10**9) -> None:
        self.bad, self.times = bad, times

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        numbers = []
        for sample in samples:
            numbers.append(sample.pop("number"))
            if numbers[-1] in self.bad and self.times > 0:
                self.times -= 1
                raise ValueError(f"ragged: {numbers[-1]}")
        return torch.tensor(numbers)


@pytest.mark.parametrize("times", [1, 10**9])
def test_a_collator_may_take_its_samples_apart(tmp_path: Path, times: int) -> None:
    data = guarded(Rows([{"number": number} for number in range(32)]), tmp_path)
    collate = GuardedCollator(Popping({5}, times), data.guard, data)
    batch = collate(data.__getitems__([4, 5, 6, 7]))
    rows = quarantined(tmp_path)
    if times == 1:
        assert not rows
        assert batch.tolist() == [4, 5, 6, 7]
    else:
        assert [(row["dataset_index"], row["error"]) for row in rows] == [(5, "ragged: 5")]
        assert batch.tolist() == [4, rows[0]["replaced_by"], 6, 7]


@pytest.mark.parametrize("batch", [[4, 5], [5, 4]])
def test_of_two_samples_that_do_not_fit_the_odd_one_is_meant(tmp_path: Path, batch: list[int]) -> None:
    data = guarded(Rows([{"input_ids": [1] * (3 if number == 5 else 2)} for number in range(32)]), tmp_path)
    collate = GuardedCollator(default_data_collator, data.guard, data)
    assert collate(data.__getitems__(batch))["input_ids"].shape == (2, 2)
    assert names(tmp_path) == [5]


class Picky:
    """A collator that raises for some samples, alone or in company."""

    def __init__(self, bad: Any, alone: bool = True) -> None:
        self.bad, self.alone = bad, alone

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        found = [sample for sample in samples if sample["number"] in self.bad]
        if found and (self.alone or len(samples) > 1):
            raise ValueError(f"ragged: {found[0]['number']}")
        return torch.tensor([sample["number"] for sample in samples])


@pytest.mark.parametrize("alone", [True, False])
def test_the_sample_a_collator_raises_for_is_found(tmp_path: Path, alone: bool) -> None:
    data = guarded(Rows([{"number": number} for number in range(32)]), tmp_path)
    collate = GuardedCollator(Picky({5}, alone), data.guard, data)
    batch = collate(data.__getitems__([4, 5, 6, 7]))
    (row,) = quarantined(tmp_path)
    assert (row["dataset_index"], row["problem"], row["preview"]) == (5, "collation", "{'number': 5}")
    assert batch.tolist() == [4, row["replaced_by"], 6, 7]
    assert collate(data.__getitems__([5])).tolist() == [row["replaced_by"]]


def test_a_stream_fills_the_batch_with_what_comes_next(tmp_path: Path) -> None:
    guard = Guard(known(tmp_path), seed=7)
    stream = GuardedStream(STREAMS["mapped"](), guard)
    collate = GuardedCollator(Picky({5, 31}), guard, stream)
    batches = [batch.tolist() for batch in DataLoader(stream, batch_size=4, collate_fn=collate)]
    assert batches[1] == [4, 8, 6, 7]
    assert sorted(itertools.chain(*batches)) == [number for number in range(32) if number not in (5, 31)]
    assert {(row["shard"], row["stream_ordinal"]) for row in quarantined(tmp_path)} == {(0, 5), (3, 7)}


# ---- streams ----


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
    """A stream whose iterator lives on; it fails once, past the sample it raises for or not."""

    def __init__(self, past: bool) -> None:
        self.past, self.failed = past, False

    def load(self, number: int) -> dict[str, int]:
        if number == 17 and not self.failed:
            self.failed = True
            raise ValueError("a glitch")
        return {"number": number}

    def __iter__(self) -> Iterator[dict[str, int]]:
        return map(self.load, range(32)) if self.past else Staying(self)


class Staying:
    def __init__(self, stream: Stumbling) -> None:
        self.stream, self.number = stream, 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        return self

    def __next__(self) -> dict[str, int]:
        if self.number == 32:
            raise StopIteration
        given = self.stream.load(self.number)
        self.number += 1
        return given


@pytest.mark.parametrize("past", [True, False])
def test_an_iterator_that_lives_on_loses_no_sample_to_a_glitch(tmp_path: Path, past: bool) -> None:
    guard = Guard(known(tmp_path), seed=7)
    assert [sample["number"] for sample in GuardedStream(Stumbling(past), guard)] == list(range(32))
    assert not quarantined(tmp_path)
    assert len(guard.known.retried) == 1


class Positioned(torch.utils.data.IterableDataset):
    """A stream that knows where it stands, and is past a sample before it loads it."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[int]:
        while self.position < 8:
            self.position += 1
            if self.position - 1 == 5:
                raise ValueError("torn")
            yield self.position - 1


def test_a_source_that_died_is_opened_behind_the_sample_where_it_knows_how(tmp_path: Path) -> None:
    guard = Guard(known(tmp_path), seed=7)
    assert list(GuardedStream(Positioned(), guard)) == [0, 1, 2, 3, 4, 6, 7]
    assert [row["stream_ordinal"] for row in quarantined(tmp_path)] == [5]


def test_what_a_function_raised_for_is_not_handed_to_it_again(tmp_path: Path) -> None:
    handed: list[int] = []

    def picky(example: dict[str, int]) -> dict[str, int]:
        handed.append(example["number"])
        if example["number"] in BAD:
            raise ValueError("no")
        return {}

    stream = numbered().map(picky)
    guard = Guard(known(tmp_path), seed=7)
    first, second = (list(GuardedStream(stream, guard)) for _ in range(2))
    assert first == second == [{"number": number} for number in range(32) if number not in BAD]
    assert [handed.count(number) for number in BAD] == [2, 2]


def test_indices_given_to_a_function_are_those_of_the_samples(tmp_path: Path) -> None:
    def picky(example: dict[str, int], index: int) -> dict[str, int]:
        if example["number"] == 5:
            raise ValueError("no")
        return {"index": index}

    stream = numbered().map(picky, with_indices=True)
    guard = Guard(known(tmp_path), seed=7)
    for _ in range(2):
        assert all(sample["index"] == sample["number"] for sample in GuardedStream(stream, guard))


# ---- a resume ----


@pytest.mark.parametrize("kind", ["poison", "raising"])
def test_a_resume_does_not_touch_what_is_quarantined(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    rows = rows_of(tokenizer, tmp_path)
    if kind == "poison":
        rows[5]["input_ids"][0] = tokenizer.convert_tokens_to_ids(POISON_WORD)
    data = Rows(rows, () if kind == "poison" else (5,))
    arguments = {"max_steps": 2 * EPOCH, "save_strategy": "steps", "save_steps": EPOCH}
    first = trainer_on(data, tmp_path, tokenizer, **arguments)
    PoisonToken(first.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    first.train()
    assert 5 in names(tmp_path)
    once = data.asked.count(5)

    second = trainer_on(data, tmp_path, tokenizer, **arguments)
    PoisonToken(second.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{EPOCH}"))
    assert data.asked.count(5) == once
    assert_same_weights(weights(second), weights(first))


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_stream_resumed_in_mid_epoch_gives_the_same(tmp_path: Path, tokenizer: Any, shuffled: bool) -> None:
    rows, result = rows_of(tokenizer, tmp_path), []
    for resume in (None, str(tmp_path / "checkpoint-4")):
        stream = mapped_stream(rows)
        stream = stream.shuffle(seed=3, buffer_size=8) if shuffled else stream
        trainer = trainer_on(stream, tmp_path, tokenizer, max_steps=7, save_strategy="steps", save_steps=4)
        trainer.train(resume_from_checkpoint=resume)
        result.append(weights(trainer))
    assert_same_weights(result[1], result[0])


def test_a_new_run_does_not_believe_an_old_one(tmp_path: Path, tokenizer: Any) -> None:
    rows = rows_of(tokenizer, tmp_path)
    trainer_on(Rows(rows, BAD), tmp_path, tokenizer, max_steps=EPOCH).train()
    repaired = Rows(rows)
    trainer_on(repaired, tmp_path, tokenizer, max_steps=EPOCH).train()
    assert set(BAD) <= set(repaired.asked)


def test_a_run_that_goes_on_reads_what_its_earlier_process_wrote(tmp_path: Path) -> None:
    Quarantine(tmp_path).watch("run 1", "data").add(BadSample("loading", "ValueError", "no", dataset_index=5))
    assert set(Quarantine(tmp_path).watch("run 1", "data").blocked) == {5}
    assert not Quarantine(tmp_path).watch("run 2", "data").blocked
    assert not Quarantine(tmp_path).watch("run 1", "other data").blocked


def test_a_row_that_was_dropped_in_a_later_step_comes_again(tmp_path: Path) -> None:
    row = QuarantinedRow(5, None, None, "a hash", None, None, micro_batch=0, row=0)
    quarantine = Quarantine(tmp_path)
    quarantine.watch("run", "data")
    quarantine.add([row], 7, 0.5, "incident")
    for again in (quarantine, Quarantine(tmp_path)):
        assert again.watch("run", "data", step=8).blocked == {5: POISON}
        assert not again.watch("run", "data", step=7).blocked
        again.add([row], 7, 0.5, "another incident")
        assert again.watch("run", "data", step=8).blocked == {5: POISON}
    assert len(quarantine.path.read_text().splitlines()) == 1


def test_the_quarantine_survives_its_checkpoint(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    quarantine.watch("run", "data").blocked.update({5: "no", "0:3@1": "no"})
    again = Quarantine(tmp_path / "elsewhere")
    again.load_state_dict(quarantine.state_dict())
    assert again.blocked == quarantine.blocked
    again.load_state_dict({"seen": ["written by an earlier version"]})
    assert again.seen == {"written by an earlier version"}


def test_leaving_and_entering_again_changes_no_bit(tmp_path: Path, tokenizer: Any) -> None:
    rows, result = rows_of(tokenizer, tmp_path), []
    for interrupted in (False, True):
        output_dir = tmp_path / str(interrupted)
        trainer = plain_trainer(
            output_dir, tokenizer, max_steps=12, callbacks=[RaisingAt("on_step_begin", 6)] if interrupted else None
        )
        trainer.train_dataset = Rows(rows, BAD)
        SelfHealingTrainer(trainer, HealingConfig(retry_initial_seconds=0.0)).train()
        result.append(weights(trainer))
    assert_same_weights(result[1], result[0])


# ---- workers ----


class OwnProcesses:
    """A collator that can be sent to a process that is started afresh."""

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        return [sample["number"] for sample in samples]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_are_guarded_however_they_are_started(tmp_path: Path, start: str) -> None:
    data = guarded(Rows([{"number": number} for number in range(32)], BAD), tmp_path)
    collate = GuardedCollator(OwnProcesses(), data.guard, data)
    loader = DataLoader(
        data, batch_size=4, num_workers=2, collate_fn=collate, multiprocessing_context=start, persistent_workers=True
    )
    first, second = (list(itertools.chain(*loader)) for _ in range(2))
    data.guard.known.read_new_lines()
    assert set(data.guard.known.blocked) == set(BAD)
    assert first == second
    assert first == [data.actual(index) for index in range(32)]
    assert names(tmp_path) == list(BAD)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_no_step_and_no_bit(tmp_path: Path, tokenizer: Any) -> None:
    rows, result = rows_of(tokenizer, tmp_path), []
    for name in ("undisturbed", "killed"):
        flag = tmp_path / name
        if name == "undisturbed":
            flag.touch()
        trainer = plain_trainer(tmp_path / f"run-{name}", tokenizer, max_steps=12, dataloader_num_workers=2)
        trainer.train_dataset = KilledOnce(rows, 40, flag)
        SelfHealingTrainer(trainer, HealingConfig()).train()
        assert flag.exists()
        result.append(weights(trainer))
    assert_same_weights(result[1], result[0])
    (found,) = journal(tmp_path / "run-killed", "diagnosed")
    assert found["failure"] == "process_died"
    assert sum(event["steps_lost"] for event in journal(tmp_path / "run-killed", "outcome")) == 0


class KillsAWorker(TrainerCallback):
    """Kills a data loader worker in the fourth step, at one place, and sees to it that torch has been told."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.killed = 0

    def kill(self, place: str, step: int) -> None:
        if place != self.place or step != 3 or self.killed:
            return
        worker = psutil.Process(multiprocessing.active_children()[0].pid)
        self.killed = worker.pid
        os.kill(worker.pid, signal.SIGKILL)
        while worker.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"].optimizer

        def half_way(*_: Any) -> None:
            self.kill("optimizer step", state.global_step)

        optimizer.register_step_pre_hook(half_way)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.kill("before the step", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with contextlib.suppress(RuntimeError):
            # As logging code does that must not end a run.
            self.kill("code that contains errors", state.global_step - 1)


@pytest.mark.parametrize(
    "place",
    [
        "optimizer step",
        pytest.param("before the step", marks=pytest.mark.slow),
        pytest.param("code that contains errors", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_anywhere_in_a_step_costs_no_step(tmp_path: Path, tokenizer: Any, place: str) -> None:
    arguments = {"max_steps": 6, "dataloader_num_workers": 1}
    clean = plain_trainer(tmp_path / "clean", tokenizer, **arguments)
    clean.train()
    before = signal.getsignal(signal.SIGCHLD)
    trainer = plain_trainer(tmp_path / "killed", tokenizer, **arguments)
    healer = SelfHealingTrainer(trainer, sleep=lambda _: None)
    trainer.add_callback(fault := KillsAWorker(place))
    healer.train()
    assert fault.killed
    (incident,) = healer.get_report().incidents
    assert (incident["failure"], incident["steps_lost"]) == ("process_died", 0)
    assert_same_weights(weights(trainer), weights(clean))
    assert signal.getsignal(signal.SIGCHLD) == before


def test_workers_are_ended_before_torch_raises_for_the_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost:
        def get(self, **_: Any) -> Any:
            raise EOFError

    batches: Any = iter(DataLoader(Rows([{"a": 1}] * 8), num_workers=2))
    workers = batches._workers
    monkeypatch.setattr(batches, "_data_queue", Lost())
    with pytest.raises(EOFError) as caught:
        next(batches)
    end_workers_that_failed(caught.value)
    assert not any(worker.is_alive() for worker in workers)
    assert not batches._worker_pids_set


@pytest.mark.parametrize("error", [PanicException, Unspeakable])
def test_a_sample_that_raises_an_odd_kind_of_exception_is_replaced(
    tmp_path: Path, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Rows):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise error
            return super().__getitem__(index)

    found = known(tmp_path)
    dataset = GuardedDataset(Odd([{"input_ids": [1], "number": number} for number in range(64)]), Guard(found, seed=1))
    assert dataset[5]["number"] != 5
    assert [sample.error_type for sample in found.new] == [error.__name__]
    assert "self_healing failed" not in caplog.text


def tokenized_or_panic(row: dict[str, Any]) -> dict[str, Any]:
    if row["number"] == 5:
        raise PanicException
    return row


def test_a_stream_leaves_out_what_its_function_panics_for(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"number": number, "input_ids": [1]} for number in range(12)])
    found = known(tmp_path)
    stream = GuardedStream(rows.to_iterable_dataset().map(tokenized_or_panic), Guard(found, seed=1))
    assert [row["number"] for row in stream] == [number for number in range(12) if number != 5]
    assert [sample.error_type for sample in found.new] == ["PanicException"]


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid(s) 12, 13) exited unexpectedly",
        "Pin memory thread exited unexpectedly",
        "DataLoader worker (pid 12) is killed by signal: Killed. ",
        "DataLoader worker (pid 12) exited unexpectedly with exit code 1. Details are lost due to multiprocessing.",
    ],
)
def test_a_dead_worker_is_told_from_code_that_raises(text: str) -> None:
    assert classify_exception(RuntimeError(text)) is FailureType.PROCESS_DIED
    assert classify_exception(RuntimeError(f"Caught ValueError: {text}")) is FailureType.USER_CODE


# ---- the end of a run ----


def test_too_many_bad_samples_end_the_run_and_are_listed(tmp_path: Path, tokenizer: Any) -> None:
    bad = range(0, 64, 4)
    rows = Rows(rows_of(tokenizer, tmp_path), bad)
    trainer = trainer_on(rows, tmp_path, tokenizer, max_steps=2 * EPOCH)
    with pytest.raises(UnrecoverableTrainingError, match=r"max_bad_data_fraction=0\.1 allows \(6\).*cannot decode"):
        trainer.train()
    assert trainer.state.global_step < EPOCH
    assert (tmp_path / "postmortem.json").exists()
    assert "quarantine.jsonl" in (tmp_path / "postmortem.json").read_text()


def test_a_broken_source_ends_the_run_with_a_postmortem(tmp_path: Path, tokenizer: Any) -> None:
    rows = Rows(rows_of(tokenizer, tmp_path), range(64))
    trainer = trainer_on(rows, tmp_path, tokenizer, max_steps=EPOCH)
    with pytest.raises(UnrecoverableTrainingError, match="not the samples but the code or the storage"):
        trainer.train()
    assert (tmp_path / "postmortem.json").exists()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_on_request_the_error_surfaces_and_names_the_sample(tmp_path: Path, tokenizer: Any, workers: int) -> None:
    rows = Rows(rows_of(tokenizer, tmp_path), {5})
    config = HealingConfig(on_bad_sample="raise")
    trainer = trainer_on(rows, tmp_path, tokenizer, config, max_steps=EPOCH, dataloader_num_workers=workers)
    with pytest.raises(ValueError, match="cannot decode 5") as caught:
        trainer.train()
    said = str(caught.value) + " ".join(getattr(caught.value, "__notes__", []))
    assert "sample with index 5" in said
    assert not quarantined(tmp_path)


def test_on_request_the_error_of_the_collator_names_the_sample(tmp_path: Path) -> None:
    data = guarded(Rows([{"number": number} for number in range(32)]), tmp_path, names_only=True)
    collate = GuardedCollator(Picky({5}), data.guard, data)
    with pytest.raises(ValueError, match="ragged: 5") as caught:
        collate(data.__getitems__([4, 5, 6, 7]))
    assert caught.value.__notes__ == ["self_healing: raised by the collator, for the sample with index 5."]
    assert not quarantined(tmp_path)


# ---- our own failures ----


def test_a_mistake_in_the_guard_does_not_reach_the_run(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: Any) -> Any:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(GuardedDataset, "_fetch", mistaken)
    monkeypatch.setattr(GuardedCollator, "_collate", mistaken)
    rows = Rows(rows_of(tokenizer, tmp_path))
    trainer = trainer_on(rows, tmp_path, tokenizer, max_steps=4)
    trainer.train()
    assert trainer.state.global_step == 4


def test_findings_that_cannot_be_written_do_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "quarantine.jsonl").mkdir()
    data = guarded(Rows([{"number": number} for number in range(32)], BAD), tmp_path)
    assert len(data.__getitems__([4, 5])) == 2
    assert set(data.guard.known.blocked) == {5}


def test_whether_findings_can_be_written_is_known_before(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    assert why_not_appendable(path) is None
    assert not [*tmp_path.iterdir()]
    path.mkdir()
    assert isinstance(why_not_appendable(path), IsADirectoryError)


def test_workers_tell_of_their_findings_where_the_file_cannot_be_written(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "quarantine.jsonl").mkdir()
    rows = Rows(rows_of(tokenizer, tmp_path), range(0, 64, 3))
    trainer = trainer_on(rows, tmp_path, tokenizer, max_steps=EPOCH, dataloader_num_workers=1)
    with pytest.raises(UnrecoverableTrainingError, match="max_bad_data_fraction"):
        trainer.train()


def test_a_dataset_may_give_several_samples_as_a_generator(tmp_path: Path) -> None:
    class Together(Rows):
        def __getitems__(self, indices: list[int]) -> Iterator[Any]:
            return (self[index] for index in indices)

    data = guarded(Together([{"number": number} for number in range(32)], {5}), tmp_path)
    assert data[4] == {"number": 4}
    assert len(data.__getitems__([4, 5, 6])) == 3
    assert names(tmp_path) == [5]


def test_a_loader_of_a_kind_of_its_own_is_left_alone() -> None:
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(train_dataloader=[{"input_ids": torch.ones(1, 2)}]))
    assert TrainingLoader(trainer).dataset is None


class Loader(TrainerCallback):
    """Keeps what the training loader holds before and during the run."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.loader = kwargs["train_dataloader"]
        self.held.append((self.loader.dataset, self.loader.collate_fn))

    on_step_end = on_train_begin


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_the_loader_is_given_back_as_it_was(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    rows = rows_of(tokenizer, tmp_path)
    data = Dataset.from_list(rows)
    loader = Loader()
    trainer = trainer_on(
        data if kind == "indexed" else data.to_iterable_dataset().map(dict),
        tmp_path,
        tokenizer,
        callbacks=[loader, SelfHealingCallback()],
        max_steps=2,
    )
    trainer.train()
    before, during = loader.held[0], loader.held[1]
    assert during[0] is not before[0]
    assert (loader.loader.dataset, loader.loader.collate_fn) == before


def test_a_guarded_dataset_passes_for_the_one_it_guards(tmp_path: Path) -> None:
    class Epochs(Rows):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    rows = Epochs([{}] * 8)
    data = guarded(rows, tmp_path)
    data.set_epoch(3)
    data.start = 5
    assert (len(data), rows.epoch, rows.start) == (8, 3, 5)
    assert not hasattr(data, "generator")
    assert not hasattr(guarded(Rows([]), tmp_path), "set_epoch")


def test_guards_can_be_sent_to_another_process(tmp_path: Path) -> None:
    data = guarded(Rows([{"number": number} for number in range(8)]), tmp_path)
    collate = GuardedCollator(OwnProcesses(), data.guard, data)
    data, collate = pickle.loads(pickle.dumps((data, collate)))
    assert data.guard is collate.guard
    assert collate(data.__getitems__([1, 2])) == [1, 2]


def test_a_poison_row_is_that_of_the_sample_that_was_used(tmp_path: Path, tokenizer: Any) -> None:
    set_seed(0)
    instead = next(candidates(5, 64, seed=7))
    texts = [f"{text} {POISON_WORD}" if index == instead else text for index, text in enumerate(TEXTS)]
    trainer = sft_trainer(tmp_path, tokenizer, texts=texts, max_steps=EPOCH, callbacks=[SelfHealingCallback()])
    trainer.train_dataset = Rows(trainer.train_dataset, {5})
    PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()
    found = [row["dataset_index"] for row in quarantined(tmp_path) if "content_hash" in row]
    assert found == [instead]
