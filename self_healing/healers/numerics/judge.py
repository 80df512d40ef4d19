"""Judges one step from top to bottom, and hands it to who heals it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ...failures.classify import describe_exception
from ...failures.recipes import Action, Cause, FailureType, TrainingFault, UnrecoverableTrainingError
from ...hf.memory import free_memory, is_out_of_memory, memory_figures, release_frames
from ...hf.objective import StepSignals
from ...hf.step import Bounds, Window
from ...journal.incident import Incident
from ...ranks import votes
from ...run.healer import Healer, HealingContext
from ...run.run import Run
from ...system import processes
from .healer import NumericsHealer, RollbackEscalation
from .loss import LOOK_EVERY, AppliedSteps, RedFlagHealer, SpikeHealer
from .nonfinite import CorruptedStateHealer, NonfiniteHealer
from .replicas import ReplicaHealer
from .state import NumericsState


logger = logging.getLogger("self_healing")


# ---- judge ----


class StepJudge(Healer):
    """Judges the steps of a run, with gradients computed and nothing applied yet, and hands each to who heals it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.numerics = run.part(NumericsState)
        self.rollback = run.rollback
        self.applied = AppliedSteps(run)
        # The others ask the run for these.
        run.add(RollbackEscalation(run), self.applied)
        self.memory = OomDuringHealing(run)
        self.red_flags = RedFlagHealer(run)
        self.corrupted_state = CorruptedStateHealer(run)
        self.replicas = ReplicaHealer(run)
        self.nonfinite = NonfiniteHealer(run)
        self.spikes = SpikeHealer(run)
        self.untrained_run = TooManySkippedSteps(run)

    def attach(self, first: bool) -> None:
        self.run.instrument.rates.control = self.numerics.learning_rate
        self.run.instrument.saves.watch = self.numerics.watch

    def judge(self, window: Window) -> None:
        """Judges one step. It is left as it is, healed in place, or left out; or the run ends."""
        if self.rollback.copies_in_doubt:
            # A step later: what is copied anew in every step is healed by now.
            self.corrupted_state.look_at_copies()
        known, states = len(self.run.journal.incidents), self.rollback.states
        try:
            signals, calm = self._judge(window)
            applied = self.numerics.applied
            if applied is not None and applied.step == window.step:
                # As it was healed.
                signals = applied
            due = states.step_taken(window, signals.loss, calm, self.replicas.compared_since)
            tensors = states.promote(window.step) if due else []
            if self.rollback.checkpoints.waiting:
                states.verify_checkpoints(window.step)
            if tensors:
                self.corrupted_state.heal_silent(window, tensors)
            return
        except Exception as caught:
            error = self.memory.ran_out(caught)
        # Outside of the handler: what the failed attempt held is gone.
        self.memory.go_on_without(error, window, known)

    def bounds(self, window: Window) -> Bounds | None:
        """See [`Healer.bounds`]: not of a step in which anything else may be done than to wait for the detectors."""
        run, numerics, step = self.run, self.numerics, window.step
        bounds = numerics.bounds
        if bounds is None or numerics.watch.incident is not None or numerics.repeatability.owed:
            return None
        asked = run.stop_incident or numerics.roll_back_for or run.asked_to_leave or run.news.waiting
        if asked or step <= numerics.observed_step or step % LOOK_EVERY == 0 or self.rollback.copies_in_doubt:
            return None
        compares = not self.replicas.off and self.replicas.due(step)
        return None if compares or self.rollback.states.will_trust(step) else bounds.single()

    def _judge(self, window: Window) -> tuple[StepSignals, bool]:
        """The signals of a step as it is applied, healed where it has to be; whether nothing was wrong with it."""
        run, numerics, step = self.run, self.numerics, window.step
        compares = not self.replicas.off and self.replicas.due(step)
        signals = window.signals(
            stop=run.stop_incident is not None,
            roll_back=numerics.roll_back_for is not None,
            leave=run.asked_to_leave is not None,
            news=run.news.waiting,
            digest=self.replicas.digest if compares else None,
        )
        numerics.schedule.observe(step, window.engine.view.scheduled_rate)
        if step % LOOK_EVERY == 0:
            self.applied.look_at_parameters(step)
            self.applied.look_at_weights(signals)
        asked = window.stop_wanted or window.rollback_wanted or window.has_news or compares
        acted_on = asked or numerics.watch.incident or numerics.repeatability.owed or step <= numerics.observed_step
        if numerics.bounds is not None and not acted_on and numerics.bounds.admit(signals):
            # Healthy: the detectors have nothing to say of it, and are shown it later, in one go with others.
            numerics.waiting.append(signals)
            numerics.applied, numerics.observed_step = signals, step
            if run.outcomes.awaited:
                run.outcomes.take_in(signals.loss, step)
            return signals, True
        if numerics.waiting:
            numerics.feed()
        numerics.bounds = None
        if window.has_news:
            run.news.exchange(run.instrument.view.device)
        if not self.replicas.off and self._heal_replicas(window, compares, suspicious=not signals.finite):
            # What was to be judged was computed with weights that were not the same on all ranks.
            return window.signals(), False
        if signals.finite and not window.stop_wanted and not window.rollback_wanted:
            # What the detectors see is the same on all ranks: nothing to meet for.
            undisturbed = True
            with run.instrument.failsafe.noted():
                undisturbed = self._look(window, signals)
        else:
            undisturbed = self._look(window, signals)
        if not signals.finite:
            # Rows that were left out may be drawn again by any rank, right after the last step of an epoch.
            run.news.exchange(run.instrument.view.device)
        return signals, undisturbed and numerics.settled

    def _heal_replicas(self, window: Window, compared: bool, suspicious: bool) -> bool:
        """Heals weights that are not the same on all ranks any more; returns whether there were any."""
        apart = window.apart
        if not compared:
            if not suspicious or self.replicas.same_at is None:
                return False
            apart = self.replicas.apart()
        self.replicas.note(window.step, apart)
        return apart and self.replicas.heal(window)

    def _look(self, window: Window, signals: StepSignals) -> bool:
        """Looks at a step, and heals it; returns whether it was left as it is."""
        numerics, finite = self.numerics, signals.finite
        if window.engine.left_out_by_itself:
            self.untrained_run.note_skipped(window.step)
        if self.untrained_run.skipped:
            self.untrained_run.stop_unless_training(window.step)
        if window.stop_wanted:
            self.red_flags.stop(window)
        roll_back = window.rollback_wanted
        if numerics.repeatability.owed and finite:
            numerics.repeatability.measure(window)
            signals = window.signals()
            finite = signals.finite
        opened = numerics.opened + numerics.watch.opened
        symptom = None if finite else numerics.detector.judge(signals, window.engine.scaler_active)
        if symptom is not None:
            self.nonfinite.heal(window, symptom)
        elif roll_back:
            self.red_flags.roll_back(window)
        elif finite:
            self._judge_finite(window, signals)
        return finite and not window.skipped and numerics.opened + numerics.watch.opened == opened

    def _judge_finite(self, window: Window, signals: StepSignals) -> None:
        """Takes in a step that is finite, unless its gradient has to be healed."""
        panel, clipping = self.numerics.panel, self.numerics.clipping
        assert panel is not None, "it is there before the first step"
        self.numerics.detector.overflows = 0
        symptom = panel.alarming(signals)
        unusual = symptom is not None or (clipping is not None and clipping.acts)
        if unusual and not panel.gradient_is_usual(signals) and self.applied.look_at_parameters(signals.step):
            symptom = panel.alarming(signals)
        if symptom is not None and self.spikes.heals:
            with self.run.instrument.failsafe.together():
                self.spikes.heal(window, symptom)
            return
        if symptom is not None:
            self.spikes.report(symptom)
        self.applied.take_in(window, signals)

    # ---- events beside it ----

    def rows_raise(self, window: Window, error: Exception) -> bool:
        return self.nonfinite.rows_raise(window, error)

    def left_out_by_engine(self) -> None:
        window = self.run.instrument.window
        if window is not None:
            self.untrained_run.note_skipped(window.step)
            # Whether anything is trained still is looked at in the next, which therefore does not wait.
            self.numerics.feed()

    # ---- between two steps ----

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        found, clipping, rate = dict[str, float](), self.numerics.clipping, self.numerics.learning_rate
        if self.run.attached is not None and rate.touched:
            found["healing/lr_scale"] = rate.scale(self.run.step)
        return found | clipping.metrics() if training and clipping is not None else found

    def verify_state(self) -> None:
        self.memory.contain(self.corrupted_state.verify_state, None)

    def heal_interrupted_step(self, context: HealingContext) -> None:
        self.memory.contain(lambda: self.corrupted_state.heal_interrupted_step(context), context.window, unsound=True)

    def left_half_way(self, window: Window) -> bool:
        run, why, step = self.run, self.run.instrument.call.half_way, self.run.instrument.view.step
        if processes.world_size() > 1:
            return False
        logger.warning("Step %d: %s. The steps since the newest trusted state are applied again.", step, why)
        again = self.rollback.repeat(window)
        if again.steps is None:
            logger.warning("Step %d: the weights are left as they are: %s.", step, again.why)
            return False
        run.journal.event("made_anew", step, to_step=step - again.steps, **again.to_dict())
        # As with a snapshot, which is trusted after as many steps.
        shown = not 0 < again.steps < run.config.snapshot_verify_steps and not again.apart
        run.journal.doubt = "" if shown else f"{why}; they were made anew, and few steps show how exactly"
        return True

    def read_logs(self, step: int, logs: Mapping[str, Any]) -> None:
        self.red_flags.read_logs(step, logs)

    def last_step_taken(self) -> None:
        """
        Heals weights that turned NaN with the last step, which would be handed over as trained, and ends as failed a
        run most of whose steps are not in the weights, or none of those since it was resumed.
        """
        self.corrupted_state.look_at_copies()
        device = self.run.instrument.view.device
        if votes.any_rank("news at the end", self.run.news.waiting, device):
            self.run.news.exchange(device)
        # What cannot be looked at is not handed over as trained.
        self.memory.contain(self.corrupted_state.heal_the_end, None, unsound=True)
        if not self.run.instrument.leaving.begun:
            self.untrained_run.stop_unless_trained()


# ---- memory while healing: keeps a run going, or ends it, where healing itself runs out of memory ----


class OomDuringHealing(NumericsHealer):
    """Runs code that heals; where memory runs out in it, training goes on, or ends if the step needed it."""

    def contain(self, heal: Callable[[], None], window: Window | None, unsound: bool = False) -> None:
        """Heals a step, and contains an out-of-memory error of healing itself."""
        known = len(self.run.journal.incidents)
        try:
            heal()
            return
        except Exception as caught:
            error = self.ran_out(caught)
        # Outside of the handler: what the failed attempt held is gone.
        self.go_on_without(error, window, known, unsound)

    def ran_out(self, caught: Exception) -> BaseException:
        """Gives the out-of-memory error that an exception of healing is; in its handler: raises any other again."""
        error = caught.error if isinstance(caught, TrainingFault) else caught
        # On several ranks the others wait for this one. A fault may be claimed by who enters `train()` again.
        left_to_others = processes.world_size() > 1 or (error is not caught and self.run.healers.has_claim)
        if isinstance(caught, UnrecoverableTrainingError) or left_to_others or not is_out_of_memory(error):
            raise
        return error

    def go_on_without(self, error: BaseException, window: Window | None, known: int, unsound: bool = False) -> None:
        """Goes on training after memory ran out in what heals, or ends the run if the step needed it."""
        release_frames(error)
        opened = self.run.journal.incidents[known:]
        corrupted = any(incident.failure is FailureType.CORRUPTED_STATE for incident in opened)
        unsound |= corrupted or self.rollback.states.displaced
        if unsound or (self.acts and window is not None and not window.sound):
            self._stop_without_memory(error, window, opened)
        logger.warning(
            "Step %d: self_healing ran out of memory while it checked this step (%s). The step needs no healing and "
            "is applied as it is; checking resumes with the next one.",
            self.run.instrument.view.step,
            describe_exception(error),
        )

    def _stop_without_memory(
        self, error: BaseException, window: Window | None, opened: Sequence[Incident]
    ) -> NoReturn:
        instrument = self.run.instrument
        if window is not None:
            # No gradient of it is applied, and their memory is there for what is left to do.
            window.skip(None, keep_buffers=True)
        free_memory(instrument.view.device)
        evidence = {
            "place": "healing",
            "message": str(error)[:500],
            "memory": memory_figures(instrument.view.device),
            "remedy": "Please leave a little more room beside training, which by itself fits: a smaller "
            "per_device_train_batch_size with more gradient_accumulation_steps, or look for who else uses the device.",
        }
        ran_out = self.run.incident(instrument.view.step, "out_of_memory", evidence)
        ran_out.diagnosed(FailureType.OUT_OF_MEMORY, "out of memory in what self_healing does beside training")
        own = self.rollback.fall_back()
        held = "those of the last finished step" if own else "not those of the last finished step, and are not saved"
        wrong = ", ".join(each.cause for each in opened if each.cause != Cause.UNKNOWN) or "the step is not sound"
        context = HealingContext(ran_out.incident, instrument, window)
        context.verdict = (
            f"memory ran out, twice, while self_healing diagnosed a fault ({wrong}) that would have ruined the "
            f"weights. They are {held}"
        )
        self.numerics.limits.reset()
        if own:
            self.actions.apply(Action.EMERGENCY_CHECKPOINT, context, self.args)
        context.error = error
        self.actions.apply(Action.STOP, context, self.args)
        raise AssertionError("the last of these actions raises")


# ---- untrained run ----


# Share of a run's steps that have to be in its weights at its end.
_LEAST_TRAINED = 0.5
# This many steps in a row that the engine has skipped by itself are more than bad batches explain.
_SKIPPED_IN_A_ROW = 20


class TooManySkippedSteps(NumericsHealer):
    """Counts the steps that the engine skips by itself, and looks at the end of the run how much was trained."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.skipped = range(0)

    def note_skipped(self, step: int) -> None:
        """Counts a step that the engine has skipped by itself."""
        self.numerics.missing.left_out(step)
        since = self.skipped.start if step in (self.skipped.stop, self.skipped.stop - 1) else step
        self.skipped = range(since, step + 1)

    def stop_unless_training(self, step: int) -> None:
        """Ends a run whose engine leaves out one step after the other: it would do so until the end."""
        skipped = self.skipped
        if len(skipped) < _SKIPPED_IN_A_ROW or step > skipped.stop:
            return
        verdict = (
            f"every step is skipped: DeepSpeed has skipped all {len(skipped)} since step {skipped.start}, because "
            "loss or gradient was not finite, so nothing is trained any more"
        )
        self._end("every step is skipped", verdict, steps=skipped.stop, skipped_in_a_row=len(skipped))

    def stop_unless_trained(self) -> None:
        """
        At the end of the run: one most of whose steps are not in the weights, or none of those since it was resumed,
        has failed, however well it seems to have come to its end.
        """
        step, missing = self.run.instrument.view.step, self.numerics.missing
        trained, since = missing.trained(step), step - missing.entry_step
        none_since = since > 0 and trained <= missing.trained_at_entry
        if trained >= _LEAST_TRAINED * step and not none_since:
            return
        of_these = f", none of the {since} since step {missing.entry_step} among them" if none_since else ""
        verdict = f"the run has come to its end, but only {trained} of its {step} steps are in the weights{of_these}"
        cause = "most steps are not in the weights"
        self._end(cause, verdict, steps=step, trained=trained, since_entry=since)

    def _end(self, cause: str, verdict: str, **evidence: int) -> None:
        instrument = self.run.instrument
        with self.run.incident(instrument.view.step, "steps_missing", evidence) as opened:
            opened.diagnosed(FailureType.NOT_TRAINED, cause)
            context = HealingContext(opened.incident, instrument, instrument.window, verdict=verdict)
            self.actions.apply(Action.STOP, context, self.args)
