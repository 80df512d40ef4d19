"""What a process reads of the one before it, from files written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from self_healing.run.record import (
    MARK,
    PROGRESS_FILE,
    RECORD_FILE,
    RunRecord,
    UnreadableRecordError,
)
from self_healing.system.processes import Launch, launch_of, of_all_ranks


def record_of(directory: Path) -> RunRecord:
    record = RunRecord(directory, "run")
    record.begin_attempt(None, 0)
    return record


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
