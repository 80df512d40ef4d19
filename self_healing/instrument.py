"""
The only module that knows the Trainer's internals.

It wraps one trainer instance (never a class) so that each optimizer step becomes a [`Window`]: something that can be
judged between the last backward and `optimizer.step()`, computed again bit for bit, run on some of its rows, or left
out. Everything it sets is taken back by [`Instrument.detach`].

Read against transformers 5.4 to 5.23, TRL 1.16, accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import math
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from transformers import Trainer
from transformers.integrations.neftune import deactivate_neftune

from . import consensus
from .failures import UnrecoverableTrainingError, is_nonfinite_exception
from .objectives import Layout, Objective, layout_of, objective_of, own_token_count, select_rows
from .signals import StepSignals


logger = logging.getLogger(__name__)

_SCALARS = (int, float, bool, str, type(None))
# Containers in which TRL trainers collect metrics and completions until the next log.
_STORES = ("_metrics", "_stored_metrics", "_logs", "_textual_logs", "_pending_metrics", "_pending_extra_logs")
# Set by the training loop around the step, not by the step.
_SET_BY_THE_LOOP = frozenset({"current_flos", "is_in_train", "_train_batch_size"})
# What a new process needs to go on counting where the old one stopped.
_PERSISTENT_SCALARS = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "_total_train_tokens",
    "_step",
    "_current_train_step_time",
)


class TrainingFault(Exception):
    """Carries an exception of the user's training code out of our own, so that it is not taken for a bug of ours."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Phase(Enum):
    """Where in the optimizer step the Trainer is."""

    IDLE = "outside a step"
    FETCHING = "fetching batches"
    COMPUTING = "forward and backward"
    STEPPING = "inside optimizer.step"
    STEPPED = "after optimizer.step"


@dataclass(slots=True)
class RandomState:
    """Every generator a training step draws from."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    device: torch.Tensor | None
    device_type: str

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device, device.type)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.get_device_module(self.device_type).set_rng_state(self.device)


@dataclass(slots=True)
class Bookkeeping:
    """
    Everything a trainer counts beside weights and optimizer state, as of one moment.

    Containers are marked by length, not copied: they are appended to or replaced, so a mark costs the same however
    long ago the last log was.
    """

    scalars: dict[str, Any]
    running_loss: torch.Tensor
    tokens_seen: int
    total_flos: float
    log_length: int
    stores: dict[str, Any]
    generated: Any
    buffers: dict[str, torch.Tensor]
    rng: RandomState


@dataclass(slots=True)
class Pending:
    """What the Trainer still had to do for a finished step when it was interrupted."""

    step_end: bool = False
    log: bool = False
    evaluate: bool = False
    save: bool = False
    epoch_end: bool = False
    grad_norm: Any = None
    learning_rate: float | None = None

    def __bool__(self) -> bool:
        return self.step_end or self.log or self.evaluate or self.save or self.epoch_end


@dataclass(slots=True)
class ResumePoint:
    """A place in the run from which `train()` can be entered again as if it had never been left."""

    step: int
    path: str
    bookkeeping: Bookkeeping
    pending: Pending


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where a row of a batch came from; `None` where that is unknown."""

    dataset_index: int | None = None
    segment: int | None = None
    stream_ordinal: int | None = None


def _mark(container: Any) -> Any:
    if isinstance(container, dict):
        return container, {key: _mark(value) for key, value in container.items()}
    if isinstance(container, list):
        return container, len(container)
    if isinstance(container, deque):
        return container, tuple(container)
    return container, None


def _rewind(mark: tuple[Any, Any]) -> Any:
    container, content = mark
    if isinstance(container, dict):
        container.clear()
        container.update({key: _rewind(value) for key, value in content.items()})
    elif isinstance(container, list):
        del container[content:]
    elif isinstance(container, deque):
        container.clear()
        container.extend(content)
    return container


def _plain_metrics(store: Any) -> Any:
    """A metrics store as JSON; values that are not numbers are left out."""
    if isinstance(store, Mapping):
        return {str(key): _plain_metrics(value) for key, value in store.items()}
    return [float(value) for value in store if isinstance(value, (int, float))] if isinstance(store, list) else []


def find_trainer(callback: Any) -> Trainer | None:
    """
    The trainer whose `train()` is calling the callback right now.

    The Trainer hands callbacks its state, not itself. The caller of `on_train_begin` is one of its methods.
    """
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer) and callback in candidate.callback_handler.callbacks:
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    return None


def find_resume_path() -> str | None:
    """The checkpoint the `train()` call we are in resumes from."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer) and "resume_from_checkpoint" in frame.f_locals:
            path = frame.f_locals["resume_from_checkpoint"]
            return str(path) if isinstance(path, (str, os.PathLike)) else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Window:
    """
    One optimizer step: its micro-batches, what came out of them, and the state they started from.

    Args:
        instrument ([`Instrument`]):
            The instrument of the trainer the step belongs to.
        size (`int`):
            Number of micro-batches in the step.
    """

    def __init__(self, instrument: Instrument, size: int) -> None:
        self._instrument = instrument
        self._trainer = instrument.trainer
        self.size = size
        self.step = int(self._trainer.state.global_step)
        self.epoch = self._trainer.state.epoch
        self.started = time.perf_counter()
        self.losses: list[torch.Tensor] = []
        self.grad_norm: Any = None
        self.judged = False
        self.skipped = False
        self.counted = False
        self.prepared: dict[int, Any] = {}
        self.objective: Objective = instrument.objective
        self._calls: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._start: Bookkeeping | None = None
        self._tokens_inside = 0
        self._measure: Callable[[], Any] = lambda: None
        self._touched = False

    # ---- what the step looked like ----

    def signals(self) -> StepSignals:
        """Loss and gradient norm as floats. The one device sync of a healthy step, and its one collective."""
        loss = torch.stack([loss.detach().float() for loss in self.losses]).sum()
        norm = _as_tensor(self.grad_norm, loss.device)
        values = consensus.sum_over_ranks(torch.stack([loss, loss if norm is None else norm.float()]))
        loss_sum, norm_sum = values.tolist()
        ranks = consensus.world_size()
        return StepSignals(
            step=self.step,
            loss=loss_sum / ranks,
            grad_norm=None if norm is None else norm_sum / ranks,
            seconds=time.perf_counter() - self.started,
        )

    @property
    def scaler_active(self) -> bool:
        """Whether a GradScaler looks after overflowing gradients (fp16)."""
        scaler = self._trainer.accelerator.scaler
        return scaler is not None and scaler.is_enabled()

    def nonfinite_micro_batches(self) -> list[int]:
        """Micro-batches whose loss on this rank is not finite."""
        return [index for index, loss in enumerate(self.losses) if not math.isfinite(float(loss))]

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
        # Not `if keep`: a rank that drops nothing still takes part in counting what the others dropped.
        counting = keep is not None
        keep = keep or {}
        layouts = {index: self.layout(index) for index in keep}
        counts = self._count_items(keep, layouts) if counting else None
        self._rewind()
        losses: list[torch.Tensor] = []
        emptied = [index for index, rows in keep.items() if not rows]
        last = max((index for index in range(self.size) if index not in emptied), default=-1)
        accumulation = self._trainer.current_gradient_accumulation_steps
        if emptied and not self.objective.counts_own_tokens:
            self._trainer.current_gradient_accumulation_steps = max(self.size - len(emptied), 1)
        try:
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
                losses.append(self._run(index, pick, last=index == last, items=items))
        finally:
            self._trainer.current_gradient_accumulation_steps = accumulation
        self.losses = losses
        self.grad_norm = self._measure()

    def layout(self, index: int) -> Layout | None:
        """How the rows of a micro-batch can be told apart. Known once the step has been re-executed."""
        return layout_of(self.prepared.get(index), self.objective)

    def probe(self, index: int, rows: Sequence[int]) -> bool:
        """Whether some rows of a micro-batch alone give a finite loss and finite gradients."""
        layout = self.layout(index)
        if layout is None:
            raise ValueError(f"the rows of micro-batch {index} cannot be told apart")
        return self._probe(index, select_rows(self.prepared[index], layout, rows))

    def probe_batch(self, inputs: Any) -> bool:
        """Whether another micro-batch, as the data loader gave it, is finite with the weights as they are."""
        return self._probe(self.size - 1, self._instrument.prepare_inputs(copy.copy(inputs)))

    def _probe(self, index: int, batch: Any) -> bool:
        self._rewind()
        loss = self._run(index, lambda _: batch, last=True, synchronise=False)
        gradients = [p.grad for p in self._trainer.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else loss
        finite = math.isfinite(float(loss)) and (
            self.scaler_active or math.isfinite(float(_as_tensor(norm, loss.device)))
        )
        self._rewind()
        return finite

    def _run(
        self,
        index: int,
        pick: Callable[[Any], Any],
        last: bool,
        items: Any = None,
        synchronise: bool = True,
    ) -> torch.Tensor:
        model, inputs, args, kwargs = self._calls[index]
        if items is not None:
            args, kwargs = _with_items(args, kwargs, items)
        accelerator = self._trainer.accelerator
        accelerator.gradient_state._set_sync_gradients(last)
        together = contextlib.nullcontext() if last and synchronise else accelerator.no_sync(model=model)
        with self._instrument.preparing(lambda batch: self._note(index, batch, pick)), together:
            try:
                return self._instrument.call_training_step(model, copy.copy(inputs), *args, **kwargs)
            except Exception as error:
                raise TrainingFault(error) from error

    def _note(self, index: int, batch: Any, pick: Callable[[Any], Any]) -> Any:
        # A copy: `compute_loss` may pop keys from the batch it is given.
        self.prepared.setdefault(index, copy.copy(batch))
        return pick(batch)

    def _advance_without(self, index: int) -> None:
        """Lets a trainer that generates its own rows do so for a micro-batch nothing of which is trained on."""
        if self.objective.online:
            self._instrument.prepare_inputs(copy.copy(self._calls[index][1]))
            self._trainer._step += 1

    def _count_items(self, keep: Mapping[int, Sequence[int]], layouts: Mapping[int, Layout | None]) -> _Items:
        """What the loss is divided by once rows are gone."""
        dropped = torch.zeros((), device=self._trainer.accelerator.device)
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

    def _rewind(self) -> None:
        assert self._start is not None
        self._touched = True
        self._trainer.model.zero_grad()
        scaler = self._trainer.accelerator.scaler
        if scaler is not None:
            # `unscale_` refuses to run twice for one optimizer; what it noted belongs to gradients that are gone.
            scaler._per_optimizer_states.clear()
        tokens = self._trainer.state.num_input_tokens_seen - self._tokens_inside
        self._instrument.rewind(self._start, keep_loop_counts=True)
        self._trainer.state.num_input_tokens_seen = tokens
        self._tokens_inside = 0

    # ---- what becomes of it ----

    def accept(self) -> None:
        """Puts the re-executed step in the place of the one that failed: loss, gradients and their norm."""
        self._set_running_loss(self.losses)

    def skip(self, substitute_loss: float | None) -> None:
        """
        Leaves the step out: no gradient, so neither weights nor moments move (with zeroed gradients AdamW would still
        decay the weights and move by momentum).

        Args:
            substitute_loss (`float` or `None`):
                What the step counts with in the logged average if its own loss is not finite.
        """
        self.skipped = True
        for parameter in self._trainer.model.parameters():
            parameter.grad = None
        total = torch.stack([loss.detach().float() for loss in self.losses]).sum()
        if math.isfinite(float(total)):
            self._set_running_loss(self.losses)
        else:
            self._set_running_loss([] if substitute_loss is None else [torch.full_like(total, substitute_loss)])

    def abandon(self) -> None:
        """After a failure of our own: a step that was touched is left out, one that was not goes on as it is."""
        if self._touched:
            self.skip(None)

    def _set_running_loss(self, losses: Sequence[torch.Tensor]) -> None:
        assert self._start is not None
        running: torch.Tensor = self._trainer._tr_loss
        running.copy_(self._start.running_loss)
        for loss in losses:
            # One by one, as the Trainer does: the sum has to be the same to the last bit.
            running += loss.detach().to(running.device)

    # ---- where its rows came from ----

    def sources(self, index: int) -> list[RowSource]:
        """Where each row (pair, segment) of a micro-batch came from."""
        layout = self.layout(index)
        return [] if layout is None else self._instrument.sources(self, index, layout)

    def inputs(self, index: int) -> Any:
        """The micro-batch as the data loader gave it."""
        return self._calls[index][1]

    def record(self) -> dict[str, Any]:
        """What is needed to compute the step again elsewhere, on the CPU: prepared batches and random states."""
        assert self._start is not None
        rng = self._start.rng
        return {
            "step": self.step,
            "micro_batches": {index: _to_cpu(batch) for index, batch in self.prepared.items()},
            "rng": {"cpu": rng.cpu, "device": rng.device, "python": rng.python},
        }


@dataclass(slots=True)
class _Items:
    items: Any
    dropped: torch.Tensor | None


class Instrument:
    """
    Wraps one trainer instance for the time of a `train()` call.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer. Only this object is touched, and [`detach`] undoes it.
        judge (`Callable[[Window], None]`):
            Called once per optimizer step, with gradients computed and clipped and nothing applied yet.
        extra_logs (`Callable[[], dict[str, float]]`):
            Metrics to add to what the trainer logs.
        broken (`Callable[[Exception], None]`):
            Told when code of ours failed; by then the trainer is its plain self again.
        heals_exceptions (`bool`):
            Whether an exception that only says "NaN" is treated as a non-finite loss.
    """

    def __init__(
        self,
        trainer: Trainer,
        judge: Callable[[Window], None],
        extra_logs: Callable[[], dict[str, float]],
        broken: Callable[[Exception], None],
        heals_exceptions: bool,
    ) -> None:
        # Any: half of what is used below is private, and TRL's trainers have attributes of their own.
        self.trainer: Any = trainer
        self.objective = objective_of(trainer)
        self.phase = Phase.IDLE
        self.window: Window | None = None
        self.started_at = time.time()
        self._judge_step = judge
        self._extra_logs = extra_logs
        self._broken = broken
        self._heals_exceptions = heals_exceptions
        self._originals: list[tuple[Any, str, Any, bool]] = []
        self._hooks: list[Any] = []
        self._finished: Bookkeeping | None = None
        self._finished_step = -1
        self._epoch_rng: RandomState | None = None
        self._after_fetch_rng: RandomState | None = None
        self._step_end_rng: RandomState | None = None
        self._fetched_in_epoch = 0
        self._first_fetched = 0
        self._rows_in_epoch = 0
        self._epoch_began = False
        self._epoch_ended = False
        self._finalizing = False
        self._entry_step = 0
        self._in_training_step = False
        self._scheduler_before: Any = None
        self._learning_rate: float | None = None
        self._sampled: dict[int, list[int]] = {}
        self._recorded: tuple[Any, type] | None = None
        self._moving_buffers: list[tuple[str, torch.Tensor]] | None = None
        self._buffer_versions: dict[str, int] = {}

    @property
    def can_reexecute(self) -> bool:
        """DeepSpeed, XLA and model-parallel SageMaker own the backward pass: there we only watch."""
        return self.trainer.accelerator.distributed_type not in (
            DistributedType.DEEPSPEED,
            DistributedType.XLA,
            DistributedType.MEGATRON_LM,
        )

    # ---- attaching and detaching ----

    def attach(self) -> None:
        """Called in `on_train_begin`: the optimizer, the data loader and the running loss exist by then."""
        trainer = self.trainer
        self._entry_step = int(trainer.state.global_step)
        self._replace(trainer, "get_batch_samples", self._get_batch_samples)
        self._replace(trainer, "training_step", self._training_step)
        self._replace(trainer, "log", self._log)
        self._replace(trainer.accelerator, "clip_grad_norm_", self._clip_grad_norm_)
        optimizer = _innermost(trainer.optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_optimizer_step))
        self._record_samplers()

    def detach(self) -> None:
        """Gives the trainer back as it was."""
        for holder, name, original, was_set in reversed(self._originals):
            if was_set:
                setattr(holder, name, original)
            else:
                vars(holder).pop(name, None)
        self._originals.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._recorded is not None:
            sampler, cls = self._recorded
            sampler.__class__ = cls
            self._recorded = None
        self.window = None

    def told(self, event: str) -> None:
        """One of the callback events below, contained: a failure of ours is not the training's."""
        if not self._originals:
            return
        try:
            getattr(self, event)()
        except Exception as error:
            self._contain(error)

    def may_empty_micro_batches(self, keep: Mapping[int, Sequence[int]], device: torch.device) -> bool:
        """With several processes every one must run every micro-batch: the loss may contain collectives."""
        emptied = any(not rows for rows in keep.values())
        return consensus.world_size() == 1 or not consensus.any_rank(emptied, device)

    def _replace(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(holder, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self._originals.append((holder, name, original, name in vars(holder)))
        setattr(holder, name, replaced)

    def _contain(self, error: Exception) -> None:
        logger.error(
            "self_healing failed at step %s and has switched itself off; training goes on without it. "
            "Please report this traceback.",
            self.trainer.state.global_step,
            exc_info=error,
        )
        self.detach()
        self._broken(error)

    # ---- the wrapped methods ----

    def _get_batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = self.trainer.state
        if 0 < state.max_steps <= state.global_step:
            # A run that was interrupted after its last step: transformers would train one step too many.
            return [], None
        try:
            self.phase = Phase.FETCHING
            self.window = None
            self._finished = self._capture()
            self._finished_step = int(state.global_step)
            self._after_fetch_rng = self._step_end_rng = None
            self._epoch_began = self._epoch_ended = False
        except Exception as error:
            self._contain(error)
        result = original(*args, **kwargs)
        try:
            batches = result[0]
            self._after_fetch_rng = RandomState.capture(self.trainer.accelerator.device)
            self.window = Window(self, len(batches)) if self._originals and batches else None
            self.phase = Phase.COMPUTING
        except Exception as error:
            self._contain(error)
        return result

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        window = self.window
        if window is None or window.judged or self._in_training_step or len(window._calls) >= window.size:
            return original(model, inputs, *args, **kwargs)
        try:
            if window._start is None:
                assert self._finished is not None
                window._start = self._capture(self._finished.running_loss)
                window.started = time.perf_counter()
            window._calls.append((model, copy.copy(inputs), args, kwargs))
        except Exception as error:
            self._contain(error)
            return original(model, inputs, *args, **kwargs)
        before = self.trainer.state.num_input_tokens_seen
        loss = self.call_training_step(model, inputs, *args, **kwargs)
        window.losses.append(loss)
        window._tokens_inside += self.trainer.state.num_input_tokens_seen - before
        return loss

    def call_training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The trainer's own `training_step`; a non-finite number that surfaces as an exception becomes a NaN loss."""
        original = self._original(self.trainer, "training_step")
        self._in_training_step = True
        try:
            loss: torch.Tensor = original(model, inputs, *args, **kwargs)
            return loss
        except Exception as error:
            if self._heals_exceptions and consensus.world_size() == 1 and is_nonfinite_exception(error):
                return torch.full((), math.nan, device=self.trainer.args.device)
            raise
        finally:
            self._in_training_step = False

    def _clip_grad_norm_(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        window = self.window
        if window is None or window.judged or self._in_training_step or len(window.losses) < window.size:
            return original(parameters, *args, **kwargs)
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        window._measure = lambda: original(parameters, *args, **kwargs)
        window.grad_norm = window._measure()
        self._judge(window)
        return window.grad_norm

    def before_optimizer_step(self) -> None:
        """For steps in which the trainer clips nothing through the accelerator (gradients on mixed meshes)."""
        window = self.window
        if window is None or window.judged or len(window.losses) < window.size:
            return
        window._measure = lambda: self.trainer._get_grad_norm(self.trainer.model_wrapped)
        window.grad_norm = window._measure()
        self._judge(window)

    def _judge(self, window: Window) -> None:
        window.judged = True
        fault: TrainingFault | None = None
        try:
            self._judge_step(window)
        except UnrecoverableTrainingError:
            raise
        except TrainingFault as caught:
            fault = caught
        except Exception as error:
            window.abandon()
            self._contain(error)
        if fault is not None:
            # Outside the handler, so that the exception keeps the cause and context it came with.
            raise fault.error

    def _log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        try:
            logs.update(self._extra_logs())
            if "train_runtime" in logs:
                self._finalizing = True
                # By now it is part of the total; a re-entry after this point must not add it again.
                self.trainer._tr_loss.zero_()
                self._cover_the_whole_run(logs)
        except Exception as error:
            self._contain(error)
        return original(logs, *args, **kwargs)

    def _cover_the_whole_run(self, logs: dict[str, float]) -> None:
        """The Trainer's final speed metrics know only the last entry into `train()`."""
        runtime = logs["train_runtime"]
        whole = time.time() - self.started_at
        if whole <= runtime:
            return
        steps = int(self.trainer.state.global_step) - int(getattr(self.trainer, "_initial_global_step", 0))
        samples = logs.get("train_samples_per_second", 0.0) * runtime
        logs["train_runtime"] = round(whole, 4)
        if "train_samples_per_second" in logs:
            logs["train_samples_per_second"] = round(samples / whole, 3)
        if "train_steps_per_second" in logs:
            logs["train_steps_per_second"] = round(steps / whole, 3)

    def _before_optimizer_step(self, *_: Any) -> None:
        self.phase = Phase.STEPPING

    def _after_optimizer_step(self, *_: Any) -> None:
        self.phase = Phase.STEPPED

    def _original(self, holder: Any, name: str) -> Callable[..., Any]:
        for wrapped, wrapped_name, original, _ in self._originals:
            if wrapped is holder and wrapped_name == name:
                return original  # type: ignore[no-any-return]
        return getattr(holder, name)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def preparing(self, change: Callable[[Any], Any]) -> Iterator[None]:
        """Passes what the trainer's `_prepare_inputs` returns through `change`, once."""
        trainer = self.trainer
        original, was_set = trainer._prepare_inputs, "_prepare_inputs" in vars(trainer)
        changed = False

        @functools.wraps(original)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            nonlocal changed
            batch = original(*args, **kwargs)
            if changed:
                return batch
            changed = True
            return change(batch)

        trainer._prepare_inputs = prepare
        try:
            yield
        finally:
            if was_set:
                trainer._prepare_inputs = original
            else:
                del trainer._prepare_inputs

    def prepare_inputs(self, inputs: Any) -> Any:
        """The trainer's own preparation of a micro-batch (for online trainers: generation)."""
        try:
            self.trainer.model.train()
            return self.trainer._prepare_inputs(inputs)
        except Exception as error:
            raise TrainingFault(error) from error

    # ---- bookkeeping ----

    def _capture(self, running_loss: torch.Tensor | None = None) -> Bookkeeping:
        trainer = self.trainer
        attributes = vars(trainer)
        return Bookkeeping(
            scalars={name: value for name, value in attributes.items() if type(value) in _SCALARS},
            running_loss=trainer._tr_loss.detach().clone() if running_loss is None else running_loss,
            tokens_seen=trainer.state.num_input_tokens_seen,
            total_flos=trainer.state.total_flos,
            log_length=len(trainer.state.log_history),
            stores={name: _mark(attributes[name]) for name in _STORES if name in attributes},
            generated=attributes.get("_buffered_inputs"),
            buffers=self._copy_moving_buffers(),
            rng=RandomState.capture(trainer.accelerator.device),
        )

    def _copy_moving_buffers(self) -> dict[str, torch.Tensor]:
        """
        Copies of the buffers a forward pass changes (batch norm statistics, fp8 scales).

        Which ones do is seen from their version counters: the first step copies all of them, later ones only those
        that have moved by then.
        """
        if self._moving_buffers is None:
            buffers = list(self.trainer.model.named_buffers())
            if not self._buffer_versions:
                self._buffer_versions = {name: buffer._version for name, buffer in buffers}
            elif self._steps_since_entry() > 0:
                self._moving_buffers = buffers = [
                    (name, buffer) for name, buffer in buffers if self._buffer_versions.get(name) != buffer._version
                ]
        else:
            buffers = self._moving_buffers
        return {name: buffer.detach().clone() for name, buffer in buffers}

    def _steps_since_entry(self) -> int:
        return int(self.trainer.state.global_step) - self._entry_step

    def rewind(self, bookkeeping: Bookkeeping, keep_loop_counts: bool) -> None:
        """Sets the trainer's counters, metrics, random states and moving buffers back to an earlier moment."""
        trainer = self.trainer
        for name, value in bookkeeping.scalars.items():
            if not keep_loop_counts or name not in _SET_BY_THE_LOOP:
                setattr(trainer, name, value)
        for name, mark in bookkeeping.stores.items():
            setattr(trainer, name, _rewind(mark))
        if "_buffered_inputs" in vars(trainer):
            trainer._buffered_inputs = bookkeeping.generated
        del trainer.state.log_history[bookkeeping.log_length :]
        buffers = dict(trainer.model.named_buffers())
        for name, value in bookkeeping.buffers.items():
            buffers[name].copy_(value)
        bookkeeping.rng.restore()
        if not keep_loop_counts:
            trainer._tr_loss.copy_(bookkeeping.running_loss)
            trainer.state.num_input_tokens_seen = bookkeeping.tokens_seen
            trainer.state.total_flos = bookkeeping.total_flos

    def export_bookkeeping(self) -> dict[str, Any]:
        """What a new process needs to go on logging where this one stopped, as JSON."""
        trainer = self.trainer
        attributes = vars(trainer)
        return {
            "running_loss": float(trainer._tr_loss),
            "scalars": {name: attributes[name] for name in _PERSISTENT_SCALARS if name in attributes},
            "stores": {
                name: _plain_metrics(attributes[name])
                for name in ("_metrics", "_stored_metrics")
                if name in attributes
            },
        }

    def import_bookkeeping(self, exported: Mapping[str, Any]) -> None:
        """Goes on counting from what [`export_bookkeeping`] of an earlier process wrote."""
        trainer = self.trainer
        attributes = vars(trainer)
        trainer._tr_loss.fill_(exported["running_loss"])
        for name, value in exported["scalars"].items():
            if name in attributes:
                setattr(trainer, name, value)
        for name, store in exported["stores"].items():
            for mode, metrics in store.items():
                if name in attributes and mode in attributes[name]:
                    attributes[name][mode].clear()
                    attributes[name][mode].update(metrics)
        if "_buffered_inputs" in attributes:
            trainer._buffered_inputs = None

    # ---- leaving and entering train() ----

    def epoch_begins(self) -> None:
        """Called in `on_epoch_begin`: a resume at an epoch boundary loads its random state here."""
        trainer = self.trainer
        self._epoch_rng = RandomState.capture(trainer.accelerator.device)
        self._epoch_began = True
        self._after_fetch_rng = None
        self._fetched_in_epoch = 0
        self._rows_in_epoch = 0
        resumed_here = int(trainer.state.global_step) == self._entry_step
        if resumed_here and self._entry_step > 0 and not trainer.args.ignore_data_skip:
            loader = trainer.callback_handler.train_dataloader
            accumulation = trainer.args.gradient_accumulation_steps
            with contextlib.suppress(TypeError):
                updates = max(math.ceil(len(loader) / accumulation), 1)
                self._fetched_in_epoch = self._entry_step % updates * accumulation
        self._first_fetched = self._fetched_in_epoch

    def step_ends(self) -> None:
        """Called in `on_step_end`."""
        if self.window is not None:
            self._advance_data_position(self.window)
        self._note_random_state()

    def epoch_ends(self) -> None:
        """Called in `on_epoch_end`."""
        self._epoch_ended = True
        self._note_random_state()

    def _note_random_state(self) -> None:
        control = self.trainer.control
        if control.should_log or control.should_evaluate or control.should_save:
            self._step_end_rng = RandomState.capture(self.trainer.accelerator.device)

    def _advance_data_position(self, window: Window) -> None:
        if window.counted:
            return
        window.counted = True
        self._fetched_in_epoch += window.size
        for position in [position for position in self._sampled if position < self._fetched_in_epoch]:
            del self._sampled[position]
        for _, inputs, _, _ in window._calls:
            if isinstance(inputs, list):
                self._rows_in_epoch += len(inputs)
            elif (layout := layout_of(inputs, self.objective)) is not None:
                self._rows_in_epoch += layout.rows

    @property
    def moved_since_entry(self) -> bool:
        """Whether a step was finished, or may have been begun to be applied, since `train()` was entered."""
        finished = int(self.trainer.state.global_step) > self._entry_step
        return finished or self.phase in (Phase.STEPPING, Phase.STEPPED)

    def settle(self) -> tuple[Bookkeeping, Pending] | None:
        """
        After an exception left `train()`: brings the trainer to the end of its last finished step.

        Returns:
            The bookkeeping as of then and what the Trainer still owed that step, or `None` where weights or moments
            may have been half updated.
        """
        trainer = self.trainer
        if self._finished is None or self.phase in (Phase.IDLE, Phase.STEPPING):
            return None
        if self.phase is Phase.STEPPED:
            if int(trainer.state.global_step) == self._finished_step:
                self._count_the_step()
            told = self.window is None or self.window.counted
            if self.window is not None:
                self._advance_data_position(self.window)
            control = trainer.control
            pending = Pending(
                step_end=not told,
                log=control.should_log and trainer.state.global_step > trainer._globalstep_last_logged,
                evaluate=control.should_evaluate,
                save=control.should_save,
                epoch_end=not self._epoch_ended and not self._epoch_began and self._at_epoch_end(),
                grad_norm=self.window.grad_norm if self.window is not None else None,
                learning_rate=self._learning_rate,
            )
            if self._finalizing and trainer.state.log_history and "train_runtime" in trainer.state.log_history[-1]:
                trainer.state.log_history.pop()
            if trainer._globalstep_last_logged == trainer.state.global_step and not control.should_log:
                # TRL empties its metrics after the trackers were told; one of them may have raised before that.
                for name in ("_metrics", "_stored_metrics"):
                    for mode, metrics in getattr(trainer, name, {}).items():
                        if mode == "train":
                            metrics.clear()
            if pending.evaluate:
                self._forget_half_an_evaluation()
            bookkeeping = self._capture()
            if self._epoch_began and self._epoch_rng is not None:
                bookkeeping.rng = self._epoch_rng
            elif pending.evaluate and self._step_end_rng is not None:
                bookkeeping.rng = self._step_end_rng
        else:
            pending = Pending()
            bookkeeping = self._finished
            self.rewind(bookkeeping, keep_loop_counts=False)
            bookkeeping.rng = self._resume_rng()
        bookkeeping.rng.restore()
        trainer.model.zero_grad()
        scaler = trainer.accelerator.scaler
        if scaler is not None:
            scaler._per_optimizer_states.clear()
        for flag in ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop"):
            setattr(trainer.control, flag, False)
        return bookkeeping, pending

    def _forget_half_an_evaluation(self) -> None:
        trainer = self.trainer
        history = trainer.state.log_history
        while history and history[-1]["step"] == trainer.state.global_step and "eval_runtime" in history[-1]:
            history.pop()
        for name in ("_metrics", "_stored_metrics"):
            getattr(trainer, name, {}).get("eval", {}).clear()

    def _resume_rng(self) -> RandomState:
        """
        The random state a resume has to load to draw what the interrupted step would have drawn.

        At an epoch boundary it is loaded before the data iterator is made, elsewhere after the window was fetched.
        """
        assert self._finished is not None
        if self._fetched_in_epoch == 0 and self._epoch_rng is not None:
            return self._epoch_rng
        return self._after_fetch_rng or self._finished.rng

    def _count_the_step(self) -> None:
        """An exception came between `optimizer.step()` and the count: the step is done, so it is counted."""
        trainer, window = self.trainer, self.window
        scheduler = trainer.lr_scheduler
        stepped_by_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        skipped = trainer.accelerator.optimizer_step_was_skipped
        if not stepped_by_metric and not skipped and self._scheduler_position() == self._scheduler_before:
            scheduler.step()
        trainer.state.global_step += 1
        if window is not None:
            loader = trainer.callback_handler.train_dataloader
            with contextlib.suppress(TypeError):
                epoch = math.floor(trainer.state.epoch or 0)
                trainer.state.epoch = epoch + (self._fetched_in_epoch + window.size) / len(loader)

    def _at_epoch_end(self) -> bool:
        with contextlib.suppress(TypeError):
            return self._fetched_in_epoch >= len(self.trainer.callback_handler.train_dataloader)
        return False

    def _scheduler_position(self) -> Any:
        return getattr(self.trainer.lr_scheduler, "last_epoch", None)

    def note_schedule(self) -> None:
        """Called in `on_pre_optimizer_step`: to tell later whether the schedule moved, and which rate was used."""
        self._scheduler_before = self._scheduler_position()
        self._learning_rate = self.trainer._get_learning_rate()

    def save_checkpoint(self) -> str:
        """Writes a checkpoint of the trainer as it stands, in the Trainer's own format; pushes nothing to the Hub."""
        trainer = self.trainer
        push, trainer.args.push_to_hub = trainer.args.push_to_hub, False
        try:
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        finally:
            trainer.args.push_to_hub = push
        return self.checkpoint_path()

    def checkpoint_path(self) -> str:
        """Where the checkpoint of the current step is or would be."""
        folder = f"checkpoint-{self.trainer.state.global_step}"
        return os.path.join(self.trainer._get_output_dir(trial=None), folder)

    def continue_from(self, point: ResumePoint) -> None:
        """
        Called in `on_train_begin` of a re-entry: running loss, metrics and token counts of the interrupted call go on,
        and what it still owed its last step is done.
        """
        trainer = self.trainer
        for name, value in point.bookkeeping.scalars.items():
            if name not in _SET_BY_THE_LOOP and name != "current_gradient_accumulation_steps":
                setattr(trainer, name, value)
        for name, mark in point.bookkeeping.stores.items():
            setattr(trainer, name, _rewind(mark))
        if "_buffered_inputs" in vars(trainer):
            trainer._buffered_inputs = point.bookkeeping.generated
        trainer._tr_loss.copy_(point.bookkeeping.running_loss)
        if point.pending:
            self._finish(point)

    def _finish(self, point: ResumePoint) -> None:
        trainer, pending = self.trainer, point.pending
        point.bookkeeping.rng.restore()

        def log_evaluate_save() -> None:
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss,
                pending.grad_norm,
                trainer.model_wrapped,
                None,
                trainer.state.epoch,
                None,
                self.started_at,
                learning_rate=pending.learning_rate,
            )

        trainer.control.should_log = pending.log
        trainer.control.should_evaluate = pending.evaluate
        trainer.control.should_save = pending.save
        try:
            if pending.step_end:
                # Delivered again to every callback: which of them have had it cannot be known.
                trainer.control = trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
            log_evaluate_save()
            if pending.epoch_end:
                trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
                log_evaluate_save()
        except Exception as error:
            raise TrainingFault(error) from error
        point.pending = Pending()
        # Evaluation may have drawn random numbers: the resume has to go on behind them.
        trainer._save_rng_state(point.path)

    def release(self) -> None:
        """After an exception left `train()`: gives back what the Trainer only gives back when it ends by itself."""
        trainer = self.trainer
        handle = getattr(trainer, "neftune_hook_handle", None)
        if trainer.is_in_train and getattr(trainer, "neftune_noise_alpha", None) is not None and handle is not None:
            deactivate_neftune(trainer.model, handle, trainer.accelerator)
        for loader in list(trainer.accelerator.gradient_state.dataloader_references):
            if loader is not None:
                trainer.accelerator.gradient_state._remove_dataloader(loader)
        trainer.is_in_train = False
        # Counted in the checkpoint that is resumed from, or of a step that was not finished.
        trainer.current_flos = 0
        gc.collect()
        if trainer.accelerator.device.type != "cpu":
            torch.get_device_module(trainer.accelerator.device).empty_cache()

    # ---- where rows came from ----

    def _record_samplers(self) -> None:
        """
        Keeps the index lists the batch sampler gives out.

        The sampler object gets a subclass of its own class for the time of the run: it stays the same object with the
        same attributes for accelerate and for the Trainer, wherever they hold it.
        """
        sampler = getattr(self.trainer.callback_handler.train_dataloader, "batch_sampler", None)
        if sampler is None or isinstance(self.trainer.train_dataset, torch.utils.data.IterableDataset):
            return
        cls, sampled, instrument = type(sampler), self._sampled, self

        def __iter__(self: Any) -> Iterator[Any]:
            sampled.clear()
            for position, batch in enumerate(cls.__iter__(self)):
                # Batches that a resume skips are drawn as well, but never looked up.
                if position >= instrument._fetched_in_epoch and isinstance(batch, (list, tuple)):
                    sampled[position] = list(batch)
                yield batch

        try:
            sampler.__class__ = type(cls.__name__, (cls,), {"__iter__": __iter__, "__module__": cls.__module__})
        except TypeError:
            logger.info("The batch sampler %s cannot be watched: rows will have no dataset index.", cls.__name__)
            return
        self._recorded = (sampler, cls)

    def sources(self, window: Window, index: int, layout: Layout) -> list[RowSource]:
        """Where each row of a micro-batch came from."""
        if self.objective.online:
            return [RowSource() for _ in range(layout.rows)]
        position = self._fetched_in_epoch + index
        if isinstance(self.trainer.train_dataset, torch.utils.data.IterableDataset):
            return self._stream_sources(window, index, layout)
        indices = self._sampled.get(position)
        if indices is None:
            return [RowSource() for _ in range(layout.rows)]
        if layout.kind != "segments":
            known = len(indices) == layout.rows
            return [RowSource(dataset_index=int(indices[row]) if known else None) for row in range(layout.rows)]
        sources = [
            RowSource(dataset_index=int(item), segment=segment if segments > 1 or self._packed() else None)
            for item in indices
            for segments in (self._segments_of(int(item)),)
            for segment in range(segments)
        ]
        return sources if len(sources) == layout.rows else [RowSource() for _ in range(layout.rows)]

    def _stream_sources(self, window: Window, index: int, layout: Layout) -> list[RowSource]:
        if consensus.world_size() > 1 or layout.kind == "segments" or self._first_fetched > 0:
            return [RowSource() for _ in range(layout.rows)]
        before = self._rows_in_epoch
        for _, inputs, _, _ in window._calls[:index]:
            earlier = layout_of(inputs, self.objective)
            before += 0 if earlier is None else earlier.rows
        return [RowSource(stream_ordinal=before + row) for row in range(layout.rows)]

    def _packed(self) -> bool:
        return bool(getattr(self.trainer.args, "packing", False))

    def _segments_of(self, item: int) -> int:
        """How many sequences TRL's packing put into one row of the dataset."""
        columns = getattr(self.trainer.train_dataset, "column_names", None) or []
        return len(self.trainer.train_dataset[item]["seq_lengths"]) if "seq_lengths" in columns else 1

    # ---- experiments on the state ----

    def nonfinite_tensors(self) -> list[str]:
        """Names of parameters, buffers and optimizer states that hold NaN or Inf."""
        named: list[tuple[str, Any]] = [*self.trainer.model.named_parameters(), *self.trainer.model.named_buffers()]
        names = {id(parameter): name for name, parameter in self.trainer.model.named_parameters()}
        optimizer = _innermost(self.trainer.optimizer)
        for parameter, state in getattr(optimizer, "state", {}).items():
            if isinstance(state, Mapping):
                named.extend(
                    (f"optimizer:{names.get(id(parameter), '?')}.{key}", value) for key, value in state.items()
                )
        return [
            name
            for name, value in named
            if isinstance(value, torch.Tensor)
            and (value.is_floating_point() or value.is_complex())
            # A causal mask kept as a buffer holds -inf on purpose: among buffers only NaN is wrong.
            and not bool(
                (torch.isfinite(value) if isinstance(value, torch.nn.Parameter) else ~torch.isnan(value)).all()
            )
        ]


@contextlib.contextmanager
def preserved(trainer: Trainer) -> Iterator[None]:
    """
    Puts a trainer back as it was, whatever happens inside: weights, buffers, optimizer, schedule, scaler, random
    states, counters, metrics, callbacks and what accelerate holds on to.
    """
    model: Any = trainer.model
    accelerator: Any = trainer.accelerator
    rng = RandomState.capture(accelerator.device)
    training = {name: module.training for name, module in model.named_modules()}
    gradients = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    tensors = {name: value.detach().to("cpu", copy=True) for name, value in _all_tensors(model)}
    attributes = dict(vars(trainer))
    stores = {name: copy.deepcopy(attributes[name]) for name in _STORES if name in attributes}
    state, control = copy.deepcopy(trainer.state), copy.copy(trainer.control)
    handler = dict(vars(trainer.callback_handler))
    held = {
        name: list(getattr(accelerator, name)) for name in ("_models", "_optimizers", "_schedulers", "_dataloaders")
    }
    accelerated = {"step": accelerator.step}
    moving_parts = [part for part in (trainer.optimizer, trainer.lr_scheduler, accelerator.scaler) if part is not None]
    saved = [(part, copy.deepcopy(part.state_dict())) for part in moving_parts]
    forward = model.forward if "forward" in vars(model) else None
    try:
        yield
    finally:
        for name, value in _all_tensors(model):
            if name in tensors:
                value.data.copy_(tensors[name])
        model.zero_grad()
        for part, content in saved:
            part.load_state_dict(content)
        for name, module in model.named_modules():
            module.training = training.get(name, module.training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(gradients.get(name, parameter.requires_grad))
        if forward is None:
            vars(model).pop("forward", None)
        else:
            model.forward = forward
        vars(trainer).clear()
        vars(trainer).update(attributes)
        for name, store in stores.items():
            setattr(trainer, name, store)
        trainer.state, trainer.control = state, control
        vars(trainer.callback_handler).clear()
        vars(trainer.callback_handler).update(handler)
        for name, items in held.items():
            setattr(accelerator, name, items)
        accelerator.step = accelerated["step"]
        rng.restore()


def _all_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _as_tensor(norm: Any, device: torch.device) -> torch.Tensor | None:
    if norm is None:
        return None
    full = getattr(norm, "full_tensor", None)
    return torch.as_tensor(full() if full is not None else norm, device=device)


def _innermost(optimizer: Any) -> Any:
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


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
    return value if isinstance(value, _SCALARS) else repr(value)
