"""`ReportingGuard`: keeps what trackers and the Hub raise away from training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..failures.classify import is_error
from ..hf.patching import Replacements
from ..system.random_state import RandomState


logger = logging.getLogger(__name__)

# Trackers to which TRL's online trainers log completions by themselves, beside the callbacks.
_TABLE_LOGGERS = frozenset({"trackio", "wandb", "pandas", "pyarrow"})


class Containing(Protocol):
    """Makes calls that nothing depends on; what they raise is reported and does not reach the caller."""

    def call(
        self,
        service: str,
        step: int,
        rewind: Callable[[], None],
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a function; `None` if it failed."""

    def failed(self, service: str, step: int, error: BaseException) -> None:
        """Reports a call that failed in the background."""


class ReportingGuard:
    """Keeps what trackers and the Hub raise away from training, for as long as it is attached."""

    def __init__(
        self,
        trainer: Trainer,
        containing: Containing,
        before_closing: Callable[[TrainerCallback], None] | None = None,
    ) -> None:
        self._trainer: Any = trainer
        self._containing = containing
        self._before_closing = before_closing
        self._replaced = Replacements()
        self._followed: list[Future[Any]] = []

    def attach(self) -> None:
        """Wraps trackers and uploads, before `train()` or in `on_train_begin`."""
        try:
            self._attach()
        except Exception as error:
            logger.error(
                "self_healing could not guard trackers and Hub; what they raise ends the run. Please report this "
                "traceback.",
                exc_info=error,
            )
            self.detach()

    def _attach(self) -> None:
        trainer = self._trainer
        for callback in trainer.callback_handler.callbacks:
            if is_tracker(callback):
                for event in events_of(callback):
                    self._guard(callback, event, type(callback).__name__)
        if trainer.args.push_to_hub:
            self._replaced.wrap(trainer, "_push_from_checkpoint", self._push)
            self._replaced.wrap(trainer, "_finish_current_push", self._finish_push)
        if getattr(trainer, "log_completions", False):
            self._replaced.wrap(trainer, "log", self._log)

    def detach(self) -> None:
        """Gives the trainer and its callbacks back as they were."""
        self._replaced.give_back()
        self._report_pushes()
        for job in self._followed:
            # It may end after the run: then its failure is logged.
            job.add_done_callback(_say_if_it_failed)
        self._followed.clear()

    def _guard(self, callback: TrainerCallback, event: str, service: str) -> None:
        def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if event == "on_train_end" and self._before_closing is not None:
                self._before_closing(callback)
            return self._call(service, original, *args, **kwargs)

        self._replaced.wrap(callback, event, guarded)

    def _call(self, service: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A client that fails may have drawn the jitter of its own retries from the run's generators.
        rng = RandomState.capture(self._trainer.accelerator.device)
        return self._containing.call(service, self._step, rng.restore, function, *args, **kwargs)

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    # ---- the Hub ----

    def _push(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._report_pushes()
        self._call("Hub", original, *args, **kwargs)
        self._follow_pushes()

    def _finish_push(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._call("Hub", original, *args, **kwargs)
        self._report_pushes()

    def _follow_pushes(self) -> None:
        jobs = getattr(getattr(self._trainer, "push_in_progress", None), "jobs", None)
        known = {id(job) for job in self._followed}
        self._followed.extend(job for job in jobs or () if isinstance(job, Future) and id(job) not in known)

    def _report_pushes(self) -> None:
        """Reports uploads that failed: they run in the background, and the Trainer never asks what became of them."""
        done = [job for job in self._followed if job.done()]
        self._followed = [job for job in self._followed if not job.done()]
        for job in done:
            error = None if job.cancelled() else job.exception()
            if error is not None:
                self._containing.failed("Hub", self._step, error)

    # ---- completions ----

    def _log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rng = RandomState.capture(self._trainer.accelerator.device)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            if not is_error(error) or not from_the_table_of_completions(error):
                raise
            rng.restore()
            self._containing.failed("table of completions", self._step, error)


def from_the_table_of_completions(error: BaseException) -> bool:
    """
    Whether an exception that left `trainer.log` of a TRL trainer came from the table of completions, which it writes
    and sends to trackers once everything else is logged.
    """
    in_log = False
    traceback = error.__traceback__
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        module = str(frame.f_globals.get("__name__", ""))
        if in_log and module.split(".")[0] in _TABLE_LOGGERS:
            return True
        in_log = frame.f_code.co_name == "log" and module.split(".")[0] == "trl"
    return False


def is_tracker(callback: Any) -> bool:
    """Whether a callback is one of `report_to`."""
    return isinstance(callback, tuple(INTEGRATION_TO_CALLBACK.values()))


def events_of(callback: TrainerCallback) -> Iterator[str]:
    """Lists the events that a callback does something in."""
    for name in dir(TrainerCallback):
        if not name.startswith("on_"):
            continue
        # By whatever the object has: some are given a function of their own.
        own = getattr(callback, name)
        if getattr(own, "__func__", own) is not getattr(TrainerCallback, name):
            yield name


def _say_if_it_failed(job: Future[Any]) -> None:
    with contextlib.suppress(Exception):
        if not job.cancelled() and job.exception() is not None:
            logger.warning("A push to the Hub failed after training had ended: %s", job.exception())
