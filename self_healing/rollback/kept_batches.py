"""Keeps batches of earlier steps: to apply steps again, to compare with, and to try learning rates on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from ..hf.step import Control, Recording, Window, on_host
from .snapshots import Snapshot


# Steps of a run's beginning that are kept for as long as it is early, to try out learning rates on.
_TRIAL_STEPS = 10
# All steps since the newest trusted state are kept, to be applied again, if their batches take no more than this.
_LARGEST_TAPE = 256 * 2**20
# A batch is kept, to tell harder data from worse weights, only if it is small beside the model.
_LARGEST_CONTROL = 64 * 2**20


class KeptBatches:
    """Holds what is kept of the batches of earlier steps."""

    def __init__(self) -> None:
        self.newest_healthy: Control | None = None
        self.healthy_inputs: Any = None
        self.first_steps: list[Control] = []
        self.tape: deque[Recording] = deque()
        self._tape_bytes = 0
        self._on_host = False
        self._gap = False

    def release(self) -> None:
        """Lets go of all of them."""
        self.newest_healthy = self.healthy_inputs = None
        self.first_steps, self._gap = [], False
        self.cut_tape()

    def copy_of(self, window: Window, loss: float) -> Control | None:
        """Copies a step to be computed again later."""
        control = window.control(loss, _LARGEST_CONTROL)
        if control is not None and self._on_host:
            # The device has just been waited for: only the copy itself takes time.
            control.leave_device()
        return control

    def note_healthy(self, window: Window) -> None:
        """Keeps the first micro-batch of a step with nothing wrong."""
        if not window.objective.online:
            inputs = window.inputs(0)
            self.healthy_inputs = on_host(inputs) if self._on_host else inputs

    # ---- the beginning of the run ----

    def keep_first(self, control: Control | None) -> None:
        """Keeps a step of the beginning of the run, unless there are enough, or one was left out for its size."""
        if len(self.first_steps) >= _TRIAL_STEPS or (control is not None and not math.isfinite(control.loss)):
            return
        # Without a gap: those that several ranks have in common are the first of each.
        self._gap |= control is None or control.nbytes > _LARGEST_CONTROL // _TRIAL_STEPS
        if control is not None and not self._gap:
            self.first_steps.append(control)

    def forget_first(self) -> None:
        """Drops the steps of the beginning of the run, once it is past that."""
        if self.first_steps:
            self.first_steps = []

    # ---- the tape ----

    def record(self, window: Window, control: Control | None) -> None:
        """Keeps the steps since the newest trusted state, to be applied again; not beyond a gap."""
        recording = None if control is None else window.recording(control)
        if recording is None or control is None or self._tape_bytes + control.nbytes > _LARGEST_TAPE:
            self.cut_tape()
            return
        self.tape.append(recording)
        self._tape_bytes += control.nbytes

    def recorded(self, steps: range) -> list[Recording] | None:
        """Returns the recordings of these steps; `None` if not all of them are kept."""
        found = [each for each in self.tape if each.step in steps]
        return found if [each.step for each in found] == list(steps) else None

    def cut_tape(self) -> None:
        """Lets go of all recordings."""
        self.tape.clear()
        self._tape_bytes = 0

    def forget_before(self, step: int) -> None:
        """Drops the steps before the newest trusted state: they are not applied again."""
        while self.tape and self.tape[0].step < step:
            self._tape_bytes -= self.tape.popleft().control.nbytes

    def forget_beyond(self, step: int) -> None:
        """Drops the steps from this one on: the run goes on from here with others."""
        while self.tape and self.tape[-1].step >= step:
            self._tape_bytes -= self.tape.pop().control.nbytes

    # ---- where memory ran out ----

    def free(self, of_host: bool, device: torch.device, snapshots: Iterable[Snapshot]) -> int:
        """Frees memory that kept batches take, after memory ran out."""
        snapshots = list(snapshots)
        with_snapshots = [snapshot.extras.get("control") for snapshot in snapshots]
        recorded = [recording.control for recording in self.tape]
        every = [*recorded, *self.first_steps, *with_snapshots, self.newest_healthy]
        kept = {id(control): control for control in every if control is not None}.values()
        # The same tensors, mostly, as those of the newest step that is kept.
        self.healthy_inputs = None if of_host else on_host(self.healthy_inputs)
        if not of_host:
            self._on_host = True
            return sum(control.leave_device() for control in kept)
        if device.type != "cpu" and not self._on_host:
            return 0
        self.first_steps, self.newest_healthy, self._gap = [], None, True
        self.cut_tape()
        for snapshot in snapshots:
            snapshot.extras.pop("control", None)
        return sum(control.nbytes for control in kept)
