"""What is done when nothing else helps, and what a checkpoint that is resumed from still owes, with made-up saves."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from self_healing import Action, FailureType, HealingConfig, UnrecoverableTrainingError
from self_healing.checkpoints.marker import write_marker
from self_healing.healers.assembly import Run, assemble
from self_healing.healers.restarts import attempts, ending
from self_healing.healers.restarts.attempts import continue_bookkeeping
from self_healing.healers.restarts.ending import LastResorts
from self_healing.rollback.rollback import Target, WentBack
from self_healing.run.healer import HealingContext
from self_healing.run.record import RunRecord
from self_healing.system.processes import Process, launch_of, restarts_on_exit


class TestAnEmergencyCheckpoint:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
        self.saved: list[dict[str, Any]] = []
        self.newest: str | None = None
        # What becomes of the next one.
        self.point: Any = SimpleNamespace(path="emergency/checkpoint-6", step=6)

        def save(instrument: Any, run: str, **how: Any) -> Any:
            self.saved.append({"run": run, **how})
            if isinstance(self.point, Exception):
                raise self.point
            return self.point

        monkeypatch.setattr(ending, "save_emergency_checkpoint", save)
        monkeypatch.setattr(ending, "newest_checkpoint_of", lambda run, output_dir: self.newest)
        return assemble(HealingConfig(), tmp_path, run_id="run")

    def save(self, run: Run, error: Exception | None = None, **settings: Any) -> dict[str, Any]:
        made_room: list[str] = []
        checkpoints = SimpleNamespace(leave_room=lambda: made_room.append("left"), give_way=lambda: made_room)
        resorts = LastResorts(
            run.context,
            run.attempts,
            run.ending,
            SimpleNamespace(checkpoints=checkpoints),  # type: ignore[arg-type]
            run.last_step,
        )
        resorts.config = HealingConfig(**settings)
        self.made_room = made_room
        return resorts.table()[Action.EMERGENCY_CHECKPOINT](self.context(run, error), SimpleNamespace())  # type: ignore[arg-type]

    def context(self, run: Run, error: Exception | None = None) -> HealingContext:
        self.state = SimpleNamespace(global_step=5)
        trainer = SimpleNamespace(state=self.state, args=SimpleNamespace(output_dir=str(run.context.directory)))
        phase = SimpleNamespace(phase=SimpleNamespace(value="in the optimizer step"), moved=False)
        instrument: Any = SimpleNamespace(trainer=trainer, reentry=phase)
        context = HealingContext(run.journal.incidents[0] if run.journal.incidents else None, instrument, error=error)  # type: ignore[arg-type]
        if hasattr(self, "back"):
            context.attempted, context.went_back = [Action.ROLL_BACK], self.back
        return context

    def test_the_run_goes_on_from_it(self, run: Run) -> None:
        assert self.save(run) == {"checkpoint": "emergency/checkpoint-6"}
        assert run.attempts.resume_point is self.point
        (how,) = self.saved
        assert (how["run"], how["heals"], self.made_room) == ("run", False, ["left"])
        assert how["give_way"]() is True

    def test_a_state_that_an_exception_left_is_healed_first(self, run: Run) -> None:
        self.save(run, ValueError())
        assert self.saved[0]["heals"]

    def test_it_may_not_be_wanted(self, run: Run) -> None:
        found = self.save(run, emergency_checkpoint=False)
        assert found == {"checkpoint": None, "why": "emergency_checkpoint=False", "happened": False}
        assert self.saved == []

    @pytest.mark.parametrize(
        ("processes", "why"),
        [
            (1, "the weights cannot be trusted: it happened in the optimizer step"),
            (2, "several processes train together, and the others may not be able to save"),
        ],
    )
    def test_where_there_is_no_state_to_save_it_says_why(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, processes: int, why: str
    ) -> None:
        monkeypatch.setattr(ending.consensus, "world_size", lambda: processes)
        self.point = None
        assert self.save(run) == {"checkpoint": None, "why": why, "happened": False}
        assert run.attempts.resume_point is None

    def test_one_that_cannot_be_written_is_none(self, run: Run, caplog: pytest.LogCaptureFixture) -> None:
        self.point = OSError("full")
        assert self.save(run) == {"checkpoint": None, "why": "OSError: full", "happened": False}
        assert "falling back on the newest regular one" in caplog.text

    def test_a_device_that_is_lost_meanwhile_is_told_of(self, run: Run) -> None:
        self.point = RuntimeError("CUDA error: an illegal memory access was encountered")
        with pytest.raises(RuntimeError, match="illegal memory"):
            self.save(run)

    @pytest.mark.parametrize(
        ("back", "newest", "why"),
        [
            (None, None, "there is no trusted state to save"),
            (WentBack(0, Target.INITIAL, 6, 0), None, "it would hold the state the run began with"),
            (WentBack(4, Target.NEWEST, 2, 4), 6, "{} holds more training"),
            (WentBack(4, Target.NEWEST, 2, 4), 9, "{} holds more training"),
            (WentBack(4, Target.NEWEST, 2, 4), 5, ""),
            (WentBack(4, Target.NEWEST, 2, 4), None, ""),
        ],
    )
    def test_a_state_gone_back_to_is_saved_where_it_got_furthest(
        self, run: Run, tmp_path: Path, back: WentBack | None, newest: int | None, why: str
    ) -> None:
        self.back = back
        if newest is not None:
            checkpoint = tmp_path / "checkpoint-1"
            checkpoint.mkdir()
            write_marker(checkpoint, "run", newest, {}, emergency=False)
            self.newest = str(checkpoint)
        found = self.save(run)
        assert found.get("why", "") == why.format(self.newest)
        assert len(self.saved) == (not why)

    def test_steps_that_are_not_in_the_weights_are_no_training(self, run: Run) -> None:
        self.back = WentBack(4, Target.NEWEST, 2, 4)
        run.numerics.trained_steps = lambda finished: finished - 6  # type: ignore[method-assign]
        assert self.save(run)["why"] == "it would hold the state the run began with"


def test_the_wait_is_that_of_the_times_the_run_was_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = SimpleNamespace(draw_wait=lambda times: times + 0.00049)
    monkeypatch.setattr(ending, "RetryPolicy", SimpleNamespace(of=lambda config: policy))
    slept: list[float] = []
    run = assemble(HealingConfig(), tmp_path, sleep=slept.append, run_id="run")
    resorts = LastResorts(run.context, run.attempts, run.ending, run.rollback, run.last_step)
    found = []
    for run.context.budget.used in (0, 1, 3):
        context, args = SimpleNamespace(), SimpleNamespace()
        found.append(resorts.table()[Action.WAIT_AND_RESUME](context, args))  # type: ignore[arg-type]
    assert slept == [1.00049, 1.00049, 3.00049]
    assert found == [{"waited_seconds": 1.0}, {"waited_seconds": 1.0}, {"waited_seconds": 3.0}]


def test_a_stop_ends_the_run_and_lets_go_of_the_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = assemble(HealingConfig(), tmp_path, run_id="run")
    stopped: list[tuple[Any, ...]] = []
    released: list[bool] = []

    def stop(*given: Any) -> UnrecoverableTrainingError:
        stopped.append(given)
        return UnrecoverableTrainingError("over", failure=FailureType.DIVERGENCE)

    monkeypatch.setattr(run.ending, "stop", stop)
    monkeypatch.setattr(run.rollback, "release", lambda: released.append(True))
    incident, error = run.journal.open(3, "made up", {}), ValueError()
    given = HealingContext(incident, verdict="it rose", error=error, resume_from="checkpoint-2")
    resorts = LastResorts(run.context, run.attempts, run.ending, run.rollback, run.last_step)
    for context in (given, HealingContext(incident)):
        with pytest.raises(UnrecoverableTrainingError, match="over"):
            resorts.table()[Action.STOP](context, SimpleNamespace())  # type: ignore[arg-type]
    assert stopped == [(incident, "it rose", error, "checkpoint-2"), (incident, "it was asked to stop", None, None)]
    assert released == [True, True]


class TestWhatACheckpointOwes:
    @pytest.fixture
    def go_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
        """Goes on from a checkpoint, at step 4; gives what was done, in order."""
        done: list[Any] = []
        self.point: Any = None
        self.paid = self.written = True
        self.odd: Exception | None = None

        def take_over(bookkeeping: Any) -> None:
            if self.odd is not None:
                raise self.odd
            done.append(("taken over", bookkeeping))

        def write_again(instrument: Any, path: Path, run: str, leave: Any, later: Any) -> bool:
            done.append(("written again", path.name, run, leave))
            return self.written

        def deliver(resumed_from: str, pending: Any, leave: Any, since: float) -> str:
            done.append(("delivered", Path(resumed_from).name, pending.log))
            return "left"

        def continue_from(point: Any, since: float) -> bool:
            point.pending, point.bookkeeping = None, {}
            done.append("continued")
            return self.paid

        monkeypatch.setattr(attempts, "write_again", write_again)
        monkeypatch.setattr(attempts, "load_generated", lambda trainer, path: done.append(("generated", path.name)))
        instrument: Any = SimpleNamespace(
            trainer=None,
            view=SimpleNamespace(device=torch.device("cpu")),
            ledger=SimpleNamespace(take_over=take_over),
            reentry=SimpleNamespace(continue_from=continue_from, deliver_pending=deliver),
        )
        run = assemble(HealingConfig(), tmp_path, run_id="run")

        def go_on(
            marker: dict[str, Any] | None, saving: dict[str, Any] | None = None, resumed: bool = True, step: int = 4
        ) -> list[Any]:
            checkpoint = tmp_path / "checkpoint-4"
            checkpoint.mkdir()
            (checkpoint / "trainer_state.json").write_text("{}")
            if marker is not None:
                write_marker(checkpoint, "run", 4, marker, emergency=False)
            if saving is not None:
                run.attempts.record = RunRecord(tmp_path, "run")
                run.attempts.record.about_to_save("checkpoint-4", saving)
            if self.point is not None:
                self.point.path = str(checkpoint)
            run.attempts.resume_point = self.point
            continue_bookkeeping(run.context, run.attempts, instrument, str(checkpoint) if resumed else None, step)
            return done

        return go_on

    def test_its_marker_says_where_losses_and_metrics_stood(self, go_on: Callable[..., list[Any]]) -> None:
        assert go_on({"loss": 2.5}) == [("taken over", {"loss": 2.5}), ("generated", "checkpoint-4")]

    def test_one_of_another_step_does_not(self, go_on: Callable[..., list[Any]]) -> None:
        assert go_on({"loss": 2.5}, step=5) == []

    def test_without_a_marker_the_record_says_what_it_was_to_say(self, go_on: Callable[..., list[Any]]) -> None:
        assert go_on(None, {"loss": 3.5}) == [("taken over", {"loss": 3.5}), ("generated", "checkpoint-4")]

    def test_the_marker_comes_first(self, go_on: Callable[..., list[Any]]) -> None:
        assert go_on({"loss": 2.5}, {"loss": 3.5})[0] == ("taken over", {"loss": 2.5})

    def test_a_new_run_owes_nothing(self, go_on: Callable[..., list[Any]]) -> None:
        assert go_on({"loss": 2.5}, resumed=False) == []

    def test_what_is_owed_is_done_and_the_checkpoint_written_again(self, go_on: Callable[..., list[Any]]) -> None:
        done = go_on({"owes": {"pending": {"log": True}}})
        assert done[2:] == [("delivered", "checkpoint-4", True), ("written again", "checkpoint-4", "run", "left")]

    def test_bookkeeping_that_cannot_be_taken_over_stops_nothing(
        self, go_on: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
    ) -> None:
        self.odd = KeyError("loss")
        assert go_on({"loss": 2.5}) == [("generated", "checkpoint-4")]
        assert "cannot be taken over (KeyError: 'loss')" in caplog.text

    @pytest.mark.parametrize(("paid", "written", "owes"), [(True, True, False), (True, False, True), (False, True, 0)])
    def test_an_emergency_checkpoint_of_this_process_is_written_again_once_it_owes_nothing(
        self, go_on: Callable[..., list[Any]], paid: bool, written: bool, owes: bool
    ) -> None:
        self.point = SimpleNamespace(pending="a log", bookkeeping={"loss": 1.0}, leave="left")
        self.paid, self.written = paid, written
        done = go_on({"loss": 2.5})
        assert done == ["continued", *([("written again", "checkpoint-4", "run", "left")] if paid else [])]
        # Still owed if it could not be written.
        assert (self.point.pending == "a log") == owes
        assert (self.point.bookkeeping == {"loss": 1.0}) == owes


class TestAProcessThatALostDeviceCouldAbort:
    @pytest.fixture(autouse=True)
    def _ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        monkeypatch.setattr(ending, "_last", [])
        monkeypatch.setattr(os, "_exit", lambda code: self.done.append(code))
        monkeypatch.setattr(logging, "shutdown", lambda: self.done.append("logs"))

    def test_it_ends_with_its_code_after_the_last_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        threads: list[Any] = []
        monkeypatch.setattr(
            threading,
            "Thread",
            lambda target, name, daemon: threads.append((target, daemon)) or SimpleNamespace(start=lambda: None),
        )
        monkeypatch.setattr(ending, "time", SimpleNamespace(sleep=lambda seconds: self.done.append(seconds)))
        error = RuntimeError("lost")
        ending.end_process_with(75, error)
        ending.end_process_with(1, error, within=3.0)
        # Kept, so that nothing in its frames is freed.
        assert ending._last[0] == (75, error)
        (end, daemon), (sooner, _) = threads
        assert daemon
        end()
        sooner()
        assert self.done == [60.0, 75, 3.0, 1]
        self.done.clear()
        ending._end()
        assert self.done == ["logs", 75]

    def test_what_is_printed_last_comes_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flushed: list[str] = []

        def closed() -> None:
            raise ValueError("closed")

        monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=closed))
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(flush=lambda: flushed.append("stderr")))
        ending._last.append((75, RuntimeError("lost")))
        ending._end()
        assert (flushed, self.done) == (["stderr"], ["logs", 75])

    def test_others_end_as_they_would(self) -> None:
        ending._end()
        assert self.done == []


class TestTheLauncher:
    def test_under_torchrun_the_agent_is_the_nearest_process_it_has_not_started(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def process(pid: int, of_torchrun: bool) -> Any:
            environment = {"TORCHELASTIC_RUN_ID": "a"} if of_torchrun else {}
            return SimpleNamespace(environ=lambda: environment, pid=pid)

        above = [process(os.getpid(), True), process(os.getppid(), False), process(1, False)]
        monkeypatch.setattr(psutil.Process, "parents", lambda self: above)
        restarted = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
        launch = launch_of(restarted)
        assert launch.agent_age == pytest.approx(Process.of(os.getppid()).age, abs=30.0)
        assert (launch.agent_is_parent, launch.rendezvous) == (False, "a")
        del above[0]
        assert launch_of(restarted).agent_is_parent
        above.clear()
        assert launch_of(restarted).agent_age is None

    def test_where_it_cannot_be_looked_at_its_age_is_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: Any) -> None:
            raise psutil.AccessDenied

        monkeypatch.setattr(psutil.Process, "parents", refuse)
        launch = launch_of({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"})
        assert (launch.agent_age, launch.agent_is_parent) == (None, False)

    def test_jobs_and_pods_are_known_by_their_names(self) -> None:
        pod = launch_of({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
        assert (pod.launcher, pod.in_a_pod, pod.started_again, pod.job) == ("none", True, False, "")
        both = launch_of({"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "7", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
        assert (both.launcher, both.in_a_pod, both.job) == ("torchrun", True, "7")
        assert launch_of({"SLURM_JOB_ID": "7"}).job == "7"
        assert not launch_of({}).in_a_pod

    def test_restarts_that_are_left_are_never_negative(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("RUN_ID", "a"), ("RESTART_COUNT", "3"), ("MAX_RESTARTS", "1")):
            monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
        assert launch_of().restarts_left == 0
        assert restarts_on_exit(HealingConfig()) is False
        assert restarts_on_exit(HealingConfig(launcher_restarts="yes")) is True
        assert restarts_on_exit(HealingConfig(launcher_restarts="no")) is False
