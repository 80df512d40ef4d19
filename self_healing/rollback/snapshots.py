"""A snapshot of the training state, and how many steps lie between two."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config.healing_config import HealingConfig
from ..hf.replicas import sum_of_bits
from ..hf.state import LiveState, Search, local
from .host_memory import (
    TRANSFERS,
    HostBlock,
    NewBlock,
    Pair,
    TensorCopy,
    Transfer,
    aligned,
    copy_all,
    gathered,
    later,
    lay_out,
    leaves,
    put_back,
    room_for,
    save,
    whole,
    word_of,
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
            Time for which it held the training thread up, on the CPU.
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
    # Whether a forward wrote to the weights while they were copied: part of the copy is older than the rest.
    torn: bool = False
    # Whether it was given up: nobody asks any more what is in it.
    given_up: bool = False
    # What is copied beside training, or was.
    transfers: list[Transfer] = field(default_factory=list)
    # What is wrong with the copy: a thread looks for it as soon as it is complete.
    _found: futures.Future[list[str]] | None = None
    # Bytes that its tensors take, which may be fewer than there are in the block.
    needed: int = 0
    # The places in the block, of each tensor and of each piece, and for which kinds of tensors they were made.
    _kinds: list[Any] = field(default_factory=list)
    _hosts: list[torch.Tensor] = field(default_factory=list)
    _places: list[torch.Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Host memory it takes."""
        return 0 if self.block is None else self.block.nbytes

    # ---- taking ----

    @torch.no_grad()
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
        self.torn, self.given_up, self.transfers, self._found = False, False, [], None
        at_once, weights, state = self.describe(live)
        sums = _sums_of(weights)
        try:
            self._copy(at_once, weights + state, new_block)
        finally:
            # Where it failed, what was begun is waited for all the same before the memory is used again. The thread
            # holds on to that until then.
            self._found = later(self._look, self.transfers, sums, self.block)
        self.seconds = time.perf_counter() - began

    def describe(self, live: LiveState) -> tuple[list[Pair], list[Pair], list[Pair]]:
        """
        Takes in what belongs to a state. Gives what is copied at once, in the stream that all is computed in: buffers,
        which a forward changes, and the scale, which may change where a step is left out; then weights, and state of
        the optimizer.
        """
        at_once, weights, beside = list[Pair](), list[Pair](), list[Pair]()
        self.buffers, self.scaler = save(live.buffers, at_once), save(live.scaler, at_once)
        self.loss_scaler = save(live.loss_scaler, at_once)
        self.parameters = save(live.parameters, weights)
        groups = [] if live.optimizer is None else live.optimizer.param_groups
        states = {} if live.optimizer is None else live.optimizer.state
        self.groups = [
            save({name: value for name, value in group.items() if name not in _OF_THE_SCHEDULE}, beside)
            for group in groups
        ]
        self.states = [(parameter, save(state, beside)) for parameter, state in states.items()]
        return at_once, weights, beside

    def _copy(self, at_once: list[Pair], beside: list[Pair], new_block: NewBlock) -> None:
        now, rest = gathered(at_once), gathered(beside)
        self._make_room([*at_once, *beside], [*now, *rest], new_block)
        by_device: dict[torch.device, tuple[list[_Piece], list[_Piece]]] = {}
        for number, (place, piece) in enumerate(zip(self._places, [*now, *rest], strict=True)):
            tensor = whole(piece)
            by_device.setdefault(tensor.device, ([], []))[number >= len(now)].append((place, tensor))
        for device, (first, then) in by_device.items():
            transfer = TRANSFERS.get(device.type)
            copy_all(first, non_blocking=transfer is not None)
            if transfer is None:
                copy_all(then, non_blocking=False)
            else:
                self.transfers.append(transfer(device, partial(copy_all, then, non_blocking=True)))

    def _make_room(self, pairs: list[Pair], pieces: list[list[Pair]], new_block: NewBlock) -> None:
        kinds = [(tensor.shape, tensor.dtype, tensor.device, tensor.stride()) for _, tensor in pairs]
        if kinds != self._kinds:
            self._kinds, self._hosts, self._places, self.needed = [], [], [], room_for(pieces)
            if self.nbytes < self.needed:
                self.block = None
                self.block = new_block(self.needed, any(tensor.device.type == "cuda" for _, tensor in pairs))
            if self.block is not None:
                self._places = lay_out(pieces, self.block)
            self._kinds, self._hosts = kinds, [kept.host for kept, _ in pairs]
        for (kept, _), host in zip(pairs, self._hosts, strict=True):
            kept.host = host

    def _look(self, transfers: list[Transfer], sums: list[_Sums], _: HostBlock | None) -> list[str]:
        for transfer in transfers:
            transfer.wait()
        for copies, before in sums:
            if self.given_up:
                return []
            now = [int(sum_of_bits(kept.host, word)) for kept, word in copies]
            if now != before.tolist():
                self.torn = True
                return []
        search = Search()
        for name, kept in self.copies():
            if self.given_up:
                return []
            # A causal mask kept as a buffer holds -inf on purpose.
            search.add(name, kept.host, inf=not name.startswith("buffer:"))
        return search.nonfinite()

    def wait(self) -> None:
        """Waits until the copy is complete, and nobody reads its memory any more."""
        self.join()
        if self._found is not None:
            futures.wait([self._found])

    def join(self) -> None:
        """Orders all later work of the devices after the copy, before weights change; the host does not wait."""
        for transfer in self.transfers:
            transfer.join()

    @property
    def looked_at(self) -> bool:
        """Whether the copy is complete and was searched, so that nothing waits for [`nonfinite`]."""
        return self._found is None or self._found.done()

    def nonfinite(self) -> list[str]:
        """Names of the tensors that were not finite when it was taken. Waits for the copy, and for the search."""
        self.join()
        return [] if self._found is None else self._found.result()

    def held_up(self) -> float:
        """Gives the seconds for which training waited for it, on the CPU and on the devices."""
        return self.seconds + max((transfer.held_up() for transfer in self.transfers), default=0.0)

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
                if name in kept and (there := put_back(tensor, kept[name])) is not tensor:
                    live.replace_buffer(name, there)
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


def size_of(live: LiveState) -> int:
    """Bytes a snapshot of a state takes."""
    at_once, weights, beside = Snapshot().describe(live)
    return room_for(gathered(at_once)) + room_for(gathered(weights + beside))


def size_to_be(live: LiveState) -> int | None:
    """Bytes it will take once the optimizer has all its state; `None` where that is not known yet."""
    optimizer = live.optimizer
    if optimizer is None or optimizer.state:
        return size_of(live)
    # Not a subclass: it may have other state, and other defaults.
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    moments, needed = 3 if optimizer.defaults.get("amsgrad") else 2, size_of(live)
    for parameter in live.updated:
        if parameter.requires_grad:
            # A counter comes with them.
            needed += moments * aligned(local(parameter).nbytes) + aligned(4)
    return needed


# Where something is copied to, and what.
_Piece = tuple[torch.Tensor, torch.Tensor]
# Copies, the words they are added up in, and the sums of what was copied.
_Sums = tuple[list[tuple[TensorCopy, torch.dtype]], torch.Tensor]


def _sums_of(pairs: list[Pair]) -> list[_Sums]:
    """
    Adds up what is copied beside the next forward, before that begins: some write to weights (clamped, quantised,
    averaged ones), and by way of `.data` without a trace.
    """
    found: dict[torch.device, tuple[list[tuple[TensorCopy, torch.dtype]], list[torch.Tensor]]] = {}
    for kept, tensor in pairs:
        if tensor.device.type in TRANSFERS:
            copies, sums = found.setdefault(tensor.device, ([], []))
            copies.append((kept, word_of(tensor)))
            sums.append(sum_of_bits(tensor, copies[-1][1]))
    # Into pinned memory: complete before the copies are, which begin later.
    return [(copies, torch.stack(sums).to("cpu", non_blocking=True)) for copies, sums in found.values()]


# ---- interval: chooses how many steps lie between two snapshots, by what they cost ----


# Closer snapshots would be no older than what verification takes anyway.
_LEAST_STEPS = 5
# Share of the training time for which snapshots may hold the training thread up.
OVERHEAD_BUDGET = 0.0025
# One copy that was held up by something else must not leave the run without a newer state for hundreds of steps: the
# next one, at most this many times as far away, says what copies cost.
_MOST_GROWTH = 10


class SnapshotInterval:
    """Measures what snapshots hold up, and says how many steps lie between two."""

    def __init__(self, config: HealingConfig) -> None:
        self._config = config
        self.steps = config.snapshot_interval or _LEAST_STEPS
        # The step of the last snapshot, or of the last rollback.
        self.last_taken = 0
        # When the steps after the last snapshot began.
        self.began = 0.0
        self._chosen = False
        # A snapshot into new memory takes several times as long, and among steps there may be an evaluation: the
        # shortest count.
        self._held_up: deque[float] = deque(maxlen=5)
        self._step_seconds: deque[float] = deque(maxlen=5)

    @property
    def held_up(self) -> float:
        """Seconds for which a snapshot holds training up on this rank."""
        return min(self._held_up, default=0.0)

    def share_of_step(self, snapshot: Snapshot, steps: int) -> float:
        """Measures, so many steps after it, what a snapshot cost on this rank, in steps."""
        self._step_seconds.append((time.perf_counter() - self.began) / steps)
        self._held_up.append(snapshot.held_up())
        return self.held_up / min(self._step_seconds)

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
