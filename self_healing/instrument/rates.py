"""Sets the learning rates that an optimizer step is taken with, for that step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..hf.state import innermost
from ..hf.view import TrainerView
from .hooks import Hooks


class Rates:
    """Sets rates and options of the parameter groups for one step."""

    def __init__(self, trainer: Any, view: TrainerView, hooks: Hooks) -> None:
        self._trainer = trainer
        self._view = view
        self._hooks = hooks

    def scale(self) -> float:
        """The factor in force on the schedule's rates."""
        scale = self._hooks.rate_scale(self._view.step)
        return scale if scale == 1.0 or self._view.can_scale_rate else 1.0

    def in_force(self, scale: float | None = None) -> list[Any]:
        """The rate of each parameter group: the schedule's, times the factor in force or another one."""
        if scale is None:
            scale = self.scale()
        rates = [group["lr"] for group in self._trainer.optimizer.param_groups]
        # Not even multiplied by 1: a rate kept as a tensor would have to be read.
        return rates if scale == 1.0 or not self._view.can_scale_rate else [rate * scale for rate in rates]

    def options(self) -> list[dict[str, Any]]:
        """Settings of each parameter group that schedules change beside the rate (one-cycle momentum)."""
        return [
            {name: group[name] for name in ("betas", "momentum", "weight_decay") if name in group}
            for group in self._trainer.optimizer.param_groups
        ]

    @contextlib.contextmanager
    def set_in_update(self, rates: Sequence[Any]) -> Iterator[None]:
        """
        Puts rates in place whenever the optimizer updates weights, and for nothing else of the step: DeepSpeed moves
        its schedule on in it, and calls the optimizer once for each group.
        """
        inner, groups = innermost(self._trainer.optimizer), list(self._trainer.optimizer.param_groups)
        with contextlib.ExitStack() as update:
            # Of all groups: under ZeRO-1 and 2 the optimizer has only the one that is updated meanwhile.
            before = inner.register_step_pre_hook(lambda *_: update.enter_context(_in_place(rates, groups)))
            after = inner.register_step_post_hook(lambda *_: update.close())
            try:
                yield
            finally:
                before.remove()
                after.remove()

    @contextlib.contextmanager
    def set(self, rates: Sequence[Any], options: Sequence[Mapping[str, Any]] = ()) -> Iterator[None]:
        """Puts rates, and options where there are any, in place for the time of a step."""
        groups, theirs = self._trainer.optimizer.param_groups, self.options() if options else []
        try:
            for group, chosen in zip(groups, options, strict=False):
                group.update(chosen)
            with _in_place(rates, groups):
                yield
        finally:
            for group, before in zip(groups, theirs, strict=False):
                group.update(before)


@contextlib.contextmanager
def _in_place(rates: Sequence[Any], groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    theirs = [group["lr"] for group in groups]
    try:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        yield
    finally:
        for group, rate in zip(groups, theirs, strict=True):
            group["lr"] = rate
