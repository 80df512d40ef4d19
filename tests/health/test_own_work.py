"""The time that a rank spends on its own work: measured where it loads and computes, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType

from self_healing.instrument import OwnWork
from self_healing.instrument.interception import Interception
from self_healing.instrument.replacing import Replacements


class Trained:
    """A trainer, as far as its own work is concerned, and its instrument."""

    def __init__(self, kind: DistributedType = DistributedType.MULTI_GPU, **view: Any) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.accelerator = SimpleNamespace(distributed_type=kind, _dataloaders=[])
        self.trainer, self.replaced = self, Replacements()
        self.view = SimpleNamespace(**{"device": torch.device("cpu"), "sharded": False, "shares_rows": False, **view})

    def get_batch_samples(self, iterator: Iterator[Any], count: int, device: Any) -> list[Any]:
        return [next(iterator) for _ in range(count)]

    def replace(self, holder: Any, name: str, wrapper: Any) -> None:
        self.replaced.wrap(holder, name, wrapper)

    def intercept_calls(self, model: torch.nn.Module, wrapper: Any) -> None:
        original = model._call_impl
        self.replaced.put(model, "_call_impl", Interception(model, "_call_impl", original, wrapper))

    def watched(self) -> OwnWork:
        work = OwnWork(self)  # type: ignore[arg-type]
        work.attach()
        return work


def slow(seconds: float) -> Iterator[int]:
    number = 0
    while True:
        time.sleep(seconds)
        yield (number := number + 1)


def test_batches_and_forward_passes_are_measured_and_nothing_else_of_a_step() -> None:
    trained = Trained()
    work, rows = trained.watched(), slow(0.02)
    trained.model.register_forward_hook(lambda *_: time.sleep(0.03))
    for _ in range(4):
        assert len(trained.get_batch_samples(rows, 2, None)) == 2
        trained.model(torch.zeros(1, 2))
        with torch.no_grad():
            # An evaluation.
            trained.model(torch.zeros(1, 2))
        time.sleep(0.05)
    steps, seconds, data, forward = work.told()
    assert data is not None
    assert forward is not None
    assert steps == 3
    # The first fetch of an epoch starts workers, and is not counted.
    assert 0.08 <= data < seconds - 0.15
    assert 0.09 <= forward < seconds - 0.15


def test_what_waits_for_other_ranks_is_not_measured() -> None:
    for trained in (
        Trained(DistributedType.FSDP),
        Trained(sharded=True),
        Trained(shares_rows=True),
        Trained(DistributedType.DEEPSPEED),
    ):
        work, rows = trained.watched(), slow(0.0)
        for _ in range(3):
            trained.get_batch_samples(rows, 1, None)
            trained.model(torch.zeros(1, 2))
        assert work.told()[3] is None
    trained = Trained()
    trained.accelerator._dataloaders.append(DataLoaderDispatcher.__new__(DataLoaderDispatcher))
    work = trained.watched()
    trained.get_batch_samples(slow(0.0), 1, None)
    assert work.told()[2] is None


def test_the_end_of_an_epoch_and_attributes_of_a_loader_pass_through() -> None:
    trained = Trained()
    trained.watched()
    rows = iter([1, 2])
    trained.get_batch_samples(rows, 1, None)
    trained.get_batch_samples(rows, 1, None)
    with pytest.raises(StopIteration):
        trained.get_batch_samples(rows, 1, None)


def test_a_trainer_is_given_back_as_it_was() -> None:
    trained = Trained()
    trained.watched()
    trained.replaced.give_back()
    assert "get_batch_samples" not in vars(trained)
    assert "_call_impl" not in vars(trained.model)


def test_forward_passes_of_a_device_are_read_when_it_is_through_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done = False

    class Event:
        """Of a device that takes 40 ms from one to the next."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def query(self) -> bool:
            return done

        def elapsed_time(self, other: Event) -> float:
            return 40.0

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    trained = Trained(device=torch.device("cuda"))
    work, rows = trained.watched(), slow(0.0)
    for _ in range(3):
        trained.get_batch_samples(rows, 1, None)
        trained.model(torch.zeros(1, 2))
    assert work.told()[3] == 0.0
    done = True
    trained.get_batch_samples(rows, 1, None)
    assert work.told()[3] == pytest.approx(0.12)


@pytest.mark.parametrize("fails", ["_take_time", "_moment", "_add_forward"])
def test_what_cannot_be_measured_any_more_changes_nothing_in_training(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Trained()
    work, rows = trained.watched(), slow(0.0)

    def measure() -> None:
        assert len(trained.get_batch_samples(rows, 2, None)) == 2
        assert trained.model(torch.zeros(1, 2)).shape == (1, 2)

    measure()
    measure()
    # As a device does that has no such events while its work is captured.
    setattr(work, fails, lambda *_: 1 / 0)
    for _ in range(3):
        measure()
    assert work.told()[2:] == (None, None), "nothing is compared that is not known"
    assert sum("not measured any more" in each.message for each in caplog.records) == 1
