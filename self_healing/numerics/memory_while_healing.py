"""Keeps a run going, or ends it, where healing itself runs out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..failures.classify import describe_exception
from ..failures.recipes import Action, Cause, FailureType, TrainingFault, UnrecoverableTrainingError
from ..hf.memory import free_memory, is_out_of_memory, let_go, memory_figures
from ..hf.step import Window
from ..journal.incident import Incident
from ..run.healer import HealingContext
from ..system import processes
from .healer import NumericsHealer


logger = logging.getLogger("self_healing")


class MemoryWhileHealing(NumericsHealer):
    """Does something of ours, with or without the memory for it."""

    def contain(self, heal: Callable[[], None], window: Window | None, unsound: bool = False) -> None:
        """Does something of ours."""
        known = len(self.run.journal.incidents)
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
        instrument = self.instrument
        opened = self.run.journal.incidents[known:]
        corrupted = any(incident.failure is FailureType.CORRUPTED_STATE for incident in opened)
        unsound |= corrupted or self.rollback.in_place.displaced
        unsound |= self.acts and window is not None and not window.sound
        if not unsound:
            logger.warning(
                "Step %d: no memory was left for what self_healing does beside training (%s). The step needs no "
                "healing and goes on as it is; the next one is watched again.",
                instrument.view.step,
                describe_exception(error),
            )
            return
        self._stop_without_memory(error, window, opened)

    def _memory_ran_out(self, error: Exception) -> Exception | None:
        """The out-of-memory error in which healing has ended; `None` for any other, and where somebody heals it."""
        if processes.world_size() > 1:
            # The others wait for this one.
            return None
        if isinstance(error, TrainingFault):
            # Handed to the wrapper, which enters `train()` again.
            if self.run.attachment.healers.has_claim:
                return None
            error = error.error
        return error if is_out_of_memory(error) else None

    def _stop_without_memory(self, error: Exception, window: Window | None, opened: Sequence[Incident]) -> NoReturn:
        instrument = self.instrument
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
            f"memory ran out, twice, while self_healing looked into something that was wrong ({wrong}); without that "
            f"the weights would have been lost. They are {held}"
        )
        self.numerics.policy.reset()
        if own:
            self.actions.apply(Action.EMERGENCY_CHECKPOINT, context, self.args)
        context.error = error
        self.actions.apply(Action.STOP, context, self.args)
        raise AssertionError("the last of these actions raises")
