"""Takes the rungs of the rollback ladder: back to a trusted state, with what has to change, or the end."""

from __future__ import annotations

import logging

from ...failures.recipes import FAILURE_RECIPES, Action, Cause, FailureType, TrainingFault
from ...numerics.damaged_checkpoint import DamagedCheckpointHealer
from ...numerics.healer import NumericsHealer
from ...numerics.rate_trial import try_rates
from ...ranks import votes
from ...rollback.rollback import Rollback, Target, WentBack
from ...run.healer import HealingContext
from ...run.run import RunContext
from .state import NumericsState


logger = logging.getLogger("self_healing")

# What a damaged checkpoint looks like at first.
_OF_A_DAMAGED_CHECKPOINT = frozenset(
    {FailureType.NONFINITE_NUMERICAL, FailureType.CORRUPTED_STATE, FailureType.DIVERGENCE}
)
# With fewer steps to try learning rates on, the ladder is climbed rung by rung.
_LEAST_TRIAL_STEPS = 3


class RollbackClimb(NumericsHealer):
    """Goes back to a trusted state in the middle of a step, for any failure that this may cure."""

    def __init__(
        self, run: RunContext, numerics: NumericsState, rollback: Rollback, damaged: DamagedCheckpointHealer
    ) -> None:
        super().__init__(run, numerics, rollback)
        self._damaged = damaged
        # The last step in which the run went back.
        self.went_back_in = -1

    def take_rung(self, context: HealingContext, failure: FailureType, verdict: str = "") -> None:
        """Takes the next rung of the ladder: back to a trusted state, with what has to change, or the end."""
        run, instrument, incident, window = self.run, self.instrument, context.incident, context.window
        if window is None:
            raise ValueError("going back in the middle of a run needs `context.window`")
        if failure in _OF_A_DAMAGED_CHECKPOINT:
            self._damaged.suspect(context)
        if not self.rollback.can_go_back():
            why = verdict or FAILURE_RECIPES[failure].diagnosis.rstrip(".")
            context.verdict = f"{why}; there is no trusted state to go back to, neither in memory nor on disk"
            self.numerics.policy.reset()
            saving = failure is FailureType.NONFINITE_NUMERICAL
            self.actions.apply(
                (Action.EMERGENCY_CHECKPOINT, Action.STOP) if saving else (Action.STOP,), context, self.args
            )
            return
        step = instrument.view.step
        control = self.numerics.learning_rate
        decision = self.numerics.ladder.next(
            failure,
            step,
            early=self.rollback.states.early(step),
            may_reduce=instrument.view.can_scale_rate and not control.exhausted,
            rate=f"{instrument.view.learning_rate:.3g}, after {_times(control.reductions)}",
        )
        # The last one that was applied; those since then were left out.
        context.blamed_step = max(step - self.numerics.policy.unhealed_in_a_row, 0)
        incident.evidence["rung"] = decision.rung
        context.verdict = "; ".join(each for each in (verdict, decision.verdict) if each)
        context.target = decision.target or context.target
        if decision.failure is not None:
            run.journal.diagnosed(incident, decision.failure, incident.cause, {})
        if decision.stops:
            self.numerics.policy.reset()
            self.numerics.ladder.reset()
            if incident.cause == Cause.COMPUTATION:
                context.verdict += (
                    "; trusted weights give the same loss, so it is neither they nor the rate, but what is computed. "
                    "If its definition changes on purpose, set on_divergence='warn'"
                )
        if decision.target is Target.INITIAL and Action.REDUCE_LEARNING_RATE in decision.actions:
            context.rate_scale = self._try_rates(context)
        self.actions.apply(decision.actions, context, self.args)
        self.went_back_in = window.step
        self.owe_checkpoint(context.went_back)
        if context.went_back is None and not decision.stops:
            found = ", ".join(instrument.view.nonfinite_tensors()[:5])
            frozen = f" (not finite still: {found}; what is frozen is in no snapshot)" if found else ""
            context.verdict = (
                f"{FAILURE_RECIPES[failure].diagnosis.rstrip('.')}, and no state tried was any better{frozen}"
            )
            self.actions.apply((Action.STOP,), context, self.args)
        if not window.skipped:
            self.clip(window, window.signals())

    def _try_rates(self, context: HealingContext) -> float | None:
        """A run that fails in its first steps: the factor with which it learns, if there is one within reach."""
        instrument, panel = self.instrument, self.panel
        start, kept = self.rollback.ring.initial, self.rollback.batches.first_steps
        if start is None or context.window is None:
            return None
        on_all_ranks = votes.smallest("first steps that are kept", len(kept), instrument.view.device)
        steps = kept[: round(on_all_ranks)]
        if len(steps) < _LEAST_TRIAL_STEPS:
            return None
        step = instrument.view.step
        control = self.numerics.learning_rate
        try:
            trial = try_rates(
                context.window,
                self.rollback.trials,
                start,
                steps,
                now=control.scale(step),
                lowest=control.lowest(step),
                limit=panel.divergence.early.limit,
                adaptive=instrument.view.beta2 is not None,
            )
        except TrainingFault as fault:
            logger.warning("Learning rates could not be tried out.", exc_info=fault.error)
            return None
        finally:
            # No vote: an experiment may have been left by one that has raised.
            self.rollback.trials.put_back(start)
        found = {f"{scale:.4g}": loss for scale, loss in trial.losses.items()}
        context.incident.evidence["loss_by_rate_scale"] = found
        return trial.scale

    def owe_checkpoint(self, went: WentBack | None) -> None:
        """Checkpoints that are suspect now have to be replaced as soon as the loss is back."""
        suspects = went is not None and bool(went.suspects)
        if votes.from_first_rank("checkpoints are suspect", lambda: suspects, self.instrument.view.device):
            self.numerics.watch.owed = True


def _times(reductions: int) -> str:
    return "one reduction" if reductions == 1 else f"{reductions} reductions"
