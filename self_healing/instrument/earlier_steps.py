"""Computes and applies earlier steps again in the middle of a step, which is computed again afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..ranks import votes
from ..signals import StepSignals
from ..system import processes
from .kept_step import Control, Recording
from .window import Window


class EarlierSteps:
    """Runs steps that were kept, between the backward of the step that is judged and its `optimizer.step()`."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._engine = window.engine
        self._state = window.engine.trainer.state

    def loss_of(self, control: Control) -> float:
        """Computes the loss of an earlier step with the weights as they are, over all ranks."""
        loss = self._loss_from_the_start(control)
        if not math.isfinite(loss):
            # A fault that passes may have struck just then.
            loss = self._loss_from_the_start(control)
        self._window.rewind()
        return loss

    def train_on(self, control: Control, scale: float) -> float:
        """Takes one optimizer step on an earlier step's batches, as an experiment: weights and moments move."""
        try:
            loss = self._loss_from_the_start(control)
            if math.isfinite(loss):
                self._engine.step_again(self._engine.rates_in_force(scale))
        finally:
            self._window.rewind()
        return loss

    def replay(self, recording: Recording) -> StepSignals:
        """Applies an earlier step again, as it was applied then."""
        window, state = self._window, self._state
        assert window.start is not None
        tokens, step, norm = state.num_input_tokens_seen, state.global_step, None
        # Once the step that is judged has been applied, what was logged and counted since then is as it should be.
        counts = window.start if step == window.step else window.ledger.capture()

        def compute() -> float:
            window.discard()
            recording.rng.restore()
            return self._loss(recording.control)

        try:
            # A loss may depend on it.
            state.global_step = recording.step
            loss = self._until_it_fits(compute)
            if math.isfinite(loss):
                norm = self._engine.step_again(recording.rates, recording.scaled_by, recording.options)
        finally:
            state.global_step = step
            self._engine.discard()
            window.ledger.rewind_counts(counts)
            state.num_input_tokens_seen = tokens
        return StepSignals(recording.step, loss, norm)

    def _loss_from_the_start(self, control: Control) -> float:
        """Computes the loss of an earlier step, from the random states that the step that is judged began with."""

        def compute() -> float:
            self._window.rewind()
            return self._loss(control)

        return self._until_it_fits(compute)

    def _loss(self, control: Control) -> float:
        """Computes forward and backward of an earlier step; its loss, over all ranks."""
        last = len(control.calls) - 1
        with self._engine.accumulating(len(control.calls)):
            losses = [self._window.compute(call, last=index == last) for index, call in enumerate(control.calls)]
        total = torch.stack([loss.detach().float() for loss in losses]).sum()
        ranks = votes.sum_over_ranks("loss of an earlier step", total.reshape(1), total.device)
        return ranks[0] / processes.world_size()

    def _until_it_fits(self, compute: Callable[[], float]) -> float:
        return self._engine.until_it_fits(compute, self._window.discard)
