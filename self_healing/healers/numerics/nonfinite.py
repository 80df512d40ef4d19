"""Steps or weights that are not finite."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from ...failures.classify import add_note, describe_exception
from ...failures.recipes import FAILURE_RECIPES, THE_END, Action, Cause, FailureType, Given, Symptom
from ...hf.state import nonfinite_copies
from ...hf.step import Window
from ...ranks import votes
from ...rollback.rollback import RollbackRecord
from ...run.healer import HealingContext
from ...run.incidents import Diagnosis, OpenIncident
from ...system.random_state import RandomState
from .diagnosis import diagnose, diagnose_start, rows_that_raise
from .healer import NumericsHealer, keep_batch
from .loss import AppliedSteps


# ---- nonfinite: heals steps whose loss or gradient is not finite ----


# What is to blame where weights that were never changed give numbers that are not finite.
_NOT_THE_RATE = {
    Cause.MODEL: "the model or the precision it computes in",
    Cause.PRECISION: "the precision it computes in",
    Cause.DATA: "the data",
    Cause.LOSS_OR_LABELS: "the loss or the labels",
    Cause.GRADIENT: "the model, the loss or the precision they are computed in",
    Cause.MODEL_PRECISION_OR_DATA: "the model, the precision it computes in, or the data",
}
# What to do about it; where no place was found, the recipe has all of it.
_REMEDIES: dict[Cause, str] = {
    Cause.DATA: "Repair these values where they are made, or leave the column out: they are NaN or Inf before "
    "anything is computed. `check_data_quality` counts the rows.",
    Cause.PRECISION: "Train in bf16 or fp32 instead of fp16, which ends at 65504.",
    Cause.MODEL: "Look at this module: log(0) or a division by zero in a layer of your own, or weights converted to a "
    "type with too small a range (fp16 ends at 65504: load the model in bf16 or fp32).",
    Cause.LOSS_OR_LABELS: "Look at labels that are all masked, and for log(0) or a division by zero in a loss of your "
    "own.",
    Cause.GRADIENT: "Look for the square root or the norm of 0, a division by a value near 0, or a `where` one branch "
    "of which is not finite.",
}


class NonfiniteHealer(NumericsHealer):
    """
    Finds out by experiment what made a step not finite, and applies it, leaves rows or all of it out, goes back to a
    trusted state, or ends the run.
    """

    def rows_raise(self, window: Window, error: Exception) -> bool:
        """See [`Hooks.rows_raise`]."""
        if self.config.on_nonfinite != "heal":
            return False
        # The message may quote the row.
        window.raising = describe_exception(error) if self.config.quarantine_text else type(error).__name__
        rows = rows_that_raise(window, self.rollback.batches.healthy_inputs)
        if rows and self.config.on_bad_sample == "raise":
            sources = window.sources(len(window.calls) - 1)
            found = [sources[row] for row in rows]
            named = ", ".join(
                str(each.stream_ordinal if each.dataset_index is None else each.dataset_index) for each in found
            )
            add_note(error, f"self_healing: raised in the model, by the sample with index {named}.")
            rows = []
        window.raising = window.raising if rows else ""
        return bool(rows)

    def heal(self, window: Window, symptom: Symptom) -> None:
        """Diagnoses a step that is not finite, and acts on it."""
        if not self.acts and self.numerics.reported_step == symptom.step - 1:
            # Nothing is done about it, so it stays that way: one incident for all of it.
            self.numerics.reported_step = symptom.step
            return
        self.numerics.reported_step = symptom.step
        name, evidence = symptom.name, symptom.evidence
        if window.raising:
            name, evidence = window.raising.partition(":")[0], {"diagnosis": window.raising}
        with self.incident(symptom.step, name, evidence) as opened:
            self._heal(opened, window)

    def _heal(self, opened: OpenIncident, window: Window) -> None:
        run, incident = self.run, opened.incident
        self._make_weights_anew(window)
        # Before it is computed again. The gradient has been summed over ranks, and says no more whose it was.
        losses_are_finite = math.isfinite(sum(map(float, window.losses)))
        if self.acts and self.config.on_nonfinite == "heal":
            for _ in range(2):
                diagnosis = diagnose(window, self.run.instrument, self.rollback.batches.healthy_inputs)
                if not self._make_weights_anew(window):
                    break
                # It was found with weights that are no more.
            else:
                if diagnosis.failure is FailureType.NONFINITE_TRANSIENT:
                    window.recompute_with_retry()
        else:
            asked_for: dict[str, Any] = {"on_nonfinite": self.config.on_nonfinite}
            if (watched := self.run.instrument.view.only_watched) is not None:
                asked_for["remedy"] = f"{watched}: steps are not healed. Go back to a checkpoint from before this one."
            diagnosis = Diagnosis(FailureType.NONFINITE_UNDIAGNOSED, Cause.NOT_LOOKED_FOR, asked_for)
        if diagnosis.failure is FailureType.CORRUPTED_STATE:
            ranks = self.ranks_with(diagnosis.evidence["tensors"])
        else:
            here = bool(diagnosis.poison) if diagnosis.poison_rows else not losses_are_finite
            ranks = self.ranks_where("it is not finite here", here)
        opened.diagnosed(diagnosis.failure, diagnosis.cause, {**diagnosis.evidence, **ranks})
        context = HealingContext(incident, self.run.instrument, window, diagnosis)
        if diagnosis.failure is FailureType.CORRUPTED_STATE:
            self.climb.take_rung(context, diagnosis.failure)
            return
        if diagnosis.everywhere and not self.run.instrument.optimizer_step.weights_moved:
            self._stop_at_the_start(opened, context)
        keep_batch(self.run, window, incident)
        actions: tuple[Action, ...] = ()
        if self.acts and self.config.on_nonfinite != "raise":
            rows = FailureType.NONFINITE_POISON_ROWS if diagnosis.poison_rows else diagnosis.failure
            actions = self.numerics.ladder.next(rows, {Given.PATIENCE_LEFT}).actions
        elif self.acts:
            actions = THE_END
            context.verdict = "loss or gradient norm is not finite (on_nonfinite='raise')"
        self.actions.apply(actions, context, self.args)
        if not window.skipped and actions:
            # What the healed step shows has incidents of its own.
            opened.stop_clock()
            healed = window.signals()
            run.outcomes.take_in(healed.loss, self.run.instrument.view.step)
            self.run.part(AppliedSteps).observe(window, healed)
        opened.wait()
        stop = self.numerics.limits.note(
            window.skipped,
            explained=diagnosis.poison_rows > 0,
            rows=diagnosis.rows,
            dropped=diagnosis.poison_rows,
        )
        if not stop:
            return
        if diagnosis.failure is FailureType.NONFINITE_NUMERICAL and self.numerics.limits.out_of_patience:
            if not self.run.instrument.optimizer_step.weights_moved:
                self._stop_at_the_start(opened, context)
            self.climb.take_rung(context, diagnosis.failure, verdict=stop)
            opened.wait()
            return
        self.end(context, stop)

    def _make_weights_anew(self, window: Window) -> bool:
        """Where computing the step has left a `training_step` of the user's own half-way; returns whether it has."""
        half_way = bool(self.run.instrument.call.half_way)
        if half_way:
            self.run.healers.left_half_way(window)
            # With weights that are no more.
            window.kept = None
        return half_way

    def _stop_at_the_start(self, opened: OpenIncident, context: HealingContext) -> NoReturn:
        """
        Ends a run whose weights no update has changed: they are what they were given as, and no state to go back to
        and no lower rate makes them others.
        """
        incident, window = opened.incident, context.step_in_hand
        keep_batch(self.run, window, incident)
        found = diagnose_start(window, str(incident.evidence.get("why", "")))
        if found.cause in _REMEDIES:
            found.evidence["remedy"] = f"{_REMEDIES[found.cause]} Another learning rate does not help."
        opened.diagnosed(found.failure, found.cause, found.evidence)
        incident.evidence.pop("why", None)
        window.skip(None)
        context.verdict = (
            "loss or gradient is not finite, and no update has changed the weights yet, so it is neither the learning "
            f"rate nor the optimizer, but {_NOT_THE_RATE[found.cause]}. {found.evidence['diagnosis']}"
        )
        opened.stop_clock()
        self.numerics.limits.reset()
        self.actions.apply(FAILURE_RECIPES[found.failure].actions, context, self.args)
        raise AssertionError("the last of these actions raises")


# ---- corrupted state: heals weights and optimizer states that are not finite where no loss has shown it yet ----


class CorruptedStateHealer(NumericsHealer):
    """
    Goes back to a trusted state, between two steps, before a save, or at the end of the run, and applies the steps
    since then again.
    """

    _told_of_state = False

    def heal_silent(self, window: Window, tensors: list[str]) -> None:
        """Goes back from a state that is not finite, which no loss has shown yet: a row of an embedding, a mean."""
        instrument = self.run.instrument
        found = instrument.view.nonfinite_tensors()
        if self.config.on_nonfinite != "heal" or not votes.any_rank(
            "the state is not finite", bool(found), instrument.view.device
        ):
            return
        with self._open(window.step, found[:20] or tensors, found) as opened:
            self.climb.take_rung(HealingContext(opened.incident, instrument, window), FailureType.CORRUPTED_STATE)

    def heal_the_end(self) -> None:
        """After the last step: weights that turned NaN with it would be handed over as trained."""
        instrument = self.run.instrument
        window, step = instrument.window, instrument.view.step
        if self.config.on_nonfinite != "heal" or not instrument.view.can_recompute or window is None:
            return
        found = instrument.view.nonfinite_tensors()
        if not votes.any_rank("the state at the end is not finite", bool(found), instrument.view.device):
            return
        best = instrument.trainer.state.best_model_checkpoint if instrument.view.best_model_loaded else None
        with self._open(step, found[:20], found) as opened:
            incident = opened.incident
            in_weights = any(not name.startswith("optimizer:") for name in found)
            if best is not None and not votes.any_rank(
                "the best model is not finite", in_weights, instrument.view.device
            ):
                self._report(
                    opened,
                    f"The best model ({best}) is loaded, and finite: nothing was changed. A checkpoint that was "
                    "written with this optimizer state is refused at a resume",
                )
                return
            context = HealingContext(incident, instrument, window)
            went = self._undo_corruption(context)
            if went is None:
                context.verdict = "the weights at the end of the run are not finite, and there is no trusted state"
                self.actions.apply((Action.STOP,), context, self.args)
                return
            opened.close("resolved")
        owed = bool(went.suspects) and not self.rollback.checkpoints.has_good(step)
        if votes.from_first_rank("a checkpoint is owed", lambda: owed, instrument.view.device):
            # Otherwise a resume would go back to before the fault.
            instrument.saves.write_checkpoint()

    def _undo_corruption(self, context: HealingContext) -> RollbackRecord | None:
        """Between two steps: back to the newest trusted state, and the finished steps since then applied again."""
        context.finished = True
        self.actions.apply(FAILURE_RECIPES[FailureType.CORRUPTED_STATE].rungs[0].actions, context, self.args)
        if context.went_back is not None:
            self.climb.owe_checkpoint(context.went_back)
        return context.went_back

    def verify_state(self) -> None:
        """Searches what goes into a checkpoint for NaN and Inf that no loss has shown, and heals what it finds."""
        instrument = self.run.instrument
        if not instrument.view.can_recompute:
            # The engine holds the optimizer's state, and parts of the weights, where they cannot be looked at.
            return
        found = instrument.view.nonfinite_tensors()
        finite = not votes.any_rank("the state to be saved is not finite", bool(found), instrument.view.device)
        # Or nothing could be done about it at the save before this one.
        if not finite and not self._told_of_state:
            with self._open(instrument.view.step, found[:20], found) as opened:
                finite = self._heal_before_a_save(opened)
        if not finite:
            instrument.saves.disown_best()
        self.rollback.checkpoints.searched = instrument.view.step, finite
        self._told_of_state = not finite

    def _heal_before_a_save(self, opened: OpenIncident) -> bool:
        instrument, incident = self.run.instrument, opened.incident
        window, step = instrument.window or instrument.reentry.interrupted, instrument.view.step
        if self.config.on_nonfinite != "heal" or window is None or instrument.leaving.begun:
            return self._report(opened, "It is not healed here; no checkpoint of it is trusted")
        if not self.rollback.can_go_back():
            return self._report(opened, "There is no trusted state to go back to; no checkpoint of it is trusted")
        context = HealingContext(incident, instrument, window)
        spent = self.numerics.ladder.pay(step)
        if spent:
            context.verdict = f"{FAILURE_RECIPES[FailureType.CORRUPTED_STATE].diagnosis.rstrip('.')}; {spent}"
            self.actions.apply(Action.STOP, context, self.args)
        # Training goes on to draw from the generators.
        rng = RandomState.capture(instrument.view.device)
        try:
            went = self._undo_corruption(context)
        finally:
            rng.restore()
        if went is None:
            # What is frozen is in no snapshot.
            context.verdict = f"no trusted state is any better: {', '.join(instrument.view.nonfinite_tensors()[:5])}"
            self.actions.apply((Action.STOP,), context, self.args)
            return False
        if incident.steps_lost:
            # It is not what was evaluated.
            instrument.saves.disown_best()
            self.numerics.went_back(incident)
            opened.wait()
        else:
            opened.close("resolved")
        return True

    def look_at_copies(self) -> None:
        """Reports copies of the weights beside the model that are not finite, which no rollback reaches, each once."""
        journal, found = self.run.journal, nonfinite_copies(self.run.instrument.trainer)
        self.rollback.copies_in_doubt = False
        told = [each for each in journal.incidents if each.symptom == "nonfinite_copy" and each.outcome == "reported"]
        for incident in told:
            if found.pop(incident.cause, None) is None:
                journal.closed(incident, "self_recovered")
        for name, counts in found.items():
            with self.run.incident(self.run.instrument.view.step, "nonfinite_copy", counts) as opened:
                opened.diagnosed(FailureType.CORRUPTED_COPY, name)
                opened.close("reported")

    def _open(self, step: int, tensors: list[str], nonfinite: list[str]) -> OpenIncident:
        """Every rank has to come, also one whose own state is finite."""
        ranks = self.ranks_with(nonfinite)
        opened = self.incident(step, "nonfinite_state", {"tensors": tensors})
        opened.diagnosed(FailureType.CORRUPTED_STATE, Cause.CORRUPTED_STATE, ranks)
        return opened

    def _report(self, opened: OpenIncident, why: str) -> bool:
        """Says why nothing was done. Gives `False`: the state is not finite."""
        opened.incident.evidence["why"] = why
        opened.close("reported")
        return False

    def heal_interrupted_step(self, context: HealingContext) -> None:
        """Goes back where an `optimizer.step()` may have updated some weights and not others."""
        window, half_done = context.step_in_hand, "; it may have updated some weights and not others, and"
        if not self.rollback.can_go_back():
            context.verdict += f"{half_done} there is no trusted state to go back to, neither in memory nor on disk"
            self.actions.apply(Action.STOP, context, self.args)
        self.run.instrument.optimizer_step.undone()
        # Where the steps since then could not be applied again the first time, they are lost.
        replaying = () if window.skipped else (Action.REPLAY_STEPS,)
        self.actions.apply((Action.ROLL_BACK, *replaying), context, self.args)
        if context.went_back is None:
            context.verdict += f"{half_done} no trusted state was any better"
            self.actions.apply(Action.STOP, context, self.args)
        self.climb.owe_checkpoint(context.went_back)
        if not window.skipped:
            self.clip(window, window.signals())
