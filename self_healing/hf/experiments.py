"""Experiments on steps: on some rows, on kept states, on earlier steps."""

from __future__ import annotations

import copy
import functools
import logging
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Trainer

from ..failures.recipes import TrainingFault
from ..ranks import votes
from ..system import processes
from ..system.random_state import Repeatability, StepPrint
from .batches import Layout, select_rows
from .dataloader import TrainingLoader
from .engine import Origin, nonfinite_in
from .memory import free_memory
from .objective import StepSignals
from .state import Search, named_gradients_of
from .step import Control, Recording, Window


logger = logging.getLogger(__name__)


class StepExperiments:
    """Computes a step in other ways than it was, to find out what is wrong with it."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._engine = window.engine
        self._trainer = window.engine.trainer

    # ---- some of its rows, and others ----

    def probe(self, index: int, rows: Sequence[int]) -> bool:
        """Whether some rows of a micro-batch alone give a finite loss and finite gradients."""
        layout = self._layout(index)
        return self._probe(index, lambda: select_rows(self._window.prepared[index], layout, rows))

    def probe_row(self, index: int, row: int) -> bool:
        """The same of one row alone."""
        return self.probe(index, self._layout(index).alone(row))

    def _layout(self, index: int) -> Layout:
        layout = self._window.layout(index)
        if layout is None:
            raise ValueError(f"the rows of micro-batch {index} cannot be told apart")
        return layout

    def probe_batch(self, inputs: Any) -> bool:
        """Whether another micro-batch, as the data loader gave it, is finite with the weights as they are."""
        return self._probe(self._window.size - 1, lambda: self._engine.prepare_inputs(copy.copy(inputs)))

    def _probe(self, index: int, rows: Callable[[], Any]) -> bool:
        return self._window.until_it_fits(lambda: self._probe_once(index, rows()))

    def _probe_once(self, index: int, batch: Any) -> bool:
        self._window.rewind()
        try:
            loss = self._window.compute_micro_batch(index, lambda _: batch, last=True, synchronise=False)
            # In this order: where tensors of a layer are spread over ranks, all of them have to ask about gradients.
            return self._engine.gradients_are_finite() and math.isfinite(float(loss))
        finally:
            self._window.rewind()

    def rows_elsewhere(self, count: int) -> list[Any]:
        """
        Loads batches of one row each from all over the training data, none of them in this step, for each twice the
        same: what is computed from a batch may need more than one.
        """
        if self._window.objective.online:
            return []
        try:
            return TrainingLoader(self._trainer).rows_elsewhere(count, self._window.samples())
        except Exception:
            logger.info("Other rows of the data could not be loaded to compare with.", exc_info=True)
            return []

    # ---- where it begins ----

    def origin(self, backward: bool = False) -> Origin | None:
        """Finds where the step first gives a number that is not finite; `None` where that cannot be seen."""
        found: Origin | None = None
        for index in range(self._window.size):
            if found is None or processes.world_size() > 1:
                # Several processes compute equally many, because a loss may contain collectives.
                here = self._window.until_it_fits(functools.partial(self._origin_in, index, backward=backward))
                found = found or here
        return found

    def origin_in_row(self, index: int, row: int) -> Origin | None:
        """The same of one row of a micro-batch alone, in the backward as well."""
        layout = self._layout(index)

        def pick(batch: Any) -> Any:
            return select_rows(batch, layout, layout.alone(row))

        return self._window.until_it_fits(lambda: self._origin_in(index, pick, backward=True))

    def _origin_in(
        self, index: int, pick: Callable[[Any], Any] = lambda batch: batch, backward: bool = False
    ) -> Origin | None:
        window = self._window
        window.rewind()
        spoiled: list[str] = []

        def look(batch: Any) -> Any:
            picked = pick(batch)
            spoiled.extend(nonfinite_in(picked))
            return picked

        try:
            with self._engine.watching_outputs() as seen:
                loss = window.compute_micro_batch(index, look, last=True, synchronise=False)
            if spoiled:
                return Origin("inputs", tuple(spoiled))
            if seen:
                return seen[0]
            if not math.isfinite(float(loss)):
                return Origin("loss")
            search = Search()
            for name, gradient in named_gradients_of(self._trainer.model):
                search.add(name, gradient, inf=True)
            bad = search.nonfinite()
            if not bad:
                return None
            return Origin("gradient", tuple(bad), self._begins_in_backward(index, pick) if backward else {})
        finally:
            window.rewind()

    def _begins_in_backward(self, index: int, pick: Callable[[Any], Any]) -> dict[str, Any]:
        """Finds the module in whose backward the gradient is first not finite; empty where that cannot be seen."""
        self._window.rewind()
        try:
            with self._engine.watching_gradients() as seen:
                self._window.compute_micro_batch(index, pick, last=True, synchronise=False)
        except TrainingFault as fault:
            # Such hooks put views around what modules give, and code that writes over it in place does not allow them.
            logger.info("The backward could not be looked into.", exc_info=fault.error)
            return {}
        return seen[0].details if seen else {}

    def finite_in_full_precision(self) -> bool | None:
        """Whether the step is finite without mixed precision; `None` where there is none."""
        with self._engine.full_precision() as changed:
            if not changed:
                return None
            self._window.reexecute()
            finite = self._window.signals().finite
        self._window.rewind()
        return finite

    # ---- does it repeat? ----

    def repeatability(self) -> Repeatability | None:
        """Computes the step once more, and tells how far the two lie apart; `None` if that cannot be known."""
        first = self._print()
        if first is None or not self._computed_once_more():
            return None
        found = self._apart_from(first)
        if found is None or found.bitwise or not self._computed_once_more():
            return found
        # Its gradients are those that are applied, and a fault may have struck it: then the third is the first again.
        again = self._apart_from(first)
        return again if again is not None and again.bitwise else found

    def _print(self) -> StepPrint | None:
        try:
            loss = torch.stack([loss.detach().double() for loss in self._window.losses]).sum()
            return StepPrint.of(float(loss), self._engine.gradients())
        except Exception:
            logger.info("Step %d: whether it repeats could not be measured.", self._window.step, exc_info=True)
            return None

    def _apart_from(self, first: StepPrint) -> Repeatability | None:
        again = self._print()
        return None if again is None else first.apart_from(again, self._engine.precision)

    def _computed_once_more(self) -> bool:
        """Computes it in any case; whether that succeeded at the first attempt."""
        window = self._window
        try:
            with window.experiment():
                self._compute_once_more()
        except TrainingFault as fault:
            logger.info("Step %d: computed once more to compare, it failed.", window.step, exc_info=fault.error)
        else:
            return True
        # Outside of the handler: what the failed attempt held is gone.
        window.discard()
        free_memory(self._engine.view.device)
        window.until_it_fits(self._compute_once_more)
        return False

    def _compute_once_more(self) -> None:
        window = self._window
        tokens = self._trainer.state.num_input_tokens_seen - window.tokens_inside
        window.add_loss(*window.compute_again_so_far(tokens))
        window.measure_again()
        window.accept()


class StepReplayer:
    """Runs steps that were kept, between the backward of the step that is judged and its `optimizer.step()`."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._engine = window.engine
        self._state = window.engine.trainer.state

    def loss_of(self, control: Control) -> float:
        """The loss of an earlier step with the weights as they are, over all ranks."""
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
                self._engine.step_again(self._engine.rates.in_force(scale))
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
            loss = window.until_it_fits(compute)
            if math.isfinite(loss):
                norm = self._engine.step_again(recording.rates, recording.scaled_by, recording.options)
        finally:
            state.global_step = step
            self._engine.discard()
            window.ledger.rewind_counts(counts)
            state.num_input_tokens_seen = tokens
        return StepSignals(recording.step, loss, norm)

    def _loss_from_the_start(self, control: Control) -> float:
        """From the random states that the step that is judged began with."""

        def compute() -> float:
            self._window.rewind()
            return self._loss(control)

        return self._window.until_it_fits(compute)

    def _loss(self, control: Control) -> float:
        last = len(control.calls) - 1
        with self._engine.accumulating(len(control.calls)):
            losses = [self._window.compute(call, last=index == last) for index, call in enumerate(control.calls)]
        total = torch.stack([loss.detach().float() for loss in losses]).sum()
        ranks = votes.sum_over_ranks("loss of an earlier step", total.reshape(1), total.device)
        return ranks[0] / processes.world_size()


def give_batches(trainer: Any, micro_batches: Sequence[Any], items: Any, load_from: str | None) -> None:
    """Has the `train()` of another trainer go over one step's micro-batches, from the weights of a checkpoint."""
    if load_from is not None:
        trainer._load_from_checkpoint(load_from)
    loader: Any = torch.utils.data.DataLoader(list(micro_batches), batch_size=None)  # type: ignore[arg-type]
    trainer.get_train_dataloader = lambda: loader
    # As the step had them: neither counted again, which with several processes would give another number, ...
    items = items.to(trainer.args.device) if isinstance(items, torch.Tensor) else items
    trainer.get_batch_samples = lambda *_: (list(micro_batches), items)
    # ... nor generated again.
    trainer._prepare_inputs = types.MethodType(Trainer._prepare_inputs, trainer)
