"""The step log: what is written is read, however the writer ended, and it stays small."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest

from self_healing.journal.step_log import StepLog, StepRow, read_step_log, step_log_of


def row(step: int, loss: float = 2.0, attempt: int = 1, **more: float) -> StepRow:
    return StepRow(step, attempt=attempt, loss=loss, loss_max=loss)._replace(**more)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return step_log_of(tmp_path, "made-up")


def write(path: Path, *rows: StepRow, most: int = 1000) -> None:
    log = StepLog(path, {"run": "made-up"}, rows=most)
    for each in rows:
        log.kept.append(each)
        log.write()


def test_what_is_written_is_read(path: Path) -> None:
    whole = StepRow(7, 1, 1, 2, 1.5e9, *(0.5 * number for number in range(13)))
    write(path, whole, row(8, math.inf))
    about, rows = read_step_log(path)
    assert rows[0] == whole
    assert (rows[1].step, rows[1].loss) == (8, math.inf)
    assert (about["schema"], about["run"]) == (1, "made-up")


@pytest.mark.parametrize("content", [b"", b'{"schema": 2, "row_bytes": 80}\n'])
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


# ---- what goes wrong ----


def test_after_a_full_disk_the_rows_that_follow_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StepLog(path, {"run": "made-up"})
    log.kept.append(row(0))
    log.write()
    log.kept.append(row(1))

    def write_a_part(self: Path, *_: Any) -> Any:
        os.truncate(self, self.stat().st_size + 5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "open", write_a_part)
        with pytest.raises(OSError, match="No space left"):
            log.write()
    log.kept.append(row(9))
    log.write()
    assert [each.step for each in read_step_log(path)[1]] == [0, 9]
