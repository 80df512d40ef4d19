"""`Failsafe`: keeps failures of this library away from training, and gives the trainer back before one leaves it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..classify import classify_exception
from ..exceptions import UnrecoverableTrainingError
from ..failures import FailureType
from ..log_safely import log_safely
from .hooks import Hooks
from .on_exception import OnException
from .replacing import Replacements


logger = logging.getLogger(__name__)


class Failsafe:
    """
    Decides what becomes of an exception that is raised in, or passes through, the wrapped methods of a trainer.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer.
        hooks ([`Hooks`]):
            Called when the device is lost, and when this library fails.
        replaced ([`Replacements`]):
            The methods that are wrapped.
        give_back (`Callable[[], None]`):
            Gives the trainer back.
    """

    def __init__(self, trainer: Any, hooks: Hooks, replaced: Replacements, give_back: Callable[[], None]) -> None:
        self._trainer = trainer
        self._hooks = hooks
        self._replaced = replaced
        self.give_back = give_back
        # Whether this library has failed: training goes on without it.
        self.switched_off = False
        self._lost_device_error: BaseException | None = None
        self._containing, self._leaving = OnException(self._contain), OnException(self._leave_with)

    @property
    def attached(self) -> bool:
        """Whether the methods of the trainer are wrapped."""
        return bool(self._replaced)

    @property
    def device_lost(self) -> bool:
        """Whether nothing can be computed any more, not even to put back what an experiment has changed."""
        return self._lost_device_error is not None

    def contained(self) -> OnException:
        """Contains a failure of this library in a block: logs it and gives the trainer back; training goes on."""
        return self._containing

    def _contain(self, error: BaseException) -> bool:
        if not isinstance(error, Exception) or self.lets_pass(error):
            return False
        self.switch_off(error)
        return True

    def lets_pass(self, error: Exception) -> bool:
        """
        Whether an exception in this library is no failure of it, and ends `train()`; the trainer is given back. torch
        raises that a data loader worker has died wherever the main thread is, and that the device is lost wherever it
        is waited for.
        """
        meant = isinstance(error, UnrecoverableTrainingError) or self.tells_of_lost_device(error)
        if not meant and classify_exception(error) is not FailureType.PROCESS_DIED:
            return False
        self.give_back()
        return True

    def switch_off(self, error: Exception) -> None:
        """Logs a failure of this library, and gives the trainer back for the rest of the run."""
        log_safely(
            logger,
            logging.ERROR,
            "self_healing failed at step %s and has switched itself off; training goes on without it. "
            "Please report this traceback.",
            self._trainer.state.global_step,
            exc_info=error,
        )
        self.switched_off = True
        self.give_back()
        self._hooks.broken()

    def tells_of_lost_device(self, error: BaseException) -> bool:
        """Whether an exception says that the device is lost; if so, that is journaled before anything else is done."""
        if classify_exception(error) is not FailureType.DEVICE:
            return False
        self._lost_device_error = self._lost_device_error or error
        self._hooks.device_lost(error)
        return True

    def leaving_on_exception(self) -> OnException:
        """Gives the trainer back if an exception leaves a block: it ends `train()`, and no event says so."""
        return self._leaving

    def _leave_with(self, error: BaseException) -> bool:
        self.tells_of_lost_device(error)
        self.give_back()
        return False

    def watch_the_device(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps a part of `train()` that calls all the others: what is raised between them is seen as well."""
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            lost = self.tells_of_lost_device(error)
            self._hooks.left_by(error)
            if not lost:
                raise
            self.give_back()
            first = self._lost_device_error
            if first is None or first is error:
                raise
        # What was raised on the way out says less than the first exception.
        raise first
