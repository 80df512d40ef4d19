"""One optimizer step that can be judged, computed again, run on some of its rows, or left out."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..hf.dataloader import DataPosition
from ..hf.engine import Call, StepEngine
from ..hf.step import StepRecord, as_tensor
from ..hf.trainer_state import Bookkeeper, Bookkeeping
from ..signals import StepSignals
from .fewer_rows import FewerRows
from .kept_step import Control, Recording, nbytes_of
from .uneven_rows import gathering_uneven_rows


_T = TypeVar("_T")


class Window(StepRecord):
    """
    One optimizer step, between its backward and `optimizer.step()`: it can be computed again from the state it began
    with, on all of its rows or some, and is then applied, changed, or left out.
    """

    def __init__(self, engine: StepEngine, ledger: Bookkeeper, position: DataPosition, size: int) -> None:
        super().__init__(engine, position, size)
        self.ledger = ledger
        self.judged = False
        self.skipped = False
        self._trainer = engine.trainer
        self.touched = False
        self._recordable = True
        self._scaled_by = 1.0

    def experiment(self) -> contextlib.AbstractContextManager[None]:
        """Marks what is computed inside as not needed by the run: [`StepEngine.experiment`]."""
        return self.engine.experiment()

    @property
    def scaler_active(self) -> bool:
        """Whether a GradScaler looks after overflowing gradients (fp16)."""
        return self.engine.scaler_active

    # ---- computing it again ----

    def reexecute(self, keep: Mapping[int, Sequence[int]] | None = None) -> None:
        """Computes losses and gradients of the step again, from the state and the random numbers it started with."""
        self.until_it_fits(lambda: self._reexecute(keep))

    def compute_again(self, keep: Mapping[int, Sequence[int]] | None = None) -> StepSignals:
        """
        Computes the step again as a remedy or an experiment, and once more if that is not finite: a fault that passes
        may have struck just then.
        """
        self.reexecute(keep)
        signals = self.signals()
        if signals.finite:
            return signals
        self.reexecute(keep)
        return self.signals()

    def until_it_fits(self, compute: Callable[[], _T]) -> _T:
        """[`StepEngine.until_it_fits`], for a computation that begins with [`rewind`]."""
        return self.engine.until_it_fits(compute, self.discard)

    def _reexecute(self, keep: Mapping[int, Sequence[int]] | None) -> None:
        self._recordable = keep is None
        self._scaled_by = 1.0
        # Not `if keep`: a rank that drops nothing still takes part in counting what the others dropped.
        rows = FewerRows({}, {}) if keep is None else FewerRows.of(self, keep, self.engine)
        self.rewind()
        losses: list[torch.Tensor] = []
        computed = rows.computed(self.size)
        uneven = keep is not None and self.engine.view.world_size > 1
        with (
            self.engine.accumulating(None if self.objective.counts_own_tokens else rows.micro_batches),
            gathering_uneven_rows(self._trainer.accelerator) if uneven else contextlib.nullcontext(),
        ):
            for index in range(self.size):
                if index not in computed:
                    self._advance_without(index)
                    losses.append(torch.zeros_like(self.losses[index]))
                    continue
                pick, last = functools.partial(rows.select, index), index == computed[-1]
                if rows.emptied(index):
                    with self.engine.counting_nothing():
                        # A rank that counts its items alone may have none left, and would divide by them.
                        items = None if rows.items is None else max(rows.items, 1)
                        losses.append(0.0 * self.compute_micro_batch(index, pick, last, items))
                else:
                    losses.append(self.compute_micro_batch(index, pick, last, rows.items))
        self.losses = losses
        self.measure_again()

    def compute_again_so_far(self, tokens: int) -> tuple[torch.Tensor, int]:
        """Computes the step again up to and including the call that was made last, which has failed."""
        state, generated = self._trainer.state, self._generated
        assert self.start is not None
        of_generation = 0 if generated is None else generated[1].tokens_seen - self.start.tokens_seen
        self._tokens_inside, state.num_input_tokens_seen = 0, tokens
        # Rows that were generated are not generated again: it takes long, and rewards may be asked of a service.
        self.rewind(None if generated is None else generated[1])
        losses, added = [], 0
        for index, call in enumerate(self._calls):
            before = state.num_input_tokens_seen
            if index == 0 and generated is not None:
                with self.engine.preparing(lambda batch: batch, prepared=generated[0]):
                    losses.append(self.compute(call, last=self.size == 1))
            else:
                losses.append(self.compute(call, last=index == self.size - 1))
            if index == 0:
                state.num_input_tokens_seen += of_generation
            added = state.num_input_tokens_seen - before
            self._tokens_inside += added
        self._tokens_inside -= added
        self.losses = losses[:-1]
        if all(math.isfinite(float(loss)) for loss in self.losses):
            # Else it is as the Trainer has filtered it.
            self._set_running_loss(self.losses)
        return losses[-1], added

    def compute_micro_batch(
        self,
        index: int,
        pick: Callable[[Any], Any],
        last: bool,
        items: Any = None,
        synchronise: bool = True,
    ) -> torch.Tensor:
        """Computes forward and backward of one of its micro-batches."""
        model, inputs, args, kwargs = self._calls[index]
        if items is not None:
            args, kwargs = _with_items(args, kwargs, items)
        with self.engine.preparing(lambda batch: self._note(index, batch, pick)):
            return self.compute((model, inputs, args, kwargs), last, synchronise)

    def compute(self, call: Call, last: bool, synchronise: bool = True) -> torch.Tensor:
        """Computes forward and backward of one call: [`StepEngine.compute`]."""
        return self.engine.compute(call, last, self.note_exception, synchronise)

    def _note(self, index: int, batch: Any, pick: Callable[[Any], Any]) -> Any:
        # A copy: `compute_loss` may pop keys from the batch it is given.
        self.prepared.setdefault(index, copy.copy(batch))
        return pick(batch)

    def _advance_without(self, index: int) -> None:
        """Lets a trainer that generates its own rows do so for a micro-batch nothing of which is trained on."""
        if self.objective.online:
            self.engine.prepare_inputs(copy.copy(self._calls[index][1]))
            self._trainer._step += 1

    def discard(self) -> None:
        """Drops its gradients: it is computed again, or left out."""
        self.touched = True
        self.engine.discard()

    def rewind(self, to: Bookkeeping | None = None) -> None:
        """Brings the trainer to where the step began, or to a later moment of it; its gradients are gone."""
        assert self.start is not None
        to = to or self.start
        self.discard()
        tokens = self._trainer.state.num_input_tokens_seen - self._tokens_inside
        self.ledger.rewind_step(to)
        self._trainer.state.num_input_tokens_seen = tokens
        self._tokens_inside = 0

    def restore_buffers(self) -> None:
        """Puts buffers that a forward pass changes (batch norm statistics) back to where the step began."""
        if self.start is not None:
            self.ledger.restore_buffers(self.start)

    def control(self, loss: float, largest: int) -> Control | None:
        """
        Keeps the step, to be computed again later; `None` if its rows are generated again each time, or are too many.
        """
        nbytes = sum(nbytes_of(inputs) for inputs in self.all_inputs())
        if self.objective.online or nbytes > largest:
            return None
        return Control(self._calls, loss, nbytes)

    def recording(self, control: Control) -> Recording | None:
        """Records the step, to be applied later, again or for the first time; `None` if rows of it were left out."""
        if self.start is None or not self._recordable or getattr(self._trainer.args, "sync_ref_model", False):
            # A reference model that follows the model does so in a callback, which is not called again.
            return None
        rates = self.engine.rates_in_force()
        options = self.engine.group_options()
        return Recording(self.step, control, self.start.rng, rates, self._scaled_by, options)

    def begin_from_here(self) -> None:
        """Has the step start from the state there is now, after a replay."""
        if self.start is not None:
            self.start = self.ledger.with_buffers_of_now(self.start)

    # ---- what becomes of it ----

    def accept(self) -> None:
        """Puts the re-executed step in the place of the one that failed: loss, gradients and their norm."""
        self._set_running_loss(self.losses)

    def scale_gradients(self, factor: float, always: bool = True) -> None:
        """Multiplies all gradients by a factor."""
        self.engine.scale_gradients(factor)
        if always:
            self._scaled_by *= factor

    def skip(self, substitute_loss: float | None, keep_buffers: bool = False) -> None:
        """
        Leaves the step out: no gradient, so neither weights nor moments move (with zeroed gradients AdamW would still
        decay the weights and move by momentum).
        """
        self.skipped = True
        if not keep_buffers:
            self.restore_buffers()
        self._catch_up_generation()
        self.engine.discard()
        total = torch.stack([loss.detach().float() for loss in self.losses]).sum()
        self.engine.leave_out(overflowed=self.scaler_active and self._overflowed(total))
        if math.isfinite(float(total)):
            self._set_running_loss(self.losses)
        else:
            self._set_running_loss([] if substitute_loss is None else [torch.full_like(total, substitute_loss)])

    def _overflowed(self, loss: torch.Tensor) -> bool:
        norm = None if self.grad_norm is None else float(as_tensor(self.grad_norm, loss.device))
        gradient_is_finite = norm is not None and math.isfinite(norm)
        return math.isfinite(float(loss)) and not gradient_is_finite

    def _catch_up_generation(self) -> None:
        """Counts the micro-batches of a skipped step, too, where a trainer generates its rows."""
        if self.objective.online and self.start is not None and "_step" in self.start.scalars:
            self._trainer._step = self.start.scalars["_step"] + self.size
            if self._raised:
                # It raised while it generated: there is nothing to go on with.
                self._trainer._buffered_inputs = None

    @property
    def sound(self) -> bool:
        """Whether it is as the Trainer has computed it, and finite. Takes no memory."""
        if self.touched:
            return False
        # Of a sharded norm each process has a part, and all of it only together.
        norms = [] if self.grad_norm is None or hasattr(self.grad_norm, "full_tensor") else [self.grad_norm]
        return all(math.isfinite(float(value)) for value in (*self.losses, *norms))

    def abandon(self, leave_out_nonfinite: bool) -> None:
        """Leaves the step out after a failure of this library, if its gradients are not the Trainer's."""
        if self.touched or (leave_out_nonfinite and not self.sound):
            self.skip(None)

    def _set_running_loss(self, losses: Sequence[torch.Tensor]) -> None:
        assert self.start is not None
        running: torch.Tensor = self._trainer._tr_loss
        running.copy_(self.start.running_loss)
        for loss in losses:
            # One by one, as the Trainer does: the sum has to be the same to the last bit.
            running += loss.detach().to(running.device)


def _with_items(args: tuple[Any, ...], kwargs: dict[str, Any], items: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (items, *args[1:]), kwargs
    return args, {**kwargs, "num_items_in_batch": items}
