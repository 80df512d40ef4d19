"""The step log: what is written is read, however the writer ended, and it stays small."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from self_healing.journal.step_log import StepLog, StepRow, merged, read_step_log, step_log_of


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def row(step: int, loss: float = 2.0, attempt: int = 1, **more: float) -> StepRow:
    return StepRow(step, attempt=attempt, loss=loss, loss_max=loss)._replace(**more)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return step_log_of(tmp_path, "made-up")


def write(path: Path, *rows: StepRow, most: int = 1000) -> None:
    log = StepLog(path, {"run": "made-up"}, rows=most)
    for each in rows:
        log.add(each)
    log.close()


def test_what_is_written_is_read(path: Path) -> None:
    whole = StepRow(7, 1, 1, 2, 1.5e9, *(0.5 * number for number in range(13)))
    write(path, whole)
    about, rows = read_step_log(path)
    assert rows == [whole]
    assert (about["schema"], about["run"], about["stride"]) == (1, "made-up", 1)


def test_steps_are_written_once_a_second(path: Path) -> None:
    clock = Clock()
    log = StepLog(path, {"run": "made-up"}, clock=clock)
    for step in range(3):
        log.add(row(step))
    assert [each.step for each in read_step_log(path)[1]] == [0]
    clock.now = 1.0
    assert log.due
    log.add(row(3))
    assert not log.due
    assert [each.step for each in read_step_log(path)[1]] == [0, 1, 2, 3]


def test_the_next_process_goes_on_after_a_torn_row(path: Path) -> None:
    write(path, row(0), row(1))
    os.truncate(path, path.stat().st_size - 5)
    assert [each.step for each in read_step_log(path)[1]] == [0]
    write(path, row(1, attempt=2))
    assert [(each.step, each.attempt) for each in read_step_log(path)[1]] == [(0, 1), (1, 2)]


def test_a_file_that_is_none_is_replaced(path: Path) -> None:
    write(path, row(0))
    log = StepLog(path, {"run": "another"})
    log.close()
    assert read_step_log(path) == ({"schema": 1, "run": "another", "stride": 1, "row_bytes": 80}, [])


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]\n", b'{"schema": 2, "row_bytes": 80}\n', b"\xff\n"])
def test_what_is_no_step_log_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"JSON|Expecting|known version|decode"):
        read_step_log(path)
    # And it does not keep a run from writing its own.
    write(path, row(0))
    assert len(read_step_log(path)[1]) == 1


def test_a_long_run_stays_small_and_keeps_its_highest_loss(path: Path) -> None:
    write(path, *(row(step, 9.0 if step == 777 else 2.0) for step in range(5000)), most=64)
    rows = read_step_log(path)[1]
    assert 16 <= len(rows) <= 64
    assert sum(each.steps for each in rows) == 5000
    assert [each.step for each in rows if each.loss_max == 9.0] == [max(e.step for e in rows if e.step <= 777)]
    assert sum(each.loss * each.steps for each in rows) == pytest.approx(2.0 * 4999 + 9.0, rel=1e-6)


def test_a_process_that_goes_on_keeps_the_stride(path: Path) -> None:
    write(path, *(row(step) for step in range(100)), most=64)
    write(path, *(row(step) for step in range(100, 104)), most=64)
    assert [(each.step, each.steps) for each in read_step_log(path)[1]][-2:] == [(96, 4), (100, 4)]


def test_rows_are_merged_by_their_steps_where_they_follow_each_other() -> None:
    first = row(0, 1.0, steps=3, skipped=1, seconds=2.0, memory=5.0)
    rows = [first, row(3, 5.0, seconds=6.0, memory=4.0), row(9), row(10, attempt=2)]
    one, two, three = merged(rows, 4)
    assert (one.step, one.steps, one.skipped, one.loss, one.loss_max, one.seconds) == (0, 4, 1, 2.0, 5.0, 3.0)
    assert (one.memory, two.step, three.step) == (5.0, 9, 10)


def test_a_step_without_a_loss_does_not_count_in_the_mean() -> None:
    (one,) = merged([row(0, 3.0), row(1, math.nan, skipped=1)], 2)
    assert (one.loss, one.loss_max, one.skipped) == (3.0, 3.0, 1)


# ---- what goes wrong ----


def test_a_write_in_parts_is_gone_on_with(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StepLog(path, {"run": "made-up"})
    write_all = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write_all(file, content[:50]))
    for step in range(3):
        log.add(row(step))
    log.close()
    assert [each.step for each in read_step_log(path)[1]] == [0, 1, 2]


def test_a_full_disk_leaves_whole_rows_and_those_that_follow_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    log = StepLog(path, {"run": "made-up"}, clock=clock)
    for step in range(4):
        log.add(row(step))
    write_all, room = os.write, [120]

    def write_what_fits(file: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write_all(file, content[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_what_fits)
        with pytest.raises(OSError, match="No space left"):
            log.flush()
    assert [each.step for each in read_step_log(path)[1]] == [0, 1]
    log.add(row(9))
    log.close()
    assert [each.step for each in read_step_log(path)[1]] == [0, 1, 9]


def test_a_file_that_cannot_be_opened_again_is_opened_with_the_next_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = StepLog(path, {"run": "made-up"}, rows=4)
    for step in range(5):
        log.add(row(step))

    def fails(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as crowded:
        crowded.setattr(os, "open", fails)
        with pytest.raises(OSError, match="Too many open files"):
            log.flush()
    # What has this number from here on is not ours.
    other = os.open(os.devnull, os.O_WRONLY)
    log.add(row(5))
    log.close()
    os.close(other)
    rows = read_step_log(path)[1]
    assert (rows[0].step, rows[-1].step, sum(each.steps for each in rows)) == (0, 5, 6)
    log.close()


def test_what_is_past_a_float32_is_infinite(path: Path) -> None:
    write(path, row(0, 1e39), row(1, -1e39), row(2))
    assert [each.loss for each in read_step_log(path)[1]] == [math.inf, -math.inf, 2.0]
