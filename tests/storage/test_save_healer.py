"""Saves that fail, told to their healer one by one, without a trainer."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_run import MadeUpRun

from self_healing.checkpoints.retention import disk_full
from self_healing.healers.saves import SaveHealer
from self_healing.journal.incident import headline


FULL = OSError(errno.ENOSPC, "No space left on device")
HIDDEN = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
BROKEN = OSError(errno.EIO, "Input/output error")


class Saves:
    """A run that writes checkpoints, and the healer it tells of those it cannot write."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.run = MadeUpRun(directory, **settings)
        run: Any = self.run
        run.run_id = "made-up"
        # Checkpoints in last-known-good/.
        self.kept: list[str] = []
        self.healer = SaveHealer(run, self.give_way)

    def give_way(self) -> list[str]:
        gone, self.kept = self.kept, []
        return gone

    def checkpoint(self, step: int, size: int = 10) -> Path:
        path = self.directory / f"checkpoint-{step}"
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"0" * size)
        return path

    def fail(self, step: int, error: Exception = FULL, **how: Any) -> bool:
        """Returns whether to write it once more."""
        return self.healer.failed(error, self.checkpoint(step), step, None, **how)

    @property
    def actions(self) -> list[tuple[str, bool]]:
        return [(each["action"], each.get("happened", True)) for each in self.events("action")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.directory / "healing_events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    return Saves(tmp_path)


def test_what_was_written_of_it_is_removed_and_the_run_goes_on(saves: Saves, tmp_path: Path) -> None:
    assert not saves.fail(5)
    assert not (tmp_path / "checkpoint-5").exists()
    assert saves.actions == [("remove_partial_checkpoint", True), ("go_on_without", True)]
    assert saves.run.journal.incidents[0].evidence["missing"] == [5]


def test_one_that_was_there_already_is_not_touched(saves: Saves, tmp_path: Path, caplog: Any) -> None:
    saves.fail(5, untouched=True)
    assert (tmp_path / "checkpoint-5").exists()
    assert saves.actions[0] == ("remove_partial_checkpoint", False)
    assert "could not be removed" not in caplog.text


def test_one_that_cannot_be_removed_is_said_loudly(
    saves: Saves, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("self_healing.healers.saves.remove_torn", lambda path: "it is held open")
    saves.fail(5)
    assert saves.actions[0] == ("remove_partial_checkpoint", False)
    assert "could not be removed (it is held open)" in caplog.text


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (FULL, True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EIO, "No space left, says another"), False),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("I/O error: Input/output error (os error 5)"), False),
    ],
)
def test_where_the_disk_is_full_what_is_kept_gives_way(saves: Saves, error: Exception, full: bool) -> None:
    saves.kept = ["checkpoint-2"]
    saves.checkpoint(4)
    assert saves.fail(5, error) is full
    assert (("make_room", True) in saves.actions) is full
    assert (saves.run.journal.incidents[0].figures == ["last-known-good/ gave way: checkpoint-2 removed"]) is full


@pytest.mark.parametrize(("others", "free", "full"), [(True, 5, True), (True, 10**9, False), (False, 5, True)])
def test_torch_does_not_say_why_so_the_room_is_measured(
    saves: Saves, monkeypatch: pytest.MonkeyPatch, others: bool, free: int, full: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=10**10))
    saves.kept = ["checkpoint-2"]
    if others:
        saves.checkpoint(4)
    assert saves.fail(5, HIDDEN) is full


@pytest.mark.parametrize("error", [FULL, HIDDEN, Exception("No space left on device (os error 28)")])
def test_a_full_disk_is_told_with_the_room_it_has(
    saves: Saves, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4, total=4_000_000))
    saves.checkpoint(4)
    saves.fail(5, error)
    (detected,) = saves.events("detected")
    room = f"4e-06 of 4 MB free at {saves.directory}"
    assert (detected["symptom"], detected["evidence"]["message"]) == ("DiskFull", room)
    assert headline(saves.run.journal.incidents[0], 500).startswith(f"step 5: checkpoint not written: {room} -> ")
    assert room in saves.events("action")[0]["error"]


@pytest.mark.parametrize(("error", "free"), [(HIDDEN, 3_000_000), (BROKEN, 0), (BROKEN, 3_000_000)])
def test_a_disk_that_is_not_full_is_not_said_to_be(
    saves: Saves, monkeypatch: pytest.MonkeyPatch, error: Exception, free: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=4_000_000))
    saves.fail(5, error)
    (detected,) = saves.events("detected")
    assert (detected["symptom"], "free" in json.dumps(detected)) == (type(error).__name__, False)


def test_a_quota_that_is_used_up_is_told_as_the_system_says_it(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000, total=4_000_000))
    saves.fail(5, FULL)
    (detected,) = saves.events("detected")
    assert (detected["symptom"], detected["evidence"]["message"]) == ("OSError", str(FULL))


def test_a_mistake_in_code_is_not_taken_for_a_full_disk(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0, total=4_000_000))
    mistake = TypeError("Object of type Model is not JSON serializable")
    assert disk_full(mistake, saves.checkpoint(5)) is None


@pytest.mark.parametrize("oldest", [True, False])
def test_with_make_room_the_oldest_that_may_go_does_once_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oldest: bool
) -> None:
    saves = Saves(tmp_path, make_room_for_checkpoints=True)
    gone = saves.checkpoint(1)
    monkeypatch.setattr(
        "self_healing.healers.saves.expendable_checkpoint",
        lambda run, directory, best: gone if oldest else None,
    )
    assert saves.fail(5) is oldest
    assert gone.exists() is not oldest
    assert ("make_room", oldest) in saves.actions
    assert saves.run.journal.incidents[0].figures == (["checkpoint-1 removed"] if oldest else [])
    if oldest:
        saves.checkpoint(1)
    assert not saves.fail(5)
    assert gone.exists()


def test_saves_that_fail_are_one_incident_until_one_is_written(saves: Saves, tmp_path: Path, caplog: Any) -> None:
    saves.fail(5)
    saves.fail(10, OSError(errno.EIO, "x" * 2000))
    assert "missing so far: 5, 10" in caplog.text
    saves.healer.saved(tmp_path / "checkpoint-15", 15)
    assert len(saves.run.incidents) == 1
    (outcome,) = saves.events("outcome")
    assert (outcome["outcome"], outcome["missing"]) == ("resolved", [5, 10])
    saves.fail(20)
    assert len(saves.run.journal.incidents) == 2
    assert saves.run.journal.incidents[1].evidence["missing"] == [20]


def test_a_long_message_is_cut(saves: Saves) -> None:
    saves.fail(5, OSError(errno.EIO, "x" * 2000))
    assert len(saves.run.journal.incidents[0].evidence["message"]) == 500
    assert len(saves.events("action")[0]["error"]) == 300


def test_a_save_made_again_after_making_room_is_in_the_journal(saves: Saves, tmp_path: Path) -> None:
    saves.kept = ["checkpoint-2"]
    assert saves.fail(5)
    assert saves.events("outcome") == []
    saves.healer.saved(tmp_path / "checkpoint-5", 5)
    (outcome,) = saves.events("outcome")
    assert (outcome["outcome"], outcome["missing"]) == ("resolved", [])


def test_a_run_that_ends_without_its_last_checkpoint_says_so(saves: Saves, caplog: Any) -> None:
    saves.healer.run_ends(4)
    assert "could not be written" not in caplog.text
    saves.fail(5)
    saves.healer.run_ends(5)
    assert "The last checkpoint could not be written: the steps up to 5" in caplog.text
    assert saves.events("outcome")[0]["outcome"] == "unresolved"


def test_an_older_one_that_cannot_be_removed_is_no_failure(saves: Saves, tmp_path: Path, caplog: Any) -> None:
    saves.fail(5)
    saves.healer.not_rotated(OSError(errno.EIO, "busy"), tmp_path / "checkpoint-10", 10)
    assert "save_total_limit is exceeded" in caplog.text
    assert saves.events("outcome")[0]["outcome"] == "resolved"


def test_of_older_ones_that_cannot_be_removed_the_first_is_an_incident(saves: Saves, tmp_path: Path) -> None:
    for step in (5, 10, 15):
        saves.healer.not_rotated(OSError(errno.EBUSY, "busy"), tmp_path / f"checkpoint-{step}", step)
    [detected], [outcome] = saves.events("detected"), saves.events("outcome")
    assert (detected["step"], "busy" in detected["evidence"]["why"]) == (5, True)
    assert (outcome["outcome"], outcome["missing"]) == ("resolved", [])
    saves.fail(20)
    assert saves.run.journal.incidents[1].cause == "a checkpoint could not be written"
