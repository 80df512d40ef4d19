"""`OptimizerStep`: the trainer's `optimizer.step()`, taken with the rates in force, and again where memory ran out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..instrument.hooks import Hooks
from ..instrument.less_memory import UpdateOneByOne
from ..instrument.memory_retry import MemoryRetry
from ..instrument.phase import Phase
from ..instrument.rates import Rates
from ..instrument.step_mark import StepMark
from ..instrument.window import Window
from ..ranks import votes
from ..system import processes
from .deepspeed import engine_of
from .hooks import Failsafe
from .reentry import Reentry
from .state import innermost


class OptimizerStep:
    """Wraps the optimizer steps of one trainer's loop."""

    def __init__(
        self,
        trainer: Any,
        *,
        hooks: Hooks,
        failsafe: Failsafe,
        retry: MemoryRetry,
        rates: Rates,
        reentry: Reentry,
        window: Callable[[], Window | None],
    ) -> None:
        self._hooks = hooks
        self._failsafe = failsafe
        self._retry = retry
        self._rates = rates
        self._reentry = reentry
        self._window = window
        # DeepSpeed's uses up the gradient, and is left half-way with the groups of one partition.
        self.can_be_taken_again = engine_of(trainer) is None
        # It calls the optimizer once for each group of parameters, and gathers weights after that.
        self._ends_with_the_optimizer = self.can_be_taken_again
        self._mark = StepMark(trainer.optimizer)
        self._one_by_one = UpdateOneByOne(trainer.optimizer)
        inner = innermost(trainer.optimizer)
        self._optimizer = inner if isinstance(inner, torch.optim.Optimizer) else None
        self._handles: list[Any] = []
        self._begun = votes.Collectives().begun
        # Whether an update may have changed the weights: one with a rate of 0, or without gradients, has not.
        self.weights_moved = self._optimizer is None

    def attach(self) -> None:
        """Hooks into the optimizer itself, which sees steps that do not go through [`step`] as well."""
        if self._optimizer is not None:
            self._handles.append(self._optimizer.register_step_pre_hook(self._begins))
            self._handles.append(self._optimizer.register_step_post_hook(self._ends))

    def detach(self) -> None:
        """Gives the optimizer back as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._one_by_one.switch_off()

    def _begins(self, *_: Any) -> None:
        self._reentry.phase = Phase.STEPPING

    def _ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._ends_with_the_optimizer:
            self._reentry.phase = Phase.STEPPED
        if self.weights_moved:
            return
        window = self._window()
        if window is None or not window.skipped:
            rates = [group.get("lr") for group in optimizer.param_groups]
            self.weights_moved = any(rate is None or float(rate) != 0.0 for rate in rates)

    # ---- wrapped methods ----

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `optimizer.step`: takes the step with the rates in force."""
        scale = 1.0
        with self._failsafe.contained():
            self._hooks.before_optimizer_step()
            self._hooks.about_to_step()
        if self._failsafe.attached:
            # With another rate on each rank the weights would be others, too.
            with self._failsafe.contained(), self._failsafe.together():
                scale = self._rates.scale()
        if scale == 1.0:
            return self._until_it_fits(original, *args, **kwargs)
        rates = self._rates.in_force(scale)
        at_once = self._ends_with_the_optimizer or self._optimizer is None
        with self._rates.set(rates) if at_once else self._rates.set_in_update(rates):
            return self._until_it_fits(original, *args, **kwargs)

    def _until_it_fits(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        while True:
            self._mark.set()
            begun = self._begun() if processes.world_size() > 1 else None
            try:
                result = original(*args, **kwargs)
            except Exception as error:
                alone = begun is not None and self._begun() == begun and self.can_be_taken_again
                ran_out = self._retry.caught(error, place="optimizer step", alone=alone)
                if ran_out is None:
                    raise
            else:
                with self._failsafe.contained():
                    self._hooks.stepped()
                return result
            with self._failsafe.leaving_on_exception():
                again = self._retry.handled_in_optimizer_step(ran_out)
            if not again:
                raise ran_out.error

    def learning_rate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `_get_learning_rate`, which the Trainer logs: gives the rate in force, not the schedule's."""
        rate = original(*args, **kwargs)
        scale = 1.0
        with self._failsafe.contained():
            scale = self._rates.scale()
        return rate if scale == 1.0 else rate * scale

    # ---- after a step that raised ----

    def undo(self) -> bool:
        """Takes back a step that raised before it changed any weight; whether it did. It can be taken again then."""
        if not self._mark.undo():
            return False
        self.undone()
        return True

    def undone(self) -> None:
        """Notes that the weights are as before a step that raised."""
        self._reentry.phase = Phase.COMPUTING

    def update_one_by_one(self) -> bool:
        """Makes the optimizer update parameter by parameter, with less memory at a time; whether it did not before."""
        return self._one_by_one.switch_on()
