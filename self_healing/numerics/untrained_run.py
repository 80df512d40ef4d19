"""Ends a run whose steps are skipped one after the other, or most of whose steps are not in its weights."""

from __future__ import annotations

from ..failures.recipes import Action, FailureType
from ..healers.numerics.state import NumericsState
from ..rollback.rollback import Rollback
from ..run.healer import HealingContext
from ..run.run import RunContext
from .damaged_checkpoint import DamagedCheckpointHealer
from .healer import NumericsHealer


# Share of a run's steps that have to be in its weights at its end.
_LEAST_TRAINED = 0.5
# So many steps in a row that an engine of its own has left out are no bad batches.
_SKIPPED_IN_A_ROW = 20


class UntrainedRunHealer(NumericsHealer):
    """Counts the steps of a run that an engine of its own leaves out, and looks at its end how much was trained."""

    def __init__(
        self, run: RunContext, numerics: NumericsState, rollback: Rollback, damaged: DamagedCheckpointHealer
    ) -> None:
        super().__init__(run, numerics, rollback)
        self._damaged = damaged
        self._skipped = range(0)

    def note_skipped(self, step: int) -> None:
        """Takes in a step that an engine of its own has left out."""
        self.numerics.missing.left_out(step)
        since = self._skipped.start if step in (self._skipped.stop, self._skipped.stop - 1) else step
        self._skipped = range(since, step + 1)

    def stop_unless_training(self, step: int) -> None:
        """Ends a run whose engine leaves out one step after the other: it would do so until the end."""
        skipped = self._skipped
        if len(skipped) < _SKIPPED_IN_A_ROW or step > skipped.stop:
            return
        evidence = {"steps": skipped.stop, "skipped_in_a_row": len(skipped)}
        verdict = (
            f"every step is skipped: DeepSpeed has left out all {len(skipped)} since step {skipped.start}, because "
            "loss or gradient was not finite, and nothing is trained any more"
        )
        with self.run.incident(step, "steps_missing", evidence) as opened:
            opened.diagnosed(FailureType.NOT_TRAINED, "every step is skipped")
            context = HealingContext(opened.incident, self.instrument, self.instrument.window, verdict=verdict)
            self.actions.apply((Action.STOP,), context, self.args)

    def stop_unless_trained(self) -> None:
        """
        At the end of the run: one most of whose steps are not in the weights, or none of those since it was resumed,
        has failed, however well it seems to have come to its end.
        """
        instrument, step = self.instrument, self.instrument.view.step
        missing = self.numerics.missing
        trained, since = missing.trained(step), step - missing.entry_step
        none_since = since > 0 and trained <= missing.trained_at_entry
        if trained >= _LEAST_TRAINED * step and not none_since:
            return
        evidence = {"steps": step, "trained": trained, "since_entry": since}
        of_these = f", none of the {since} since step {missing.entry_step} among them" if none_since else ""
        verdict = f"the run has come to its end, but only {trained} of its {step} steps are in the weights{of_these}"
        with self.run.incident(step, "steps_missing", evidence) as opened:
            opened.diagnosed(FailureType.NOT_TRAINED, "most steps are not in the weights")
            context = HealingContext(opened.incident, instrument, instrument.window, verdict=verdict)
            if none_since:
                self._damaged.suspect(context)
            self.actions.apply((Action.STOP,), context, self.args)
