"""One optimizer step from top to bottom: is it fit to be applied, and if not, what becomes of it?"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NoReturn

from . import consensus
from .checkpoints.choice import mark_suspect, older_checkpoints
from .classify import describe_exception
from .config import HealingConfig
from .detectors import DetectorPanel, Symptom
from .diagnosis import diagnose, diagnose_rise, diagnose_start, diagnose_stillness
from .failures import FAILURE_RECIPES, Action, DamagedCheckpointError, FailureType, UnrecoverableTrainingError
from .instrument import Instrument, TrainingFault, Window, free_memory, is_out_of_memory, let_go, memory_figures
from .journal import Incident
from .offending_batch import save_offending_batch
from .rate_trial import try_rates
from .resume_trial import try_older_checkpoints
from .rollback import Target, WentBack
from .run.diagnosis import Diagnosis
from .run.remedies import HealingContext, Remedies
from .session import Session
from .signals import StepSignals


logger = logging.getLogger("self_healing")

# What the panel sees, and the failure it is a sign of; anything else is worth a note and no more.
_FAILURES = {
    "vanishing_gradient": FailureType.VANISHING_GRADIENT,
    "dead_loss": FailureType.DEAD_LOSS,
    "never_learned": FailureType.NEVER_LEARNED,
    "plateau": FailureType.PLATEAU,
    "slow_rise": FailureType.SLOW_RISE,
}
# They look at a run, and leave it as it is.
_LOOKS = frozenset({Action.CHECK_MODEL_INIT, Action.CHECK_DATA_QUALITY})
# Causes of a divergence that going back may cure, or has to end.
_MAY_GO_BACK = frozenset({"weights", "the computation, not the weights"})
# What a damaged checkpoint looks like at first.
_OF_A_DAMAGED_CHECKPOINT = frozenset(
    {FailureType.NONFINITE_NUMERICAL, FailureType.CORRUPTED_STATE, FailureType.DIVERGENCE}
)
# How far, in logarithms, a loss has to be above that of an older checkpoint at least, and where nothing is known of
# what is usual.
_LEAST_RISE, _CLEARLY_WORSE = 0.1, 1.0
# Older checkpoints that are tried: what is wrong with three of them is wrong with something else.
_OLDER_CHECKPOINTS = 3
# Share of a run's steps that have to be in its weights at its end.
_LEAST_TRAINED = 0.5
# What is to blame where weights that were never changed give numbers that are not finite.
_NOT_THE_RATE = {
    "model": "the model or the precision it computes in",
    "precision": "the precision it computes in",
    "data": "the data",
    "loss or labels": "the loss or the labels",
    "gradient": "the model, the loss or the precision they are computed in",
    "model, precision or data": "the model, the precision it computes in, or the data",
}
# With fewer steps to try learning rates on, the ladder is climbed rung by rung.
_LEAST_TRIAL_STEPS = 3

# Steps in which other parameters may be trained without anybody having looked: fewer than a baseline is learned in.
_LOOK_EVERY = 10


class StepJudge:
    """
    Judges the steps of a run, with gradients computed and nothing applied yet, and heals them.

    Args:
        config ([`HealingConfig`]):
            What to do about what.
        session ([`Session`]):
            The memory of the run.
        actions ([`Remedies`]):
            Carry out what is decided.
    """

    def __init__(self, config: HealingConfig, session: Session, actions: Remedies) -> None:
        self.config = config
        self.session = session
        self.actions = actions
        self._went_back_in = -1
        self._told_of_state = False
        self._trained: list[bool] = []

    def judge(self, window: Window) -> None:
        """One step. It is left as it is, healed in place, or left out; or the run ends."""
        self._within_memory(lambda: self._judge(window), window)

    def _judge(self, window: Window) -> None:
        session = self.session
        signals = self._signals(window)
        if window.stop_wanted:
            self._stop_for_red_flag(window)
        if session.numerics.repeatability.owed and signals.finite:
            session.numerics.repeatability.measure(window)
            signals = self._signals(window)
        session.numerics.schedule.observe(signals.step, self._instrument.view.scheduled_rate)
        self._look_what_is_trained(signals)
        incidents = len(session.journal.incidents)
        symptom = session.numerics.detector.judge(signals, window.scaler_active)
        if symptom is not None:
            self._heal_nonfinite(window, symptom)
        elif window.rollback_wanted:
            self._roll_back_for_red_flag(window)
        elif signals.finite:
            self._judge_finite(window, signals)
        undisturbed = signals.finite and not window.skipped and len(session.journal.incidents) == incidents
        tensors = session.rollback.step_taken(window, signals.loss, healthy=undisturbed and session.numerics.calm)
        if session.numerics.on_trial and self._stands_the_test():
            session.numerics.on_trial = False
        if tensors:
            self._heal_silent_corruption(window, tensors)

    def _signals(self, window: Window) -> StepSignals:
        session = self.session
        return window.signals(
            stop=session.stop_for is not None,
            roll_back=session.numerics.roll_back_for is not None,
            leave=session.preempted,
        )

    def _look_what_is_trained(self, signals: StepSignals) -> None:
        """
        With other parameters the gradient has another norm (gradual unfreezing): no spike, but a new usual.

        Nothing tells when `requires_grad` changes, and asking hundreds of parameters takes as long as all detectors.
        So they are asked while the norm is not the usual one, before anything is said about it, and now and then.
        """
        if signals.step % _LOOK_EVERY and self._panel.gradient_is_usual(signals):
            return
        # Whether they may have a gradient, not whether they have one: experts that no token went to have none.
        groups = getattr(self._instrument.trainer.optimizer, "param_groups", ())
        trained = [parameter.requires_grad for group in groups for parameter in group["params"]]
        if self._trained and trained != self._trained:
            logger.info("Step %d: other parameters are trained; what gradient is usual is learned anew.", signals.step)
            self._panel.learn_gradients_anew()
            if self.session.numerics.clipping is not None:
                self.session.numerics.clipping.begin_anew()
        self._trained = trained

    # ---- where healing itself runs out of memory ----

    def _within_memory(self, heal: Callable[[], None], window: Window | None, unsound: bool = False) -> None:
        """
        Does something of ours. Where that runs out of memory for good, a step that is sound goes on as it is, and for
        any other the run ends: without what healing would have done, its weights would be lost.

        Args:
            heal (`Callable[[], None]`):
                What is done.
            window ([`Window`], *optional*):
                The step in hand; between two steps there is none.
            unsound (`bool`, *optional*, defaults to `False`):
                Whether it is known before that something is wrong.
        """
        known = len(self.session.journal.incidents)
        try:
            heal()
            return
        except UnrecoverableTrainingError:
            raise
        except Exception as caught:
            error = self._memory_ran_out(caught)
            if error is None:
                raise
        # Outside of the handler: what the failed attempt held is gone.
        let_go(error)
        instrument = self._instrument
        opened = self.session.journal.incidents[known:]
        corrupted = any(incident.failure is FailureType.CORRUPTED_STATE for incident in opened)
        unsound |= corrupted or self.session.rollback.displaced
        unsound |= self._acts and window is not None and not window.sound
        if not unsound:
            logger.warning(
                "Step %d: no memory was left for what self_healing does beside training (%s). Nothing is to be done "
                "about the step; it goes on as it is, and the next one is looked after again.",
                instrument.view.step,
                describe_exception(error),
            )
            return
        self._stop_without_memory(error, window, opened)

    def _memory_ran_out(self, error: Exception) -> Exception | None:
        """The out-of-memory error in which healing has ended; `None` for any other, and where somebody heals it."""
        if isinstance(error, TrainingFault):
            # Of several processes, or handed to the wrapper, which enters `train()` again.
            if consensus.world_size() > 1 or self.session.handed_over is not None:
                return None
            error = error.error
        return error if is_out_of_memory(error) else None

    def _stop_without_memory(self, error: Exception, window: Window | None, opened: Sequence[Incident]) -> NoReturn:
        session, instrument = self.session, self._instrument
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
        incident = session.journal.open(instrument.view.step, "out_of_memory", evidence)
        cause = "out of memory in what self_healing does beside training"
        session.journal.diagnosed(incident, FailureType.OUT_OF_MEMORY, cause, {})
        own = session.rollback.fall_back()
        held = "those of the last finished step" if own else "not those of the last finished step, and are not saved"
        wrong = ", ".join(each.cause for each in opened if each.cause != "unknown") or "the step is not sound"
        context = HealingContext(incident, instrument, window)
        context.verdict = (
            f"memory ran out, twice, while self_healing looked into something that was wrong ({wrong}); without that "
            f"the weights would have been lost. They are {held}"
        )
        for each in opened:
            if each.outcome == "open":
                session.journal.closed(each, "unresolved")
        session.numerics.policy.start_anew()
        if own:
            self.actions.apply(Action.EMERGENCY_CHECKPOINT, context, self._args)
        context.error = error
        self.actions.apply(Action.STOP, context, self._args)
        raise AssertionError("the last of these actions raises")

    # ---- not finite ----

    def _heal_nonfinite(self, window: Window, symptom: Symptom) -> None:
        session = self.session
        began = time.perf_counter()
        if not self._acts and session.numerics.reported_step == symptom.step - 1:
            # Nothing is done about it, so it stays that way: one incident for all of it.
            session.numerics.reported_step = symptom.step
            return
        session.numerics.reported_step = symptom.step
        incident = session.journal.open(symptom.step, symptom.name, symptom.evidence)
        diagnosis = self._diagnose(window)
        session.journal.diagnosed(incident, diagnosis.failure, diagnosis.cause, diagnosis.evidence)
        context = HealingContext(incident, self._instrument, window, diagnosis)
        if diagnosis.failure is FailureType.CORRUPTED_STATE:
            self._climb(context, diagnosis.failure)
            self._after_rollback(incident, began, window)
            return
        if diagnosis.everywhere and not self._instrument.weights_moved:
            self._stop_at_the_start(context, began)
        decision = session.numerics.policy.decide(diagnosis, acts=self._acts)
        if diagnosis.failure is not FailureType.NONFINITE_TRANSIENT:
            self._keep_batch(window, incident)
        context.verdict = decision.verdict
        self.actions.apply(decision.actions, context, self._args)
        incident.seconds_lost = time.perf_counter() - began
        if not window.skipped and decision.actions:
            healed = window.signals()
            session.outcomes.take_in(healed.loss, self._instrument.view.step)
            self._observe(window, healed)
        session.outcomes.wait_for(incident)
        stop = session.numerics.policy.note(
            window.skipped,
            explained=diagnosis.failure is FailureType.NONFINITE_POISON_ROWS,
            rows=diagnosis.rows,
            dropped=diagnosis.poison_rows,
        )
        if stop is not None:
            if diagnosis.failure is FailureType.NONFINITE_NUMERICAL and session.numerics.policy.out_of_patience:
                if not self._instrument.weights_moved:
                    self._stop_at_the_start(context, began)
                self._climb(context, diagnosis.failure, verdict=stop)
                self._after_rollback(incident, began, window)
                return
            context.verdict = stop
            session.numerics.policy.start_anew()
            self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, self._args)
        session.journal.dealt_with(incident)

    def _stop_at_the_start(self, context: HealingContext, began: float) -> NoReturn:
        """
        Ends a run whose weights no update has changed: they are what they were given as, and no state to go back to
        and no lower rate makes them others.
        """
        session, incident, window = self.session, context.incident, context.window
        if window is None:
            raise ValueError("ending a run at its start needs `context.window`")
        self._suspect_checkpoint(context)
        found = diagnose_start(window, str(incident.evidence.get("why", "")))
        session.journal.diagnosed(incident, found.failure, found.cause, found.evidence)
        incident.evidence.pop("why", None)
        window.skip(None)
        context.verdict = (
            "loss or gradient is not finite, and no update has changed the weights yet, so it is neither the learning "
            f"rate nor the optimizer, but {_NOT_THE_RATE[found.cause]}. {found.evidence['diagnosis']}"
        )
        incident.steps_lost = max(incident.steps_lost, 1)
        incident.seconds_lost = time.perf_counter() - began
        session.numerics.policy.start_anew()
        self.actions.apply(FAILURE_RECIPES[found.failure].ladder, context, self._args)
        raise AssertionError("the last of these actions raises")

    @property
    def _acts(self) -> bool:
        """Whether anything is done about a step that is not finite."""
        return self.config.on_nonfinite != "warn" and self._instrument.view.can_reexecute

    def _diagnose(self, window: Window) -> Diagnosis:
        if self.config.on_nonfinite != "heal" or not self._acts:
            return Diagnosis(
                FailureType.NONFINITE_UNDIAGNOSED, "not looked for", {"on_nonfinite": self.config.on_nonfinite}
            )
        return diagnose(window, self._instrument, self.config, self.session.healthy_inputs)

    # ---- resumed from a checkpoint that may be damaged ----

    def _stands_the_test(self) -> bool:
        """Whether enough healthy steps have followed a resume; without a gradient a step shows nothing."""
        return self.session.rollback.streak >= self.config.snapshot_verify_steps and not self._panel.vanishing.below

    def _suspect_checkpoint(self, context: HealingContext) -> None:
        """
        A run that has not been well since it was resumed: before anything else is blamed, older checkpoints are tried
        on the same batch. Where it is the checkpoint, the run goes on from the older one, or ends.
        """
        session, instrument, window = self.session, self._instrument, context.window
        resumed, incident = session.first_resume, context.incident
        if not session.numerics.on_trial or resumed is None or window is None or not instrument.view.can_reexecute:
            return
        moved = instrument.weights_moved
        trial = try_older_checkpoints(
            window,
            session.rollback,
            resumed,
            self._older_than(resumed),
            scale=session.numerics.learning_rate.scale(window.step),
            rise=self._half_of_the_rise(window.signals().loss),
            unmoved=session.numerics.missing.trained(window.step) <= session.numerics.missing.trained_at_entry,
        )
        # The updates of the experiment are none of the run's.
        instrument.weights_moved = moved
        if trial.tried:
            incident.evidence["with_checkpoints"] = trial.tried
            self._compute_anew(window)
        if trial.sound is None:
            return
        session.numerics.on_trial = False
        cause = "the checkpoint it was resumed from"
        session.journal.diagnosed(incident, FailureType.DAMAGED_CHECKPOINT, cause, {"damaged": trial.damaged})
        if consensus.is_first_rank() and self._args.should_save:
            for damaged in trial.damaged:
                mark_suspect(damaged, str(self._args.output_dir), incident.id)
        if session.may_enter_again and session.budget.spend(instrument.view.step):
            raise DamagedCheckpointError(incident, trial.sound)
        context.resume_from = trial.sound
        context.verdict = (
            f"the run has not been well since it was resumed from {resumed}; with {trial.sound} the same batch is well"
        )
        self.actions.apply((Action.STOP,), context, self._args)

    def _half_of_the_rise(self, loss: float) -> float:
        """Half of how far a loss is above what was usual, in logarithms: the other half may be the batch."""
        level, scale = self._panel.loss_level, self._panel.loss_trend.scale
        if level is None or not math.isfinite(loss) or not min(level, loss) > 0:
            return _CLEARLY_WORSE
        return max(0.5 * math.log(loss / level), 2 * scale, _LEAST_RISE)

    def _older_than(self, checkpoint: str) -> Iterator[str]:
        """Older checkpoints, as the first rank sees them."""
        output_dir = str(self._args.output_dir)
        found = older_checkpoints(checkpoint, output_dir) if consensus.is_first_rank() else iter(())
        for _ in range(_OLDER_CHECKPOINTS):
            older: str | None = consensus.from_first_rank(next(found, None))
            if older is None:
                return
            yield older

    def _compute_anew(self, window: Window) -> None:
        """After an experiment: the step is what it was before it."""
        if window.skipped:
            window.skip(self.session.numerics.detector.last_loss)
            return
        window.reexecute()
        window.accept()

    # ---- back to a trusted state ----

    def _climb(self, context: HealingContext, failure: FailureType, verdict: str = "") -> None:
        """Takes the next rung of the ladder: back to a trusted state, with what has to change, or the end."""
        session, instrument, incident, window = self.session, self._instrument, context.incident, context.window
        if window is None:
            raise ValueError("going back in the middle of a run needs `context.window`")
        if failure in _OF_A_DAMAGED_CHECKPOINT:
            self._suspect_checkpoint(context)
        if not session.rollback.can_go_back():
            why = verdict or FAILURE_RECIPES[failure].diagnosis.rstrip(".")
            context.verdict = f"{why}; there is no trusted state to go back to, neither in memory nor on disk"
            session.numerics.policy.start_anew()
            saving = failure is FailureType.NONFINITE_NUMERICAL
            self.actions.apply(
                (Action.EMERGENCY_CHECKPOINT, Action.STOP) if saving else (Action.STOP,), context, self._args
            )
            return
        step = instrument.view.step
        control = session.numerics.learning_rate
        decision = session.numerics.ladder.next(
            failure,
            step,
            early=session.rollback.early(step),
            may_reduce=instrument.view.can_scale_rate and not control.exhausted,
            rate=f"{instrument.view.learning_rate:.3g}, after {_times(control.reductions)}",
        )
        # The last one that was applied; those since then were left out.
        context.blamed_step = max(step - session.numerics.policy.unhealed_in_a_row, 0)
        incident.evidence["rung"] = decision.rung
        context.verdict = "; ".join(each for each in (verdict, decision.verdict) if each)
        context.target = decision.target or context.target
        if decision.failure is not None:
            session.journal.diagnosed(incident, decision.failure, incident.cause, {})
        if decision.stops:
            session.numerics.policy.start_anew()
            session.numerics.ladder.start_anew()
            if incident.cause.startswith("the computation"):
                context.verdict += (
                    "; trusted weights give the same loss, so it is neither they nor the rate, but what is computed. "
                    "If its definition changes on purpose, set on_divergence='warn'"
                )
        if decision.target is Target.INITIAL and Action.REDUCE_LEARNING_RATE in decision.actions:
            context.rate_scale = self._try_rates(context)
        self.actions.apply(decision.actions, context, self._args)
        self._went_back_in = window.step
        self._owe_checkpoint(context.went_back)
        if context.went_back is None and not decision.stops:
            found = ", ".join(instrument.view.nonfinite_tensors()[:5])
            frozen = f" (not finite still: {found}; what is frozen is in no snapshot)" if found else ""
            context.verdict = (
                f"{FAILURE_RECIPES[failure].diagnosis.rstrip('.')}, and no state tried was any better{frozen}"
            )
            self.actions.apply((Action.STOP,), context, self._args)

    def _try_rates(self, context: HealingContext) -> float | None:
        """A run that fails in its first steps: the factor with which it learns, if there is one within reach."""
        session, instrument, panel = self.session, self._instrument, self._panel
        start, steps = session.rollback.ring.initial, session.rollback.first_steps
        if start is None or len(steps) < _LEAST_TRIAL_STEPS or context.window is None:
            return None
        step = instrument.view.step
        control = session.numerics.learning_rate
        try:
            trial = try_rates(
                context.window,
                session.rollback,
                start,
                steps,
                now=control.scale(step),
                lowest=control.lowest(step),
                limit=panel.divergence.early_limit,
                adaptive=instrument.view.beta2 is not None,
            )
        except TrainingFault as fault:
            logger.warning("Learning rates could not be tried out.", exc_info=fault.error)
            return None
        finally:
            session.rollback.try_on(start)
        found = {f"{scale:.4g}": loss for scale, loss in trial.losses.items()}
        context.incident.evidence["loss_by_rate_scale"] = found
        return trial.scale

    def _heal_silent_corruption(self, window: Window, tensors: list[str]) -> None:
        """A state that is not finite where no loss has shown it yet: a row of an embedding, a running mean."""
        session, instrument = self.session, self._instrument
        found = instrument.view.nonfinite_tensors()
        if self.config.on_nonfinite != "heal" or not self._on_any_rank(bool(found)):
            return
        began = time.perf_counter()
        incident = session.journal.open(window.step, "nonfinite_state", {"tensors": found[:20] or tensors})
        session.journal.diagnosed(incident, FailureType.CORRUPTED_STATE, "corrupted state", {})
        self._climb(HealingContext(incident, instrument, window), FailureType.CORRUPTED_STATE)
        self._after_rollback(incident, began, window)

    def run_ends(self) -> None:
        """After the last step: weights that turned NaN with it would be handed over as trained."""
        # What cannot be looked at is not handed over as trained.
        self._within_memory(self._heal_the_end, None, unsound=True)

    def _heal_the_end(self) -> None:
        session, instrument = self.session, self._instrument
        window, step = instrument.window, instrument.view.step
        if self.config.on_nonfinite != "heal" or not instrument.view.can_reexecute or window is None:
            return
        found = instrument.view.nonfinite_tensors()
        if not self._on_any_rank(bool(found)):
            return
        incident = session.journal.open(step, "nonfinite_state", {"tensors": found[:20]})
        session.journal.diagnosed(incident, FailureType.CORRUPTED_STATE, "corrupted state", {})
        best = instrument.trainer.state.best_model_checkpoint if instrument.view.best_model_loaded else None
        if best is not None and not self._on_any_rank(any(not name.startswith("optimizer:") for name in found)):
            incident.evidence["why"] = (
                f"The best model ({best}) is loaded, and finite: nothing was changed. A checkpoint that was written "
                "with this optimizer state is refused at a resume"
            )
            session.journal.dealt_with(incident)
            session.journal.closed(incident, "reported")
            return
        went = self._undo_corruption(incident, window, step)
        if went is None:
            context = HealingContext(incident, instrument, window)
            context.verdict = "the weights at the end of the run are not finite, and there is no trusted state"
            self.actions.apply((Action.STOP,), context, self._args)
            return
        if best is not None:
            reached = went.step if incident.steps_lost else step
            incident.evidence["why"] = (
                f"The best model ({best}) was not finite: the weights are those of step {reached}"
            )
        session.journal.dealt_with(incident)
        session.journal.closed(incident, "resolved")
        if consensus.from_first_rank(bool(went.suspects) and not session.rollback.has_good_checkpoint(step)):
            # Otherwise a resume would go back to before the fault.
            instrument.write_checkpoint()

    def _undo_corruption(self, incident: Incident, window: Window, step: int) -> WentBack | None:
        """Between two steps: back to the newest trusted state, and the finished steps since then applied again."""
        session = self.session
        went = session.rollback.go_back(Target.NEWEST, step - 1, incident.id)
        if went is None:
            return None
        session.journal.acted(incident, Action.ROLL_BACK.value, **went.to_dict())
        session.numerics.missing.went_back(step, went.trained)
        replayed = session.rollback.replay(window, session.numerics.is_well, finished=True)
        incident.steps_lost = went.steps_lost if replayed.steps is None else 0
        if replayed.steps is None:
            session.journal.acted(incident, Action.REPLAY_STEPS.value, happened=False, why=replayed.why)
            incident.figures.append(f"the steps since then were not kept: {replayed.why}")
        else:
            session.numerics.missing.applied_again(replayed.steps)
            session.journal.acted(incident, Action.REPLAY_STEPS.value, **replayed.to_dict())
            session.outcomes.nothing_lost_since(went.step)
            went = session.rollback.reinstate(went)
        self._owe_checkpoint(went)
        return went

    def _owe_checkpoint(self, went: WentBack | None) -> None:
        """Checkpoints that are suspect now have to be replaced as soon as the loss is back."""
        if consensus.from_first_rank(went is not None and bool(went.suspects)):
            self.session.numerics.watch.owed = True

    # ---- what goes into a checkpoint ----

    def vouch_for_state(self) -> None:
        """
        Right before a checkpoint is written: searches all that goes into it for NaN and Inf that no loss has shown,
        and heals what it finds, so that the checkpoint can be trusted.
        """
        self._within_memory(self._vouch_for_state, None)

    def _vouch_for_state(self) -> None:
        session, instrument = self.session, self._instrument
        if not instrument.view.can_reexecute:
            # The engine holds the optimizer's state, and parts of the weights, where they cannot be looked at.
            return
        found = instrument.view.nonfinite_tensors()
        finite = not self._on_any_rank(bool(found))
        if not finite:
            finite = self._heal_state_to_be_saved(found)
        if not finite:
            instrument.disown_best()
        session.rollback.note_scan(instrument.view.step, finite)
        self._told_of_state = not finite

    def _heal_state_to_be_saved(self, found: list[str]) -> bool:
        session, instrument = self.session, self._instrument
        window, step = instrument.window or instrument.reentry.interrupted, instrument.view.step
        if self._told_of_state:
            # Nothing could be done about it at the save before this one.
            return False
        began = time.perf_counter()
        incident = session.journal.open(step, "nonfinite_state", {"tensors": found[:20]})
        session.journal.diagnosed(incident, FailureType.CORRUPTED_STATE, "corrupted state", {})
        if self.config.on_nonfinite != "heal" or window is None or session.leaving:
            return self._report_state(incident, "It is not healed here; no checkpoint of it is trusted")
        if not session.rollback.can_go_back():
            return self._report_state(
                incident, "There is no trusted state to go back to; no checkpoint of it is trusted"
            )
        context = HealingContext(incident, instrument, window)
        if not session.budget.spend(step):
            context.verdict = (
                f"{FAILURE_RECIPES[FailureType.CORRUPTED_STATE].diagnosis.rstrip('.')}; the budget of "
                f"{self.config.max_recovery_attempts} attempts without progress is spent"
            )
            self.actions.apply((Action.STOP,), context, self._args)
        with instrument.random_state_kept():
            went = self._undo_corruption(incident, window, step)
        if went is None:
            # What is frozen is in no snapshot.
            context.verdict = f"no trusted state is any better: {', '.join(instrument.view.nonfinite_tensors()[:5])}"
            self.actions.apply((Action.STOP,), context, self._args)
            return False
        if incident.steps_lost:
            # It is not what was evaluated.
            instrument.disown_best()
            session.rollback.settled(step - 1)
            session.numerics.went_back(incident)
            session.outcomes.wait_for(incident)
        else:
            session.journal.closed(incident, "resolved")
        incident.seconds_lost += time.perf_counter() - began
        session.journal.dealt_with(incident)
        return True

    def _report_state(self, incident: Incident, why: str) -> bool:
        incident.evidence["why"] = why
        self.session.journal.dealt_with(incident)
        self.session.journal.closed(incident, "reported")
        return False

    def stop_unless_trained(self) -> None:
        """
        At the end of the run: one most of whose steps are not in the weights, or none of those since it was resumed,
        has failed, however well it seems to have come to its end.
        """
        session, instrument, step = self.session, self._instrument, self._instrument.view.step
        missing = session.numerics.missing
        trained, since = missing.trained(step), step - missing.entry_step
        none_since = since > 0 and trained <= missing.trained_at_entry
        if trained >= _LEAST_TRAINED * step and not none_since:
            return
        evidence = {"steps": step, "trained": trained, "since_entry": since}
        incident = session.journal.open(step, "steps_missing", evidence)
        session.journal.diagnosed(incident, FailureType.NOT_TRAINED, "most steps are not in the weights", {})
        of_these = f", none of the {since} since step {missing.entry_step} among them" if none_since else ""
        verdict = f"the run has come to its end, but only {trained} of its {step} steps are in the weights{of_these}"
        context = HealingContext(incident, instrument, instrument.window, verdict=verdict)
        if none_since:
            self._suspect_checkpoint(context)
        self.actions.apply((Action.STOP,), context, self._args)

    def _on_any_rank(self, flag: bool) -> bool:
        return consensus.any_rank(flag, self._instrument.view.device)

    def _after_rollback(self, incident: Incident, began: float, window: Window) -> None:
        if not window.skipped:
            self._clip(window, window.signals())
        incident.seconds_lost += time.perf_counter() - began
        self.session.outcomes.wait_for(incident)
        self.session.journal.dealt_with(incident)

    def heal_interrupted_step(self, context: HealingContext) -> None:
        """
        After an `optimizer.step()` that raised and may have updated some weights and not others: back to the newest
        trusted state, with the steps since then applied again if that can be done; this step is computed again, too.
        """
        self._within_memory(lambda: self._heal_interrupted_step(context), context.window, unsound=True)

    def _heal_interrupted_step(self, context: HealingContext) -> None:
        if context.window is None:
            raise ValueError("going back in the middle of a run needs `context.window`")
        if not self.session.rollback.can_go_back():
            context.verdict += (
                "; it may have updated some weights and not others, and there is no trusted state to go back to, "
                "neither in memory nor on disk"
            )
            self.actions.apply(Action.STOP, context, self._args)
        self._instrument.step_undone()
        # Where the steps since then could not be applied again the first time, they are lost.
        replaying = () if context.window.skipped else (Action.REPLAY_STEPS,)
        self.actions.apply((Action.ROLL_BACK, *replaying), context, self._args)
        if context.went_back is None:
            context.verdict += "; it may have updated some weights and not others, and no trusted state was any better"
            self.actions.apply(Action.STOP, context, self._args)
        self._owe_checkpoint(context.went_back)
        if not context.window.skipped:
            self._clip(context.window, context.window.signals())

    def _may_go_back(self, step: int) -> bool:
        """
        Without a state to go back to, a run that goes on may still recover; one that was stopped cannot. After a warm
        restart the loss rises because it is meant to.
        """
        if self.config.on_divergence != "heal" or not self._instrument.view.can_reexecute:
            return False
        if self.session.numerics.schedule.raised_lately(step, self.config.divergence_patience):
            return False
        return self.session.rollback.can_go_back()

    def _may_try_trusted_weights(self, step: int) -> bool:
        """Before a verdict, whatever is done about it; where the run might go back, only if it may."""
        if self.config.on_divergence == "heal":
            return self._may_go_back(step)
        return self._instrument.view.can_reexecute and self.session.rollback.can_go_back()

    def _diagnose_rise(self, window: Window, loss: float) -> Diagnosis:
        panel = self._panel
        level = panel.loss_level if panel.loss_trend.ready else None
        if level is None:
            level = median(panel.divergence.first or [math.nan])
        return diagnose_rise(window, self.session.rollback, loss, level, panel.loss_trend.scale)

    def _heal_divergence(self, incident: Incident, window: Window) -> bool:
        """
        Finds out what made the loss rise, whatever is done about it; back to a trusted state if it was the weights.
        Harder data are left alone: only then is it dealt with here, too.
        """
        session, began = self.session, time.perf_counter()
        if not self._may_try_trusted_weights(window.step):
            return False
        if self.config.on_divergence == "heal":
            self._suspect_checkpoint(HealingContext(incident, self._instrument, window))
        found = self._diagnose_rise(window, window.signals().loss)
        if self.config.on_divergence != "warn" or found.failure is FailureType.HARDER_DATA:
            session.journal.diagnosed(incident, found.failure, found.cause, found.evidence)
        if found.cause in _MAY_GO_BACK and self.config.on_divergence == "heal":
            self._climb(HealingContext(incident, self._instrument, window, found), FailureType.DIVERGENCE)
            self._after_rollback(incident, began, window)
            return True
        # Computed again for the experiment, its gradient is as it came out of the backward.
        self._clip(window, window.signals())
        incident.seconds_lost += time.perf_counter() - began
        if found.failure is not FailureType.HARDER_DATA:
            # What is not known is no reason to change a run: it is watched.
            return False
        self._panel.divergence.prove_harmless()
        session.numerics.watch.forget()
        session.journal.dealt_with(incident)
        session.journal.closed(incident, "reported")
        return True

    def _heal_stillness(self, incident: Incident, window: Window) -> bool:
        """Weights that were driven where there is no gradient are a divergence, however slow the loss shows it."""
        began = time.perf_counter()
        self._suspect_checkpoint(HealingContext(incident, self._instrument, window))
        panel, still = self._panel, window.signals()
        first = median(panel.divergence.first or [math.nan])
        found = diagnose_stillness(window, self.session.rollback, still, first, panel.loss_trend.scale)
        if found.cause != "weights":
            return False
        self.session.journal.diagnosed(incident, found.failure, found.cause, found.evidence)
        self._climb(HealingContext(incident, self._instrument, window, found), FailureType.DIVERGENCE)
        self._after_rollback(incident, began, window)
        return True

    # ---- finite, and wrong all the same ----

    def _judge_finite(self, window: Window, signals: StepSignals) -> None:
        panel = self._panel
        symptom = panel.alarming(signals)
        if symptom is not None and self.config.on_spike == "heal" and self._instrument.view.can_reexecute:
            self._heal_spike(window, symptom)
            return
        self._remember_spike(signals)
        if symptom is not None:
            self._report_spike(symptom)
        self._take_in(window, signals)

    def _remember_spike(self, signals: StepSignals) -> None:
        if signals.step > self.session.numerics.observed_step:
            self._panel.remember_spike(signals)

    def _heal_spike(self, window: Window, symptom: Symptom) -> None:
        session = self.session
        began = time.perf_counter()
        incident = session.journal.open(symptom.step, symptom.name, symptom.evidence, symptom.severity)
        again = window.compute_again()
        transient = again.finite and self._panel.spike(again) is None
        if again.finite:
            # As it is without the passing fault: faults that come again and again are not what is usual.
            self._remember_spike(again)
        failure = FailureType.SPIKE_TRANSIENT if transient else FailureType.GRADIENT_SPIKE
        cause = "transient" if transient else "the same again" if again.finite else "not finite when computed again"
        evidence = {"again": {"loss": again.loss, "grad_norm": again.grad_norm}}
        session.journal.diagnosed(incident, failure, cause, evidence)
        if not transient:
            self._keep_batch(window, incident)
        if not transient and again.finite and self._weights_spike(incident, window, symptom, again):
            self._climb(HealingContext(incident, self._instrument, window), FailureType.DIVERGENCE)
            self._after_rollback(incident, began, window)
            return
        usual = self._panel.gradient_level
        decision = session.numerics.policy.decide_spike(symptom, transient, again.finite, may_clip=usual is not None)
        context = HealingContext(incident, self._instrument, window, clip_to=usual)
        self.actions.apply(decision.actions, context, self._args)
        incident.seconds_lost = time.perf_counter() - began
        session.outcomes.wait_for(incident)
        if window.skipped:
            context.verdict = session.numerics.policy.note(skipped=True, explained=True) or ""
            if context.verdict:
                session.numerics.policy.start_anew()
                self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, self._args)
        else:
            clipped = Action.CLIP_GRADIENT in decision.actions and usual is not None
            self._take_in(window, again, usual if clipped and usual is not None else math.inf)
        session.journal.dealt_with(incident)

    def _weights_spike(self, incident: Incident, window: Window, symptom: Symptom, again: StepSignals) -> bool:
        """
        Whether it is the weights: a batch that is left out does not come back in the next step. One such step is left
        to pass; that of the step after is held against trusted weights.
        """
        in_a_row = symptom.name == "co_spike" and window.step - 1 in self.session.numerics.policy.spike_skips
        if not in_a_row or not self._may_go_back(window.step):
            return False
        found = self._diagnose_rise(window, again.loss)
        if found.cause == "weights":
            self.session.journal.diagnosed(incident, found.failure, found.cause, found.evidence)
        return found.cause == "weights"

    def _report_spike(self, symptom: Symptom) -> None:
        if symptom.name == "co_spike":
            # The loss spike in the same step is an incident already.
            self.session.journal.noticed(symptom)
            return
        incident = self._open(symptom, FailureType.GRADIENT_SPIKE, "not looked for")
        self.session.journal.dealt_with(incident)
        self.session.journal.closed(incident, "reported")

    def _take_in(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        self.session.healthy_step(window, signals)
        self._observe(window, signals, clipped_to)

    def _keep_batch(self, window: Window, incident: Incident) -> None:
        # A batch is text in another alphabet.
        if self.config.save_offending_batch and self.config.quarantine_text:
            incident.evidence["batch_file"] = save_offending_batch(window, self.session.directory, incident)

    def _observe(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        """Shows the detectors a step that will be applied, and clips its gradient."""
        session, panel = self.session, self._panel
        self._clip(window, signals, clipped_to)
        if signals.step <= session.numerics.observed_step:
            # An exception came between this and the update: it is the same step again.
            return
        session.numerics.observed_step = signals.step
        for symptom in panel.observe(signals):
            if self._went_back_in == window.step:
                # What was seen belongs to the state that was left.
                return
            if symptom.name in ("loss_spike", "divergence"):
                session.numerics.watch.begin(symptom, lambda incident, failure: self._tell(incident, failure, window))
            elif symptom.name == "second_rise":
                session.numerics.watch.rises_further(symptom)
            elif symptom.name in _FAILURES and (symptom.name != "plateau" or self.config.lr_increase_factor > 1):
                failure = _FAILURES[symptom.name]
                self._tell(self._open(symptom, failure, symptom.name.replace("_", " ")), failure, window)
            else:
                session.journal.noticed(symptom)
        if self._went_back_in == window.step:
            return
        if panel.loss_is_usual:
            session.numerics.detector.accept(signals.loss)
        session.numerics.watch.follow(panel)

    def _clip(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        if self.session.numerics.clipping is not None:
            view = self._instrument.view
            ceiling = min(view.max_grad_norm or math.inf, clipped_to)
            self.session.numerics.clipping.apply(window, signals, ceiling, may_clip=view.can_reexecute)

    def _open(self, symptom: Symptom, failure: FailureType, cause: str) -> Incident:
        incident = self.session.journal.open(symptom.step, symptom.name, symptom.evidence, symptom.severity)
        self.session.journal.diagnosed(incident, failure, cause, {})
        return incident

    def _tell(self, incident: Incident, failure: FailureType, window: Window | None) -> None:
        if window is not None and self._heal_told(incident, failure, window):
            return
        if self.session.numerics.schedule.raised_lately(incident.step, self.config.divergence_patience):
            incident.evidence["why"] = "The schedule has just raised the learning rate again: it may well pass"
        decision = self.session.numerics.policy.decide_watched(failure)
        if Action.STOP in decision.actions:
            self.session.numerics.watch.forget()
        verdict = decision.verdict
        if verdict and failure is FailureType.DIVERGENCE and incident.cause != "weights":
            # The recipe blames the weights.
            verdict = f"The loss has risen and stays up; that it is the weights is not shown ({incident.cause})"
        context = HealingContext(incident, self._instrument, window, verdict=verdict)
        self.actions.apply(decision.actions, context, self._args)
        self.session.journal.dealt_with(incident)
        if _LOOKS.issuperset(decision.actions):
            self.session.journal.closed(incident, "reported")

    def _heal_told(self, incident: Incident, failure: FailureType, window: Window) -> bool:
        """Heals what going back can cure; whether the incident is dealt with."""
        if failure is FailureType.DIVERGENCE:
            return self._heal_divergence(incident, window)
        if failure is FailureType.VANISHING_GRADIENT and self._may_go_back(window.step):
            return self._heal_stillness(incident, window)
        return False

    # ---- what the trainer logs ----

    def read_logs(self, step: int, logs: Mapping[str, Any]) -> None:
        """Holds a log against the metric rules. A rule that ends the run does so before the next step is applied."""
        session, numerics = self.session, self.session.numerics
        evaluation = logs.get("eval_loss")
        if isinstance(evaluation, float):
            symptom = self._panel.observe_evaluation(step, evaluation)
            if symptom is not None:
                session.journal.noticed(symptom)
        if numerics.rules is None:
            return
        for symptom in numerics.rules.observe(step, logs):
            if symptom.severity == "info":
                session.journal.noticed(symptom)
                continue
            incident = self._open(symptom, FailureType.RED_FLAG, symptom.name.removeprefix("rule:").replace("_", " "))
            action = str(symptom.evidence.get("action"))
            if session.numerics.policy.acts_on(action) and action == "stop" and session.stop_for is None:
                session.stop_for = incident
            elif (
                session.numerics.policy.acts_on(action)
                and action == "rollback"
                and session.numerics.roll_back_for is None
            ):
                session.numerics.roll_back_for = incident
            else:
                session.journal.dealt_with(incident)
                session.journal.closed(incident, "reported")

    def _stop_for_red_flag(self, window: Window) -> None:
        session = self.session
        incident = session.stop_for or self._seen_elsewhere(window)
        session.stop_for = None
        evidence = incident.evidence
        verdict = str(evidence.get("diagnosis", "a metric rule ended the run"))
        if incident.failure is FailureType.RED_FLAG:
            verdict += f" (rule {incident.cause})"
        context = HealingContext(incident, self._instrument, window, verdict=verdict)
        self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, self._args)

    def _roll_back_for_red_flag(self, window: Window) -> None:
        session = self.session
        began = time.perf_counter()
        incident = session.numerics.roll_back_for or self._seen_elsewhere(window)
        session.numerics.roll_back_for = None
        if not self._instrument.view.can_reexecute or not session.rollback.can_go_back():
            incident.evidence["why"] = "Its action is to roll back, and there is no trusted state to go back to"
            session.journal.dealt_with(incident)
            session.journal.closed(incident, "reported")
            return
        self._climb(HealingContext(incident, self._instrument, window), FailureType.RED_FLAG)
        self._after_rollback(incident, began, window)

    def _seen_elsewhere(self, window: Window) -> Incident:
        """A red flag that another rank has seen, in a metric that is not the same everywhere."""
        incident = self.session.journal.open(window.step, "red_flag_on_another_rank", {})
        self.session.journal.diagnosed(incident, FailureType.RED_FLAG, "seen by another rank", {})
        return incident

    # ---- the run it belongs to ----

    @property
    def _instrument(self) -> Instrument:
        if self.session.instrument is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        return self.session.instrument

    @property
    def _panel(self) -> DetectorPanel:
        if self.session.numerics.panel is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        return self.session.numerics.panel

    @property
    def _args(self) -> Any:
        return self._instrument.trainer.args


def _times(reductions: int) -> str:
    return "one reduction" if reductions == 1 else f"{reductions} reductions"
