"""Around `optimizer.step()`: whether it was taken, and with which learning rates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import optimizer as optim
from transformers import TrainerCallback

from ..system import processes
from .deepspeed import engine_of
from .reentry import Reentry
from .sections import Phase
from .state import unwrap_optimizer
from .step import Bounds, Window
from .view import TrainerView


# ---- optimizer step ----


# Optimizers that write to tensors through torch, which counts it; kernels of others may go around the counter.
_COUNTED = ("torch", "transformers")


class OptimizerStep:
    """Knows of the optimizer steps of one trainer whether they have begun and ended, and whether one can be undone."""

    def __init__(self, instrument: Any) -> None:
        self._instrument = instrument
        self._reentry: Reentry = instrument.reentry
        # DeepSpeed's uses up the gradient, and is left half-way with the groups of one partition.
        self.can_be_taken_again = engine_of(instrument.trainer) is None
        inner = unwrap_optimizer(instrument.trainer.optimizer)
        self.optimizer = inner if isinstance(inner, torch.optim.Optimizer) else None
        self._handles: list[Any] = []
        # The versions of the parameters right before the step in which the optimizer makes its state, the first one.
        self._versions: dict[torch.Tensor, int] | None = None
        # How long the last step has taken here.
        self.seconds = math.nan
        # Whether an update may have changed the weights: one with a rate of 0, or without gradients, has not.
        self.weights_moved = self.optimizer is None

    def attach(self) -> None:
        """Hooks into the optimizer itself: what other hooks of it raise comes before its step has begun."""
        if self.optimizer is not None:
            self._handles.append(self.optimizer.register_step_pre_hook(self._begins))
            self._handles.append(self.optimizer.register_step_post_hook(self._ends))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begins(self, *_: Any) -> None:
        self._reentry.phase = Phase.STEPPING

    def _ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.can_be_taken_again:
            # DeepSpeed's calls the optimizer once for each group of parameters, and gathers weights after that.
            self._reentry.phase = Phase.STEPPED
        self._versions = None
        if self.weights_moved:
            return
        window: Window | None = self._instrument.window
        if window is None or not window.skipped:
            rates = [group.get("lr") for group in optimizer.param_groups]
            self.weights_moved = any(rate is None or float(rate) != 0.0 for rate in rates)

    def mark(self) -> None:
        """Called right before a step in which the optimizer makes its state, the first one: it can be undone."""
        optimizer = self.optimizer
        assert optimizer is not None
        if type(optimizer).__module__.partition(".")[0] in _COUNTED:
            self._versions = {each: each._version for group in optimizer.param_groups for each in group["params"]}

    def undo(self) -> bool:
        """Takes back a step that raised before it changed any weight; whether it did. It can be taken again then."""
        optimizer, versions = self.optimizer, self._versions
        if optimizer is None or versions is None or any(each._version != was for each, was in versions.items()):
            return False
        # Fused kernels write to tensors without torch counting it, but count their steps.
        fused = any(group.get("fused") for group in optimizer.param_groups)
        if fused and any("step" not in each or float(each["step"]) != 0 for each in optimizer.state.values()):
            return False
        # What it has made of it may be incomplete.
        optimizer.state.clear()
        self.undone()
        return True

    def undone(self) -> None:
        """Notes that the weights are as before a step that raised."""
        self._reentry.phase = Phase.COMPUTING


# ---- veto: an update that the device itself leaves out ----


# Elsewhere the host would wait for nothing, and nothing is won.
VETO_ON = {"cuda"}


class Veto:
    """
    Has an update launched before the host knows the numbers of its step: the device compares them with bounds, and
    fused optimizers of torch apply nothing where `found_inf` is 1. The host waits for the numbers while the update
    runs.
    """

    def __init__(self, instrument: Any) -> None:
        trainer, self._device = instrument.trainer, instrument.view.device
        self._reentry: Reentry = instrument.reentry
        self._optimizer: Any = unwrap_optimizer(trainer.optimizer)
        self.usable = self._device.type in VETO_ON and self._may_be_left_out(trainer)
        self._bounds: Bounds | None = None
        if self.usable:
            on_gpu = self._device.type == "cuda"
            self._on_device = torch.zeros(2, 2, device=self._device)
            self._found = torch.zeros((), device=self._device)
            self._on_host = torch.empty(2, pin_memory=on_gpu)
            self._event: Any = torch.Event("cuda") if on_gpu else None

    def _may_be_left_out(self, trainer: Any) -> bool:
        """Whether nobody but the optimizer takes part in an update, and it can leave one out on the device."""
        if processes.world_size() > 1 or trainer.accelerator.scaler is not None or engine_of(trainer) is not None:
            return False
        # Another would be told of an update that may be none.
        if any(takes_part(each, "on_pre_optimizer_step") for each in trainer.callback_handler.callbacks):
            return False
        # A subclass may do more than its update; SGD makes its momentum of what is not written.
        kind, step = type(self._optimizer), vars(self._optimizer).get("step")
        # What the schedule has wrapped, to count steps, is the method of the class.
        plain = step is None or getattr(step, "__wrapped__", None) is kind.step
        return kind in (torch.optim.Adam, torch.optim.AdamW) and plain

    def allows(self, window: Window) -> bool:
        """Whether the step that was measured just now may be launched; its norm lies on the device then."""
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            if not group.get("fused"):
                return False
        # Those of this library alone: others would be told of an update that may be none.
        hooked = len(optimizer._optimizer_step_pre_hooks) > 1 or len(optimizer._optimizer_step_post_hooks) > 1
        everywhere = bool(optim._global_optimizer_pre_hooks or optim._global_optimizer_post_hooks)
        return not hooked and not everywhere and type(window.grad_norm) is torch.Tensor

    def compare(self, numbers: torch.Tensor, bounds: Bounds) -> None:
        """Has the device compare loss and norm with bounds, and send them to the host."""
        if bounds != self._bounds:
            self._on_device = torch.tensor(bounds, device=self._device)
            self._bounds = bounds
        lows, highs = self._on_device
        # NaN is in no order with anything.
        within = (lows <= numbers).logical_and_(numbers <= highs).all()
        torch.logical_not(within, out=self._found)
        self._on_host.copy_(numbers, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def launch(self, window: Window, bounds: Bounds, step: Callable[[], Any]) -> Any:
        """Launches the update, then reads the numbers; whether it was applied is in `window.applied`."""
        self._optimizer.found_inf = self._found
        try:
            result = step()
        finally:
            del self._optimizer.found_inf
        # Whoever interrupts the wait does not know whether the update was applied.
        self._reentry.phase = Phase.STEPPING
        if self._event is not None:
            self._event.synchronize()
        window.read = self._on_host.tolist()
        window.applied = all(
            low <= each <= high for low, each, high in zip(bounds[0], window.read, bounds[1], strict=True)
        )
        self._reentry.phase = Phase.STEPPED if window.applied else Phase.COMPUTING
        return result


def takes_part(callback: Any, event: str) -> bool:
    """Whether a callback, but for that of this library, does something in an event."""
    own = type(callback).__module__.partition(".")[0] == __name__.partition(".")[0]
    told = getattr(getattr(callback, event), "__func__", None)
    return not own and told is not getattr(TrainerCallback, event)


# ---- rates: sets the learning rates that an optimizer step is taken with, for that step ----


class Rates:
    """Sets rates and options of the parameter groups for one step."""

    def __init__(self, instrument: Any) -> None:
        self._trainer = instrument.trainer
        self._view: TrainerView = instrument.view
        # Its groups are those of the optimizer within; accelerate's wrapper gets them in calls.
        self._optimizer = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)
        # What decides on the factor: `scale(step)`. That it has `touched` the rates at all is asked first.
        self.control: Any = SimpleNamespace(touched=False)

    def scale(self) -> float:
        """The factor in force on the schedule's rates."""
        touched = self.control.touched and self._view.can_scale_rate
        return float(self.control.scale(self._trainer.state.global_step)) if touched else 1.0

    def in_force(self, scale: float | None = None) -> list[Any]:
        """The rate of each parameter group: the schedule's, times the factor in force or another one."""
        if scale is None:
            scale = self.scale()
        rates = [group["lr"] for group in self._trainer.optimizer.param_groups]
        # Not even multiplied by 1: a rate kept as a tensor would have to be read.
        return rates if scale == 1.0 or not self._view.can_scale_rate else [rate * scale for rate in rates]

    def settings(self) -> tuple[list[Any], list[dict[str, Any]]]:
        """The rate in force of each parameter group, and what schedules change beside it (one-cycle momentum)."""
        scale, rates, options = self.scale() if self.control.touched else 1.0, [], []
        for group in self._optimizer.param_groups:
            rates.append(group["lr"] if scale == 1.0 else group["lr"] * scale)
            kept = {}
            for name in ("betas", "momentum", "weight_decay"):
                if name in group:
                    kept[name] = group[name]
            options.append(kept)
        return rates, options

    @contextlib.contextmanager
    def set_in_update(self, rates: Sequence[Any]) -> Iterator[None]:
        """
        Puts rates in place whenever the optimizer updates weights, and for nothing else of the step: DeepSpeed moves
        its schedule on in it, and calls the optimizer once for each group.
        """
        inner, groups = unwrap_optimizer(self._trainer.optimizer), list(self._trainer.optimizer.param_groups)
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
        groups, theirs = self._trainer.optimizer.param_groups, self.settings()[1] if options else []
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
