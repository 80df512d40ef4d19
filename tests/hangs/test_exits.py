"""What a process that was ended because of a hang leaves to the next one of its job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from self_healing import HealingConfig
from self_healing.healers.hangs.watchdog import HangExits


RESTARTED = HealingConfig(launcher_restarts="yes")


def next_process(directory: Path, rank: int = 0) -> tuple[HangExits, dict[str, float]]:
    exits = HangExits(directory, rank)
    return exits, exits.read(RESTARTED)


def test_of_each_part_the_longest_time_is_known(tmp_path: Path) -> None:
    for section, seconds in [("step", 90.0), ("data", 30.0), ("step", 60.0)]:
        next_process(tmp_path)[0].note_exit(7, section, seconds)
    assert next_process(tmp_path)[1] == {"step": 90.0, "data": 30.0}


def test_a_hang_is_the_same_one_only_at_the_same_step_in_the_same_part(tmp_path: Path) -> None:
    HangExits(tmp_path).note_exit(7, "step", 90.0)
    exits, _ = next_process(tmp_path)
    assert exits.has_left(7, "step")
    assert not exits.has_left(8, "step")
    assert not exits.has_left(7, "data")
    assert not HangExits(tmp_path).has_left(7, "step"), "of another run, until it is read"


def test_each_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    HangExits(tmp_path).note_exit(7, "step", 90.0)
    HangExits(tmp_path, rank=1).note_exit(7, "step", 80.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["healing_hangs.json", "healing_hangs.rank1.json"]
    assert next_process(tmp_path, rank=0)[1] == {"step": 90.0}
    assert next_process(tmp_path, rank=1)[1] == {"step": 80.0}


def test_of_a_job_that_is_ended_ever_again_the_newest_exits_are_kept(tmp_path: Path) -> None:
    for step in range(53):
        next_process(tmp_path)[0].note_exit(step, "step", 10.0)
    exits, _ = next_process(tmp_path)
    assert [step for step in range(53) if exits.has_left(step, "step")] == list(range(3, 53))


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        {"exits": 1},
        {"exits": [1]},
        {"exits": [{"step": 7}]},
        {"exits": [{"step": 7, "section": "step", "seconds": "long"}]},
        {"exits": [{"step": float("inf"), "section": "step", "seconds": 1.0}]},
    ],
)
def test_a_file_that_makes_no_sense_is_warned_of_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: Any
) -> None:
    HangExits(tmp_path).path.write_text(json.dumps(content))
    exits, known = next_process(tmp_path)
    assert known == {}
    assert "cannot be read" in caplog.text
    exits.note_exit(7, "step", 90.0)
    assert next_process(tmp_path)[1] == {"step": 90.0}


def test_nothing_is_said_where_there_is_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert next_process(tmp_path)[1] == {}
    assert caplog.text == ""


def test_a_file_that_cannot_be_written_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    HangExits(tmp_path / "not there").path.parent.write_text("in the way")
    HangExits(tmp_path / "not there").note_exit(7, "step", 90.0)
    assert "the next process knows nothing of this hang" in caplog.text
