"""Reports and postmortems, read from journals that were written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from self_healing import Action, FailureType, HealingConfig, HealingReport
from self_healing.journal.journal import Journal
from self_healing.journal.postmortem import Postmortem


def test_an_action_that_did_not_happen_is_not_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path, HealingConfig(), "made-up")
    incident = journal.open(3, "divergence", {})
    journal.diagnosed(incident, FailureType.DIVERGENCE, "weights", {})
    journal.acted(incident, Action.ROLL_BACK.value, happened=False, why="there is no trusted state")
    journal.acted(incident, Action.STOP.value)
    journal.closed(incident, "fatal")
    (told,) = HealingReport.from_run_dir(tmp_path).incidents
    assert told["actions"] == ["stop"]
    assert (told["failure"], told["cause"], told["outcome"]) == ("divergence", "weights", "fatal")


@pytest.mark.parametrize(
    ("checkpoint", "older", "line"),
    [("here", "older", "'here'"), (None, "older", "'older'"), (None, None, None)],
)
def test_a_postmortem_names_the_line_that_resumes(checkpoint: Any, older: Any, line: str | None) -> None:
    end = Postmortem(
        verdict="no",
        failure=FailureType.DIVERGENCE,
        step=3,
        error=None,
        log_history=[],
        checkpoint=checkpoint,
        older_checkpoint=older,
    )
    assert end.resume_with == (None if line is None else f"trainer.train(resume_from_checkpoint={line})")
