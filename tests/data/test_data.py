"""Samples that cannot be used: found, tried once more, quarantined and replaced, wherever the data come from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    PanicException,
    Unspeakable,
    assert_same_weights,
    journal,
    plain_trainer,
    quarantined,
    weights,
)
from datasets import Dataset
from transformers import Trainer, TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback, UnrecoverableTrainingError
from self_healing.failures.retry import RetryPolicy
from self_healing.healers.data.datasets import GuardedCollator, GuardedDataset
from self_healing.healers.data.guard import DataSourceError, Guard, candidates
from self_healing.healers.data.quarantine import KnownBadSamples, Quarantine


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


@pytest.mark.heals("bad_sample", "callback")
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


# ---- substitutes ----


def test_the_substitutes_of_a_sample_depend_on_nothing_but_index_and_seed() -> None:
    torch.manual_seed(1)
    first = list(itertools.islice(candidates(5, 64, seed=7), 12))
    torch.manual_seed(2)
    assert list(itertools.islice(candidates(5, 64, seed=7), 12)) == first
    assert list(itertools.islice(candidates(5, 64, seed=8), 12)) != first
    assert sorted(candidates(5, 20, seed=7)) == [index for index in range(20) if index != 5]


def test_a_substitute_that_raises_is_passed_over(tmp_path: Path) -> None:
    first, second = itertools.islice(candidates(5, 32, seed=7), 2)
    data = guarded(Rows([{"number": number} for number in range(32)], {5, first}), tmp_path)
    assert data[5] == {"number": second}
    assert {row["dataset_index"]: row["replaced_by"] for row in quarantined(tmp_path)} == {5: second, first: second}


def test_where_nothing_can_be_loaded_it_is_not_the_samples(tmp_path: Path) -> None:
    data = guarded(Rows([{}] * 32, range(32)), tmp_path)
    with pytest.raises(DataSourceError, match=r"sample 5 \(ValueError.*not the samples but the code or the storage"):
        data.__getitems__([5])


# ---- what counts as bad ----


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


def test_a_lost_connection_is_tried_again_in_place(tmp_path: Path, tokenizer: Any) -> None:
    rows = Rows(rows_of(tokenizer, tmp_path), {5}, error=ConnectionError, times=2)
    config = HealingConfig(api_retry_base_delay=0.0)
    trainer = trainer_on(rows, tmp_path, tokenizer, config, max_steps=EPOCH)
    trainer.train()
    assert not quarantined(tmp_path)
    assert [event["failure"] for event in journal(tmp_path, "diagnosed")] == ["network"]


def test_its_text_is_shown_as_it_was_before_the_transform(tmp_path: Path) -> None:
    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        if "torn" in rows["text"]:
            raise ValueError("cannot be decoded")
        return {"number": rows["text"]}

    guarded(Dataset.from_dict({"text": ["whole"] * 19 + ["torn"]}).with_transform(transform), tmp_path)[19]
    assert [row["preview"] for row in quarantined(tmp_path)] == ["torn"]


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


# ---- the end of a run ----


def test_too_many_bad_samples_end_the_run_and_are_listed(tmp_path: Path, tokenizer: Any) -> None:
    bad = range(0, 64, 4)
    rows = Rows(rows_of(tokenizer, tmp_path), bad)
    trainer = trainer_on(rows, tmp_path, tokenizer, max_steps=2 * EPOCH)
    with pytest.raises(UnrecoverableTrainingError, match=r"max_bad_fraction=0\.1 allows \(6\).*cannot decode"):
        trainer.train()
    assert trainer.state.global_step < EPOCH
    assert (tmp_path / "postmortem.json").exists()
    assert "quarantine.jsonl" in (tmp_path / "postmortem.json").read_text()


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


# ---- our own failures ----


def test_a_mistake_in_the_guard_does_not_reach_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: Any) -> Any:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(GuardedDataset, "_recovered", mistaken)
    data = guarded(Rows([{"number": number} for number in range(8)], {5}, times=1), tmp_path)
    assert [sample["number"] for sample in data.__getitems__([4, 5])] == [4, 5]
    assert data.guard.off
    monkeypatch.setattr(GuardedCollator, "_recovered", mistaken)
    raised = iter([True])

    def collate(samples: Any) -> Any:
        if next(raised, False):
            samples.clear()
            raise ValueError("once")
        return samples

    data = guarded(Rows([{"number": number} for number in range(8)]), tmp_path)
    assert len(GuardedCollator(collate, data.guard, data)(data.__getitems__([4, 5]))) == 2
    assert data.guard.off


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
