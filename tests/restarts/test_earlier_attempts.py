"""What a process makes of the ones before it: it goes on with their run, or refuses to try it once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from self_healing import FailureType, HealingConfig, Incident, UnrecoverableTrainingError
from self_healing.healers.assembly import assemble
from self_healing.healers.numerics.state import NumericsState
from self_healing.healers.restarts.attempts import Attempts, take_up
from self_healing.healers.restarts.start import Start
from self_healing.run.record import Attempt, ExitReason, RunRecord
from self_healing.run.run import Run


def attempt(number: int, first: int, last: int, ending: ExitReason, why: str = "") -> Attempt:
    return Attempt(number, 4321, "here", 1000.0 + number, None, first, last, ending, why)


def record_of(directory: Path, *attempts: Attempt, incidents: tuple[Incident, ...] = ()) -> RunRecord:
    return RunRecord(directory, "run", list(attempts), [each.to_dict() for each in incidents])


def process(record: RunRecord, rank: int = 0, **settings: Any) -> Run:
    """The next process of the run of a record."""
    run = assemble(HealingConfig(**settings), record.directory, rank, run_id=record.run)
    run.part(Attempts).keep(record, taken_up=True)
    return run


def go_on(run: Run, step: int = 4, **start: Any) -> None:
    """Goes on at a step with the run of its record."""
    take_up(run, Start(f"checkpoint-{step}", step, run.part(Attempts).record, **start))


def refusal(run: Run, step: int = 4, checkpoint: str | None = None, **start: Any) -> UnrecoverableTrainingError:
    with pytest.raises(UnrecoverableTrainingError) as caught:
        take_up(run, Start(checkpoint, step, run.part(Attempts).record, **start))
    return caught.value


def newest(run: Run) -> Attempt:
    assert run.part(Attempts).record is not None
    return run.part(Attempts).record.newest


class TestTheBudget:
    @pytest.mark.parametrize(
        ("ending", "step", "start", "used"),
        [
            (ExitReason.RUNNING, 4, {}, 0),
            (ExitReason.RUNNING, 0, {}, 1),
            (ExitReason.FAILED, 0, {}, 1),
            (ExitReason.FAILED, 0, {"by_hand": True}, 0),
            (ExitReason.PREEMPTED, 0, {}, 0),
            (ExitReason.PREEMPTED, 0, {"by_agent": True}, 1),
            (ExitReason.FINISHED, 0, {}, 0),
        ],
    )
    def test_what_came_no_further_costs_one_attempt(
        self, tmp_path: Path, ending: ExitReason, step: int, start: dict[str, Any], used: int
    ) -> None:
        run = process(record_of(tmp_path, attempt(1, 0, 6, ending)))
        go_on(run, step, **start)
        assert run.budget.used == used

    def test_once_it_is_spent_the_run_is_not_tried_again(self, tmp_path: Path) -> None:
        attempts = (attempt(1, 0, 9, ExitReason.RUNNING), attempt(2, 4, 7, ExitReason.FAILED, "KeyError: 'a'"))
        run = process(record_of(tmp_path, *attempts), max_recovery_attempts=0)
        error = refusal(run)
        assert "the job was started 1 times from step 4 and never came beyond step 7 (last end: failed: KeyError" in (
            str(error)
        )
        assert "the budget of 0 attempts without progress is spent" in str(error)
        assert newest(run).ending is ExitReason.GAVE_UP


class TestARunThatHadEndedForGood:
    def record(self, directory: Path) -> RunRecord:
        return record_of(
            directory, attempt(1, 0, 9, ExitReason.FAILED), attempt(2, 4, 6, ExitReason.GAVE_UP, "no data")
        )

    def test_without_one_it_is_written(self, tmp_path: Path) -> None:
        checkpoint = tmp_path / "checkpoint-4"
        run = process(self.record(tmp_path))
        error = refusal(run, checkpoint=str(checkpoint))
        assert error.failure is FailureType.PROCESS_DIED
        assert error.postmortem == str(tmp_path / "postmortem.json")
        written = json.loads((tmp_path / "postmortem.json").read_text())
        assert (written["failure"], written["step"]) == ("process_died", 9)
        assert written["verdict"] == "it had ended for good at step 9 (no data)"
        assert written["what_to_do"].startswith("Once the cause is removed")
        assert written["resume_with"] == f"trainer.train(resume_from_checkpoint={str(checkpoint)!r})"
        assert written["emergency_checkpoint"] is None
        # This process's as well.
        assert len(written["attempts"]) == 3

    def test_started_by_hand_it_gets_new_attempts(self, tmp_path: Path) -> None:
        spent = assemble(HealingConfig(max_recovery_attempts=1), tmp_path, run_id="run")
        spent.budget.spend(6)
        record = self.record(tmp_path)
        record.recovery_state = spent.part(NumericsState).recovery_state()
        run = process(record, max_recovery_attempts=1)
        assert run.budget.used == 1
        go_on(run, by_hand=True)
        assert run.budget.used == 0
        assert newest(run).ending is ExitReason.RUNNING
