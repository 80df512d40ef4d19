"""What a marker says of its checkpoint, and what becomes of checkpoints that are kept: without a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from self_healing.checkpoints.choice import check_resumed
from self_healing.checkpoints.marker import set_standing, standing_of, write_marker, written_at
from self_healing.healers.restarts.emergency import owed_in, owing
from self_healing.hf.trainer_state import Leave, Pending


def checkpoint_at(directory: Path, step: int, **marker: Any) -> Path:
    path = directory / f"checkpoint-{step}"
    path.mkdir()
    (path / "trainer_state.json").write_text("{}")
    save_file({"weight": torch.ones(1)}, path / "model.safetensors")
    write_marker(path, "run", step, {}, emergency=False, **marker)
    return path


@pytest.mark.parametrize("pending", [Pending(), Pending(log=True), Pending(evaluate=True), Pending(save=True)])
@pytest.mark.parametrize("stop", [True, False])
def test_what_is_owed_for_a_step_is_read_as_it_was_written(pending: Pending, stop: bool) -> None:
    leave = Leave(None, stop, True)
    found = owed_in(json.loads(json.dumps(owing(pending, leave))))
    assert found == ((pending, leave) if pending or stop else None)


@pytest.mark.parametrize("bookkeeping", [{}, {"owes": None}, {"owes": [1]}, {"owes": {"pending": 3}}])
def test_nothing_is_owed_by_what_cannot_be_read(bookkeeping: dict[str, Any]) -> None:
    assert owed_in(bookkeeping) is None


def test_a_checkpoint_without_a_marker_has_no_standing(tmp_path: Path) -> None:
    assert standing_of(tmp_path) == "unmarked"
    assert standing_of(checkpoint_at(tmp_path, 3)) == "unverified"
    assert standing_of(checkpoint_at(tmp_path, 4, standing="verified")) == "verified"


def test_a_checkpoint_was_written_when_its_marker_says(tmp_path: Path) -> None:
    checkpoint = checkpoint_at(tmp_path, 3)
    os.utime(checkpoint / "trainer_state.json", (100.0, 100.0))
    assert written_at(checkpoint) > 100.0
    (checkpoint / "healing.json").unlink()
    assert written_at(checkpoint) == 100.0
    (checkpoint / "trainer_state.json").unlink()
    assert written_at(checkpoint) == 0.0


def test_a_warning_about_a_suspect_one_names_a_good_one(tmp_path: Path) -> None:
    good, suspect = checkpoint_at(tmp_path, 3), checkpoint_at(tmp_path, 6)
    assert check_resumed(suspect, tmp_path) is None
    set_standing(suspect, "suspect", "incident")
    warned = check_resumed(suspect, tmp_path)
    assert warned is not None
    assert warned.startswith("it was written in a stretch that was rolled back or went bad")
    set_standing(good, "suspect", "incident")
    assert "there is none that can be trusted" in str(check_resumed(suspect, tmp_path))
