"""What a process reads of the one before it, from files written by hand."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path

import pytest

from self_healing.checkpoint_files import STATE_FILE
from self_healing.launcher import launch_of
from self_healing.restarts.record import RunRecord
from self_healing.restarts.start import bookkeeping_of, was_writing


def record_of(directory: Path, saving: str | None = "checkpoint-8") -> RunRecord:
    """A record whose process was about to write a checkpoint."""
    record = RunRecord(directory, "run")
    record.begin_attempt(None, 0)
    if saving is not None:
        record.about_to_save(saving, {"loss": 2.5})
    return record


def checkpoint_in(directory: Path, step: int, age: float = 0.0) -> Path:
    checkpoint = directory / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE_FILE).write_text("{}")
    if age:
        then = time.time() - age
        os.utime(checkpoint / STATE_FILE, (then, then))
    return checkpoint


class TestCheckpointsWithoutMarker:
    def test_the_one_that_was_being_written_is_of_the_run(self, tmp_path: Path) -> None:
        assert was_writing(record_of(tmp_path), checkpoint_in(tmp_path, 8))

    def test_another_one_is_not(self, tmp_path: Path) -> None:
        checkpoint_in(tmp_path, 8)
        assert not was_writing(record_of(tmp_path), checkpoint_in(tmp_path, 4))

    def test_one_that_was_there_before_is_not(self, tmp_path: Path) -> None:
        assert not was_writing(record_of(tmp_path), checkpoint_in(tmp_path, 8, age=3600.0))

    def test_one_that_the_run_has_gone_on_from_is(self, tmp_path: Path) -> None:
        record, checkpoint = record_of(tmp_path, saving=None), checkpoint_in(tmp_path, 4)
        assert not was_writing(record, checkpoint)
        record.begin_attempt(str(checkpoint), 4)
        assert was_writing(record, checkpoint)

    def test_what_its_marker_was_to_say_is_known(self, tmp_path: Path) -> None:
        record, checkpoint = record_of(tmp_path), checkpoint_in(tmp_path, 8)
        assert bookkeeping_of(record, checkpoint) == {"loss": 2.5}
        assert bookkeeping_of(record, checkpoint_in(tmp_path, 4)) is None
        assert bookkeeping_of(None, checkpoint) is None


def test_a_record_that_another_process_is_told_of_keeps_all_but_what_is_open(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    record.end_attempt(record.ending, "", 6)
    told = pickle.loads(pickle.dumps(record))
    assert told.describe_attempts() == record.describe_attempts()
    assert (told.directory, told.run, told.saving) == (record.directory, record.run, record.saving)
    told.note_step(9)
    told.close()
    told.write()
    assert json.loads((tmp_path / "healing_run.json").read_text())["run"] == "run"


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
    assert (launch.restarts, launch.restarts_left, launch.requeued, launch.by_agent) == (
        restarts,
        left,
        requeued,
        by_agent,
    )
