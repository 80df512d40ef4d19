"""One optimizer step that can be judged, computed again, run on some of its rows, or left out."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .. import consensus
from ..objectives import Layout, Objective, layout_of, own_token_count, select_rows
from ..signals import StepSignals
from .bookkeeping import Bookkeeper, Bookkeeping
from .kept_step import Control, Recording, nbytes_of
from .out_of_memory import with_room
from .row_sources import DataPosition, RowSource
from .step_engine import Call, StepEngine


logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Window:
    """
    One optimizer step: its micro-batches, what came out of them, and the state they started from.

    Args:
        engine ([`StepEngine`]):
            Computes and applies the steps of the trainer.
        ledger ([`Bookkeeper`]):
            What the trainer counts.
        position ([`DataPosition`]):
            Where the trainer is in its data.
        size (`int`):
            Number of micro-batches in the step.
    """

    def __init__(self, engine: StepEngine, ledger: Bookkeeper, position: DataPosition, size: int) -> None:
        self.engine = engine
        self.ledger = ledger
        self._position = position
        self._trainer = engine.trainer
        self.size = size
        self.step = int(self._trainer.state.global_step)
        self.epoch = self._trainer.state.epoch
        self._began = time.perf_counter()
        self.losses: list[torch.Tensor] = []
        self.grad_norm: Any = None
        self.judged = False
        self.skipped = False
        self.stop_wanted = self.rollback_wanted = self.leave_wanted = False
        self.prepared: dict[int, Any] = {}
        self.objective: Objective = engine.view.objective
        self._calls: list[Call] = []
        self.start: Bookkeeping | None = None
        self._generated: tuple[Any, Bookkeeping] | None = None
        self._raised = False
        self._tokens_inside = 0
        self._measure: Callable[[], Any] = lambda: None
        self._touched = False
        self._thinned = False
        self._scaled_by = 1.0

    # ---- fed by the instrument, micro-batch by micro-batch ----

    @property
    def started(self) -> bool:
        """Whether its first forward has begun."""
        return self.start is not None

    @property
    def complete(self) -> bool:
        """Whether all its micro-batches have been through forward and backward."""
        return len(self.losses) >= self.size

    def begin(self, start: Bookkeeping) -> None:
        """Notes the state its first forward starts from."""
        self.start = start
        self._began = time.perf_counter()

    def add_call(self, model: Any, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps a call of `training_step`, to be made again."""
        # A copy: the training step may pop keys from the dictionary it is given.
        self._calls.append((model, copy.copy(inputs), args, kwargs))

    def add_loss(self, loss: torch.Tensor, tokens: int) -> None:
        """Keeps the loss of a call, and counts the tokens it added to the Trainer's count by itself."""
        self.losses.append(loss)
        self._tokens_inside += tokens

    def note_generated(self, batch: Any, bookkeeping: Bookkeeping) -> None:
        """Keeps the rows a trainer has generated for the first call, and the bookkeeping as of then."""
        self._generated = copy.copy(batch), bookkeeping

    def note_exception(self) -> None:
        """One of the calls ended in an exception that stands for a NaN."""
        self._raised = True

    def measured_by(self, measure: Callable[[], Any]) -> None:
        """Measures the gradient norm of the step (and clips the gradient), now and each time it is computed again."""
        self._measure = measure
        self.grad_norm = measure()

    def measure_again(self) -> None:
        """Measures the gradient norm of the step computed again, as it was measured before."""
        self.grad_norm = self._measure()

    # ---- what the step looked like ----

    def signals(self, stop: bool = False, roll_back: bool = False, leave: bool = False) -> StepSignals:
        """
        Loss and gradient norm as floats. The one device sync of a healthy step, and its one collective.

        Args:
            stop (`bool`, *optional*, defaults to `False`):
                Whether this rank wants the run to end with this step; [`stop_wanted`] says whether any does.
            roll_back (`bool`, *optional*, defaults to `False`):
                Whether this rank wants the run to go back to an earlier state; [`rollback_wanted`] likewise.
            leave (`bool`, *optional*, defaults to `False`):
                Whether this rank was asked to leave after the step; [`leave_wanted`] likewise.
        """
        ranks = consensus.world_size()

        def numbers() -> torch.Tensor:
            losses = [loss.detach().float() for loss in self.losses]
            loss = losses[0] if len(losses) == 1 and losses[0].dim() == 0 else torch.stack(losses).sum()
            # Without a norm the loss stands in for it, so that there is one value per place on every rank.
            norm = loss if self.grad_norm is None else _as_tensor(self.grad_norm, loss.device).float()
            # What a rank wants travels with the numbers: no collective of its own, and nothing at all on one process.
            wishes = [torch.full_like(loss, wish) for wish in (stop, roll_back, leave)] if ranks > 1 else []
            return torch.stack([loss, norm, *wishes])

        loss_sum, norm_sum, *votes = consensus.sum_over_ranks(self._with_room(numbers)).tolist()
        wanted = [vote > 0 for vote in votes or (stop, roll_back, leave)]
        self.stop_wanted, self.rollback_wanted = wanted[0], wanted[1]
        # Numbers that are taken a second time carry no wish, and do not take one back.
        self.leave_wanted = self.leave_wanted or wanted[2]
        return StepSignals(
            step=self.step,
            loss=loss_sum / ranks,
            grad_norm=None if self.grad_norm is None else norm_sum / ranks,
            seconds=time.perf_counter() - self._began,
        )

    def _with_room(self, compute: Callable[[], _T]) -> _T:
        # With several processes the norm may be a collective, which one of them cannot begin again.
        return compute() if consensus.world_size() > 1 else with_room(compute, self.engine.view.device)

    def experiment(self) -> contextlib.AbstractContextManager[None]:
        """Marks what is computed inside as not needed by the run: [`StepEngine.experiment`]."""
        return self.engine.experiment()

    @property
    def scaler_active(self) -> bool:
        """Whether a GradScaler looks after overflowing gradients (fp16)."""
        return self.engine.scaler_active

    # ---- computing it again ----

    def reexecute(self, keep: Mapping[int, Sequence[int]] | None = None) -> None:
        """
        Computes losses and gradients of the step again, from the state and the random numbers it started with.

        Args:
            keep (`Mapping[int, Sequence[int]]`, *optional*):
                For the micro-batches named, the rows that stay; the loss is normalised as if the others had never
                been in the batch. A micro-batch that keeps nothing contributes nothing.

        Raises:
            TrainingFault: An exception of the training code.
        """
        self.until_it_fits(lambda: self._reexecute(keep))

    def compute_again(self, keep: Mapping[int, Sequence[int]] | None = None) -> StepSignals:
        """
        Computes the step again as a remedy or an experiment, and once more if that is not finite: a fault that passes
        may have struck just then.

        Args:
            keep (`Mapping[int, Sequence[int]]`, *optional*):
                As for [`reexecute`].

        Raises:
            TrainingFault: An exception of the training code.
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
        # Not `if keep`: a rank that drops nothing still takes part in counting what the others dropped.
        counting = keep is not None
        self._thinned = counting
        self._scaled_by = 1.0
        keep = keep or {}
        layouts = {index: self.layout(index) for index in keep}
        counts = self._count_items(keep, layouts) if counting else None
        self.rewind()
        losses: list[torch.Tensor] = []
        emptied = [index for index, rows in keep.items() if not rows]
        last = max((index for index in range(self.size) if index not in emptied), default=-1)
        fewer = emptied and not self.objective.counts_own_tokens
        with self.engine.accumulating(max(self.size - len(emptied), 1) if fewer else None):
            for index in range(self.size):
                if index in emptied:
                    self._advance_without(index)
                    losses.append(torch.zeros_like(self.losses[index]))
                    continue
                rows = keep.get(index)
                layout = layouts.get(index)

                def pick(batch: Any, rows: Any = rows, layout: Layout | None = layout) -> Any:
                    if counts is not None and counts.dropped is not None and isinstance(batch, Mapping):
                        batch = {**batch, "num_items_in_batch": batch["num_items_in_batch"] - counts.dropped}
                    return batch if rows is None or layout is None else select_rows(batch, layout, rows)

                items = None if counts is None else counts.items
                losses.append(self.compute_micro_batch(index, pick, last=index == last, items=items))
        self.losses = losses
        self.measure_again()

    @property
    def tokens_inside(self) -> int:
        """Tokens its calls have added to the Trainer's count by themselves."""
        return self._tokens_inside

    def compute_again_so_far(self, tokens: int) -> tuple[torch.Tensor, int]:
        """
        Computes the step again up to and including the call that was made last, which has failed.

        Args:
            tokens (`int`):
                The Trainer's count of tokens, without those its calls have added by themselves.

        Returns:
            The loss of that call, and the tokens it has added to the Trainer's count.

        Raises:
            TrainingFault: An exception of the training code.
        """
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

    def layout(self, index: int) -> Layout | None:
        """The way to tell the rows of a micro-batch apart. Known once the step has been re-executed."""
        return layout_of(self.prepared.get(index), self.objective)

    def compute_micro_batch(
        self,
        index: int,
        pick: Callable[[Any], Any],
        last: bool,
        items: Any = None,
        synchronise: bool = True,
    ) -> torch.Tensor:
        """
        Computes forward and backward of one of its micro-batches.

        Args:
            index (`int`):
                Which one.
            pick (`Callable`):
                Given the prepared micro-batch; what it returns is computed.
            last (`bool`):
                Whether it is the last to be computed.
            items (`Any`, *optional*):
                What the loss is divided by, instead of what the Trainer has counted.
            synchronise (`bool`, *optional*, defaults to `True`):
                Whether gradients are summed over ranks with the last one.

        Raises:
            TrainingFault: An exception of the training code.
        """
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

    def _count_items(self, keep: Mapping[int, Sequence[int]], layouts: Mapping[int, Layout | None]) -> _Items:
        """Counts what the loss is divided by once rows are gone."""
        dropped = torch.zeros((), device=self.engine.view.device)
        batches = []
        for index in range(self.size):
            batch, rows, layout = self.prepared[index], keep.get(index), layouts.get(index)
            if rows is None or layout is None:
                batches.append(batch)
                continue
            gone = [row for row in range(layout.rows) if row not in set(rows)]
            tokens = own_token_count(batch, layout, gone) if gone and self.objective.online else None
            if tokens is not None:
                dropped = dropped + tokens
            if rows:
                batches.append(select_rows(batch, layout, rows))
        if self.objective.online:
            carried = any(
                isinstance(batch, Mapping) and "num_items_in_batch" in batch for batch in self.prepared.values()
            )
            return _Items(items=None, dropped=consensus.sum_over_ranks(dropped) if carried else None)
        return _Items(items=self._trainer._get_num_items_in_batch(batches, self._trainer.args.device), dropped=None)

    def discard(self) -> None:
        """Drops what there is of its gradients: it is computed again, or left out."""
        self._touched = True
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
        """Buffers that a forward pass changes (batch norm statistics) as they were when the step began."""
        if self.start is not None:
            self.ledger.restore_buffers(self.start)

    def control(self, loss: float, largest: int) -> Control | None:
        """
        This step, to be computed again later; `None` if its rows are generated again each time, or are too many.

        Args:
            loss (`float`):
                What came out of it.
            largest (`int`):
                Bytes its inputs may have.
        """
        nbytes = sum(nbytes_of(inputs) for inputs in self.all_inputs())
        if self.objective.online or nbytes > largest:
            return None
        return Control(self._calls, loss, nbytes)

    def recording(self, control: Control) -> Recording | None:
        """This step, to be applied later, again or for the first time; `None` if rows of it were left out."""
        if self.start is None or self._thinned or getattr(self._trainer.args, "sync_ref_model", False):
            # A reference model that follows the model does so in a callback, which is not called again.
            return None
        rates = self.engine.rates_in_force()
        options = self.engine.group_options()
        return Recording(self.step, control, self.start.rng, rates, self._scaled_by, options)

    def cannot_be_repeated(self) -> None:
        """Notes that its gradients were changed in a way that is not kept."""
        self._thinned = True

    def begin_from_here(self) -> None:
        """Has the step start from the state there is now, after a replay."""
        if self.start is not None:
            self.start = self.ledger.with_buffers_of_now(self.start)

    # ---- what becomes of it ----

    def accept(self) -> None:
        """Puts the re-executed step in the place of the one that failed: loss, gradients and their norm."""
        self._set_running_loss(self.losses)

    def scale_gradients(self, factor: float, always: bool = True) -> None:
        """
        Multiplies all gradients by a factor.

        Args:
            factor (`float`):
                The factor.
            always (`bool`, *optional*, defaults to `True`):
                Whether this belongs to the step, and not to what was wrong with it this time.
        """
        self.engine.scale_gradients(factor)
        if always:
            self._scaled_by *= factor

    def skip(self, substitute_loss: float | None, keep_buffers: bool = False) -> None:
        """
        Leaves the step out: no gradient, so neither weights nor moments move (with zeroed gradients AdamW would still
        decay the weights and move by momentum).

        Args:
            substitute_loss (`float` or `None`):
                What the step counts with in the logged average if its own loss is not finite.
            keep_buffers (`bool`, *optional*, defaults to `False`):
                Whether buffers are left as they are, because they belong to a state that was gone back to.
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
        norm = None if self.grad_norm is None else float(_as_tensor(self.grad_norm, loss.device))
        gradient_is_finite = norm is not None and math.isfinite(norm)
        return math.isfinite(float(loss)) and not gradient_is_finite

    def _catch_up_generation(self) -> None:
        """A trainer that generates its rows counts the micro-batches it has used up: those of a skipped step, too."""
        if self.objective.online and self.start is not None and "_step" in self.start.scalars:
            self._trainer._step = self.start.scalars["_step"] + self.size
            if self._raised:
                # It raised while it generated: there is nothing to go on with.
                self._trainer._buffered_inputs = None

    @property
    def sound(self) -> bool:
        """Whether it is as the Trainer has computed it, and finite. Takes no memory."""
        if self._touched:
            return False
        # Of a sharded norm each process has a part, and all of it only together.
        norms = [] if self.grad_norm is None or hasattr(self.grad_norm, "full_tensor") else [self.grad_norm]
        return all(math.isfinite(float(value)) for value in (*self.losses, *norms))

    def abandon(self, leave_out_nonfinite: bool) -> None:
        """
        After a failure of our own: leaves a step out whose gradients are not the Trainer's.

        Args:
            leave_out_nonfinite (`bool`):
                Whether one that is not finite is left out as well.
        """
        if self._touched or (leave_out_nonfinite and not self.sound):
            self.skip(None)

    def _set_running_loss(self, losses: Sequence[torch.Tensor]) -> None:
        assert self.start is not None
        running: torch.Tensor = self._trainer._tr_loss
        running.copy_(self.start.running_loss)
        for loss in losses:
            # One by one, as the Trainer does: the sum has to be the same to the last bit.
            running += loss.detach().to(running.device)

    # ---- where its rows came from ----

    def sources(self, index: int) -> list[RowSource]:
        """The place in the data that each row (pair, segment) of a micro-batch came from."""
        layout = self.layout(index)
        if layout is None:
            return []
        return self._position.sources(layout, index, [self.inputs(before) for before in range(index)])

    def samples(self) -> set[int]:
        """Indices in the dataset of the samples it is made of, as far as they are known."""
        return self._position.sampled(self.size)

    def inputs(self, index: int) -> Any:
        """The micro-batch as the data loader gave it."""
        return self._calls[index][1]

    def shapes(self) -> list[dict[str, list[int]]]:
        """Shapes of the tensors in its micro-batches, as far as they have been computed."""
        return [
            {name: list(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
            if isinstance(inputs, Mapping)
            else {"rows": [len(inputs)] if hasattr(inputs, "__len__") else []}
            for inputs in self.all_inputs()
        ]

    def all_inputs(self) -> list[Any]:
        """All its micro-batches as the data loader gave them."""
        return [inputs for _, inputs, _, _ in self._calls]

    def record(self) -> dict[str, Any]:
        """Gives what is needed to compute the step elsewhere, on the CPU: prepared batches and random states."""
        assert self.start is not None
        rng = self.start.rng
        return {
            "step": self.step,
            "micro_batches": {index: _to_cpu(batch) for index, batch in self.prepared.items()},
            "rng": {"cpu": rng.cpu, "devices": rng.devices, "python": rng.python},
        }


@dataclass(slots=True)
class _Items:
    items: Any
    dropped: torch.Tensor | None


def _as_tensor(norm: Any, device: torch.device) -> torch.Tensor:
    full = getattr(norm, "full_tensor", None)
    return torch.as_tensor(full() if full is not None else norm, device=device)


def _with_items(args: tuple[Any, ...], kwargs: dict[str, Any], items: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (items, *args[1:]), kwargs
    return args, {**kwargs, "num_items_in_batch": items}


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _to_cpu(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_cpu(inner) for inner in value]
    return value if isinstance(value, (int, float, bool, str, type(None))) else repr(value)
