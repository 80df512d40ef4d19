"""What a trainer counts beside weights and optimizer state: captured, rewound, carried over to another process."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..system.random_state import RandomState
from .memory import with_room


_SCALARS = frozenset({int, float, bool, str, type(None)})
# Containers in which TRL trainers collect metrics and completions until the next log.
STORES = ("_metrics", "_stored_metrics", "_logs", "_textual_logs", "_pending_metrics", "_pending_extra_logs")
METRIC_STORES = ("_metrics", "_stored_metrics")
# Set by the training loop around the step, not by the step.
_SET_BY_THE_LOOP = frozenset({"current_flos", "is_in_train", "_train_batch_size"})
_SET_ON_ENTRY = _SET_BY_THE_LOOP | {"current_gradient_accumulation_steps"}
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
# Of TRL's GRPO (1.x), where the run itself has moved them; else they are settings, and those of the new process hold.
_MOVED_SCALARS = {"use_adaptive_entropy": ("entropy_coef", "_last_world_entropy")}


@dataclass(slots=True)
class Bookkeeping:
    """Everything a trainer counts beside weights and optimizer state, as of one moment."""

    scalars: dict[str, Any]
    running_loss: torch.Tensor
    tokens_seen: int
    total_flos: float
    log_length: int
    stores: dict[str, Any]
    generated: Any
    buffers: dict[str, torch.Tensor]
    rng: RandomState


class Bookkeeper:
    """Captures and rewinds the bookkeeping of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._device: torch.device = trainer.accelerator.device
        self._entry_step = int(trainer.state.global_step)
        self._moving_buffers: list[tuple[str, torch.Tensor]] | None = None
        self._first_buffers: dict[str, torch.Tensor] = {}
        self._rng: RandomState | None = None

    def random_state(self) -> RandomState:
        """Captures the random states."""
        self._rng = RandomState.capture(self._device, since=self._rng)
        return self._rng

    def capture(self, running_loss: torch.Tensor | None = None) -> Bookkeeping:
        """Captures the bookkeeping."""
        trainer = self._trainer
        attributes = vars(trainer)
        return Bookkeeping(
            scalars={name: value for name, value in attributes.items() if type(value) in _SCALARS},
            running_loss=self._cloned(trainer._tr_loss) if running_loss is None else running_loss,
            tokens_seen=trainer.state.num_input_tokens_seen,
            total_flos=trainer.state.total_flos,
            log_length=len(trainer.state.log_history),
            stores=self.mark_stores(),
            generated=attributes.get("_buffered_inputs"),
            buffers=self._copy_moving_buffers(),
            rng=self.random_state(),
        )

    def _copy_moving_buffers(self) -> dict[str, torch.Tensor]:
        """Copies the buffers a forward pass changes (batch norm statistics, fp8 scales)."""
        moving = self._moving_buffers
        if moving is None:
            buffers = [(name, each) for name, each in self._trainer.model.named_buffers() if not each.is_meta]
            if int(self._trainer.state.global_step) == self._entry_step:
                copies = {name: self._cloned(buffer) for name, buffer in buffers}
                self._first_buffers = self._first_buffers or copies
                return copies
            first = self._first_buffers
            moving = [(name, buffer) for name, buffer in buffers if not _same(first.get(name), buffer)]
            self._moving_buffers, self._first_buffers = moving, {}
        return {name: self._cloned(buffer) for name, buffer in moving}

    def _cloned(self, tensor: torch.Tensor) -> torch.Tensor:
        return with_room(lambda: _clone(tensor), self._device)

    def restore_buffers(self, bookkeeping: Bookkeeping) -> None:
        """Puts the buffers a forward pass changes back."""
        buffers = dict(self._trainer.model.named_buffers())
        for name, value in bookkeeping.buffers.items():
            buffers[name].copy_(value)

    def rewind_step(self, bookkeeping: Bookkeeping) -> None:
        """Goes back to where a step began; what the training loop counts around the step stays."""
        self._rewind(bookkeeping, _SET_BY_THE_LOOP)
        bookkeeping.rng.restore()

    def rewind_counts(self, bookkeeping: Bookkeeping) -> None:
        """Puts counters and log back as they were; random states and buffers stay."""
        self._set_counts(bookkeeping, _SET_BY_THE_LOOP)
        del self._trainer.state.log_history[bookkeeping.log_length :]

    def with_buffers_of_now(self, bookkeeping: Bookkeeping) -> Bookkeeping:
        """Gives the same moment, with the buffers as they are now."""
        return replace(bookkeeping, buffers=self._copy_moving_buffers())

    def rewind(self, bookkeeping: Bookkeeping) -> None:
        """Goes back to an earlier moment altogether."""
        trainer = self._trainer
        self._rewind(bookkeeping, frozenset())
        trainer._tr_loss.copy_(bookkeeping.running_loss)
        trainer.state.num_input_tokens_seen = bookkeeping.tokens_seen
        trainer.state.total_flos = bookkeeping.total_flos
        bookkeeping.rng.restore()

    def _rewind(self, bookkeeping: Bookkeeping, stay: frozenset[str]) -> None:
        trainer = self._trainer
        self._set_counts(bookkeeping, stay)
        del trainer.state.log_history[bookkeeping.log_length :]
        self.restore_buffers(bookkeeping)

    def _set_counts(self, bookkeeping: Bookkeeping, stay: frozenset[str]) -> None:
        trainer = self._trainer
        for name, value in bookkeeping.scalars.items():
            if name not in stay:
                setattr(trainer, name, value)
        self.rewind_stores(bookkeeping.stores)
        if "_buffered_inputs" in vars(trainer):
            trainer._buffered_inputs = bookkeeping.generated

    def mark_stores(self) -> dict[str, Any]:
        """Notes where the containers of metrics stand."""
        attributes = vars(self._trainer)
        return {name: _mark(attributes[name]) for name in STORES if name in attributes}

    def rewind_stores(self, marks: Mapping[str, Any]) -> None:
        """Takes what was added to the containers of metrics since [`mark_stores`] out again."""
        for name, mark in marks.items():
            setattr(self._trainer, name, _unmark(mark))

    def continue_from(self, bookkeeping: Bookkeeping) -> None:
        """Goes on with the counters of an earlier `train()` call; a new one has set its own to zero."""
        self._set_counts(bookkeeping, _SET_ON_ENTRY)
        self._trainer._tr_loss.copy_(bookkeeping.running_loss)

    # ---- in another process ----

    def export(self) -> dict[str, Any]:
        """Gives what another process needs to go on logging where this one stopped, as JSON."""
        return {"running_loss": float(self._trainer._tr_loss), **self.export_counts()}

    def export_counts(self) -> dict[str, Any]:
        """Gives the same without the running loss, for which the host would have to wait for the device."""
        attributes = vars(self._trainer)
        moved = (name for moves, names in _MOVED_SCALARS.items() if attributes.get(moves) for name in names)
        return {
            "scalars": {name: attributes[name] for name in (*_PERSISTENT_SCALARS, *moved) if name in attributes},
            "stores": {name: _plain_metrics(attributes[name]) for name in METRIC_STORES if name in attributes},
        }

    def take_over(self, exported: Mapping[str, Any]) -> None:
        """Goes on counting from what [`export`] of an earlier process wrote."""
        trainer, attributes = self._trainer, vars(self._trainer)
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


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _same(before: torch.Tensor | None, now: torch.Tensor) -> bool:
    return before is not None and before.shape == now.shape and torch.equal(before, now)


def _mark(container: Any) -> Any:
    if isinstance(container, dict):
        # Lists, which most are, without a call for each.
        return container, {
            key: (value, len(value)) if type(value) is list else _mark(value) for key, value in container.items()
        }
    if isinstance(container, list):
        return container, len(container)
    if isinstance(container, deque):
        return container, tuple(container)
    return container, None


def _unmark(mark: tuple[Any, Any]) -> Any:
    container, content = mark
    if isinstance(container, dict):
        # First: what is interrupted in between leaves the trainer what it has.
        restored = {key: _unmark(value) for key, value in content.items()}
        container.clear()
        container.update(restored)
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
