"""Finds out whether it is the checkpoint a run was resumed from that makes it fail."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..checkpoints.choice import mark_suspect, older_checkpoints
from ..failures.recipes import Action, DamagedCheckpointError, FailureType
from ..hf.step import Window
from ..ranks import votes
from ..run.healer import HealingContext
from ..system import processes
from .healer import NumericsHealer
from .resume_trial import try_older_checkpoints


# How far, in logarithms, a loss has to be above that of an older checkpoint at least, and where nothing is known of
# what is usual.
_LEAST_RISE, _CLEARLY_WORSE = 0.1, 1.0
# Older checkpoints that are tried: what is wrong with three of them is wrong with something else.
_OLDER_CHECKPOINTS = 3


class DamagedCheckpointHealer(NumericsHealer):
    """Tries older checkpoints where a run has not been well since it was resumed."""

    def end_trial(self) -> None:
        """Takes the checkpoint for a good one once enough healthy steps have followed the resume."""
        if self.numerics.on_trial and self._stands_the_test():
            self.numerics.on_trial = False

    def _stands_the_test(self) -> bool:
        """Whether enough healthy steps have followed a resume; without a gradient a step shows nothing."""
        return self.rollback.states.streak >= self.config.snapshot_verify_steps and not self.panel.vanishing.below

    def suspect(self, context: HealingContext) -> None:
        """
        A run that has not been well since it was resumed: before anything else is blamed, older checkpoints are tried
        on the same batch. Where it is the checkpoint, the run goes on from the older one, or ends.
        """
        run, instrument, window = self.run, self.instrument, context.window
        resumed, incident = self.numerics.resumed_from, context.incident
        if not self.numerics.on_trial or resumed is None or window is None or not instrument.view.can_reexecute:
            return
        moved = instrument.optimizer_step.weights_moved
        trial = try_older_checkpoints(
            window,
            self.rollback.trials,
            resumed,
            self._older_than(resumed),
            scale=self.numerics.learning_rate.scale(window.step),
            rise=self._half_of_the_rise(window.signals().loss),
            unmoved=self.numerics.missing.trained(window.step) <= self.numerics.missing.trained_at_entry,
        )
        # The updates of the experiment are none of the run's.
        instrument.optimizer_step.weights_moved = moved
        if trial.tried:
            incident.evidence["with_checkpoints"] = trial.tried
            self._compute_anew(window)
        if trial.sound is None:
            return
        self.numerics.on_trial = False
        cause = "the checkpoint it was resumed from"
        run.journal.diagnosed(incident, FailureType.DAMAGED_CHECKPOINT, cause, {"damaged": trial.damaged})
        if processes.is_first_rank() and self.args.should_save:
            for damaged in trial.damaged:
                mark_suspect(damaged, str(self.args.output_dir), incident.id)
        if run.may_enter_again and run.budget.spend(instrument.view.step):
            raise DamagedCheckpointError(incident, trial.sound)
        context.resume_from = trial.sound
        context.verdict = (
            f"the run has failed since it was resumed from {resumed}; the same batch is fine with {trial.sound}"
        )
        self.actions.apply((Action.STOP,), context, self.args)

    def _half_of_the_rise(self, loss: float) -> float:
        """Half of how far a loss is above what was usual, in logarithms: the other half may be the batch."""
        level, scale = self.panel.loss_level, self.panel.loss_trend.scale
        if level is None or not math.isfinite(loss) or not min(level, loss) > 0:
            return _CLEARLY_WORSE
        return max(0.5 * math.log(loss / level), 2 * scale, _LEAST_RISE)

    def _older_than(self, checkpoint: str) -> Iterator[str]:
        """Older checkpoints, as the first rank sees them."""
        output_dir = str(self.args.output_dir)
        found, device = older_checkpoints(checkpoint, output_dir), self.instrument.view.device
        for _ in range(_OLDER_CHECKPOINTS):
            older = votes.looked_up_by_first_rank("an older checkpoint", lambda: next(found, None), device)
            if older is None:
                return
            yield older

    def _compute_anew(self, window: Window) -> None:
        """After an experiment: the step is what it was before it."""
        if window.skipped:
            window.skip(self.numerics.detector.last_loss)
            return
        window.reexecute()
        window.accept()
