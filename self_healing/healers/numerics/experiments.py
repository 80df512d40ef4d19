"""Experiments on a step: on some of its rows, in other precision, once more."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...failures.recipes import TrainingFault
from ...hf.batches import Layout, select_rows
from ...hf.dataloader import TrainingLoader
from ...hf.engine import Origin, nonfinite_in
from ...hf.memory import free_memory
from ...hf.state import Search, named_gradients_of
from ...hf.step import Window
from ...system import processes
from ...system.random_state import Repeatability, StepPrint


logger = logging.getLogger(__name__)


class StepExperiments:
    """Computes a step in other ways than it was, to find out what is wrong with it."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._engine = window.engine
        self._trainer = window.engine.trainer

    # ---- some of its rows, and others ----

    def probe(self, index: int, rows: Sequence[int]) -> bool:
        """Whether some rows of a micro-batch alone give a finite loss and finite gradients."""
        layout = self.layout(index)
        return self._probe(index, lambda: select_rows(self.window.prepared[index], layout, rows))

    def probe_row(self, index: int, row: int) -> bool:
        """The same of one row alone."""
        return self.probe(index, self.layout(index).alone(row))

    def layout(self, index: int) -> Layout:
        layout = self.window.layout(index)
        if layout is None:
            raise ValueError(f"the rows of micro-batch {index} cannot be told apart")
        return layout

    def probe_batch(self, inputs: Any) -> bool:
        """Whether another micro-batch, as the data loader gave it, is finite with the weights as they are."""
        return self._probe(self.window.size - 1, lambda: self._engine.prepare_inputs(copy.copy(inputs)))

    def _probe(self, index: int, rows: Callable[[], Any]) -> bool:
        return self.window.until_it_fits(lambda: self._probe_once(index, rows()))

    def _probe_once(self, index: int, batch: Any) -> bool:
        self.window.rewind()
        try:
            loss = self.window.compute_micro_batch(index, lambda _: batch, last=True, synchronise=False)
            # In this order: where tensors of a layer are spread over ranks, all of them have to ask about gradients.
            return self._engine.gradients_are_finite() and math.isfinite(float(loss))
        finally:
            self.window.rewind()

    def rows_elsewhere(self, count: int) -> list[Any]:
        """
        Loads batches of one row each from all over the training data, none of them in this step, for each twice the
        same: what is computed from a batch may need more than one.
        """
        if self.window.objective.online:
            return []
        try:
            return TrainingLoader(self._trainer).rows_elsewhere(count, self.window.samples())
        except Exception:
            logger.info("Other rows of the data could not be loaded to compare with.", exc_info=True)
            return []

    # ---- where it begins ----

    def origin(self) -> Origin | None:
        """Finds where the step first gives a number that is not finite; `None` where that cannot be seen."""
        found: Origin | None = None
        for index in range(self.window.size):
            if found is None or processes.world_size() > 1:
                # Several processes compute equally many, because a loss may contain collectives.
                here = self.window.until_it_fits(functools.partial(self.origin_in, index))
                found = found or here
        return found

    def origin_in(self, index: int, pick: Callable[[Any], Any] = lambda batch: batch) -> Origin | None:
        """The same of what is picked of one micro-batch, once."""
        window = self.window
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
            return Origin("gradient", tuple(bad)) if bad else None
        finally:
            window.rewind()

    def finite_in_full_precision(self) -> bool | None:
        """Whether the step is finite without mixed precision; `None` where there is none."""
        with self._engine.full_precision() as changed:
            if not changed:
                return None
            self.window.reexecute()
            finite = self.window.signals().finite
        self.window.rewind()
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
            loss = torch.stack([loss.detach().double() for loss in self.window.losses]).sum()
            return StepPrint.of(float(loss), self._engine.gradients())
        except Exception:
            logger.info("Step %d: whether it repeats could not be measured.", self.window.step, exc_info=True)
            return None

    def _apart_from(self, first: StepPrint) -> Repeatability | None:
        again = self._print()
        return None if again is None else first.apart_from(again, self._engine.precision)

    def _computed_once_more(self) -> bool:
        """Computes it in any case; whether that succeeded at the first attempt."""
        window = self.window
        try:
            with window.engine.retry.experiment():
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
        window = self.window
        tokens = self._trainer.state.num_input_tokens_seen - window.tokens_inside
        loss, added = window.compute_again_so_far(tokens)
        window.losses.append(loss)
        window.tokens_inside += added
        window.measure_again()
        window.accept()
