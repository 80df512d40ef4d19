"""How far a process has come, on disk for whoever finds it killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from self_healing.run.record import PROGRESS_FILE, ProgressMark, read_mark


class Disk:
    """A disk whose writes take as long as they are told to, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.takes = 0.0
        write = os.pwrite

        def pwrite(*args: Any) -> int:
            self.now += self.takes
            return write(*args)

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def steps(self, mark: ProgressMark, directory: Path, takes: list[float]) -> list[int]:
        """Steps of a tenth of a second; how far each left the mark."""
        found = []
        for step, self.takes in enumerate(takes, 1):
            self.now += 0.1
            mark.note_step(2, step)
            at = read_mark(directory)
            found.append(0 if at is None else at[1])
        return found


def test_the_last_attempt_and_step_are_read_back(tmp_path: Path) -> None:
    mark = ProgressMark(tmp_path / "run")
    mark.note_step(3, 7)
    assert read_mark(tmp_path / "run") == (3, 7)


def test_one_slow_write_does_not_keep_the_next_steps_from_being_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    found = disk.steps(ProgressMark(tmp_path), tmp_path, [1e-6, 0.05, 1e-6, 1e-6, 1e-6])
    assert found == [1, 2, 3, 4, 5]


def test_a_slow_disk_is_written_to_for_a_hundredth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    found = disk.steps(ProgressMark(tmp_path), tmp_path, [0.01] * 200)
    writes = len(set(found))
    assert 0.01 * writes < 0.015 * (disk.now - 100)


@pytest.mark.parametrize("content", [None, b"", b"torn"])
def test_a_mark_that_is_not_there_or_torn_says_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / PROGRESS_FILE).write_bytes(content)
    assert read_mark(tmp_path) is None


def test_a_mark_that_is_closed_stays_where_it_was(tmp_path: Path) -> None:
    mark = ProgressMark(tmp_path)
    mark.note_step(1, 4)
    mark.close()
    mark.note_step(1, 5)
    assert read_mark(tmp_path) == (1, 4)
