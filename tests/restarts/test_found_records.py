"""What a process reads of the one before it, from files written by hand."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from self_healing.healers.restarts.start import bookkeeping_of, was_writing
from self_healing.run.record import (
    PROGRESS_FILE,
    RECORD_FILE,
    Attempt,
    Ending,
    ProgressMark,
    RunRecord,
    UnreadableRecordError,
    first_call,
    read_mark,
)
from self_healing.system.files import STATE_FILE
from self_healing.system.processes import Launch, launch_of, of_all_ranks


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

    @pytest.mark.parametrize("when", [None, "noon", ...])
    def test_where_it_is_not_known_when_it_was_to_be_written_it_is_not(self, tmp_path: Path, when: Any) -> None:
        record, checkpoint = record_of(tmp_path), checkpoint_in(tmp_path, 8)
        record.saving = {"checkpoint": "checkpoint-8"} if when is ... else {"checkpoint": "checkpoint-8", "time": when}
        assert not was_writing(record, checkpoint)

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

    @pytest.mark.parametrize("bookkeeping", ["{", "{}", "[1]", "3", "null", None, 3, {"loss": 2.5}])
    def test_what_it_was_to_say_is_not_known_where_that_cannot_be_read(self, tmp_path: Path, bookkeeping: Any) -> None:
        record, checkpoint = record_of(tmp_path), checkpoint_in(tmp_path, 8)
        assert record.saving is not None
        record.saving["bookkeeping"] = bookkeeping
        assert bookkeeping_of(record, checkpoint) is None


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


@pytest.mark.parametrize(
    ("launches", "restarts", "by_agent", "agent_age"),
    [
        ([(0, False, None), (0, False, None)], 0, False, None),
        # The node of the second rank failed, and that of the first was not counted.
        ([(0, False, 5.0), (2, True, 5.5)], 2, True, 5.5),
        # The node of the first rank was replaced, and has failed once more since.
        ([(1, True, 5.0), (2, True, 9.0)], 2, True, 9.0),
        ([(1, True, None), (2, True, 5.0)], 2, True, None),
    ],
)
def test_what_the_ranks_know_of_their_launch_is_put_together(
    launches: list[tuple[int, bool, float | None]], restarts: int, by_agent: bool, agent_age: float | None
) -> None:
    def launch(count: int, again: bool, age: float | None) -> Launch:
        return Launch("torchrun", count, 3 - count, by_agent=again, agent_age=age)

    found = of_all_ranks([launch(*each) for each in launches])
    assert (found.restarts, found.by_agent, found.agent_age) == (restarts, by_agent, agent_age)
    assert found.started_again == (restarts > 0)


@pytest.mark.parametrize("requeued", [(False, False), (True, False), (False, True)])
def test_a_job_was_requeued_if_any_rank_knows_of_it(requeued: tuple[bool, ...]) -> None:
    launches = [Launch("torchrun", int(each), 3, requeued=each) for each in requeued]
    assert of_all_ranks(launches).requeued == any(requeued)


class TestARecord:
    def read(self, directory: Path, **changes: Any) -> RunRecord:
        """What is read of a record that was changed by hand; a field that is `...` is left out."""
        record = RunRecord(directory, "run", recovery_state={"budget": 1}, postmortem="postmortem.json")
        record.begin_attempt("checkpoint-4", 4, marks=False, job="17")
        record.about_to_save("checkpoint-8")
        content = json.loads((directory / RECORD_FILE).read_text()) | changes
        content = {name: value for name, value in content.items() if value is not ...}
        (directory / RECORD_FILE).write_text(json.dumps(content))
        found = RunRecord.read(directory)
        assert found is not None
        return found

    def test_is_read_as_it_was_written(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        record = self.read(tmp_path)
        assert (record.run, record.postmortem, record.recovery_state) == ("run", "postmortem.json", {"budget": 1})
        assert record.saving is not None
        assert (record.saving["checkpoint"], record.saving["bookkeeping"]) == ("checkpoint-8", "{}")
        newest = record.newest
        assert (newest.number, newest.first_step, newest.last_step, newest.call, newest.job) == (1, 4, 4, 1, "17")
        assert (newest.pid, newest.resumed_from, record.ending) == (os.getpid(), "checkpoint-4", Ending.RUNNING)
        assert caplog.text == ""

    def test_of_two_threads_that_write_it_the_last_one_knows_most(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        record, describe = self.read(tmp_path), RunRecord.describe_attempts

        def ends() -> None:
            record.end_attempt(Ending.RESTART, "a hang", 5)
            record.write()

        other = threading.Thread(target=ends)

        def describe_attempts(self: RunRecord) -> list[dict[str, Any]]:
            """Called while a thread puts together what it is about to write."""
            attempts = describe(self)
            if other.ident is None:
                other.start()
                other.join(0.3)
            return attempts

        monkeypatch.setattr(RunRecord, "describe_attempts", describe_attempts)
        assert record.ending is Ending.RUNNING
        record.write()
        other.join()
        found = RunRecord.read(tmp_path)
        assert found is not None
        assert (found.ending, found.newest.why) == (Ending.RESTART, "a hang")

    def test_is_none_where_there_is_none(self, tmp_path: Path) -> None:
        assert RunRecord.read(tmp_path) is None

    @pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"run": 1}', "\xff"])
    def test_of_which_not_even_the_run_is_known_cannot_be_read(self, tmp_path: Path, content: str) -> None:
        (tmp_path / RECORD_FILE).write_bytes(content.encode("latin-1"))
        with pytest.raises(UnreadableRecordError, match="cannot be read"):
            RunRecord.read(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"schema": 2}, "schema 2, where 1 is known"),
            ({"attempts": 3}, "the record.attempts"),
            ({"incidents": ...}, "the record.incidents"),
            ({"memory": []}, "the record.memory"),
            ({"attempts": [3]}, "attempts.0.number"),
            ({"attempts": [{"number": 1, "ending": "asleep"}]}, "attempts.0.ending"),
            ({"incidents": [3]}, "incidents.0"),
        ],
    )
    def test_names_what_it_cannot_use(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], named: str
    ) -> None:
        assert self.read(tmp_path, **changes).run == "run"
        assert "can be used only in part" in caplog.text
        assert named in caplog.text

    @pytest.mark.parametrize("attempts", [[], ..., [3], [{}], [{"ending": "asleep", "why": "a nap"}]])
    def test_tells_of_one_process_at_least_whose_end_is_not_known(self, tmp_path: Path, attempts: Any) -> None:
        record = self.read(tmp_path, attempts=attempts, time=1234.5)
        assert record.attempts == [Attempt(1, 0, "", 1234.5, None, 0, 0, Ending.FAILED, "not known")]

    def test_counts_attempts_that_do_not_say_their_number(self, tmp_path: Path) -> None:
        record = self.read(tmp_path, attempts=[{"resumed_from": 3}, {"pid": 7}])
        assert [(each.number, each.pid, each.resumed_from) for each in record.attempts] == [(1, 0, None), (2, 7, None)]

    @pytest.mark.parametrize("field", ["postmortem", "saving"])
    def test_leaves_out_what_is_of_another_kind(self, tmp_path: Path, field: str) -> None:
        assert getattr(self.read(tmp_path, **{field: 3}), field) is None

    @pytest.mark.parametrize(("attempt", "step", "last"), [(1, 9, 9), (1, 3, 4), (2, 9, 4)])
    def test_takes_in_how_far_the_killed_process_came(
        self, tmp_path: Path, attempt: int, step: int, last: int
    ) -> None:
        mark = ProgressMark(tmp_path)
        mark.note_step(attempt, step)
        assert self.read(tmp_path).newest.last_step == last

    def test_counts_the_processes_and_keeps_the_newest_ones(self, tmp_path: Path) -> None:
        record = RunRecord(tmp_path, "run")
        assert record.ending is Ending.FINISHED
        for _ in range(52):
            record.begin_attempt(None, 0, marks=False)
        assert [each.number for each in record.attempts] == [*range(3, 53)]
        assert record.newest.call == 52

    def test_marks_where_each_begins(self, tmp_path: Path) -> None:
        record = record_of(tmp_path, saving=None)
        assert read_mark(tmp_path) == (1, 0)
        record.close()
        record.note_step(5)
        assert read_mark(tmp_path) == (1, 0)
        record.begin_attempt("checkpoint-4", 4)
        assert read_mark(tmp_path) == (2, 4)
        record.close()
        record.begin_attempt("checkpoint-4", 7, marks=False)
        record.note_step(8)
        assert read_mark(tmp_path) == (2, 4)

    def test_keeps_the_furthest_step(self, tmp_path: Path) -> None:
        record = record_of(tmp_path)
        record.end_attempt(Ending.FAILED, "a bug", 6)
        record.end_attempt(Ending.FAILED, "a bug", 5)
        assert (record.ending, record.newest.why, record.newest.last_step) == (Ending.FAILED, "a bug", 6)

    def test_is_left_alone_where_it_is_that_of_another_process(self, tmp_path: Path) -> None:
        record = RunRecord(tmp_path, "run", kept=False)
        record.begin_attempt(None, 0)
        record.about_to_save("checkpoint-8")
        assert list(tmp_path.iterdir()) == []

    def test_that_cannot_be_written_is_told_of_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for name in (RECORD_FILE, PROGRESS_FILE):
            (tmp_path / name / "in the way").mkdir(parents=True)
        record = record_of(tmp_path)
        record.note_step(4)
        record.write()
        record.write()
        assert caplog.text.count("a restart will not know of budgets") == 1
        assert "after a kill, the step it came to will not be known" in caplog.text

    def test_of_a_directory_is_that_of_the_first_call_in_a_process(self, tmp_path: Path) -> None:
        assert first_call(tmp_path)
        record_of(tmp_path, saving=None)
        assert not first_call(tmp_path)
        assert not first_call(Path(os.path.relpath(tmp_path)))
        assert first_call(tmp_path / "elsewhere")
