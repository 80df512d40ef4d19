"""The events of an instrument, and the containment of failures of this library."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from ..failures import recipes
from ..failures.classify import classify_exception, comes_from_a_collective, drop_own_frames
from ..failures.recipes import FailureType, HealingFailed, TrainingFault, UnrecoverableTrainingError
from ..ranks import votes
from ..system import processes
from ..system.processes import log_safely
from .memory import OutOfMemory
from .patching import OnException, Replacements
from .step import Bounds, Window


logger = logging.getLogger(__name__)


# ---- hooks: the events of an instrument while its trainer trains, and the questions it asks ----


class Hooks:
    """The events of an [`Instrument`], in the order in which a step meets them."""

    # ---- the micro-batches of a step are fetched ----

    def fetched(self) -> None:
        """Called when the data loader has given the micro-batches of the next step."""

    def fetch_failed(self, error: BaseException) -> None:
        """Called with what it has raised instead, which ends `train()`."""

    # ---- a micro-batch is computed ----

    def handle_oom(self, ran_out: OutOfMemory, window: Window | None) -> bool:
        """
        Called when memory ran out in a training step, in its `optimizer.step()`, which may have changed some weights,
        or (without a window) in an evaluation. Whether to try again.
        """
        return False

    def rows_raise(self, window: Window, error: Exception) -> bool:
        """
        Called when a micro-batch has raised what nobody else heals: whether it is rows of it, each by itself, and not
        the code. The step is judged as one that is not finite then.
        """
        return False

    def oom_on_one_rank(self, ran_out: OutOfMemory) -> None:
        """Called when memory ran out on one of several processes: the others wait, so nothing can be tried again."""

    def on_success(self) -> None:
        """Called when a micro-batch, forward and backward, or a batch of an evaluation has been computed."""

    def left_half_way(self, window: Window) -> bool:
        """Called after an exception in a `training_step` of the user's own: makes anew what it may have moved."""
        return False

    # ---- gradients are there ----

    def judge(self, window: Window) -> None:
        """Called once per optimizer step, with gradients computed and clipped, and nothing applied yet."""

    def bounds(self, window: Window) -> Bounds | None:
        """
        Gives the loss and norm with which nothing is done about a step: it may be judged once its update is launched
        then. `None` where it is judged first.
        """
        return None

    # ---- the step is applied ----

    def before_optimizer_step(self) -> None:
        """Called before every `optimizer.step()`, those of experiments and of steps applied again included."""

    def about_to_step(self) -> None:
        """Called before the `optimizer.step()` of the Trainer's own loop, while memory is watched."""

    def left_out_by_engine(self) -> None:
        """Called after an `optimizer.step()` of the Trainer's own loop that DeepSpeed has left out by itself."""

    def step_fitted(self) -> None:
        """Called after that, while memory is watched."""

    # ---- the step is logged and saved ----

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        """Gives metrics to add to what the trainer logs."""
        return {}

    def verify_state(self) -> None:
        """
        Called between two steps, before the Trainer writes a checkpoint of its schedule, and before an evaluation that
        generates: looks at the state, and heals it.
        """

    def before_save(self, step: int) -> None:
        """Called after that, with the step, if the checkpoint is written."""

    def after_save(self, step: int) -> None:
        """Called when the Trainer has written a checkpoint with all its parts, before its callbacks are told."""

    def before_best_model(self) -> None:
        """Called at the end of the run, before the best model takes the place of the one that was trained last."""

    # ---- the run cannot go on as it was ----

    def left_by(self, error: BaseException) -> None:
        """Called with an exception on its way out of `train()`; what is done about it is done outside."""

    def device_lost(self, error: BaseException) -> None:
        """Called with an exception that says so, before the trainer is given back; maybe more than once."""

    def broken(self, error: Exception) -> None:
        """Called when code of this library failed; by then the trainer is its plain self again."""

    def ends_the_job(self, error: BaseException) -> None:
        """Called when it failed where several ranks meet, which ends the job."""


# ---- failsafe ----


# What has ended a job, or is about to, and is no failure of this library.
_MEANT = (UnrecoverableTrainingError, HealingFailed, recipes.Stranded, votes.RanksDisagree)


class Failsafe:
    """Decides what becomes of an exception that is raised in, or passes through, the wrapped methods of a trainer."""

    def __init__(self, trainer: Any, hooks: Hooks, replaced: Replacements, give_back: Callable[[], None]) -> None:
        self._trainer = trainer
        self._hooks = hooks
        self._replaced = replaced
        self.give_back = give_back
        # Whether this library has failed: training goes on without it.
        self.switched_off = False
        self._lost_device_error: BaseException | None = None
        self._containing = OnException(self.contains)
        self._noting, self._meeting = OnException(self._note), OnException(self._fail_where_ranks_meet)
        # On one of several ranks: what the others have not been told yet.
        self.failure: Exception | None = None
        # The block that each part of `train()` which calls all the others runs in.
        self.within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    @property
    def attached(self) -> bool:
        return bool(self._replaced.held)

    @property
    def device_lost(self) -> bool:
        """Whether nothing can be computed any more, not even to put back what an experiment has changed."""
        return self._lost_device_error is not None

    # ---- a failure of this library ----

    def contained(self) -> OnException:
        """Contains a failure in a block: training goes on without us, on several ranks from the next vote on."""
        return self._containing

    def noted(self) -> OnException:
        """As [`contained`] on several ranks; on one process the failure passes, to whoever judges the step."""
        return self._noting

    def together(self) -> OnException:
        """Marks a block in which ranks meet: on several of them a failure in it ends the job."""
        return self._meeting

    def contains(self, error: BaseException) -> bool:
        """Whether an exception is a failure of this library, and is contained."""
        if not isinstance(error, Exception) or self.lets_pass(error):
            return False
        if processes.world_size() == 1:
            self.switch_off(error)
            return True
        if isinstance(error, TrainingFault):
            self.give_back()
            raise error.error
        return self._note(error)

    def contain(self, error: Exception) -> None:
        """In its handler: contains an exception, or raises it again."""
        if not self.contains(error):
            raise error

    def _note(self, error: BaseException) -> bool:
        if not self._is_ours(error):
            return False
        assert isinstance(error, Exception)
        if self.failure is None:
            self.failure = error
            text = "self_healing failed on rank %d at step %s, and tells the others. The bug is ours, not yours."
            step = self._trainer.state.global_step
            log_safely(logger, logging.ERROR, text, processes.own_rank(), step, exc_info=error)
        return True

    def _fail_where_ranks_meet(self, error: BaseException) -> bool:
        if not self._is_ours(error):
            return False
        raise self.failed(error) from error

    def _is_ours(self, error: BaseException) -> bool:
        """Whether it is a failure of this library on one of several ranks."""
        several = processes.world_size() > 1 and isinstance(error, Exception)
        return several and not isinstance(error, TrainingFault) and not self.lets_pass(error)

    def failed(self, error: BaseException) -> HealingFailed:
        """Writes down a failure that ends the job, and gives what ends it."""
        self.give_back()
        self._hooks.ends_the_job(error)
        return HealingFailed.on_rank(processes.own_rank(), int(self._trainer.state.global_step), error)

    def lets_pass(self, error: BaseException) -> bool:
        """Whether an exception in this library is no failure of it, and ends `train()`; the trainer is given back."""
        if not (is_meant(error) or self.tells_of_lost_device(error)):
            return False
        self.give_back()
        return True

    def switch_off(self, error: Exception) -> None:
        """Logs a failure of this library, and gives the trainer back for the rest of the run."""
        step = self._trainer.state.global_step
        text = "self_healing failed at step %s and has switched itself off; training goes on without it."
        elsewhere = isinstance(error, votes.RankFailed) and self.failure is None
        text += " The log of another rank has the traceback." if elsewhere else " The bug is ours, not yours."
        log_safely(logger, logging.ERROR, text, step, exc_info=None if elsewhere else self.failure or error)
        self.switched_off = True
        self.give_back()
        self._hooks.broken(self.failure or error)

    # ---- an exception that ends `train()` ----

    def tells_of_lost_device(self, error: BaseException) -> bool:
        """Whether an exception says that the device is lost; if so, that is journaled before anything else is done."""
        if classify_exception(error) is not FailureType.DEVICE:
            return False
        self._lost_device_error = self._lost_device_error or error
        self._hooks.device_lost(error)
        return True

    def leaving(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps a part of `train()` that calls all the others: an exception that leaves it ends `train()`."""
        with self.within():
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                first = self._lost_device_error if self.tells_of_lost_device(error) else None
                drop_own_frames(error)
                self._hooks.left_by(error)
                self.give_back()
                if first is None or first is error:
                    raise
            # What was raised on the way out says less than the first exception.
            raise first


def is_meant(error: BaseException) -> bool:
    """Whether an exception in this library ends a run and is no failure of it, but of a process that is gone."""
    if isinstance(error, _MEANT) or classify_exception(error) is FailureType.PROCESS_DIED:
        return True
    return processes.world_size() > 1 and comes_from_a_collective(error)
