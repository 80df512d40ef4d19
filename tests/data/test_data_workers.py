"""Guards in data loader workers, and workers that die."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same_weights, journal, plain_trainer, weights
from test_data import BAD, Rows, guarded, names, rows_of
from torch.utils.data import DataLoader

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.failures.classify import classify_exception
from self_healing.failures.recipes import FailureType
from self_healing.healers.data.datasets import GuardedCollator


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


def test_guards_can_be_sent_to_another_process(tmp_path: Path) -> None:
    data = guarded(Rows([{"number": number} for number in range(8)]), tmp_path)
    collate = GuardedCollator(OwnProcesses(), data.guard, data)
    data, collate = pickle.loads(pickle.dumps((data, collate)))
    assert data.guard is collate.guard
    assert collate(data.__getitems__([1, 2])) == [1, 2]


@pytest.mark.heals("worker", "wrapper")
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
