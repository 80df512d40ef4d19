"""Where a process begins, and whose run it continues, from records and checkpoints written by hand."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from self_healing import HealingConfig
from self_healing.checkpoints.choice import CheckpointError
from self_healing.checkpoints.marker import write_marker
from self_healing.healers.restarts.start import (
    Start,
    is_off,
    refuse_to_train_beside,
    start_of,
)
from self_healing.run.record import _CALLS, Attempt, ExitReason, RunRecord
from self_healing.system.files import OFF_FILE, STATE_FILE
from self_healing.system.processes import Launch, Process


PLAIN = Launch("none", 0, None)
# The agent that has started all of them has started the process again; SLURM has.
TORCHRUN = Launch("torchrun", 1, 2, by_agent=True, agent="agent", job="17")
SLURM = Launch("slurm", 1, None, requeued=True, job="17")
POD = Launch("none", 0, None, in_a_pod=True)


@pytest.fixture(autouse=True)
def _first_process() -> Iterator[None]:
    before = _CALLS.copy()
    _CALLS.clear()
    yield
    _CALLS.clear()
    _CALLS.update(before)


def record_of(directory: Path, ending: ExitReason = ExitReason.RUNNING, **fields: Any) -> RunRecord:
    given = {"first_step": 4, "last_step": 6, "ending": ending, "job": "17", "agent": "agent", **fields}
    return RunRecord(directory, "run", [Attempt(1, 999_999_999, socket.gethostname(), 1000.0, **given)])


def checkpoint_in(directory: Path, step: int, run: str | None = "run") -> str:
    checkpoint = directory / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE_FILE).write_text(json.dumps({"global_step": step}))
    if run is not None:
        write_marker(checkpoint, run, step, {}, emergency=False)
    return str(checkpoint)


class TestWhatACheckpointBegins:
    def test_the_newest_one_of_a_run_goes_on_with_it_and_any_other_begins_another(self, tmp_path: Path) -> None:
        record, checkpoint = record_of(tmp_path), checkpoint_in(tmp_path, 4)
        for requested, goes_on in ((True, True), ("auto", True), (None, False), ("checkpoint-4", False)):
            expected = Start(checkpoint, 4, record if goes_on else None)
            assert start_of(checkpoint, 4, record, PLAIN, False, requested) == expected
        theirs = checkpoint_in(tmp_path, 6, "another run")
        assert start_of(theirs, 6, record, PLAIN, False, True) == Start(theirs, 6)

    @pytest.mark.parametrize(
        ("ending", "launch", "requested", "by_hand"),
        [
            (ExitReason.FAILED, PLAIN, "auto", True),
            (ExitReason.GAVE_UP, PLAIN, True, True),
            (ExitReason.INTERRUPTED, PLAIN, True, True),
            (ExitReason.RUNNING, PLAIN, True, False),
            (ExitReason.PREEMPTED, PLAIN, True, False),
            (ExitReason.FAILED, TORCHRUN, True, False),
            # Of another job.
            (ExitReason.FAILED, replace(SLURM, job="18"), True, True),
            # A pod does not say that it was started again.
            (ExitReason.FAILED, POD, "auto", False),
            (ExitReason.FAILED, POD, True, True),
        ],
    )
    def test_a_person_looks_at_a_failure_before_it_is_started_by_hand(
        self, tmp_path: Path, ending: ExitReason, launch: Launch, requested: Any, by_hand: bool
    ) -> None:
        start = start_of(None, 0, record_of(tmp_path, ending), launch, False, requested)
        assert (start.by_hand, start.by_agent) == (by_hand, launch.by_agent)


class TestAnotherProcess:
    @pytest.fixture
    def parent(self) -> Attempt:
        """One that lives."""
        process = Process.of(os.getppid())
        return Attempt(1, process.pid, socket.gethostname(), time.time(), process_began=process.began)

    def test_that_lives_is_not_trained_beside(self, tmp_path: Path, parent: Attempt) -> None:
        with pytest.raises(CheckpointError, match=f"Process {parent.pid} trains into"):
            refuse_to_train_beside(RunRecord(tmp_path, "run", [parent]))

    @pytest.mark.parametrize(
        "fields",
        [
            {"ending": ExitReason.FAILED},
            {"host": "elsewhere"},
            {"pid": os.getpid()},
            {"pid": 999_999_999},
            # Its number was given out again since.
            {"process_began": 1.5},
        ],
    )
    def test_that_does_not_is_no_reason(self, tmp_path: Path, parent: Attempt, fields: dict[str, Any]) -> None:
        refuse_to_train_beside(RunRecord(tmp_path, "run", [replace(parent, **fields)]))


@pytest.mark.parametrize("text", ["", '{"run": "ru', "{}", "[]"])
def test_a_note_that_healing_is_off_counts_however_little_of_it_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / OFF_FILE).write_text(text)
    args = SimpleNamespace(output_dir=str(tmp_path), device=torch.device("cpu"), process_index=0)
    assert is_off(HealingConfig(), args)
    assert f"Healing is off: {OFF_FILE} does not say why." in caplog.text
    assert f"please remove {tmp_path / OFF_FILE}" in caplog.text
