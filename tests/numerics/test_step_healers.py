"""Healers of steps, asked one question each, without a trainer or a model."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up_run import MadeUpRun, MadeUpWindow

from self_healing import Action, FailureType, Incident, UnrecoverableTrainingError
from self_healing.failures.recipes import Cause, Symptom
from self_healing.healers.numerics.diagnosis import find_poison_rows
from self_healing.healers.numerics.healer import DamagedCheckpointHealer, NumericsHealer, RollbackClimb
from self_healing.healers.numerics.judge import MemoryWhileHealing, StepJudge, UntrainedRunHealer
from self_healing.healers.numerics.loss import DivergenceHealer, RedFlagHealer, StepObserver
from self_healing.healers.numerics.nonfinite import CorruptedStateHealer
from self_healing.healers.numerics.remedies import NumericsRemedies
from self_healing.hf.objective import StepSignals
from self_healing.rollback.rollback import WentBack
from self_healing.run.healer import HealingContext
from self_healing.run.incidents import Diagnosis


NAN = math.nan


def judged(run: MadeUpRun, *windows: MadeUpWindow) -> StepJudge:
    judge = StepJudge(*run.parts)
    for window in windows:
        judge.judge(run.at(window))
    return judge


def healthy(steps: int, first: int = 0) -> list[MadeUpWindow]:
    """Losses and gradients that stray a little."""
    return [MadeUpWindow(first + n, 2.0 + 0.01 * (n % 3), 1.0 + 0.02 * (n % 5)) for n in range(steps)]


def climb(run: MadeUpRun) -> RollbackClimb:
    return RollbackClimb(*run.parts, DamagedCheckpointHealer(*run.parts))


class TestNonfinite:
    def test_a_fault_that_passes_leaves_the_step_computed_again(self, tmp_path: Path) -> None:
        run, window = MadeUpRun(tmp_path), MadeUpWindow(3, NAN, again=(2.0, 1.0))
        judged(run, window)
        assert run.actions.applied == [Action.USE_REEXECUTED_STEP]
        assert window.accepted
        assert not window.skipped
        assert run.journal.incidents[0].failure is FailureType.NONFINITE_TRANSIENT

    def test_a_step_that_nothing_explains_is_left_out(self, tmp_path: Path) -> None:
        run, window = MadeUpRun(tmp_path), MadeUpWindow(3, NAN)
        judged(run, window)
        assert window.skipped
        assert run.journal.incidents[0].failure is FailureType.NONFINITE_NUMERICAL

    def test_a_state_that_is_not_finite_is_gone_back_from(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path, trusted=[2])
        run.nonfinite = ["lm_head.weight"]
        judged(run, MadeUpWindow(5, NAN))
        assert run.actions.applied == [Action.ROLL_BACK, Action.REPLAY_STEPS]
        assert run.journal.incidents[0].failure is FailureType.CORRUPTED_STATE

    def test_patience_ends_and_the_run_goes_back_with_a_lower_rate(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path, trusted=[2], nan_patience=2)
        judged(run, MadeUpWindow(5, NAN), MadeUpWindow(6, NAN))
        assert run.actions.applied[-3:] == [Action.ROLL_BACK, Action.SKIP_STEP, Action.REDUCE_LEARNING_RATE]

    def test_what_is_only_reported_is_one_incident(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path, on_nonfinite="warn")
        judged(run, MadeUpWindow(5, NAN), MadeUpWindow(6, NAN), MadeUpWindow(7, NAN))
        assert len(run.journal.incidents) == 1
        assert run.actions.applied == []


class MadeUpExperiments:
    """Finite but for some rows; counts what is tried."""

    def __init__(self, *bad: tuple[int, int]) -> None:
        self._bad, self.probes = set(bad), 0

    def probe(self, index: int, rows: Sequence[int]) -> bool:
        self.probes += 1
        return not self._bad & {(index, row) for row in rows}

    def probe_row(self, index: int, row: int) -> bool:
        return self.probe(index, [row])


class TestPoisonRows:
    def test_each_is_found_by_halves(self) -> None:
        experiments: Any = MadeUpExperiments((1, 5), (1, 40))
        assert find_poison_rows(experiments, [64, 64], torch.device("cpu")) == {1: [5, 40]}
        assert experiments.probes < 64

    def test_one_that_fails_only_once_is_none(self) -> None:
        experiments: Any = MadeUpExperiments((0, 0))
        probe = experiments.probe
        experiments.probe = lambda index, rows: experiments.probes > 0 or probe(index, rows)
        assert find_poison_rows(experiments, [1], torch.device("cpu")) == {}


class TestSpikes:
    def test_one_that_is_gone_when_computed_again_is_applied_as_computed_again(self, tmp_path: Path) -> None:
        run, window = MadeUpRun(tmp_path), MadeUpWindow(60, 2.0, 1e4, again=(2.0, 1.0))
        judged(run, *healthy(60), window)
        assert run.actions.applied == [Action.USE_REEXECUTED_STEP]
        assert run.journal.incidents[0].failure is FailureType.SPIKE_TRANSIENT

    def test_one_of_the_gradient_alone_is_clipped(self, tmp_path: Path) -> None:
        run, window = MadeUpRun(tmp_path), MadeUpWindow(60, 2.0, 1e4)
        judged(run, *healthy(60), window)
        assert run.actions.applied == [Action.CLIP_GRADIENT]
        assert run.numerics.observed_step == 60

    def test_nothing_is_done_about_one_that_is_only_reported(self, tmp_path: Path) -> None:
        run, window = MadeUpRun(tmp_path, on_spike="warn"), MadeUpWindow(60, 2.0, 1e4)
        judged(run, *healthy(60), window)
        assert run.actions.applied == []
        assert run.incidents == [("gradient_spike", "reported")]
        assert window.computed == 1


class TestDivergence:
    def test_a_loss_that_stays_up_holds_checkpoints_where_no_state_is_trusted(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        risen = [MadeUpWindow(100 + n, 6.0 + 0.01 * (n % 3), 1.0 + 0.02 * (n % 5)) for n in range(40)]
        judged(run, *healthy(100), *risen)
        assert set(run.actions.applied) == {Action.HOLD_CHECKPOINTS}
        assert run.journal.incidents[0].failure is FailureType.DIVERGENCE

    def test_on_request_it_ends_the_run(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path, on_divergence="stop")
        risen = [MadeUpWindow(100 + n, 6.0 + 0.01 * (n % 3), 1.0 + 0.02 * (n % 5)) for n in range(40)]
        with pytest.raises(UnrecoverableTrainingError, match="the weights are not proven to be the cause"):
            judged(run, *healthy(100), *risen)
        assert not run.numerics.watch.open

    @pytest.mark.parametrize("on_divergence", ["warn", "stop"])
    def test_what_looking_for_the_cause_took_is_lost_where_nothing_is_done(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_divergence: str
    ) -> None:
        def diagnose(self: DivergenceHealer, window: Any, loss: float) -> Diagnosis:
            time.sleep(0.05)
            return Diagnosis(FailureType.DIVERGENCE, Cause.UNKNOWN)

        monkeypatch.setattr(DivergenceHealer, "diagnose_rise", diagnose)
        run = MadeUpRun(tmp_path, trusted=[90], on_divergence=on_divergence)
        risen = [MadeUpWindow(100 + n, 6.0 + 0.01 * (n % 3), 1.0 + 0.02 * (n % 5)) for n in range(40)]
        with contextlib.suppress(UnrecoverableTrainingError):
            judged(run, *healthy(100), *risen)
        assert run.journal.incidents[0].seconds_lost >= 0.05


def red_flag(run: MadeUpRun) -> Incident:
    incident = run.journal.open(5, "rule:entropy", {"action": "rollback"})
    run.journal.diagnosed(incident, FailureType.RED_FLAG, "entropy", {})
    return incident


class TestRedFlags:
    def test_a_rule_that_stops_does_so_before_the_next_step(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        run.stop.incident = run.journal.open(4, "rule:kl", {"diagnosis": "the policy has left its reference"})
        run.journal.diagnosed(run.stop.incident, FailureType.RED_FLAG, "kl", {})
        window = MadeUpWindow(5)
        window.stop_wanted = True
        with pytest.raises(UnrecoverableTrainingError, match=r"has left its reference \(rule kl\)"):
            judged(run, window)
        assert run.actions.applied == [Action.EMERGENCY_CHECKPOINT, Action.STOP]

    def test_one_that_goes_back_is_reported_where_no_state_is_trusted(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        window = MadeUpWindow(5)
        window.rollback_wanted = True
        run.numerics.roll_back_for = red_flag(run)
        judged(run, window)
        assert run.incidents == [("red_flag", "reported")]
        assert run.actions.applied == []

    def test_one_that_goes_back_does(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path, trusted=[2])
        run.numerics.roll_back_for = red_flag(run)
        RedFlagHealer(*run.parts, climb(run)).roll_back(run.at(MadeUpWindow(5)))
        assert run.actions.applied[0] is Action.ROLL_BACK


class TestCorruptedState:
    def test_a_save_is_told_that_the_state_is_finite(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        run.at(MadeUpWindow(5))
        CorruptedStateHealer(*run.parts, climb(run)).vouch_for_state()
        assert run.rollback.scanned == [(5, True)]

    def test_without_a_trusted_state_it_is_reported_once(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        run.nonfinite = ["optimizer:0.exp_avg"]
        healer = CorruptedStateHealer(*run.parts, climb(run))
        for step in (5, 10):
            run.at(MadeUpWindow(step))
            healer.vouch_for_state()
        assert run.rollback.scanned == [(5, False), (10, False)]
        assert run.incidents == [("corrupted_state", "reported")]

    def test_a_half_applied_step_ends_the_run_where_no_state_is_trusted(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        window = run.at(MadeUpWindow(5))
        incident = run.journal.open(5, "out_of_memory", {})
        context: Any = HealingContext(incident, run.instrument, window)
        with pytest.raises(UnrecoverableTrainingError, match="may have updated some weights and not others"):
            CorruptedStateHealer(*run.parts, climb(run)).heal_interrupted_step(context)


class TestClimb:
    def test_without_a_state_to_go_back_to_the_run_ends(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        window = run.at(MadeUpWindow(5))
        context: Any = HealingContext(run.journal.open(5, "divergence", {}), run.instrument, window)
        with pytest.raises(UnrecoverableTrainingError, match="no trusted state to go back to"):
            climb(run).take_rung(context, FailureType.DIVERGENCE)
        assert run.actions.applied == [Action.STOP]

    def test_each_rung_is_noted_and_the_next_one_is_lower(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path, trusted=[2])
        healer = climb(run)
        for step, rung in ((60, 1), (61, 2)):
            window = run.at(MadeUpWindow(step))
            context: Any = HealingContext(run.journal.open(step, "divergence", {}), run.instrument, window)
            healer.take_rung(context, FailureType.DIVERGENCE)
            assert context.incident.evidence["rung"] == rung
            assert healer.went_back_in == step
        assert Action.REDUCE_LEARNING_RATE not in run.actions.applied[:2]
        assert Action.REDUCE_LEARNING_RATE in run.actions.applied[2:]


class TestDamagedCheckpoint:
    def test_enough_healthy_steps_end_the_trial(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path, snapshot_verify_steps=5)
        run.numerics.on_trial = True
        judged(run, *healthy(4))
        assert run.numerics.on_trial
        judged(run, *healthy(2, first=4))
        assert not run.numerics.on_trial

    def test_nothing_is_tried_in_a_run_that_was_not_resumed(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        window = run.at(MadeUpWindow(5, NAN))
        context: Any = HealingContext(run.journal.open(5, "nonfinite_loss", {}), run.instrument, window)
        DamagedCheckpointHealer(*run.parts).suspect(context)
        assert window.computed == 1


class TestUntrainedRun:
    def test_a_run_most_of_whose_steps_are_missing_has_failed(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        for step in range(6):
            run.numerics.missing.left_out(step)
        run.at(MadeUpWindow(10))
        with pytest.raises(UnrecoverableTrainingError, match="only 4 of its 10 steps are in the weights"):
            UntrainedRunHealer(*run.parts, DamagedCheckpointHealer(*run.parts)).stop_unless_trained()

    def test_a_run_whose_engine_skips_every_step_stops(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        healer = UntrainedRunHealer(*run.parts, DamagedCheckpointHealer(*run.parts))
        # Told twice of some, as where a step is judged again; one step between the first and the others was applied.
        for step in (3, *range(5, 25)):
            healer.stop_unless_training(step)
            healer.note_skipped(step)
            healer.note_skipped(step)
        run.at(MadeUpWindow(24))
        with pytest.raises(UnrecoverableTrainingError, match=r"every step is skipped: .* all 20 since step 5"):
            healer.stop_unless_training(24)

    def test_one_that_trains_again_does_not(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        healer = UntrainedRunHealer(*run.parts, DamagedCheckpointHealer(*run.parts))
        for step in range(20):
            healer.note_skipped(step)
        healer.stop_unless_training(21)
        assert run.journal.incidents == []

    def test_a_run_half_of_whose_steps_are_missing_has_not(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        for step in range(5):
            run.numerics.missing.left_out(step)
        run.at(MadeUpWindow(10))
        UntrainedRunHealer(*run.parts, DamagedCheckpointHealer(*run.parts)).stop_unless_trained()
        assert run.journal.incidents == []


def out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


class TestMemoryWhileHealing:
    def test_a_sound_step_goes_on(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        run = MadeUpRun(tmp_path)
        window = run.at(MadeUpWindow(5))
        MemoryWhileHealing(*run.parts).contain(out_of_memory, window)  # type: ignore[arg-type]
        assert not window.skipped
        assert "the next one is watched again" in caplog.text

    def test_one_that_is_not_sound_ends_the_run(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        window = run.at(MadeUpWindow(5, NAN))
        with pytest.raises(UnrecoverableTrainingError, match="memory ran out, twice"):
            MemoryWhileHealing(*run.parts).contain(out_of_memory, window)  # type: ignore[arg-type]
        assert window.skipped
        assert run.actions.applied == [Action.EMERGENCY_CHECKPOINT, Action.STOP]

    def test_the_verdict_names_what_was_looked_into(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        window = run.at(MadeUpWindow(5, NAN))

        def heal() -> None:
            run.journal.open(5, "not_looked_into_yet", {})
            known = run.journal.open(5, "nonfinite_loss", {})
            run.journal.diagnosed(known, FailureType.CORRUPTED_STATE, Cause.CORRUPTED_STATE, {})
            out_of_memory()

        with pytest.raises(UnrecoverableTrainingError, match=r"something that was wrong \(corrupted state\)"):
            MemoryWhileHealing(*run.parts).contain(heal, window)  # type: ignore[arg-type]

    def test_a_mistake_of_ours_is_none_of_it(self, tmp_path: Path) -> None:
        run = MadeUpRun(tmp_path)
        with pytest.raises(KeyError):
            MemoryWhileHealing(*run.parts).contain(lambda: {}["x"], run.at(MadeUpWindow(5)))  # type: ignore[arg-type]


class TestRemedies:
    """What actions do, asked one by one."""

    def carry_out(self, run: MadeUpRun, action: Action, window: MadeUpWindow | None = None) -> dict[str, Any]:
        incident = run.journal.open(5, "divergence", {})
        context: Any = HealingContext(incident, run.instrument, window)
        remedies: Any = NumericsRemedies(*run.parts)
        return remedies.table()[action](context, run.instrument.trainer.args)

    @pytest.mark.parametrize("in_a_step", [True, False])
    def test_a_step_that_is_gone_back_in_is_missing_too(self, tmp_path: Path, in_a_step: bool) -> None:
        run = MadeUpRun(tmp_path)
        run.rollback.go_back = lambda target, step, incident: WentBack(4, target, 6, 4)  # type: ignore[attr-defined]
        window = run.at(MadeUpWindow(10))
        self.carry_out(run, Action.ROLL_BACK, window if in_a_step else None)
        assert run.numerics.missing.count == 6 + in_a_step

    def test_moments_begin_anew_with_a_warm_up(self, tmp_path: Path) -> None:
        run, weight = MadeUpRun(tmp_path), torch.nn.Parameter(torch.ones(2))
        optimizer = run.instrument.trainer.optimizer = torch.optim.AdamW([weight])
        weight.sum().backward()
        optimizer.step()
        done = self.carry_out(run, Action.RESET_MOMENTS)
        assert not optimizer.state
        assert done == {"warmup_steps": run.numerics.learning_rate.warmup}
        assert run.numerics.learning_rate.scale(0) == 1 / run.numerics.learning_rate.warmup

    def test_an_optimizer_that_is_not_known_keeps_its_state(self, tmp_path: Path) -> None:
        run, weight = MadeUpRun(tmp_path), torch.nn.Parameter(torch.ones(2))
        run.instrument.trainer.optimizer = torch.optim.Adagrad([weight])
        done = self.carry_out(run, Action.RESET_MOMENTS)
        assert not done["happened"]
        assert run.instrument.trainer.optimizer.state
        assert run.numerics.learning_rate.scale(0) == 1.0


def test_a_step_after_a_warm_restart_of_the_schedule_is_seen(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path)
    judge = judged(run)
    for step, rate in enumerate([1e-3, 5e-4, 1e-4, 1e-3]):
        run.instrument.view.scheduled_rate = rate
        judge.judge(run.at(MadeUpWindow(step, 2.0)))
    assert run.numerics.schedule.raised_at == 3


def test_an_incident_is_opened_with_what_was_seen(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path)
    symptom = Symptom("dead_loss", 7, {"value": 0.0})
    incident = NumericsHealer(*run.parts).open(symptom, FailureType.DEAD_LOSS, "dead loss").incident
    assert (incident.step, incident.failure, incident.cause) == (7, FailureType.DEAD_LOSS, "dead loss")


def test_parameters_unfrozen_soon_after_a_resume_are_no_spike(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path)
    frozen, trained = torch.nn.Parameter(torch.zeros(1), requires_grad=False), torch.nn.Parameter(torch.zeros(1))
    run.instrument.trainer.optimizer = SimpleNamespace(param_groups=[{"params": [frozen, trained]}])
    usual, anew = [True], list[int]()
    run.numerics.panel = SimpleNamespace(  # type: ignore[assignment]
        gradient_is_usual=lambda signals: usual[0], reset_gradient_baseline=lambda: anew.append(1)
    )
    observer = StepObserver(*run.parts, None, None)  # type: ignore[arg-type]
    # Resumed with a baseline, at a step that is not one of every so many.
    for step in (13, 14):
        observer.step_begins(StepSignals(step, 1.0, 1.0))
    frozen.requires_grad_(True)
    usual[0] = False
    observer.step_begins(StepSignals(15, 1.0, 9.0))
    assert anew == [1]
