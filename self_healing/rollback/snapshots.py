"""
States of a run in host memory: taken as candidates, trusted after healthy steps, put back in place.

A snapshot of what `optimizer.step()` changes: trained parameters, buffers, optimizer state, scaler, and whatever its
owner wants to keep with it. Tensors on a GPU are copied into pinned memory on a stream of their own, while the next
forward and backward run, which change none of them. Whatever does change them asks for [`SnapshotRing.join`] first
(the next `optimizer.step()`, which then comes after the copies on the device) or waits for them, as
[`SnapshotRing.restore`] does.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from ..extents import Extent, Search, extent_of
from ..instrument.live_state import LiveState, local
from .host_copies import HostBlock, SideStream, Transfer, aligned, copies_of


logger = logging.getLogger("self_healing")

# Entries of a parameter group that belong to the schedule, which goes on, or to how updates are computed.
_OF_THE_SCHEDULE = frozenset({"params", "lr", "initial_lr", "betas", "momentum", "weight_decay", "foreach"})
# Share of the free host memory that new buffers may take: the data loaders and the next checkpoint need some, too.
_SHARE_OF_FREE_MEMORY = 0.8
# Stands for host memory that has still to be taken.
_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is kept in host memory, and the block it lies in."""

    tensor: torch.Tensor
    block: HostBlock | None


@dataclass(slots=True)
class _Copy:
    """A tensor in host memory, and where it came from."""

    host: torch.Tensor
    device: torch.device
    may_be_infinite: bool
    extent: Extent | None = None
    # Memory that moves between host and device by itself (bitsandbytes' paged optimizers) looks like host memory, and
    # belongs to the optimizer: the tensor itself is kept, to be written to again.
    paged: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Assembled:
    """A tensor that is made of others (quantised moments: codes and scales), and what each of them holds."""

    kind: Any
    parts: dict[str, Any]
    others: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any, save: Callable[[Any, str], Any]) -> _Assembled:
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        parts = {name: save(each, name) for name, each in inner.items() if isinstance(each, torch.Tensor)}
        others = {name: each for name, each in inner.items() if name not in parts}
        return cls(type(tensor), parts, others, context, tensor.size(), tensor.stride())

    def put_back(self, live: Any) -> Any:
        """Into the parts of a live tensor, if they are of the same sizes; else a new one."""
        target = local(live) if isinstance(live, torch.Tensor) else None
        there = {name: getattr(target, name, None) for name in self.parts} if type(target) is self.kind else {}
        parts = {name: _put_back(there.get(name), part) for name, part in self.parts.items()}
        if all(part is there.get(name) for name, part in parts.items()):
            return live
        return self.kind.__tensor_unflatten__(parts | self.others, self.context, self.size, self.stride)


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
        torn (`bool`):
            Whether something wrote to the state while it was copied: it holds parts of two.
    """

    step: int = -1
    as_of: int = -1
    extras: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    allocated: bool = False
    torn: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    states: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    pool: dict[tuple[Any, ...], _Place] = field(default_factory=dict)
    under_way: list[Transfer] = field(default_factory=list)
    # What is being copied, with how often it had been written to when that began.
    sources: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        blocks = {id(place.block): place.block.nbytes for place in self.pool.values() if place.block is not None}
        own = sum(place.tensor.nbytes for place in self.pool.values() if place.block is None)
        return sum(blocks.values()) + own

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
        self._streams: dict[torch.device, SideStream] = {}
        # Whether each copy is waited for at once: something writes to the state between two updates.
        self.waits = False

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return sum(snapshot.nbytes for snapshot in self.snapshots())

    def snapshots(self) -> list[Snapshot]:
        """All there are, those whose memory is only to be used again included."""
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
            self._retire(self.trusted.pop(0))
        elif self.initial is not None and self.trusted:
            self._retire(self.initial)
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
        snapshot.extras, snapshot.torn = extras, False
        try:
            self._copy(snapshot, live)
        except BaseException:
            self._retire(snapshot)
            raise
        self.candidate = snapshot
        return snapshot

    def _copy(self, snapshot: Snapshot, live: LiveState) -> None:
        began = time.perf_counter()
        snapshot.wait()
        writer = _Writer(snapshot.pool)
        # What changes without an `optimizer.step()` is copied in the stream that all is computed in: buffers, which a
        # forward pass changes, and the scale, which may change where a step is left out.
        snapshot.buffers = writer.save(live.buffers, ("buffer",), may_be_infinite=True)
        snapshot.scaler = writer.save(live.scaler, ("scaler",))
        at_once = _by_device(writer.pending())
        self._save_rest(snapshot, live, writer)
        beside = _by_device(writer.pending())
        writer.allocate()
        try:
            for device in {**at_once, **beside}:
                stream = self._stream_of(device)
                _copy_all(at_once.get(device, ()), non_blocking=stream is not None)
                work = partial(_copy_all, beside.get(device, ()), non_blocking=stream is not None)
                if stream is None:
                    work()
                else:
                    snapshot.sources += [(tensor, tensor._version) for _, tensor in beside.get(device, ())]
                    snapshot.under_way.append(stream.start(work))
        except BaseException:
            snapshot.wait()
            raise
        snapshot.pool, snapshot.allocated = writer.used, writer.allocated
        snapshot.seconds = time.perf_counter() - began
        if self.waits:
            snapshot.wait()

    def _stream_of(self, device: torch.device) -> SideStream | None:
        copies = copies_of(device.type)
        if copies is not None and device not in self._streams:
            self._streams[device] = copies.stream(device)
        return self._streams.get(device)

    def _save_rest(self, snapshot: Snapshot, live: LiveState, writer: _Writer) -> None:
        snapshot.parameters = writer.save(live.parameters, ("parameter",))
        snapshot.groups, snapshot.states = [], []
        if live.optimizer is None:
            return
        for index, group in enumerate(live.optimizer.param_groups):
            kept = {name: value for name, value in group.items() if name not in _OF_THE_SCHEDULE}
            snapshot.groups.append(writer.save(kept, ("group", index)))
        for index, (parameter, state) in enumerate(live.optimizer.state.items()):
            snapshot.states.append((parameter, writer.save(state, ("state", index))))

    def join(self) -> None:
        """Has the devices wait, before the state is changed, for copies that are still under way."""
        for snapshot in self.snapshots():
            snapshot.join()

    def wait(self) -> None:
        """Waits for all copies that are under way."""
        for snapshot in self.snapshots():
            snapshot.wait()

    # ---- trusting ----

    def promote(self) -> None:
        """Trusts the candidate; the oldest generation gives its memory to the next one."""
        if self.candidate is None:
            return
        self.trusted.append(self.candidate)
        self.candidate = None
        if len(self.trusted) > self.generations:
            self._retire(self.trusted.pop(0))

    def begin_with_candidate(self) -> None:
        """Keeps the candidate as the state the run began with."""
        self.initial, self.candidate = self.candidate, None

    def forget_initial(self) -> None:
        """Gives the memory of the state the run began with to later ones."""
        if self.initial is not None and self.trusted:
            self._retire(self.initial)
            self.initial = None

    def discard(self) -> None:
        """Drops the candidate."""
        if self.candidate is not None:
            self.candidate.wait()
            self._retire(self.candidate)
            self.candidate = None

    def distrust(self, snapshot: Snapshot) -> None:
        """Drops a trusted state and every newer one."""
        kept = [each for each in self.trusted if each.step < snapshot.step]
        for dropped in [each for each in self.trusted if each not in kept]:
            self._retire(dropped)
        self.trusted = kept

    def _retire(self, snapshot: Snapshot) -> None:
        """Its memory is used again by a later one; what was kept with it, a batch among it, is not needed any more."""
        snapshot.extras = {}
        self._spare.append(snapshot)

    # ---- going back ----

    @torch.no_grad()
    def restore(self, snapshot: Snapshot, live: LiveState) -> None:
        """
        Writes a state into the live tensors, which stay the same objects. Optimizer state that did not exist when the
        snapshot was taken is removed, so that the optimizer makes it again.

        Copies of what is overwritten, into any snapshot, are waited for before; the host memory may be written to
        again as soon as this returns.
        """
        snapshot.wait()
        self.wait()
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
        self.wait()
        self.candidate = self.initial = None
        self.trusted, self._spare, self._streams = [], [], {}


class _Writer:
    """Copies nested state into host memory, that of an earlier snapshot where it fits."""

    def __init__(self, pool: dict[tuple[Any, ...], _Place]) -> None:
        self._pool = pool
        self.used: dict[tuple[Any, ...], _Place] = {}
        self.allocated = False
        self._missing: list[tuple[tuple[Any, ...], _Copy, torch.Tensor]] = []
        self._pending: list[tuple[_Copy, torch.Tensor]] = []

    def pending(self) -> list[tuple[_Copy, torch.Tensor]]:
        """Returns what was saved since the last call, to be copied once there is memory for it."""
        pending, self._pending = self._pending, []
        return pending

    def save(self, value: Any, key: tuple[Any, ...], may_be_infinite: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = local(value)
            if hasattr(tensor, "__tensor_flatten__"):
                return _Assembled.of(tensor, lambda part, name: self.save(part, (*key, name), may_be_infinite))
            kept = self._save_tensor(tensor, key, may_be_infinite)
            kept.paged = value if getattr(value, "is_paged", False) else None
            return kept
        if isinstance(value, dict):
            return {name: self.save(inner, (*key, name), may_be_infinite) for name, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.save(inner, (*key, index), may_be_infinite) for index, inner in enumerate(value))
        return copy.deepcopy(value)

    def _save_tensor(self, tensor: torch.Tensor, key: tuple[Any, ...], may_be_infinite: bool) -> _Copy:
        place = self._pool.get(key)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            # A kind that does not tell what it is made of: it knows itself how it is copied.
            self.used[key] = place = _Place(tensor.detach().to("cpu", copy=True), None)
            return _Copy(place.tensor, tensor.device, may_be_infinite, extent_of(tensor))
        kept = _Copy(_NOTHING, tensor.device, may_be_infinite)
        if place is not None and place.tensor.shape == tensor.shape and place.tensor.dtype == tensor.dtype:
            self.used[key], kept.host = place, place.tensor
        else:
            self._missing.append((key, kept, tensor.detach()))
        self._pending.append((kept, tensor.detach()))
        return kept

    def allocate(self) -> None:
        """Takes memory for what has none yet, in one piece."""
        nbytes = sum(aligned(tensor) for _, _, tensor in self._missing)
        copies = next((found for kind in self._devices() if (found := copies_of(kind)) is not None), None)
        block = HostBlock(nbytes, copies) if nbytes else None
        for key, kept, tensor in self._missing:
            if block is None or tensor.numel() == 0:
                kept.host = torch.empty_like(tensor, device="cpu", requires_grad=False)
            else:
                kept.host = block.like(tensor)
            self.used[key] = _Place(kept.host, block)
        self.allocated = bool(self._missing)
        self._missing = []

    def _devices(self) -> set[str]:
        return {tensor.device.type for _, _, tensor in self._missing}


def _by_device(pending: Iterable[tuple[_Copy, torch.Tensor]]) -> dict[torch.device, list[tuple[_Copy, torch.Tensor]]]:
    found: dict[torch.device, list[tuple[_Copy, torch.Tensor]]] = {}
    for kept, tensor in pending:
        found.setdefault(tensor.device, []).append((kept, tensor))
    return found


def _copy_all(pairs: Sequence[tuple[_Copy, torch.Tensor]], non_blocking: bool) -> None:
    """All together: hundreds of small tensors cost little more than one."""
    if pairs:
        hosts, tensors = [kept.host for kept, _ in pairs], [tensor for _, tensor in pairs]
        torch._foreach_copy_(hosts, tensors, non_blocking=non_blocking)
    for kept, tensor in pairs:
        # After the copy: what turns NaN in between is refused, and not trusted.
        kept.extent = extent_of(tensor)


def _put_back(live: Any, saved: Any) -> Any:
    """Writes saved values into what is there, and makes again what is not there any more."""
    if isinstance(saved, _Assembled):
        return saved.put_back(live)
    if isinstance(saved, _Copy):
        live = saved.paged if live is None else live
        if isinstance(live, torch.Tensor):
            target = local(live)
            if target.shape == saved.host.shape and target.dtype == saved.host.dtype:
                # Blocking: the host memory is written to again by the next snapshot, the live tensor by the next step.
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
    elif isinstance(saved, _Assembled):
        yield from _leaves(prefix, saved.parts)
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
    return sum(_nbytes(value) for value in (*own, *states))


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        tensor: Any = local(value)
        if hasattr(tensor, "__tensor_flatten__"):
            return sum(_nbytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        return aligned(tensor)
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
            # Cached files count as used, and are given up when the memory is needed.
            used = int((group / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
            free = min(free, int(limit) - used)
    except (OSError, ValueError):
        # Not in a container, or in one of a kind that does not tell.
        pass
    return max(free, 0) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
