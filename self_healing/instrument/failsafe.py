"""`Failsafe`: keeps failures of this library away from training, and gives the trainer back before one leaves it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch

from .. import consensus
from ..classify import classify_exception
from ..exceptions import UnrecoverableTrainingError
from ..failures import FailureType
from ..log_safely import log_safely
from .hooks import Hooks
from .on_exception import OnException
from .replacing import Replacements
from .training_fault import TrainingFault


logger = logging.getLogger(__name__)


class Failsafe:
    """
    Decides what becomes of an exception that is raised in, or passes through, the wrapped methods of a trainer.

    On one process a failure of this library is contained where it is raised. On one of several ranks it is noted, and
    the rank goes on with the others, as if nothing had been, until they meet in a vote; there all learn of it, and
    switch healing off together. Three kinds of blocks tell where that is:

    - [`contained`], [`noted`]: ranks do not meet in it. The failure is told when the next step is judged.
    - [`together`]: ranks meet in it, in votes. The failure is told in the vote that the others are in.
    - [`alike`]: what fails in it is how a rank knows what the others do. All of them fail, or this one ends.

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
        self._noting = OnException(self._note)
        # On one of several ranks: what the others have not been told yet.
        self.failure: Exception | None = None

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
        if consensus.world_size() == 1:
            self.switch_off(error)
        elif isinstance(error, consensus.AgreedFailure):
            self.give_up_together(error)
        elif isinstance(error, TrainingFault):
            self.give_back()
            raise error.error
        else:
            self.note_failure(error)
        return True

    def lets_pass(self, error: Exception) -> bool:
        """
        Whether an exception in this library is no failure of it, and ends `train()`; the trainer is given back. torch
        raises that a data loader worker has died wherever the main thread is, and that the device is lost wherever it
        is waited for.
        """
        meant = isinstance(error, UnrecoverableTrainingError | consensus.Stranded) or self.tells_of_lost_device(error)
        if not meant and classify_exception(error) is not FailureType.PROCESS_DIED:
            return False
        self.give_back()
        return True

    # ---- on several ranks ----

    def note_failure(self, error: Exception) -> None:
        """Notes a failure on one of several ranks, which are told when the next step is judged."""
        if self.failure is None:
            consensus.log_failure(f"step {self._trainer.state.global_step}", error)
            self.failure = error

    def noted(self) -> OnException:
        """Notes, on several ranks, a failure in a block in which they do not meet; on one process it passes."""
        return self._noting

    def _note(self, error: BaseException) -> bool:
        if not self._is_ours(error):
            return False
        self.note_failure(error)
        return True

    def _is_ours(self, error: BaseException | None) -> TypeGuard[Exception]:
        """Whether it is a failure of this library on one of several ranks of which the others do not know."""
        if consensus.world_size() == 1 or not isinstance(error, Exception):
            return False
        known = isinstance(error, consensus.AgreedFailure | TrainingFault)
        return not known and not self.lets_pass(error)

    @contextlib.contextmanager
    def together(self, question: str, ends_with: str | None = None) -> Iterator[None]:
        """
        Marks a block in which ranks meet in votes: one that fails tells the others in the vote that they are in.

        Args:
            question (`str`):
                Names the vote at its end, in which all say that they have come through.
            ends_with (`str`, *optional*):
                The vote that comes last in any case, where none at its end is needed: what fails after it is noted.

        Raises:
            AgreedFailure: On all ranks, if one has failed.
        """
        with self.alike(question):
            before, _ = consensus.votes_cast()
            try:
                yield
            except Exception as error:
                if not self._is_ours(error):
                    raise
                if not self._is_over(before, ends_with):
                    consensus.tell_failure(question, error, self._device)
                self.note_failure(error)
            if not self._is_over(before, ends_with):
                consensus.wait_for_all_ranks(question, self._device)

    def _is_over(self, before: int, ends_with: str | None) -> bool:
        count, last = consensus.votes_cast()
        return count > before and last == ends_with

    @contextlib.contextmanager
    def alike(self, question: str) -> Iterator[None]:
        """
        Marks a block in which a rank finds out what all of them do next, or does what has to be the same on all.

        Raises:
            AgreedFailure: If it fails on all ranks.
            Stranded: If it fails on this one.
        """
        try:
            yield
        except Exception as error:
            if not self._is_ours(error):
                raise
            raise self.agreed_on(question, error) from None

    def agreed_on(self, question: str, error: Exception) -> consensus.AgreedFailure:
        """
        Finds out whether all ranks have failed at the same place, for one that cannot know what the others do.

        Raises:
            Stranded: If this one is alone.
        """
        if isinstance(error, consensus.AgreedFailure):
            return error
        consensus.log_failure(question, error)
        if consensus.all_fail_alike(question):
            return consensus.RankFailed(f"{question}: code of self_healing has failed on all ranks")
        self.give_back()
        raise consensus.Stranded(f"{question}: self_healing has failed on this rank alone") from error

    def told(self, question: str, error: Exception) -> consensus.AgreedFailure:
        """Tells the other ranks of a failure, in the vote they are in; gives what that vote raises."""
        try:
            consensus.tell_failure(question, self.failure or error, self._device)
        except consensus.AgreedFailure as agreed:
            return agreed

    def give_up_together(
        self,
        error: consensus.AgreedFailure,
        touched: Callable[[], bool] = lambda: False,
        leave_out: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Switches healing off on all ranks, after a vote that has raised on all of them.

        Args:
            error ([`AgreedFailure`]):
                What it raised.
            touched (`Callable[[], bool]`, *optional*):
                Tells whether the step in hand is not what the trainer has computed; one rank's is left out on all.
            leave_out (`Callable[[], None]`, *optional*):
                Leaves it out.

        Raises:
            Stranded: On all ranks, if weights of one are not the run's own: a restart begins with those on disk.
        """
        try:
            displaced, left_out, *_ = consensus.sum_over_ranks(
                "what is left of the step", lambda: [self._hooks.state_displaced(), touched()], self._device
            )
            if left_out and not displaced:
                leave_out()
        except Exception as failed:
            self.give_back()
            apart = isinstance(error, consensus.RanksDisagree)
            why = f"the ranks do different things ({error})" if apart else "self_healing failed"
            raise consensus.Stranded(f"{why}, and what is left of the step is not known") from failed
        if displaced:
            self.give_back()
            raise consensus.Stranded(
                "self_healing failed while weights other than those of the run were in place; the run goes on from "
                "its newest checkpoint when it is started again"
            ) from error
        self.switch_off(error)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._trainer.accelerator.device
        return device

    # ---- the rest of the run without this library ----

    def switch_off(self, error: Exception) -> None:
        """Logs a failure of this library, and gives the trainer back for the rest of the run."""
        step = self._trainer.state.global_step
        if isinstance(error, consensus.RanksDisagree):
            log_safely(
                logger,
                logging.ERROR,
                "The ranks do different things at step %s (%s): look for code that decides on one rank alone, such as "
                "a callback that stops, saves or evaluates there. self_healing has switched itself off, because it "
                "needs all ranks to do the same; training goes on without it.",
                step,
                error,
            )
        else:
            log_safely(
                logger,
                logging.ERROR,
                "self_healing failed at step %s and has switched itself off; training goes on without it. "
                "Please report this traceback.",
                step,
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
