"""How a process leaves a run, and what is written down of how the run ends, beside a made-up trainer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from self_healing import FAILURE_RECIPES, Action, FailureType, HealingConfig, Incident, UnrecoverableTrainingError
from self_healing.healers.assembly import assemble
from self_healing.healers.numerics.state import NumericsState
from self_healing.healers.oom.healer import MemoryOutsideOfModel
from self_healing.healers.restarts import ending, preemption
from self_healing.healers.restarts.attempts import Attempts, take_up
from self_healing.healers.restarts.ending import Shutdown
from self_healing.healers.restarts.start import Start
from self_healing.ranks.messages import Failure
from self_healing.run.record import Attempt, ExitReason, RunRecord
from self_healing.run.run import Run


def process(directory: Path, step: int = 6, recorded: bool = True, rank: int = 0, **settings: Any) -> Run:
    """A process that has come to a step of a run."""
    run = assemble(HealingConfig(**settings), directory, rank, run_id="run", wrapped=recorded)
    if recorded:
        run.part(Attempts).keep(RunRecord(directory, "run"), taken_up=False)
        run.part(Attempts).begin(None, 0)
    state = SimpleNamespace(global_step=step, log_history=[{"loss": 2.5, "step": step}])
    trainer = SimpleNamespace(state=state, args=SimpleNamespace(output_dir=str(directory)))
    run.trainer = trainer
    saves = SimpleNamespace(longest=7.0)
    run.attached = SimpleNamespace(  # type: ignore[assignment]
        view=SimpleNamespace(step=step), saves=saves, trainer=trainer, may_be_left=True, on_detach=[]
    )
    return run


def record_in(directory: Path) -> RunRecord:
    record = RunRecord.read(directory)
    assert record is not None
    return record


def written(directory: Path, name: str = "postmortem.json") -> dict[str, Any]:
    found = json.loads((directory / name).read_text())
    assert isinstance(found, dict)
    return found


def fatal(run: Run, failure: FailureType = FailureType.NETWORK) -> Incident:
    incident = run.journal.open(6, "made up", {})
    run.journal.diagnosed(incident, failure, "made up", {})
    return incident


def of_rank_1(exit_code: int | None) -> Failure:
    return Failure(1, 6, FailureType.BAD_DATA, "data", exit_code=exit_code)


@pytest.mark.parametrize(
    ("exit_code", "ending"), [(1, ExitReason.GAVE_UP), (130, ExitReason.FAILED), (None, ExitReason.RESTART)]
)
def test_a_run_that_another_rank_has_given_up_is_given_up(
    tmp_path: Path, exit_code: int | None, ending: ExitReason
) -> None:
    run = process(tmp_path)
    run.part(Shutdown).end_process("rank 1 failed first", of_rank_1(exit_code), exit_code or 75)
    assert record_in(tmp_path).ending is ending


@pytest.mark.parametrize(("exit_code", "ending"), [(1, ExitReason.GAVE_UP), (None, ExitReason.FAILED)])
def test_what_the_other_ranks_end_to_be_started_again_for_is_not_given_up(
    tmp_path: Path, exit_code: int | None, ending: ExitReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = process(tmp_path)
    monkeypatch.setattr(run.ranks, "rank", 1)
    monkeypatch.setattr(run.ranks, "failures", [of_rank_1(exit_code)])
    run.part(Shutdown).note_exception(UnrecoverableTrainingError("data"))
    assert record_in(tmp_path).ending is ending


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """The newest checkpoint of the run is one that need not be there; gives what was asked for."""
    asked: list[tuple[str, str, bool]] = []

    def newest(run: str, output_dir: str, verified: bool = False) -> str:
        asked.append((run, output_dir, verified))
        return "checkpoint-4"

    monkeypatch.setattr(ending, "newest_checkpoint_of", newest)
    monkeypatch.setattr(preemption, "newest_checkpoint_of", newest)
    return asked


class TestAnIncidentThatNothingCures:
    def test_the_run_ends_with_it(self, tmp_path: Path, older: list[tuple[str, str, bool]]) -> None:
        run = process(tmp_path)
        incident = fatal(run)
        error = run.part(Shutdown).stop(incident, "The line is dead.", ConnectionError("refused"))
        assert (incident.actions, incident.outcome) == ([Action.STOP], "fatal")
        assert older == [("run", str(tmp_path), False)]
        found = written(tmp_path)
        assert (found["verdict"], found["failure"], found["step"]) == ("The line is dead.", "network", 6)
        assert found["error"]["type"] == "builtins.ConnectionError"
        assert found["metric_tail"] == [{"loss": 2.5, "step": 6}]
        assert found["resume_with"] == "trainer.train(resume_from_checkpoint='checkpoint-4')"
        advice = f"{FAILURE_RECIPES[FailureType.NETWORK].advice} The checkpoint to resume from: checkpoint-4."
        assert found["what_to_do"].startswith(advice)
        path = str(tmp_path / "postmortem.json")
        assert (error.failure, error.postmortem, run.part(Attempts).postmortem) == (FailureType.NETWORK, path, path)
        assert str(error) == (
            f"Training stopped at step 6: The line is dead. What to do: {advice} Postmortem: {path}."
        )


class TestTheEndOfTheRun:
    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (KeyError("a"), ExitReason.FAILED),
            (KeyboardInterrupt(), ExitReason.INTERRUPTED),
            (SystemExit(1), ExitReason.INTERRUPTED),
            (UnrecoverableTrainingError("over", failure=FailureType.NETWORK), ExitReason.GAVE_UP),
        ],
    )
    @pytest.mark.usefixtures("older")
    def test_an_exception_says_how_this_process_ended(
        self, tmp_path: Path, error: BaseException, expected: ExitReason
    ) -> None:
        run = process(tmp_path)
        run.part(Shutdown).note_exception(error)
        record = record_in(tmp_path)
        assert (record.ending, record.newest.why.split(":")[0]) == (expected, type(error).__name__)
        # What was told of already is told in a postmortem of its own.
        told = isinstance(error, UnrecoverableTrainingError)
        assert (tmp_path / "postmortem.json").exists() is not told
        assert record.postmortem == (None if told else str(tmp_path / "postmortem.json"))
        assert any("postmortem" in note for note in getattr(error, "__notes__", [])) is not told


def test_memory_that_runs_out_twice_in_a_step_ends_the_run_where_the_batch_is_to_stay(tmp_path: Path) -> None:
    run = assemble(HealingConfig(oom_reduce_batch=False), tmp_path, wrapped=True)
    state = SimpleNamespace(global_step=0)
    healer = MemoryOutsideOfModel(run, SimpleNamespace(state=state))
    remedies = []
    for state.global_step in (3, 4, 4):
        claim = healer.claim(MemoryError(), Incident("1", 7, "made up"))
        assert claim is not None
        remedies.append(claim.remedy)
    assert remedies == [Action.FREE_MEMORY, Action.FREE_MEMORY, Action.STOP]


# ---- what the next process makes of it ----


def attempt(number: int, first: int, last: int, ending: ExitReason, why: str = "") -> Attempt:
    return Attempt(number, 4321, "here", 1000.0 + number, None, first, last, ending, why)


def record_of(directory: Path, *attempts: Attempt, incidents: tuple[Incident, ...] = ()) -> RunRecord:
    return RunRecord(directory, "run", list(attempts), [each.to_dict() for each in incidents])


def next_process(record: RunRecord, rank: int = 0, **settings: Any) -> Run:
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
        run = next_process(record_of(tmp_path, attempt(1, 0, 6, ending)))
        go_on(run, step, **start)
        assert run.budget.used == used

    def test_once_it_is_spent_the_run_is_not_tried_again(self, tmp_path: Path) -> None:
        attempts = (attempt(1, 0, 9, ExitReason.RUNNING), attempt(2, 4, 7, ExitReason.FAILED, "KeyError: 'a'"))
        run = next_process(record_of(tmp_path, *attempts), max_recovery_attempts=0)
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
        run = next_process(self.record(tmp_path))
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
        run = next_process(record, max_recovery_attempts=1)
        assert run.budget.used == 1
        go_on(run, by_hand=True)
        assert run.budget.used == 0
        assert newest(run).ending is ExitReason.RUNNING
