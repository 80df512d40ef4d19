"""`TrainingCall`: calls the trainer's own `training_step`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from ..failures.classify import is_nonfinite_exception
from ..hf.engine import Call
from ..hf.patching import Replacements
from ..hf.sections import Heartbeat
from ..ranks import votes
from ..system import processes
from .generating import NotGenerated
from .hooks import Hooks


# How long the ranks may be apart when they raise the same: a forward of a large model. The job ends that much later
# where one has raised alone.
_ALIKE_SECONDS = 5.0


class TrainingCall:
    """Calls the trainer's own `training_step`, in passes over its rows where one does not fit."""

    def __init__(
        self,
        trainer: Any,
        replaced: Replacements,
        hooks: Hooks,
        heartbeat: Heartbeat,
        heals_exceptions: bool,
    ) -> None:
        self._trainer = trainer
        self._replaced = replaced
        self._hooks = hooks
        self._heartbeat = heartbeat
        self._heals_exceptions = heals_exceptions
        self._calls = 0
        self.running = False
        # Told why the weights need not be those of the last step any more.
        self.doubt: Callable[[str], None] = lambda why: None

    def run(self, call: Call, on_nonfinite: Callable[[], None]) -> torch.Tensor:
        """Computes forward and backward of a micro-batch."""
        model, inputs, args, kwargs = call
        original = self._replaced.original(self._trainer, "training_step")
        self.running = True
        self._calls += 1
        # When a step is computed again, it lies within whatever does so.
        again = self._heartbeat.last[0].name != "step"
        if again:
            self._heartbeat.enter("step")
        try:
            passes = self._hooks.passes
            if passes is None:
                loss: torch.Tensor = original(model, inputs, *args, **kwargs)
            else:
                items = args[0] if args else kwargs.get("num_items_in_batch")
                loss = passes.run(lambda: original(model, copy.copy(inputs), *args, **kwargs), model, items)
            # A CUDA graph (torch.compile with mode="reduce-overhead") writes the next one into the same memory.
            return loss.detach().clone()
        except BaseException as error:
            self.doubt(_doubt_about(original))
            nonfinite = isinstance(error, Exception) and is_nonfinite_exception(error)
            if self._heals_exceptions and nonfinite and self._is_raised_by_all(error):
                on_nonfinite()
                return torch.full((), math.nan, device=self._trainer.args.device)
            raise
        finally:
            if again:
                self._heartbeat.leave()
            self.running = False

    def _is_raised_by_all(self, error: BaseException) -> bool:
        """Whether no rank waits in a collective that this one never reached: weights that are NaN are so on all."""
        if processes.world_size() == 1 or isinstance(error, NotGenerated):
            return True
        return votes.all_reach(f"an exception in training step {self._calls}", _ALIKE_SECONDS)


def _doubt_about(step: Any) -> str:
    """Why weights need not be what they were after an exception; `functools.wraps` gives any step a `__module__`."""
    module = str(getattr(getattr(step, "__func__", step), "__globals__", {}).get("__name__", "your own"))
    own = module.partition(".")[0] in ("transformers", "trl")
    return "" if own else f"the training_step of {module} was left half-way, and may have moved weights by then"
