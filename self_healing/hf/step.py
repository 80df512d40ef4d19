"""`StepRecord`: what one optimizer step was computed from, and what came out of it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..ranks import votes
from ..signals import StepSignals
from .batches import Layout, layout_of
from .dataloader import DataPosition, RowSource
from .engine import Call, StepEngine
from .memory import with_room
from .objective import Objective
from .replicas import DIGEST_PARTS, are_apart
from .trainer_state import Bookkeeping


# The one vote of a healthy step: loss, norm, digest of the weights, four wishes, and whether we have failed.
_THE_STEP, _FAILED = "the step", 2 + DIGEST_PARTS + 4


class StepRecord:
    """
    Records one optimizer step, micro-batch by micro-batch: the state it began with, its calls of `training_step`,
    their losses, its gradient norm, and where its rows came from.
    """

    def __init__(self, engine: StepEngine, position: DataPosition, size: int) -> None:
        state = engine.trainer.state
        self.engine = engine
        self.size = size
        self.step = int(state.global_step)
        self.epoch = state.epoch
        self.objective: Objective = engine.view.objective
        self.start: Bookkeeping | None = None
        self.losses: list[torch.Tensor] = []
        self.grad_norm: Any = None
        self.stop_wanted = self.rollback_wanted = self.has_news = False
        self.leave_wanted = 0.0
        # Whether weights that are kept on several ranks were not the same on all of them.
        self.apart = False
        self.prepared: dict[int, Any] = {}
        # Whether all ranks have its numbers, so that none waits for them.
        self.agreed = False
        # Whether code of this library has failed on this rank since the last vote.
        self.failed = False
        # Whether it was judged to its end: each rank goes on to apply it, or what is left of it.
        self.released = False
        self._position = position
        self._began = time.perf_counter()
        self._calls: list[Call] = []
        self._generated: tuple[Any, Bookkeeping] | None = None
        self._raised = False
        self._tokens_inside = 0
        self._measure: Callable[[], Any] = lambda: None

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

    @property
    def last_call(self) -> Call:
        """The call that was made last, to be made again."""
        model, inputs, args, kwargs = self._calls[-1]
        return model, copy.copy(inputs), args, kwargs

    def add_loss(self, loss: torch.Tensor, tokens: int) -> None:
        """Keeps the loss of a call, and counts the tokens it added to the Trainer's count by itself."""
        self.losses.append(loss)
        self._tokens_inside += tokens

    def note_generated(self, batch: Any, bookkeeping: Bookkeeping) -> None:
        """Keeps the rows a trainer has generated for the first call, and the bookkeeping as of then."""
        self._generated = copy.copy(batch), bookkeeping

    def note_exception(self) -> None:
        """Notes that one of the calls ended in an exception that stands for a NaN."""
        self._raised = True

    def measured_by(self, measure: Callable[[], Any]) -> None:
        """Measures the gradient norm of the step (and clips the gradient), now and each time it is computed again."""
        self._measure = measure
        self.grad_norm = measure()

    def measure_again(self) -> None:
        """Measures the gradient norm of the step computed again, as it was measured before."""
        with self.engine.among_ranks("the gradient is measured again"):
            self.grad_norm = self._measure()

    # ---- what came out of it ----

    def signals(
        self,
        stop: bool = False,
        roll_back: bool = False,
        leave: float = 0,
        news: bool = False,
        digest: Callable[[], torch.Tensor] | None = None,
    ) -> StepSignals:
        """Reads loss and gradient norm as floats: the one device sync of a healthy step, and its one collective."""
        ranks = self.engine.view.world_size
        if ranks == 1:
            loss, norm = with_room(self._read_loss_and_norm, self.engine.view.device)
        else:
            # Not tried twice: the norm may be a collective, which one of the processes cannot begin again.
            # What a rank wants travels with the numbers: no collective of its own, and nothing at all on one process.
            wishes = stop, roll_back, news, leave, self.failed
            found = votes.sum_over_ranks(_THE_STEP, self._answers(wishes, digest), self.engine.view.device)
            self.agreed = True
            if found[_FAILED] > 0:
                raise _rank_failed(found)
            loss, norm, *rest = found[:_FAILED]
            self.apart = are_apart(rest[:DIGEST_PARTS])
            *ballots, leave = rest[DIGEST_PARTS:]
            stop, roll_back, news = (vote > 0 for vote in ballots)
        self.stop_wanted, self.rollback_wanted, self.has_news = stop, roll_back, news
        # Numbers that are taken a second time carry no wish, and do not take one back.
        self.leave_wanted = self.leave_wanted or leave
        return StepSignals(
            step=self.step,
            loss=loss / ranks,
            grad_norm=None if self.grad_norm is None else norm / ranks,
            seconds=time.perf_counter() - self._began,
        )

    def _answers(
        self, wishes: Sequence[float], digest: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor | Sequence[float]:
        loss, norm = self._loss_and_norm()
        if loss.device.type == "cpu" and digest is None:
            # There to be read: each operation on a tensor would take longer than all of the ballot.
            return (loss.item(), norm.item(), *[0.0] * DIGEST_PARTS, *wishes)
        numbers = torch.stack([loss, norm])
        if digest is None and not any(wishes):
            # What is not given is zero.
            return numbers
        of_weights = numbers.new_zeros(DIGEST_PARTS) if digest is None else digest().to(numbers.device)
        return torch.cat([numbers, of_weights, *(numbers.new_full((1,), wish) for wish in wishes)])

    def _read_loss_and_norm(self) -> Sequence[float]:
        loss, norm = self._loss_and_norm()
        # On the host each is there to be read; a device is waited for once.
        return (loss.item(), norm.item()) if loss.device.type == "cpu" else torch.stack([loss, norm]).tolist()

    def _loss_and_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        losses = [loss.detach().float() for loss in self.losses]
        loss = losses[0] if len(losses) == 1 and losses[0].dim() == 0 else torch.stack(losses).sum()
        # Without a norm the loss stands in for it, so that there is one value per place on every rank.
        return loss, loss if self.grad_norm is None else as_tensor(self.grad_norm, loss.device).float()

    @property
    def tokens_inside(self) -> int:
        """Tokens its calls have added to the Trainer's count by themselves."""
        return self._tokens_inside

    # ---- its rows ----

    def inputs(self, index: int) -> Any:
        """The micro-batch as the data loader gave it."""
        return self._calls[index][1]

    def all_inputs(self) -> list[Any]:
        """All its micro-batches as the data loader gave them."""
        return [inputs for _, inputs, _, _ in self._calls]

    def shapes(self) -> list[dict[str, list[int]]]:
        """Shapes of the tensors in its micro-batches, as far as they have been computed."""
        return [
            {name: list(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
            if isinstance(inputs, Mapping)
            else {"rows": [len(inputs)] if hasattr(inputs, "__len__") else []}
            for inputs in self.all_inputs()
        ]

    def layout(self, index: int) -> Layout | None:
        """Tells the rows of a micro-batch apart; `None` where that cannot be, or before the step is computed again."""
        if self.engine.view.shares_rows:
            return None
        return layout_of(self.prepared.get(index), self.objective)

    def sources(self, index: int) -> list[RowSource]:
        """Finds the place in the data that each row (pair, segment) of a micro-batch came from."""
        return self._sources(self.layout(index), index)

    def _sources(self, layout: Layout | None, index: int) -> list[RowSource]:
        if layout is None:
            return []
        return self._position.sources(layout, index, [self.inputs(before) for before in range(index)])

    def share_samples(self) -> None:
        """Has all ranks know the samples it is made of, where one of them loads for all. Collective."""
        self._position.share(self.size)

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
        batches = self.prepared or ({} if self.objective.online else dict(enumerate(self.all_inputs())))
        if not batches:
            return {}
        rows = {index: self._sources(layout_of(batch, self.objective), index) for index, batch in batches.items()}
        return {
            "step": self.step,
            "objective": self.objective.name,
            "micro_batches": {index: _to_cpu(batch) for index, batch in batches.items()},
            "items": {index: _to_cpu(self._items(index)) for index in batches},
            "rows": {index: [asdict(source) for source in sources] for index, sources in rows.items()},
            # What was generated is in the micro-batches, and drew numbers before their first forward.
            "rng": (self.start if self._generated is None else self._generated[1]).rng.to_plain(),
        }

    def _items(self, index: int) -> Any:
        """What the loss of a micro-batch is divided by, as the Trainer has counted it."""
        _, _, args, kwargs = self._calls[index]
        return args[0] if args else kwargs.get("num_items_in_batch")


def tell_of_failure(norm: Any, device: torch.device) -> votes.RankFailed:
    """
    Takes part in the vote of a step for a rank that has no numbers to give, because code of this library has failed.
    """
    if norm is not None:
        as_tensor(norm, device)
    return _rank_failed(votes.sum_over_ranks(_THE_STEP, [*[0.0] * _FAILED, 1.0], device))


def _rank_failed(found: Sequence[float]) -> votes.RankFailed:
    return votes.RankFailed(healthy=math.isfinite(found[0]) and math.isfinite(found[1]))


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
