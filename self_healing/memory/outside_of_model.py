"""Handles memory that runs out where nothing can be split: in a callback, or in the data."""

from __future__ import annotations

import logging
from typing import Any

from ..classify import classify_exception
from ..failures import Action, FailureType
from ..instrument import CannotReduce, smaller_batch
from ..journal.incident import Incident
from ..run.claims import Claim
from ..run.context import RunContext


logger = logging.getLogger("self_healing")

# Twice within this many steps is no accident.
_LATELY = 50


class MemoryOutsideOfModel:
    """
    Handles out-of-memory errors of one run that left `train()` and come from no call of the model: the step is done
    once more with the memory freed; soon again, with a smaller batch, which leaves more memory to everything else.

    Args:
        run ([`RunContext`]):
            The run; its configuration has `on_oom` and `oom_reduce_batch`.
        trainer ([`~transformers.Trainer`]):
            Its trainer.
    """

    def __init__(self, run: RunContext, trainer: Any) -> None:
        self._config = run.config
        self._run = run
        self._trainer = trainer
        self._ran_out_at: int | None = None

    def claim(self, error: BaseException, incident: Incident) -> Claim | None:
        """
        Claims an exception that no healer does.

        Args:
            error (`BaseException`):
                The exception.
            incident ([`Incident`]):
                Its incident.

        Returns:
            [`Claim`]: `None` if it is no out-of-memory error, or they are not to be healed.
        """
        if classify_exception(error) is not FailureType.OUT_OF_MEMORY or self._config.on_oom != "heal":
            return None
        step = int(self._trainer.state.global_step)
        last, self._ran_out_at = self._ran_out_at, step
        if last is None or step - last > _LATELY:
            return Claim(incident, Action.FREE_MEMORY)
        instrument = self._run.attachment.instrument
        if self._config.oom_reduce_batch and instrument is not None:
            try:
                plan = smaller_batch(self._trainer, instrument.objective.name)
            except CannotReduce as refusal:
                incident.evidence["not_reduced"] = str(refusal)
                logger.warning("Step %d: the batch cannot be made smaller: %s.", step, refusal)
            else:
                return Claim(incident, Action.REDUCE_BATCH_SIZE, batch=plan)
        return Claim(incident, Action.FREE_MEMORY if step > last else Action.STOP)
