"""
One optimizer step: its signals, its rows, computed again, kept for later, or left out.

`hf/adapter.py` fills it, `healers/numerics/judge.py` reads its signals, `diagnosis.py` there computes it again, as a
whole, then some rows of it, then without them or once more as a whole. `remedies.py` ends with [`Window.accept`] or
[`Window.skip`], or the step is applied as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from accelerate.utils.operations import recursively_apply

from ..ranks import votes
from ..system.random_state import RandomState
from .batches import Layout, gathering_uneven_rows, layout_of, preparing
from .dataloader import DataPosition, RowSource
from .engine import Call, StepEngine
from .memory import retry_after_freeing
from .objective import Objective, StepSignals
from .replicas import DIGEST_PARTS, are_apart
from .row_removal import RowRemoval
from .trainer_state import Bookkeeper, Bookkeeping


_T = TypeVar("_T")

# The lowest loss and gradient norm, and the highest, as float32.
Bounds = tuple[tuple[float, float], tuple[float, float]]

# The one vote of a healthy step: loss and norm; a digest of the weights; four requests (stop, roll back, news, leave);
# and whether code of this library has failed here.
_THE_STEP, _FAILED = "the step", DIGEST_PARTS + 4


class Window:
    """
    One optimizer step: what it was computed from (its calls of `training_step`, random state, buffers), what came out
    (losses, gradient norm), and what can be done with it before `optimizer.step()`: compute it again, on all of its
    rows or some, apply it, change it, or leave it out.
    """

    def __init__(self, engine: StepEngine, ledger: Bookkeeper, position: DataPosition, size: int) -> None:
        state = engine.trainer.state
        self.engine = engine
        self.size = size
        self.step = int(state.global_step)
        self.epoch = state.epoch
        self.objective: Objective = engine.view.objective
        # What its first forward started from, and when that began.
        self.start: Bookkeeping | None = None
        self.began = time.perf_counter()
        # The calls of `training_step`, to be made again (with a shallow copy of each batch), what they gave, and what
        # they have added to the Trainer's count of tokens by themselves.
        self.calls: list[Call] = []
        self.losses: list[torch.Tensor] = []
        self.tokens_inside = 0
        # Measures the norm of its gradient, and clips it; each time it is computed again as well.
        self.measure: Callable[[], Any] | None = None
        self.grad_norm: Any = None
        self.stop_wanted = self.rollback_wanted = self.has_news = self.leave_wanted = False
        # Whether weights that are kept on several ranks were not the same on all of them.
        self.apart = False
        self.prepared: dict[int, Any] = {}
        # Whether all ranks have its numbers, so that none waits for them.
        self.agreed = False
        # Whether code of this library has failed on this rank since the last vote.
        self.failed = False
        # Whether its loss is a number on all ranks, as far as is known; whether the running loss has been put right.
        self.loss_is_finite, self.loss_is_set = True, False
        # Within which its update may be launched before it is judged, on a GPU; then loss and norm as the device has
        # compared them, and whether the update was applied.
        self.bounds: Bounds | None = None
        self.read: list[float] | None = None
        self.applied = False
        # Whether it was judged to its end: each rank goes on to apply it, or what is left of it.
        self.released = False
        self._position = position
        # The rows a trainer has generated for the first call, and the bookkeeping as of then.
        self.generated: tuple[Any, Bookkeeping] | None = None
        # Whether one of the calls has ended in an exception that stands for a NaN, which it then has as its loss.
        self.raised = False
        # What rows of it raise in the model, in words: such an exception stands for a NaN from then on.
        self.raising = ""
        self.ledger = ledger
        self.judged = False
        self.skipped = False
        self._trainer = engine.trainer
        self.touched = False
        # The micro-batch that is computed again; the rows that the step as it stands was computed from, if not all.
        self.computing = 0
        self.kept: Mapping[int, Sequence[int]] | None = None
        self._recordable = True
        self._scaled_by = 1.0

    # ---- fed by the instrument, micro-batch by micro-batch ----

    def measure_again(self) -> None:
        """Measures the gradient norm of the step computed again, as it was measured before."""
        with self.engine.with_all_ranks("the gradient is measured again"):
            self.grad_norm = None if self.measure is None else self.measure()

    # ---- what came out of it ----

    def signals(
        self,
        stop: bool = False,
        roll_back: bool = False,
        leave: bool = False,
        news: bool = False,
        digest: Callable[[], torch.Tensor] | None = None,
    ) -> StepSignals:
        """Reads loss and gradient norm as floats: the one device sync of a healthy step, and its one collective."""
        ranks = self.engine.view.world_size
        if ranks == 1:
            # As the device has compared them, where the update was launched first.
            loss, norm = self.read or retry_after_freeing(self.loss_and_norm, self.engine.view.device).tolist()
            self.read = None
        else:
            # Not tried twice: the norm may be a collective, which one of the processes cannot begin again.
            # What a rank wants travels with the numbers: no collective of its own, and nothing at all on one process.
            wishes = stop, roll_back, news, leave, self.failed
            loss, norm, *rest = votes.sum_over_ranks(_THE_STEP, self._answers(wishes, digest), self.engine.view.device)
            self.agreed, self.apart = True, False
            # Mostly all of them are 0.
            if any(rest):
                if rest[_FAILED] > 0:
                    raise _rank_failed(loss, norm)
                self.apart = are_apart(rest[:DIGEST_PARTS])
                stop, roll_back, news, leave = (vote > 0 for vote in rest[DIGEST_PARTS:_FAILED])
        self.loss_is_finite = math.isfinite(loss)
        self.stop_wanted, self.rollback_wanted, self.has_news = stop, roll_back, news
        # Numbers that are taken a second time carry no wish, and do not take one back.
        self.leave_wanted = self.leave_wanted or leave
        return StepSignals(
            step=self.step,
            loss=loss / ranks,
            grad_norm=None if self.grad_norm is None else norm / ranks,
            seconds=time.perf_counter() - self.began,
        )

    def _answers(
        self, wishes: Sequence[float], digest: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor | Sequence[float]:
        numbers = self.loss_and_norm()
        if numbers.device.type == "cpu" and digest is None:
            # There to be read: each operation on a tensor would take longer than all of the ballot.
            return (*numbers.tolist(), *[0.0] * DIGEST_PARTS, *wishes)
        if digest is None and not any(wishes):
            # What is not given is zero.
            return numbers
        of_weights = numbers.new_zeros(DIGEST_PARTS) if digest is None else digest().to(numbers.device)
        return torch.cat([numbers, of_weights, *(numbers.new_full((1,), wish) for wish in wishes)])

    def loss_and_norm(self) -> torch.Tensor:
        """Loss and gradient norm, where they are, as float32 of shape (2,)."""
        losses, norm = self.losses, self.grad_norm
        loss = losses[0] if len(losses) == 1 and losses[0].dim() == 0 else torch.stack(losses).sum()
        loss = loss.float()
        if norm is None:
            # The loss stands in for it, so that there is one value per place on every rank.
            return torch.stack([loss, loss])
        known = type(norm) is torch.Tensor and norm.device == loss.device
        return torch.stack([loss, (norm if known else as_tensor(norm, loss.device)).float()])

    # ---- its rows ----

    def shapes(self) -> list[dict[str, list[int]]]:
        """Shapes of the tensors in its micro-batches, as far as they have been computed."""
        return [
            {name: list(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
            if isinstance(inputs, Mapping)
            else {"rows": [len(inputs)] if hasattr(inputs, "__len__") else []}
            for _, inputs, _, _ in self.calls
        ]

    def layout(self, index: int) -> Layout | None:
        """Tells the rows of a micro-batch apart; `None` where that cannot be, or before the step is computed again."""
        if self.engine.view.shares_rows:
            return None
        return layout_of(self.prepared.get(index), self.objective)

    def sources(self, index: int) -> list[RowSource]:
        """Finds the place in the data that each row (pair, segment) of a micro-batch came from."""
        layout = self.layout(index)
        return [] if layout is None else self._position.sources(layout, index)

    def samples(self) -> set[int]:
        """Indices in the dataset of the samples it is made of, as far as they are known."""
        return self._position.sampled(self.size)

    def export(self) -> dict[str, Any]:
        """
        Gives what is needed to compute the step elsewhere, on the CPU, for `torch.load` with `weights_only=True`:
        micro-batches, what their losses are divided by, where their rows came from, and random states.
        """
        assert self.start is not None
        # Where nothing was computed again. The Trainer's own preparation only moves a micro-batch to the device.
        batches = self.prepared
        if not batches and not self.objective.online:
            batches = {index: inputs for index, (_, inputs, _, _) in enumerate(self.calls)}
        if not batches:
            return {}
        exported: dict[str, Any] = {"step": self.step, "objective": self.objective.name}
        exported |= {"micro_batches": {}, "items": {}, "rows": {}}
        for index, batch in batches.items():
            _, _, args, kwargs = self.calls[index]
            items, layout = args[0] if args else kwargs.get("num_items_in_batch"), layout_of(batch, self.objective)
            sources = [] if layout is None else self._position.sources(layout, index)
            exported["micro_batches"][index], exported["items"][index] = _to_cpu(batch), _to_cpu(items)
            exported["rows"][index] = [asdict(source) for source in sources]
        # What was generated is in the micro-batches, and drew numbers before their first forward.
        began = self.start if self.generated is None else self.generated[1]
        return exported | {"rng": began.rng.to_plain()}

    # ---- computing it again ----

    def recompute(self, keep: Mapping[int, Sequence[int]] | None = None) -> None:
        """Computes losses and gradients of the step again, from the state and the random numbers it started with."""
        self.until_it_fits(functools.partial(self._recompute, keep))

    def recompute_with_retry(self, keep: Mapping[int, Sequence[int]] | None = None) -> StepSignals:
        """[`recompute`] for a remedy, twice if it is not finite: a fault that passes may have struck just then."""
        self.recompute(keep)
        signals = self.signals()
        if signals.finite:
            return signals
        self.recompute(keep)
        return self.signals()

    def until_it_fits(self, compute: Callable[[], _T]) -> _T:
        """
        Runs what begins with [`rewind`], on one process until it fits: memory is freed, and `TrainingCall.passes` may
        split it.
        """
        result: _T = self.engine.retry.until_it_fits(compute, self.discard)
        return result

    def _recompute(self, keep: Mapping[int, Sequence[int]] | None) -> None:
        self._recordable, self._scaled_by = keep is None, 1.0
        # Not `if keep`: a rank that drops nothing still takes part in counting what the others dropped.
        rows = None if keep is None else RowRemoval.of(self, keep, self.engine)
        self.rewind()
        if rows is None:
            last = self.size - 1
            self.losses = [self.compute_micro_batch(index, None, index == last) for index in range(self.size)]
        else:
            self.losses = self._compute_without_rows(rows)
        self.measure_again()
        self.kept = keep

    def _compute_without_rows(self, rows: RowRemoval) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        # On several ranks all: one without a row is computed with a stand-in of another rank, and counts as zero.
        computed = rows.computed(self.size)
        uneven = self.engine.view.world_size > 1
        with (
            self.engine.accumulating(None if self.objective.counts_own_tokens else rows.micro_batches),
            gathering_uneven_rows(self._trainer.accelerator) if uneven else contextlib.nullcontext(),
        ):
            for index in range(self.size):
                if index not in computed:
                    if self.objective.online:
                        # Nothing of it is trained on, but it is generated as if it were.
                        with self._counting_tokens():
                            self.engine.prepare_inputs(copy.copy(self.calls[index][1]))
                        self._trainer._step += 1
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
        return losses

    def recompute_to_last_call(self, tokens: int) -> tuple[torch.Tensor, int]:
        """
        Computes the step again up to and including the call that was made last: that ran out of memory, or it is seen
        whether it repeats.
        """
        state, generated = self._trainer.state, self.generated
        assert self.start is not None
        of_generation = 0 if generated is None else generated[1].tokens_seen - self.start.tokens_seen
        self.tokens_inside, state.num_input_tokens_seen = 0, tokens
        # Rows that were generated are not generated again: it takes long, and rewards may be asked of a service.
        self.rewind(None if generated is None else generated[1])
        losses, added = [], 0
        for index, call in enumerate(self.calls):
            before = state.num_input_tokens_seen
            if index == 0 and generated is not None:
                with preparing(self._trainer, lambda batch: batch, prepared=generated[0]):
                    losses.append(self.engine.compute(call, self.size == 1, self))
            else:
                losses.append(self.engine.compute(call, index == self.size - 1, self))
            if index == 0:
                state.num_input_tokens_seen += of_generation
            added = state.num_input_tokens_seen - before
            self.tokens_inside += added
        self.tokens_inside -= added
        self.losses = losses[:-1]
        self._set_running_loss(self.losses)
        return losses[-1], added

    def compute_micro_batch(
        self, index: int, pick: Callable[[Any], Any] | None, last: bool, items: Any = None, synchronise: bool = True
    ) -> torch.Tensor:
        """Computes forward and backward of one of its micro-batches."""
        self.computing = index
        model, inputs, args, kwargs = self.calls[index]
        if items is not None and args:
            args = (items, *args[1:])
        elif items is not None:
            kwargs = {**kwargs, "num_items_in_batch": items}

        if self.engine.only_moves_inputs:
            # A training step may compute its rows in several passes, which are given the same: all, or what is picked.
            if index not in self.prepared:
                self.prepared[index] = self._trainer._prepare_inputs(copy.copy(inputs))
            given = inputs if pick is None else pick(copy.copy(self.prepared[index]))
            with self._counting_tokens():
                return self.engine.compute((model, given, args, kwargs), last, self, synchronise)

        def note(batch: Any) -> Any:
            # A copy: `compute_loss` may pop keys from the batch it is given.
            self.prepared.setdefault(index, copy.copy(batch))
            return batch if pick is None else pick(batch)

        with self._counting_tokens(), preparing(self._trainer, note):
            return self.engine.compute((model, inputs, args, kwargs), last, self, synchronise)

    @contextlib.contextmanager
    def _counting_tokens(self) -> Iterator[None]:
        """Notes what a call counts by itself where it generates its rows: it is taken off when it is made again."""
        state = self._trainer.state
        before = state.num_input_tokens_seen
        try:
            yield
        finally:
            self.tokens_inside += state.num_input_tokens_seen - before

    def discard(self) -> None:
        """Drops its gradients: it is computed again, or left out."""
        self.touched, self.kept = True, None
        self.engine.discard()

    def rewind(self, to: Bookkeeping | None = None) -> None:
        """
        Brings random state, buffers and counts to where the step began, or to a later moment of it. Its gradients are
        gone; the running loss stays.
        """
        assert self.start is not None
        to = to or self.start
        self.discard()
        tokens = self._trainer.state.num_input_tokens_seen - self.tokens_inside
        self.ledger.rewind_step(to)
        self._trainer.state.num_input_tokens_seen = tokens
        self.tokens_inside = 0

    def restore_buffers(self) -> None:
        """Puts buffers that a forward pass changes (batch norm statistics) back to where the step began."""
        if self.start is not None:
            self.ledger.restore_buffers(self.start)

    def recording(self, control: Control) -> Recording | None:
        """Records the step, to be applied later, again or for the first time; `None` if rows of it were left out."""
        if self.start is None or not self._recordable or getattr(self._trainer.args, "sync_ref_model", False):
            # A reference model that follows the model does so in a callback, which is not called again.
            return None
        rates, options = self.engine.rates.settings()
        return Recording(self.step, control, self.start.rng, rates, self._scaled_by, options, self.epoch)

    def begin_from_here(self) -> None:
        """Has the step start from the state there is now, after a replay."""
        if self.start is not None:
            self.start = self.ledger.with_buffers_of_now(self.start)

    # ---- what becomes of it ----

    def accept(self) -> None:
        """Puts the losses of the step as last computed into the running loss; its gradients are in place already."""
        self.loss_is_set = True
        self._set_running_loss(self.losses)

    def scale_gradients(self, factor: float, always: bool = True) -> None:
        self.engine.scale_gradients(factor)
        if always:
            self._scaled_by *= factor

    def skip(self, substitute_loss: float | None, keep_buffers: bool = False) -> None:
        """
        Leaves the step out: no gradient, so neither weights nor moments move (with zeroed gradients AdamW would still
        decay the weights and move by momentum). Random state stays as last computed, or as going back has put it.
        """
        self.skipped = self.loss_is_set = True
        if not keep_buffers:
            self.restore_buffers()
        self._catch_up_generation()
        self.engine.discard()
        total = torch.stack([loss.detach().float() for loss in self.losses]).sum()
        self.engine.leave_out(overflowed=self.engine.scaler_active and self._overflowed(total))
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
            if self.raised:
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
        else:
            self.filter_running_loss()

    def filter_running_loss(self) -> None:
        """
        Adds its losses up as the Trainer does with `logging_nan_inf_filter`, which is off during the step: for one
        that is not finite, the average since the last log.
        """
        assert self.start is not None
        self.loss_is_set = True
        self._set_running_loss([])
        running, since = self._trainer._tr_loss, self._trainer._globalstep_last_logged
        for loss in self.losses:
            finite = math.isfinite(float(loss))
            running += loss if finite else running / (1 + self._trainer.state.global_step - since)

    def _set_running_loss(self, losses: Sequence[torch.Tensor]) -> None:
        assert self.start is not None
        running: torch.Tensor = self._trainer._tr_loss
        running.copy_(self.start.running_loss)
        for loss in losses:
            # One by one, as the Trainer does: the sum has to be the same to the last bit.
            running += loss.detach().to(running.device)


def tell_of_failure(norm: Any, device: torch.device) -> votes.RankFailed:
    """
    Takes part in the vote of a step for a rank that has no numbers to give, because code of this library has failed.
    """
    if norm is not None:
        as_tensor(norm, device)
    loss, norm, *_ = votes.sum_over_ranks(_THE_STEP, [*[0.0] * (2 + _FAILED), 1.0], device)
    return _rank_failed(loss, norm)


def _rank_failed(loss: float, norm: float) -> votes.RankFailed:
    return votes.RankFailed(healthy=math.isfinite(loss) and math.isfinite(norm))


def as_tensor(norm: Any, device: torch.device) -> torch.Tensor:
    """Makes a tensor of a gradient norm: collective where gradients are sharded."""
    if type(norm) is torch.Tensor and norm.device == device:
        return norm
    full = getattr(norm, "full_tensor", None)
    return torch.as_tensor(full() if full is not None else norm, device=device)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _to_cpu(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_cpu(inner) for inner in value]
    return value if isinstance(value, (int, float, bool, str, type(None))) else repr(value)


# ---- kept step ----


HOST = torch.device("cpu")


@dataclass(slots=True)
class Control:
    """A healthy step that is kept, to be computed again with other weights."""

    calls: list[Call]
    loss: float
    nbytes: int

    def leave_device(self) -> int:
        """Moves its inputs to host memory, from where the Trainer prepares them again; the bytes that were moved."""
        moved = sum(nbytes_of(inputs, elsewhere_than=HOST) for _, inputs, _, _ in self.calls)
        if moved:
            # Those of the step itself, which may be under way, stay where they are.
            self.calls = [(model, on_host(inputs), args, kwargs) for model, inputs, args, kwargs in self.calls]
        return moved


@dataclass(frozen=True, slots=True)
class Recording:
    """A step that was applied, with all that is needed to apply it again bit for bit."""

    step: int
    control: Control
    rng: RandomState
    rates: list[float]
    scaled_by: float
    options: list[dict[str, Any]]
    epoch: float | None = None


def nbytes_of(value: Any, elsewhere_than: torch.device | None = None) -> int:
    """Counts the bytes of the tensors nested in a micro-batch, or in several."""
    nbytes, found = 0, [value]
    for each in found:
        if isinstance(each, torch.Tensor):
            nbytes += 0 if each.device == elsewhere_than else each.nbytes
        elif isinstance(each, (list, tuple)):
            found += each
        elif isinstance(each, dict):
            found += each.values()
        elif each is None or isinstance(each, torch.nn.Module):
            continue
        elif type(data := getattr(each, "data", None)) is dict:
            # What a tokenizer gives: it looks every value up through several functions.
            found += data.values()
        elif isinstance(each, Mapping):
            found += each.values()
    return nbytes


def on_host(value: Any) -> Any:
    """Copies a micro-batch to host memory, nested in whatever the Trainer's own preparation knows."""
    return recursively_apply(lambda tensor: tensor.to(HOST), value)
