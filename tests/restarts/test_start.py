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
from self_healing.run.record import (
    _CALLS,
    MARK,
    PROGRESS_FILE,
    RECORD_FILE,
    Attempt,
    ExitReason,
    RunRecord,
    UnreadableRecordError,
)
from self_healing.system.files import OFF_FILE, STATE_FILE
from self_healing.system.processes import Launch, Process, launch_of, of_all_ranks


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


# ---- the launch, and what the process before has left ----


@pytest.mark.parametrize(
    ("variables", "restarts", "left", "requeued", "by_agent"),
    [
        ({}, 0, None, False, False),
        ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "3"}, 0, 3, False, False),
        (
            {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "1"},
            1,
            0,
            False,
            True,
        ),
        (
            {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "1", "SLURM_RESTART_COUNT": "2"},
            2,
            1,
            True,
            False,
        ),
        ({"SLURM_JOB_ID": "7"}, 0, None, False, False),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, 1, None, True, False),
    ],
)
def test_a_launch_is_read_from_the_environment(
    variables: dict[str, str], restarts: int, left: int | None, requeued: bool, by_agent: bool
) -> None:
    launch = launch_of(variables)
    found = (launch.restarts, launch.restarts_left, launch.requeued, launch.by_agent)
    assert found == (restarts, left, requeued, by_agent)


def test_what_the_ranks_know_of_their_launch_is_put_together() -> None:
    # The node of the second rank failed, and that of the first was not counted.
    launches = [Launch("torchrun", 0, 3), Launch("torchrun", 2, 1, by_agent=True)]
    found = of_all_ranks(launches)
    assert (found.restarts, found.by_agent, found.started_again) == (2, True, True)


class TestARecord:
    def read(self, directory: Path, **changes: Any) -> RunRecord:
        """What is read of a record that was changed by hand; a field that is `...` is left out."""
        record = RunRecord(directory, "run", recovery_state={"budget": 1}, postmortem="postmortem.json")
        record.begin_attempt("checkpoint-4", 4, job="17")
        record.write()
        content = json.loads((directory / RECORD_FILE).read_text()) | changes
        content = {name: value for name, value in content.items() if value is not ...}
        (directory / RECORD_FILE).write_text(json.dumps(content))
        found = RunRecord.read(directory)
        assert found is not None
        return found

    @pytest.mark.parametrize(
        "changes",
        [
            {"schema": 2},
            {"attempts": 3},
            {"incidents": ...},
            {"attempts": [3]},
            {"attempts": [{"number": 1, "ending": "asleep"}]},
            {"incidents": [None]},
            {"incidents": [{"step": 2}]},
            {"incidents": [{"incident": "run-001", "step": 2, "trigger": "x", "failure": "of_another_version"}]},
        ],
    )
    def test_of_another_version_or_damaged_cannot_be_read(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        with pytest.raises(UnreadableRecordError, match="cannot be read"):
            self.read(tmp_path, **changes)

    @pytest.mark.parametrize(("attempt", "step", "last"), [(1, 9, 9), (1, 3, 4), (2, 9, 4)])
    def test_takes_in_how_far_the_killed_process_came(
        self, tmp_path: Path, attempt: int, step: int, last: int
    ) -> None:
        (tmp_path / PROGRESS_FILE).write_bytes(MARK.pack(attempt, step))
        assert self.read(tmp_path).newest.last_step == last
