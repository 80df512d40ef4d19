"""A snapshot of the training state, and how many steps lie between two."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from ..config.healing_config import HealingConfig
from ..hf.state import LiveState, Search
from .host_memory import (
    HostBlock,
    NewBlock,
    Place,
    SideStream,
    StateWriter,
    TensorCopy,
    Transfer,
    by_device,
    copies_of,
    copy_all,
    leaves,
    put_back,
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
        nbytes (`int`):
            Host memory it takes.
        seconds (`float`):
            Time its copy took, on the device or on the CPU.
        writing_seconds (`float`):
            Time it took to write down what belongs to it for another process.
        allocated (`bool`):
            Whether new memory was taken for it.
        torn (`bool`):
            Whether something wrote to the state while it was copied: it holds parts of two.
    """

    step: int = -1
    as_of: int = -1
    extras: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    writing_seconds: float = 0.0
    allocated: bool = False
    torn: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    states: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    pool: dict[tuple[Any, ...], Place] = field(default_factory=dict)
    under_way: list[Transfer] = field(default_factory=list)
    # What is being copied, with how often it had been written to when that began.
    sources: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    # What [`nonfinite`] has found, once it was asked.
    _nonfinite: list[str] | None = None

    @property
    def nbytes(self) -> int:
        blocks = {id(place.block): place.block.nbytes for place in self.pool.values() if place.block is not None}
        own = sum(place.tensor.nbytes for place in self.pool.values() if place.block is None)
        return sum(blocks.values()) + own

    # ---- taking ----

    def take(
        self,
        live: LiveState,
        streams: dict[torch.device, SideStream],
        wait: bool,
        new_block: NewBlock = HostBlock,
    ) -> None:
        """
        Copies the state of a run as it is, into the host memory of what was here before where it fits.

        Args:
            live ([`LiveState`]):
                The tensors.
            streams (`dict[torch.device, SideStream]`):
                Of the devices that copy beside what they compute; those that are missing are added.
            wait (`bool`):
                Whether to return only when the copy is complete.
            new_block (`Callable`, *optional*):
                Takes host memory.
        """
        began = time.perf_counter()
        self.wait()
        self._nonfinite = None
        writer = StateWriter(self.pool)
        # What changes without an `optimizer.step()` is copied in the stream that all is computed in: buffers, which a
        # forward pass changes, and the scale, which may change where a step is left out.
        self.buffers = writer.save(live.buffers, ("buffer",), may_be_infinite=True)
        self.scaler = writer.save(live.scaler, ("scaler",))
        self.loss_scaler = writer.save(live.loss_scaler, ("loss_scaler",))
        at_once = by_device(writer.pending())
        self._save_rest(live, writer)
        beside = by_device(writer.pending())
        writer.allocate(copies_of, new_block)
        try:
            for device in {**at_once, **beside}:
                stream = _stream_of(device, streams)
                copy_all(at_once.get(device, ()), non_blocking=stream is not None)
                work = partial(copy_all, beside.get(device, ()), non_blocking=stream is not None)
                if stream is None:
                    work()
                else:
                    self.sources += [(tensor, tensor._version) for _, tensor in beside.get(device, ())]
                    self.under_way.append(stream.start(work))
        except BaseException:
            self.wait()
            raise
        self.pool, self.allocated = writer.used, writer.allocated
        self.seconds = time.perf_counter() - began
        if wait:
            self.wait()

    def _save_rest(self, live: LiveState, writer: StateWriter) -> None:
        self.parameters = writer.save(live.parameters, ("parameter",))
        self.groups, self.states = [], []
        if live.optimizer is None:
            return
        for index, group in enumerate(live.optimizer.param_groups):
            kept = {name: value for name, value in group.items() if name not in _OF_THE_SCHEDULE}
            self.groups.append(writer.save(kept, ("group", index)))
        for index, (parameter, state) in enumerate(live.optimizer.state.items()):
            self.states.append((parameter, writer.save(state, ("state", index))))

    def wait(self) -> None:
        """Waits until the copy is complete, and measures it."""
        if self.under_way:
            self.seconds = max(transfer.wait() for transfer in self.under_way)
            self.under_way = []
        self.sources = []

    def join(self) -> None:
        """Orders all later work of the devices after the copy; the host does not wait."""
        if self.sources:
            self.torn |= any(tensor._version != version for tensor, version in self.sources)
            self.sources = []
        for transfer in self.under_way:
            transfer.join()

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
        known = {parameter: saved for parameter, saved in self.states}
        for parameter in [parameter for parameter in state if parameter not in known]:
            del state[parameter]
        for parameter, saved in known.items():
            state[parameter] = put_back(state.get(parameter), saved)


def _stream_of(device: torch.device, streams: dict[torch.device, SideStream]) -> SideStream | None:
    copies = copies_of(device.type)
    if copies is not None and device not in streams:
        streams[device] = copies.stream(device)
    return streams.get(device)


# ---- interval: chooses how many steps lie between two snapshots, by what they cost ----


# Closer snapshots would be no older than what verification takes anyway.
_LEAST_STEPS = 5
# Share of the training time that copying snapshots may take.
OVERHEAD_BUDGET = 0.01
# One copy that was held up by something else must not leave the run without a newer state for hundreds of steps: the
# next one, at most this many times as far away, says what copies cost.
_MOST_GROWTH = 10


@dataclass(frozen=True, slots=True)
class IntervalChoice:
    """An interval, and why it was chosen."""

    steps: int
    seconds: float
    share_of_step: float


class SnapshotInterval:
    """
    Times steps and copies, and says when a snapshot is due: as soon as copies stay within their share of the time.
    """

    def __init__(self, config: HealingConfig) -> None:
        self._config = config
        self._steps = config.snapshot_interval or _LEAST_STEPS
        # The step of the last snapshot, or of the last rollback.
        self.last_taken = 0
        self._chosen: int | None = None
        self._step_began: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._copy_seconds: deque[float] = deque(maxlen=5)
        # The shortest of the copies into new memory, which take several times as long, and are few.
        self._first_copy_seconds = math.inf

    def entry_begins(self) -> None:
        """Forgets when the last step began: `train()` is entered (again)."""
        self._step_began = None

    def step_begins(self, step: int) -> bool:
        """Takes the time of the step before; returns whether a snapshot is due."""
        now = time.perf_counter()
        if self._step_began is not None:
            self._step_seconds.append(now - self._step_began)
        self._step_began = now
        return step - self.last_taken >= self._steps

    def copied(self) -> None:
        """Leaves the copy that was just made out of the time of the step it is held against."""
        self._step_began = time.perf_counter()

    @property
    def typical_step(self) -> float:
        """Seconds that a step takes on this rank; infinite before there was one."""
        return median(self._step_seconds) if self._step_seconds else math.inf

    def share_of_step(self, snapshot: Snapshot) -> float:
        """Measures what the copy into a snapshot cost on this rank, in steps."""
        seconds = snapshot.seconds + snapshot.writing_seconds
        if snapshot.allocated:
            self._first_copy_seconds = min(self._first_copy_seconds, seconds)
        else:
            self._copy_seconds.append(seconds)
        return self._typical_copy() / self.typical_step

    def _typical_copy(self) -> float:
        return median(self._copy_seconds) if self._copy_seconds else self._first_copy_seconds

    def choose(self, share: float) -> IntervalChoice | None:
        """Chooses the interval by what copies cost."""
        steps = self._config.snapshot_interval
        if not steps:
            steps = max(math.ceil(share / OVERHEAD_BUDGET), _LEAST_STEPS)
            steps = min(steps, _MOST_GROWTH * self._steps)
        # Near enough is left as it is: the measurement varies, and the journal is read by people.
        if self._chosen is not None and 0.5 <= steps / self._steps <= 2:
            return None
        self._steps = self._chosen = steps
        return IntervalChoice(steps, self._typical_copy(), share)
