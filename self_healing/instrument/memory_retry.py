"""`MemoryRetry`: computes again, in whatever way fits, what ran out of memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from ..failures import recipes
from ..failures.classify import classify_exception
from ..failures.recipes import FailureType, TrainingFault
from ..hf.engine import THROUGH
from ..hf.hooks import Failsafe
from ..hf.memory import OutOfMemory, Place, caught, is_out_of_memory, let_go
from ..hf.sections import Heartbeat
from ..hf.view import TrainerView
from ..ranks import votes
from ..system import processes
from .device_memory import free_memory
from .hooks import Hooks
from .window import Window


logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# How long a rank whose training code has raised in an experiment waits for the others to be through theirs.
_COMPUTING_SECONDS = 20.0


class MemoryRetry:
    """Has memory freed where it ran out, and computes again what failed."""

    def __init__(
        self,
        view: TrainerView,
        hooks: Hooks,
        failsafe: Failsafe,
        heartbeat: Heartbeat,
        window: Callable[[], Window | None],
    ) -> None:
        self._view = view
        self._hooks = hooks
        self._failsafe = failsafe
        self._heartbeat = heartbeat
        self._window = window
        # Whether what is computed is an experiment, which may fail where the run must not.
        self.experimenting = False

    def caught(self, error: Exception, place: Place | None = None, alone: bool = False) -> OutOfMemory | None:
        """Takes an exception as an out-of-memory error to be handled; `None` for any other one."""
        if not self._failsafe.attached or not self._view.can_reexecute or not self._hooks.heals_memory:
            return None
        found = caught(error, self._view.device, place)
        if found is None or processes.world_size() == 1:
            return found
        if alone:
            return replace(found, alone=True)
        self.ends_the_job(found)
        return None

    def ends_the_job(self, ran_out: OutOfMemory) -> None:
        """Has written down what did not fit on one rank of several, where it cannot be computed again without them."""
        with self._failsafe.contained():
            self._hooks.oom_on_one_rank(ran_out)

    def handled(self, ran_out: OutOfMemory) -> bool:
        """Whether there is more memory now for a training step that lacked some."""
        return self._handled(lambda: self._hooks.handle_oom(ran_out, self._window()))

    def handled_in_evaluation(self, ran_out: OutOfMemory) -> bool:
        """As [`handled`], for a batch of an evaluation."""
        return self._handled(lambda: self._hooks.handle_oom(ran_out, None))

    def handled_in_optimizer_step(self, ran_out: OutOfMemory) -> bool:
        """As [`handled`], for `optimizer.step()`, which may have changed some weights."""
        return self._handled(lambda: self._hooks.handle_oom_in_optimizer_step(ran_out, self._window()))

    def _handled(self, handle: Callable[[], bool]) -> bool:
        for section in ("step", "optimizer", "prediction", "generate"):
            # Row by row, a part takes many times as long.
            self._heartbeat.be_patient(section)
        handled = False
        with self._failsafe.contained():
            handled = handle()
        return handled

    def on_success(self) -> None:
        """Called when something that may have run out of memory before has been computed."""
        with self._failsafe.contained():
            self._hooks.on_success()

    def until_it_fits(self, compute: Callable[[], _T], discard: Callable[[], None]) -> _T:
        """
        Computes something that begins with rewinding the step: it can be begun again with more memory, or once more.
        """
        repeated = False
        while True:
            try:
                result = compute()
            except TrainingFault as fault:
                error, others_wait = fault.error, fault.others_wait
            except Exception as ours:
                # What is computed around the training step: rows picked, buffers put back, the gradient norm.
                if not is_out_of_memory(ours):
                    raise
                error, others_wait = ours, False
            else:
                self.on_success()
                return result
            # Outside of the handler: what the failed attempt held is gone, but for its gradients.
            if is_out_of_memory(error):
                discard()
            ran_out = self.caught(error)
            if ran_out is not None and self.handled(ran_out):
                continue
            if repeated or not self._may_have_passed(error):
                raise TrainingFault(error, others_wait) from error
            repeated = True

    def _may_have_passed(self, error: Exception) -> bool:
        """
        Whether a computation that is to heal another fault is tried once more after an exception: not where memory
        ran out and all has been tried, nor on several processes, where the others are waiting.
        """
        if processes.world_size() > 1:
            return False
        if is_out_of_memory(error) and not self._hooks.heals_memory:
            # Nothing is to be done where training runs out of memory; but this is none of what it computes.
            let_go(error)
            free_memory(self._view.device)
            return True
        lasting = (FailureType.OUT_OF_MEMORY, FailureType.DEVICE, FailureType.PROCESS_DIED)
        if classify_exception(error) in lasting:
            return False
        logger.info("Step %d: computed once more.", self._view.step, exc_info=error)
        return True

    @contextlib.contextmanager
    def experiment(self) -> Iterator[None]:
        """Marks what is computed inside as not needed by the run: where memory runs out in it, it is given up."""
        before, self.experimenting = self.experimenting, True
        try:
            yield
            votes.wait_for_all_ranks("an experiment is over", self._view.device)
        except TrainingFault as fault:
            self._give_up_together(fault)
            raise
        except votes.RankRaised as error:
            raise TrainingFault(error, others_know=True) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            in_ours = TrainingFault(error)
            self._give_up_together(in_ours)
            raise in_ours from error
        finally:
            self.experimenting = before

    def _give_up_together(self, fault: TrainingFault) -> None:
        """Has all ranks give up an experiment in which training code has raised on this one."""
        if processes.world_size() == 1 or fault.others_know:
            return
        if fault.others_wait and not votes.all_reach(THROUGH, _COMPUTING_SECONDS):
            raise recipes.Stranded("an experiment failed on this rank alone") from fault.error
        fault.others_know = True
        with contextlib.suppress(votes.RankRaised):
            votes.tell_raised(self._view.device)
