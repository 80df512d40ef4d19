"""A snapshot of the training state, and how many steps lie between two."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..config.healing_config import HealingConfig
from ..hf.state import LiveState, Search
from .host_memory import (
    TRANSFERS,
    HostBlock,
    NewBlock,
    Pair,
    TensorCopy,
    Transfer,
    aligned,
    by_device,
    copy_all,
    leaves,
    put_back,
    save,
)


# ---- snapshots: one state of a run in host memory ----


# Entries of a parameter group that belong to the schedule, which goes on, or to how updates are computed.
_OF_THE_SCHEDULE = frozenset({"params", "lr", "initial_lr", "betas", "momentum", "weight_decay", "foreach"})


@dataclass(slots=True)
class Snapshot:
    """
    One state of a run.

    Args:
        step (`int`):
            Optimizer steps finished when it was taken.
        as_of (`int`):
            The last step at which the run was in this state: later than `step` once it has been gone back to.
        extras (`dict`):
            What its owner keeps with it.
        seconds (`float`):
            Time it took to copy it, on the device and on the CPU, and to write it down for another process.
        block ([`HostBlock`]):
            The host memory it lies in.
        stored (`Path`):
            The file by which another process can go on from it, if there is one.
    """

    step: int = -1
    as_of: int = -1
    extras: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    states: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    block: HostBlock | None = None
    stored: Path | None = None
    under_way: list[Transfer] = field(default_factory=list)
    # Whether a forward wrote to the weights while they were copied: part of the copy is older than the rest.
    written_to: bool = False
    # What is copied beside the computation, and how often it had been written to by then.
    _copied: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    # What [`nonfinite`] has found, once it was asked.
    _nonfinite: list[str] | None = None

    @property
    def nbytes(self) -> int:
        """Host memory it takes."""
        return 0 if self.block is None else self.block.nbytes

    # ---- taking ----

    def take(self, live: LiveState, new_block: NewBlock = HostBlock) -> None:
        """
        Copies the state of a run as it is, into the host memory of what was here before if it is large enough. The
        copy may still be under way.

        Args:
            live ([`LiveState`]):
                The tensors.
            new_block (`Callable`, *optional*):
                Takes host memory.
        """
        began = time.perf_counter()
        self.wait()
        self.written_to, self._copied, self._nonfinite = False, [], None
        # What changes without an `optimizer.step()` is copied in the stream that all is computed in: buffers, which a
        # forward pass changes, and the scale, which may change where a step is left out.
        at_once, beside = list[Pair](), list[Pair]()
        self.buffers = save(live.buffers, at_once, may_be_infinite=True)
        self.scaler, self.loss_scaler = save(live.scaler, at_once), save(live.loss_scaler, at_once)
        self.parameters = save(live.parameters, beside)
        groups = [] if live.optimizer is None else live.optimizer.param_groups
        states = {} if live.optimizer is None else live.optimizer.state
        self.groups = [
            save({name: value for name, value in group.items() if name not in _OF_THE_SCHEDULE}, beside)
            for group in groups
        ]
        self.states = [(parameter, save(state, beside)) for parameter, state in states.items()]
        self._make_room([*at_once, *beside], new_block)
        try:
            self._copy(by_device(at_once), by_device(beside))
        except BaseException:
            self.wait()
            raise
        self.seconds = time.perf_counter() - began

    def _make_room(self, pairs: list[Pair], new_block: NewBlock) -> None:
        needed = sum(aligned(tensor) for _, tensor in pairs)
        if self.block is None or self.block.nbytes < needed:
            self.block = None
            pinned = any(tensor.device.type == "cuda" for _, tensor in pairs)
            self.block = new_block(needed, pinned) if needed else None
        if self.block is not None:
            self.block.clear()
        for kept, tensor in pairs:
            if self.block is None or tensor.numel() == 0:
                kept.host = torch.empty_like(tensor, device="cpu", requires_grad=False)
            else:
                kept.host = self.block.like(tensor)

    def _copy(self, at_once: dict[torch.device, list[Pair]], beside: dict[torch.device, list[Pair]]) -> None:
        for device in {**at_once, **beside}:
            transfer, pairs = TRANSFERS.get(device.type), beside.get(device, [])
            copy_all(at_once.get(device, []), non_blocking=transfer is not None)
            if transfer is None:
                copy_all(pairs, non_blocking=False)
            else:
                self._copied += [(tensor, tensor._version) for _, tensor in pairs]
                self.under_way.append(transfer(device, partial(copy_all, pairs, non_blocking=True)))

    def wait(self) -> None:
        """Waits until the copy is complete, and measures it."""
        if self.under_way:
            self._look_for_writes()
            self.seconds += max(transfer.wait() for transfer in self.under_way)
            self.under_way = []

    def join(self) -> None:
        """Orders all later work of the devices after the copy, before weights change; the host does not wait."""
        self._look_for_writes()
        for transfer in self.under_way:
            transfer.join()

    def _look_for_writes(self) -> None:
        """Once, before the optimizer writes to what was copied."""
        copied, self._copied = self._copied, []
        if any(tensor._version != version for tensor, version in copied):
            self.written_to, self._nonfinite = True, ["written to while they were copied"]

    def nonfinite(self) -> list[str]:
        """Names of the tensors that were not finite when it was taken. Waits for the copy."""
        self.wait()
        if self._nonfinite is None:
            search = Search()
            for name, kept in self.copies():
                # A causal mask kept as a buffer holds -inf on purpose.
                search.add(name, kept.extent, inf=not kept.may_be_infinite)
            self._nonfinite = search.nonfinite()
        return self._nonfinite

    def copies(self) -> Iterator[tuple[str, TensorCopy]]:
        """Yields the copies of weights, buffers and optimizer state, by name."""
        yield from leaves("", self.parameters)
        yield from leaves("buffer:", self.buffers)
        for index, (_, state) in enumerate(self.states):
            yield from leaves(f"optimizer:{index}.", state)

    # ---- putting back ----

    @torch.no_grad()
    def restore(self, live: LiveState) -> None:
        """
        Writes the state into the live tensors, which stay the same objects. Optimizer state that did not exist when
        the snapshot was taken is removed, so that the optimizer makes it again.

        The host memory may be written to again as soon as this returns.
        """
        self.wait()
        for tensors, kept in (
            (live.parameters, self.parameters),
            (live.buffers, self.buffers),
            (live.scaler, self.scaler),
        ):
            for name, tensor in tensors.items():
                if name in kept:
                    put_back(tensor, kept[name])
        if self.loss_scaler:
            put_back(live.loss_scaler, self.loss_scaler)
        if live.optimizer is None:
            return
        for group, settings in zip(live.optimizer.param_groups, self.groups, strict=False):
            for name, value in settings.items():
                group[name] = put_back(group.get(name), value)
        state = live.optimizer.state
        known = dict(self.states)
        for parameter in [parameter for parameter in state if parameter not in known]:
            del state[parameter]
        for parameter, saved in known.items():
            state[parameter] = put_back(state.get(parameter), saved, parameter)


# ---- interval: chooses how many steps lie between two snapshots, by what they cost ----


# Closer snapshots would be no older than what verification takes anyway.
_LEAST_STEPS = 5
# Share of the training time that copying snapshots may take.
OVERHEAD_BUDGET = 0.01
# One copy that was held up by something else must not leave the run without a newer state for hundreds of steps: the
# next one, at most this many times as far away, says what copies cost.
_MOST_GROWTH = 10


class SnapshotInterval:
    """
    Times steps and copies, and says when a snapshot is due: as soon as copies stay within their share of the time.
    """

    def __init__(self, config: HealingConfig) -> None:
        self._config = config
        self.steps = config.snapshot_interval or _LEAST_STEPS
        # The step of the last snapshot, or of the last rollback.
        self.last_taken = 0
        self._chosen = False
        # When the last step began, or the copy before it had ended; `None` where `train()` was entered since then.
        self.began: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=20)
        # Those into new memory take several times as long: the shortest counts.
        self._copy_seconds: deque[float] = deque(maxlen=5)

    def step_begins(self, step: int) -> bool:
        """Takes the time of the step before; returns whether a snapshot is due."""
        now = time.perf_counter()
        if self.began is not None:
            self._step_seconds.append(now - self.began)
        self.began = now
        return step - self.last_taken >= self.steps

    @property
    def typical_step(self) -> float:
        """Seconds that a step takes on this rank; infinite before there was one."""
        return median(self._step_seconds) if self._step_seconds else math.inf

    @property
    def typical_copy(self) -> float:
        """Seconds that a copy takes on this rank."""
        return min(self._copy_seconds, default=0.0)

    def share_of_step(self, snapshot: Snapshot) -> float:
        """Measures what the copy into a snapshot cost on this rank, in steps."""
        self._copy_seconds.append(snapshot.seconds)
        return self.typical_copy / self.typical_step

    def choose(self, share: float) -> bool:
        """Chooses the interval by what copies cost; whether it is another one."""
        steps = self._config.snapshot_interval
        if not steps:
            steps = min(max(math.ceil(share / OVERHEAD_BUDGET), _LEAST_STEPS), _MOST_GROWTH * self.steps)
        # Near enough is left as it is: the measurement varies, and the journal is read by people.
        if self._chosen and 0.5 <= steps / self.steps <= 2:
            return False
        self.steps, self._chosen = steps, True
        return True
