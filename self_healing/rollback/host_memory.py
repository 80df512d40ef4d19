"""Copies of the training state in host memory."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch.distributed.tensor import DTensor

from ..hf.state import Extent, LiveState, extent_of, local


logger = logging.getLogger("self_healing")


# ---- host memory: host memory for snapshots: how much of it is free, and blocks of it ----


_CACHE_LINE = 64
# Not shared with processes that are forked later; Windows knows no such thing.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}

# Of this process, and those of the process it was forked from: they are the process's because a fork copies all of it,
# whatever owns a block.
_blocks: weakref.WeakSet[HostBlock] = weakref.WeakSet()
_of_the_parent: list[HostBlock] = []
if hasattr(os, "register_at_fork"):
    # They are not there in a forked process, and what lies there instead must not be unmapped when they are let go.
    os.register_at_fork(after_in_child=lambda: _of_the_parent.extend(_blocks))


class HostBlock:
    """Host memory in one piece, no larger than it is asked for, and given back with the last tensor in it."""

    def __init__(self, nbytes: int, copies: DeviceCopies | None = None, file: Path | None = None) -> None:
        try:
            self._memory = mmap.mmap(-1, nbytes, **_PRIVATE) if file is None else _map_new(file, nbytes)
        except (OSError, OverflowError) as error:
            if file is not None:
                raise
            raise MemoryError(f"{nbytes} bytes of host memory for a snapshot: {error}") from error
        self.nbytes = nbytes
        self.file = file
        self._used = 0
        if hasattr(mmap, "MADV_DONTFORK"):
            # A data loader worker would keep each page as it was when it was forked: the memory would be taken twice,
            # and that which is pinned be copied at each fork.
            self._memory.madvise(mmap.MADV_DONTFORK)
        _blocks.add(self)
        self.pinned = copies is not None and self._pin(copies)

    def _pin(self, copies: DeviceCopies) -> bool:
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        try:
            pinned = copies.pin(address, self.nbytes)
        except Exception:
            logger.debug("Host memory could not be pinned.", exc_info=True)
            pinned = False
        if pinned:
            # Before the memory is unmapped: this block holds on to it. A process that ends need not bother.
            weakref.finalize(self, copies.unpin, address).atexit = False
        else:
            logger.info(
                "%.2f GB of host memory could not be pinned: copies of the state to it hold training up.",
                self.nbytes / 1e9,
            )
        return pinned

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes an uninitialised tensor in it, of a tensor's shape, dtype and, if it is dense, strides."""
        offset, self._used = self._used, self._used + aligned(tensor)
        flat = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Gives the bytes between its beginning and that of a tensor in it."""
        return tensor.data_ptr() - torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()


def _map_new(file: Path, nbytes: int) -> mmap.mmap:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Taken at once: a page that is missing when it is written to kills the process.
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def aligned(tensor: torch.Tensor) -> int:
    """Counts the bytes that a dense copy of a tensor takes in a [`HostBlock`]."""
    return math.ceil(tensor.numel() * tensor.element_size() / _CACHE_LINE) * _CACHE_LINE


def free_host_memory() -> int:
    """Reads how many bytes of host memory this process may take: its share of the machine or its container."""
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


# ---- host copies: copies tensors from a device to host memory beside what it computes ----


# `cudaHostRegisterPortable`: pinned for all devices.
_PORTABLE = 1


class Transfer(Protocol):
    """A copy that may still be under way."""

    def wait(self) -> float:
        """Returns once it is complete: the seconds it took."""

    def join(self) -> None:
        """Orders all later work of the device after it; the host does not wait."""


class SideStream(Protocol):
    """Does work beside what a device computes."""

    def start(self, work: Callable[[], None]) -> Transfer:
        """Does it after everything the device was given so far. What `work` refers to is kept until it is done."""


class DeviceCopies(Protocol):
    """Copies beside what a kind of device computes."""

    def stream(self, device: torch.device) -> SideStream:
        """Makes a stream for copies from a device."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Has the device write to host memory by itself; whether it can. Else copies to it are waited for."""

    def unpin(self, address: int) -> None:
        """Takes [`pin`] back."""


class _CudaTransfer:
    def __init__(self, device: torch.device, work: Callable[[], None], began: Any, done: Any) -> None:
        self._device, self._began, self._done = device, began, done
        # A tensor that is freed meanwhile would be given to other work, which writes to it.
        self._work: Callable[[], None] | None = work

    def wait(self) -> float:
        self._done.synchronize()
        self._work = None
        return float(self._began.elapsed_time(self._done)) / 1000

    def join(self) -> None:
        if self._work is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._work = None


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, work: Callable[[], None]) -> Transfer:
        event: Any = torch.cuda.Event
        began, done = event(enable_timing=True), event(enable_timing=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                began.record(self._stream)
                work()
                done.record(self._stream)
        except BaseException:
            # No transfer is returned that could be waited for.
            self._stream.synchronize()
            raise
        return _CudaTransfer(self._device, work, began, done)


class _CudaCopies:
    def stream(self, device: torch.device) -> SideStream:
        return _CudaStream(device)

    def pin(self, address: int, nbytes: int) -> bool:
        return _succeeded(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]

    def unpin(self, address: int) -> None:
        _succeeded(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


def _succeeded(result: Any) -> bool:
    if int(result) == 0:
        return True
    # CUDA keeps an error until it is asked for, and torch asks after its next kernel: let it be this one.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False


def copies_of(kind: str) -> DeviceCopies | None:
    """What a kind of device can do beside computing."""
    return _CudaCopies() if kind == "cuda" else None


# ---- copied state ----


# Takes host memory of a size, for copies from a kind of device.
NewBlock = Callable[[int, DeviceCopies | None], HostBlock]
# Stands for host memory that has still to be taken.
_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True)
class Place:
    """Host memory of one tensor, and the block it lies in."""

    tensor: torch.Tensor
    block: HostBlock | None


@dataclass(slots=True)
class TensorCopy:
    """A tensor in host memory, and where it came from."""

    host: torch.Tensor
    device: torch.device
    may_be_infinite: bool
    extent: Extent | None = None
    # Memory that moves between host and device by itself (bitsandbytes' paged optimizers) looks like host memory, and
    # belongs to the optimizer: the tensor itself is kept, to be written to again.
    paged: torch.Tensor | None = None
    # Whether it is this rank's part of a sharded tensor; and of which layout, where it has to be made again.
    sharded: bool = False
    layout: Any = None


@dataclass(frozen=True, slots=True)
class AssembledCopy:
    """A tensor that is made of others, as quantised moments are of codes and scales; copies of those."""

    kind: Any
    parts: dict[str, Any]
    others: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any, save: Callable[[Any, str], Any]) -> AssembledCopy:
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        parts = {name: save(each, name) for name, each in inner.items() if isinstance(each, torch.Tensor)}
        others = {name: each for name, each in inner.items() if name not in parts}
        return cls(type(tensor), parts, others, context, tensor.size(), tensor.stride())

    def put_back(self, live: Any) -> Any:
        """Into the parts of a live tensor, if they are of the same sizes; else a new one."""
        target = local(live) if isinstance(live, torch.Tensor) else None
        there = {name: getattr(target, name, None) for name in self.parts} if type(target) is self.kind else {}
        parts = {name: put_back(there.get(name), part) for name, part in self.parts.items()}
        if all(part is there.get(name) for name, part in parts.items()):
            return live
        return self.kind.__tensor_unflatten__(parts | self.others, self.context, self.size, self.stride)


class StateWriter:
    """Copies nested state into host memory, that of an earlier snapshot where it fits."""

    def __init__(self, pool: dict[tuple[Any, ...], Place]) -> None:
        self._pool = pool
        self.used: dict[tuple[Any, ...], Place] = {}
        self.allocated = False
        self._missing: list[tuple[tuple[Any, ...], TensorCopy, torch.Tensor]] = []
        self._pending: list[tuple[TensorCopy, torch.Tensor]] = []

    def pending(self) -> list[tuple[TensorCopy, torch.Tensor]]:
        """Returns what was saved since the last call, to be copied once there is memory for it."""
        pending, self._pending = self._pending, []
        return pending

    def save(self, value: Any, key: tuple[Any, ...], may_be_infinite: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = local(value)
            if hasattr(tensor, "__tensor_flatten__"):
                return AssembledCopy.of(tensor, lambda part, name: self.save(part, (*key, name), may_be_infinite))
            kept = self._save_tensor(tensor, key, may_be_infinite)
            kept.paged = value if getattr(value, "is_paged", False) else None
            kept.sharded = isinstance(value, DTensor)
            return kept
        if isinstance(value, dict):
            return {name: self.save(inner, (*key, name), may_be_infinite) for name, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.save(inner, (*key, index), may_be_infinite) for index, inner in enumerate(value))
        return copy.deepcopy(value)

    def _save_tensor(self, tensor: torch.Tensor, key: tuple[Any, ...], may_be_infinite: bool) -> TensorCopy:
        place = self._pool.get(key)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            # A kind that does not tell what it is made of: it knows itself how it is copied.
            self.used[key] = place = Place(tensor.detach().to("cpu", copy=True), None)
            return TensorCopy(place.tensor, tensor.device, may_be_infinite, extent_of(tensor))
        kept = TensorCopy(_NOTHING, tensor.device, may_be_infinite)
        if place is not None and place.tensor.shape == tensor.shape and place.tensor.dtype == tensor.dtype:
            self.used[key], kept.host = place, place.tensor
        else:
            self._missing.append((key, kept, tensor.detach()))
        self._pending.append((kept, tensor.detach()))
        return kept

    def allocate(self, copies_of: Callable[[str], DeviceCopies | None], new_block: NewBlock = HostBlock) -> None:
        """Takes memory for what has none yet, in one piece."""
        nbytes = sum(aligned(tensor) for _, _, tensor in self._missing)
        kinds = {tensor.device.type for _, _, tensor in self._missing}
        copies = next((found for kind in kinds if (found := copies_of(kind)) is not None), None)
        block = new_block(nbytes, copies) if nbytes else None
        for key, kept, tensor in self._missing:
            if block is None or tensor.numel() == 0:
                kept.host = torch.empty_like(tensor, device="cpu", requires_grad=False)
            else:
                kept.host = block.like(tensor)
            self.used[key] = Place(kept.host, block)
        self.allocated = bool(self._missing)
        self._missing = []


def by_device(
    pending: Iterable[tuple[TensorCopy, torch.Tensor]],
) -> dict[torch.device, list[tuple[TensorCopy, torch.Tensor]]]:
    found: dict[torch.device, list[tuple[TensorCopy, torch.Tensor]]] = {}
    for kept, tensor in pending:
        found.setdefault(tensor.device, []).append((kept, tensor))
    return found


def copy_all(pairs: Sequence[tuple[TensorCopy, torch.Tensor]], non_blocking: bool) -> None:
    """Copies tensors all together: hundreds of small ones cost little more than one."""
    if pairs:
        hosts, tensors = [kept.host for kept, _ in pairs], [tensor for _, tensor in pairs]
        torch._foreach_copy_(hosts, tensors, non_blocking=non_blocking)
    for kept, tensor in pairs:
        # After the copy: what turns NaN in between is refused, and not trusted.
        kept.extent = extent_of(tensor)


def put_back(live: Any, saved: Any) -> Any:
    """Writes saved values into what is there, and makes again what is not there any more."""
    if isinstance(saved, AssembledCopy):
        return saved.put_back(live)
    if isinstance(saved, TensorCopy):
        live = saved.paged if live is None else live
        if isinstance(live, torch.Tensor):
            target = local(live)
            if target.shape == saved.host.shape and target.dtype == saved.host.dtype:
                # Blocking: the host memory is written to again by the next snapshot, the live tensor by the next step.
                target.copy_(saved.host)
                return live
        made = saved.host.to(saved.device, copy=True)
        return made if saved.layout is None else _sharded_like(saved.layout, made)
    if isinstance(saved, dict):
        result = live if isinstance(live, dict) else {}
        for name in [name for name in result if name not in saved]:
            del result[name]
        for name, value in saved.items():
            result[name] = put_back(result.get(name), value)
        return result
    if type(saved) in (list, tuple):
        there = live if type(live) is type(saved) and len(live) == len(saved) else [None] * len(saved)
        return type(saved)(put_back(each, value) for each, value in zip(there, saved, strict=True))
    return copy.deepcopy(saved)


def _sharded_like(layout: Any, part: torch.Tensor) -> Any:
    return DTensor.from_local(
        part, layout.device_mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride()
    )


def leaves(prefix: str, saved: Any) -> Iterator[tuple[str, TensorCopy]]:
    if isinstance(saved, TensorCopy):
        yield prefix, saved
    elif isinstance(saved, AssembledCopy):
        yield from leaves(prefix, saved.parts)
    elif isinstance(saved, dict):
        for name, value in saved.items():
            separator = "." if prefix and prefix[-1] not in ".:" else ""
            yield from leaves(f"{prefix}{separator}{name}", value)
    elif isinstance(saved, (list, tuple)):
        for index, value in enumerate(saved):
            yield from leaves(f"{prefix}[{index}]", value)


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
