"""
States of a run in host memory: taken as candidates, trusted after healthy steps, put back in place.

A snapshot of what `optimizer.step()` changes: trained parameters, buffers, optimizer state, scaler, and whatever its
owner wants to keep with it. Tensors on a GPU are copied into pinned memory on a stream of their own, while the next
forward and backward run, which change none of them; [`SnapshotRing.join`] makes the next `optimizer.step()` wait.
"""

from __future__ import annotations

import copy
import logging
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from .instrument.extents import Extent, Search, extent_of
from .instrument.live_state import LiveState, local


logger = logging.getLogger("self_healing")

# Entries of a parameter group that belong to the schedule, which goes on, or to how updates are computed.
_OF_THE_SCHEDULE = frozenset({"params", "lr", "initial_lr", "betas", "momentum", "weight_decay", "foreach"})
# Share of the free host memory that new buffers may take: the data loaders and the next checkpoint need some, too.
_SHARE_OF_FREE_MEMORY = 0.8
# Address space taken at a time; pages that nothing is written to take no memory.
_SLAB_BYTES = 16 * 2**20
_CACHE_LINE = 64
# Not shared with processes that are forked later; Windows knows no such thing.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


@dataclass(slots=True)
class _Copy:
    """A tensor in host memory, and where it came from."""

    host: torch.Tensor
    device: torch.device
    may_be_infinite: bool
    extent: Extent | None


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
        allocated (`bool`):
            Whether new memory was taken for it.
    """

    step: int = -1
    as_of: int = -1
    extras: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    allocated: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    states: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    pool: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)
    done: Any = None
    began: Any = None

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.pool.values())

    def wait(self) -> None:
        """Waits until the copy is complete, and measures it."""
        if self.done is not None:
            self.done.synchronize()
            self.seconds = self.began.elapsed_time(self.done) / 1000
            self.done = self.began = None

    def nonfinite(self) -> list[str]:
        """Names of the tensors that were not finite when it was taken. Waits for the copy."""
        self.wait()
        search = Search()
        for name, kept in self._copies():
            # A causal mask kept as a buffer holds -inf on purpose.
            search.add(name, kept.extent, inf=not kept.may_be_infinite)
        return search.nonfinite()

    def _copies(self) -> Iterator[tuple[str, _Copy]]:
        yield from _leaves("", self.parameters)
        yield from _leaves("buffer:", self.buffers)
        for index, (_, state) in enumerate(self.states):
            yield from _leaves(f"optimizer:{index}.", state)


class SnapshotRing:
    """
    Candidate, trusted generations and the state a run began with.

    Buffers are allocated once and used again by later snapshots. Where host memory is short, fewer generations are
    kept; where not even one fits beside a candidate, none are ([`full`] tells).

    Args:
        generations (`int`, *optional*, defaults to 2):
            Trusted states that are kept, beside the one the run began with.
    """

    def __init__(self, generations: int = 2) -> None:
        self.generations = generations
        self.candidate: Snapshot | None = None
        self.initial: Snapshot | None = None
        self.trusted: list[Snapshot] = []
        self._spare: list[Snapshot] = []
        self._stream: Any = None

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return sum(snapshot.nbytes for snapshot in self._all())

    def _all(self) -> list[Snapshot]:
        held = [*self.trusted, *self._spare, self.candidate, self.initial]
        return [snapshot for snapshot in held if snapshot is not None]

    # ---- taking ----

    def fits(self, live: LiveState) -> bool:
        """Whether there is host memory for one more state, or that of a snapshot not needed any more."""
        if self.candidate is not None or self._spare:
            reused = self.candidate or self._spare[-1]
            return size_of(live) - reused.nbytes <= _SHARE_OF_FREE_MEMORY * free_host_memory()
        return size_of(live) <= _SHARE_OF_FREE_MEMORY * free_host_memory()

    def shrink(self) -> bool:
        """Makes room for a candidate by giving up the oldest generation; `False` if that would leave none."""
        if len(self.trusted) > 1:
            self._spare.append(self.trusted.pop(0))
        elif self.initial is not None and self.trusted:
            self._spare.append(self.initial)
            self.initial = None
        else:
            return False
        self.generations = max(len(self.trusted), 1)
        return True

    def take(self, live: LiveState, step: int, extras: dict[str, Any]) -> Snapshot:
        """
        Copies the state as it is into a new candidate, in place of one that was not promoted.

        Args:
            live ([`LiveState`]):
                The tensors.
            step (`int`):
                Optimizer steps finished.
            extras (`dict`):
                Kept with it.
        """
        snapshot = self.candidate or (self._spare.pop() if self._spare else Snapshot())
        self.candidate = None
        snapshot.step = snapshot.as_of = step
        snapshot.extras = extras
        self._copy(snapshot, live)
        self.candidate = snapshot
        return snapshot

    def _copy(self, snapshot: Snapshot, live: LiveState) -> None:
        began = time.perf_counter()
        writer = _Writer(snapshot.pool)
        # A forward pass changes buffers: they are copied before it, in the stream it runs in.
        snapshot.buffers = writer.save(live.buffers, ("buffer",), may_be_infinite=True)
        writer.write()
        device = next((tensor.device for tensor in live.parameters.values() if tensor.is_cuda), None)
        if device is None:
            self._save_rest(snapshot, live, writer)
            snapshot.seconds = time.perf_counter() - began
        else:
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                timer: Any = torch.cuda.Event
                snapshot.began, snapshot.done = timer(enable_timing=True), timer(enable_timing=True)
                snapshot.began.record(self._stream)
                self._save_rest(snapshot, live, writer)
                snapshot.done.record(self._stream)
        snapshot.pool, snapshot.allocated = writer.used, writer.allocated

    def _save_rest(self, snapshot: Snapshot, live: LiveState, writer: _Writer) -> None:
        snapshot.parameters = writer.save(live.parameters, ("parameter",))
        snapshot.scaler = writer.save(live.scaler, ("scaler",))
        snapshot.groups, snapshot.states = [], []
        if live.optimizer is None:
            writer.write()
            return
        for index, group in enumerate(live.optimizer.param_groups):
            kept = {name: value for name, value in group.items() if name not in _OF_THE_SCHEDULE}
            snapshot.groups.append(writer.save(kept, ("group", index)))
        for index, (parameter, state) in enumerate(live.optimizer.state.items()):
            snapshot.states.append((parameter, writer.save(state, ("state", index))))
        writer.write()

    def join(self) -> None:
        """Makes the device wait, before the next `optimizer.step()`, for a copy that is still under way."""
        if self.candidate is not None and self.candidate.done is not None:
            self._stream_of_device().wait_event(self.candidate.done)

    def _stream_of_device(self) -> Any:
        return torch.cuda.current_stream(self._stream.device)

    # ---- trusting ----

    def promote(self) -> None:
        """Trusts the candidate; the oldest generation gives its memory to the next one."""
        if self.candidate is None:
            return
        self.trusted.append(self.candidate)
        self.candidate = None
        if len(self.trusted) > self.generations:
            self._spare.append(self.trusted.pop(0))

    def begin_with_candidate(self) -> None:
        """Keeps the candidate as the state the run began with."""
        self.initial, self.candidate = self.candidate, None

    def forget_initial(self) -> None:
        """Gives the memory of the state the run began with to later ones."""
        if self.initial is not None and self.trusted:
            self._spare.append(self.initial)
            self.initial = None

    def discard(self) -> None:
        """Drops the candidate."""
        if self.candidate is not None:
            self.candidate.wait()
            self._spare.append(self.candidate)
            self.candidate = None

    def distrust(self, snapshot: Snapshot) -> None:
        """Drops a trusted state and every newer one."""
        kept = [each for each in self.trusted if each.step < snapshot.step]
        self._spare += [each for each in self.trusted if each not in kept]
        self.trusted = kept

    # ---- going back ----

    @torch.no_grad()
    def restore(self, snapshot: Snapshot, live: LiveState) -> None:
        """
        Writes a state into the live tensors, which stay the same objects. Optimizer state that did not exist when the
        snapshot was taken is removed, so that the optimizer makes it anew.
        """
        snapshot.wait()
        for name, tensor in live.parameters.items():
            if name in snapshot.parameters:
                _put_back(tensor, snapshot.parameters[name])
        for name, tensor in live.buffers.items():
            if name in snapshot.buffers:
                _put_back(tensor, snapshot.buffers[name])
        for name, tensor in live.scaler.items():
            if name in snapshot.scaler:
                _put_back(tensor, snapshot.scaler[name])
        if live.optimizer is None:
            return
        for group, kept in zip(live.optimizer.param_groups, snapshot.groups, strict=False):
            for name, value in kept.items():
                group[name] = _put_back(group.get(name), value)
        state = live.optimizer.state
        known = {parameter: saved for parameter, saved in snapshot.states}
        for parameter in [parameter for parameter in state if parameter not in known]:
            del state[parameter]
        for parameter, saved in known.items():
            state[parameter] = _put_back(state.get(parameter), saved)

    def release(self) -> None:
        """Gives all host memory back."""
        for snapshot in self._all():
            snapshot.wait()
        self.candidate = self.initial = self._stream = None
        self.trusted, self._spare = [], []


class _Slab:
    """
    Buffers that stay, beside the heap.

    Among the activations on it, which come and go in every step, they would keep the allocator from reusing what was
    freed: it gives pages back to the system and takes them again, up to 12 ms of a step of 130 ms.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised buffer of a tensor's shape, dtype and, if it is dense, strides."""
        if tensor.numel() == 0:
            return torch.empty_like(tensor, device="cpu", requires_grad=False)
        nbytes = tensor.numel() * tensor.element_size()
        if self._memory is None or self._used + nbytes > len(self._memory):
            try:
                # Each buffer holds on to the memory it lies in.
                self._memory, self._used = mmap.mmap(-1, max(nbytes, _SLAB_BYTES), **_PRIVATE), 0
            except OSError as error:
                raise MemoryError(f"{nbytes} bytes of host memory for a snapshot: {error}") from error
        flat = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += -(-nbytes // _CACHE_LINE) * _CACHE_LINE
        return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


class _Writer:
    """Copies nested state into host buffers, those of an earlier snapshot where they fit."""

    def __init__(self, pool: dict[tuple[Any, ...], torch.Tensor]) -> None:
        self._pool = pool
        self.used: dict[tuple[Any, ...], torch.Tensor] = {}
        self.allocated = False
        self._slab = _Slab()
        self._hosts: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []

    def write(self) -> None:
        """Copies what was saved so far, all together: hundreds of small tensors cost little more than one."""
        if self._hosts:
            torch._foreach_copy_(self._hosts, self._tensors, non_blocking=any(each.is_cuda for each in self._tensors))
        self._hosts, self._tensors = [], []

    def save(self, value: Any, key: tuple[Any, ...], may_be_infinite: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            return self._save_tensor(local(value), key, may_be_infinite)
        if isinstance(value, dict):
            return {name: self.save(inner, (*key, name), may_be_infinite) for name, inner in value.items()}
        if type(value) in (list, tuple):
            kept = (self.save(inner, (*key, index), may_be_infinite) for index, inner in enumerate(value))
            return type(value)(kept)
        return copy.deepcopy(value)

    def _save_tensor(self, tensor: torch.Tensor, key: tuple[Any, ...], may_be_infinite: bool) -> _Copy:
        buffer = self._pool.get(key)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            # A tensor of several tensors (quantised moments): it knows itself how it is copied.
            buffer = tensor.detach().to("cpu", copy=True)
        else:
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                # Of the same strides: a transposed weight is copied as one block.
                pinned = tensor.is_cuda
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=True) if pinned else self._slab.like(tensor)
                self.allocated = True
            self._hosts.append(buffer)
            self._tensors.append(tensor.detach())
        self.used[key] = buffer
        return _Copy(buffer, tensor.device, may_be_infinite, extent_of(tensor))


def _put_back(live: Any, saved: Any) -> Any:
    """Writes saved values into what is there, and makes anew what is not there any more."""
    if isinstance(saved, _Copy):
        if isinstance(live, torch.Tensor):
            target = local(live)
            if target.shape == saved.host.shape and target.dtype == saved.host.dtype:
                target.copy_(saved.host)
                return live
        return saved.host.to(saved.device, copy=True)
    if isinstance(saved, dict):
        result = live if isinstance(live, dict) else {}
        for name in [name for name in result if name not in saved]:
            del result[name]
        for name, value in saved.items():
            result[name] = _put_back(result.get(name), value)
        return result
    if type(saved) in (list, tuple):
        there = live if type(live) is type(saved) and len(live) == len(saved) else [None] * len(saved)
        return type(saved)(_put_back(each, value) for each, value in zip(there, saved, strict=True))
    return copy.deepcopy(saved)


def _leaves(prefix: str, saved: Any) -> Iterator[tuple[str, _Copy]]:
    if isinstance(saved, _Copy):
        yield prefix, saved
    elif isinstance(saved, dict):
        for name, value in saved.items():
            separator = "." if prefix and prefix[-1] not in ".:" else ""
            yield from _leaves(f"{prefix}{separator}{name}", value)
    elif isinstance(saved, (list, tuple)):
        for index, value in enumerate(saved):
            yield from _leaves(f"{prefix}[{index}]", value)


def size_of(live: LiveState) -> int:
    """Bytes a snapshot of a state takes."""
    own = [*live.parameters.values(), *live.buffers.values(), *live.scaler.values()]
    states = [] if live.optimizer is None else list(live.optimizer.state.values())
    return sum(tensor.nbytes for tensor in own) + sum(_nbytes(state) for state in states)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return local(value).nbytes
    if isinstance(value, dict):
        return sum(_nbytes(inner) for inner in value.values())
    return sum(_nbytes(inner) for inner in value) if isinstance(value, (list, tuple)) else 0


def free_host_memory() -> int:
    """Bytes of host memory this process may still take: of the machine or its container, shared among its ranks."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Cached files count as used, and are given up when somebody needs the memory.
            used = int((group / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
            free = min(free, int(limit) - used)
    except (OSError, ValueError):
        # Not in a container, or in one of a kind that does not tell.
        pass
    return max(free, 0) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
