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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor

from ..hf.replicas import INTEGERS
from ..hf.state import local, tensors_in


logger = logging.getLogger("self_healing")


# ---- blocks of host memory, and how much of it is free ----


_CACHE_LINE = 64
# Not shared with processes that are forked later; Windows knows no such thing.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
# `cudaHostRegisterPortable`: pinned for all devices.
_PORTABLE = 1

# Of this process, and those of the process it was forked from: they are the process's because a fork copies all of it,
# whatever owns a block.
_blocks: weakref.WeakSet[HostBlock] = weakref.WeakSet()
_of_the_parent: list[HostBlock] = []
if hasattr(os, "register_at_fork"):
    # They are not there in a forked process, and what lies there instead must not be unmapped when they are let go.
    os.register_at_fork(after_in_child=lambda: _of_the_parent.extend(_blocks))


class HostBlock:
    """Host memory in one piece, given back with the last tensor in it."""

    def __init__(self, nbytes: int, pinned: bool = False, file: Path | None = None) -> None:
        try:
            self._memory = mmap.mmap(-1, nbytes, **_PRIVATE) if file is None else _map_new(file, nbytes)
        except (OSError, OverflowError) as error:
            if file is not None:
                raise
            raise MemoryError(f"{nbytes} bytes of host memory for a snapshot: {error}") from error
        self.nbytes, self.file = nbytes, file
        self._used = 0
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        # Not copied for each data loader worker that is forked. Pages are taken by the thread that makes the block:
        # CUDA takes those that are missing while it pins, and launches nothing meanwhile (6 GB: 2.5 s; so 0.2 s).
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            # A kernel without huge pages refuses.
            with contextlib.suppress(AttributeError, OSError):
                self._memory.madvise(getattr(mmap, advice))
        torch.frombuffer(self._memory, dtype=torch.uint8)[:: mmap.PAGESIZE] = 0
        _blocks.add(self)
        if pinned:
            self._pin()

    def _pin(self) -> None:
        """Has devices write to it by themselves; otherwise copies to it are waited for."""
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(cuda.cudaHostRegister(self._address, self.nbytes, _PORTABLE)) == 0:
            # Before the memory is unmapped: this block holds on to it. A process that ends need not bother.
            weakref.finalize(self, cuda.cudaHostUnregister, self._address).atexit = False
            return
        # CUDA keeps an error until it is asked for, and torch asks after its next kernel: let it be this one.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
        logger.info(
            "%.2f GB of host memory could not be pinned: copies of the state to it hold training up.",
            self.nbytes / 1e9,
        )

    def clear(self) -> None:
        """Lets other tensors take the place of those in it."""
        self._used = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes an uninitialised tensor in it, of a tensor's shape, dtype and, if it is dense, strides."""
        offset, self._used = self._used, self._used + aligned(tensor.nbytes)
        flat = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Gives the bytes between its beginning and that of a tensor in it; `None` for one that lies elsewhere."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self.nbytes else None


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


def aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _CACHE_LINE) * _CACHE_LINE


def free_host_memory() -> int:
    """Reads how many bytes of host memory this process may take: its share of the machine or its container."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    # Not in a container, or in one of a kind that does not tell.
    with contextlib.suppress(OSError, ValueError):
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Cached files count as used, and are given up when the memory is needed.
            used = int((group / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
            free = min(free, int(limit) - used)
    return max(free, 0) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


# ---- copies beside what a device computes ----


class Transfer:
    """Work of a CUDA device, after all it was given so far, on a stream of its own."""

    def __init__(self, device: torch.device, work: Callable[[], None]) -> None:
        self._device = device
        # A tensor that is freed meanwhile would be given to other work, which writes to it.
        self._work: Callable[[], None] | None = work
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Who waits for it leaves the processor to others.
        self._done = _event(blocking=True)
        # Around where later work has to wait for it, if it has to.
        self._waiting: tuple[Any, Any] | None = None
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                work()
                self._done.record(stream)
        except BaseException:
            # Nobody gets this transfer, to wait for it.
            stream.synchronize()
            raise

    def wait(self) -> None:
        """Returns once it is complete. Called in a thread beside training."""
        with torch.cuda.device(self._device):
            self._done.synchronize()
        self._work = None

    def join(self) -> None:
        """Orders all later work of the device after it; the host does not wait."""
        if self._work is not None and not self._done.query():
            stream = torch.cuda.current_stream(self._device)
            before, after = self._waiting = _event(enable_timing=True), _event(enable_timing=True)
            before.record(stream)
            stream.wait_event(self._done)
            after.record(stream)
        self._work = None

    def held_up(self) -> float:
        """Gives the seconds that later work of the device waited for it; waits until they are over."""
        if self._waiting is None:
            return 0.0
        before, after = self._waiting
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000


def _event(**options: bool) -> Any:
    return torch.cuda.Event(**options)  # type: ignore[no-untyped-call]


# By kind of device: others copy at once.
TRANSFERS: dict[str, Callable[[torch.device, Callable[[], None]], Transfer]] = {"cuda": Transfer}


def later(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Has a thread beside training do something."""
    thread = ThreadPoolExecutor(1, "self_healing snapshot")
    future = thread.submit(work, *arguments)
    thread.shutdown(wait=False)
    return future


# ---- copied state ----


# Takes host memory of a size, pinned or not.
NewBlock = Callable[[int, bool], HostBlock]
# Stands for host memory that has still to be taken.
_NOTHING = torch.empty(0)


@dataclass(slots=True)
class TensorCopy:
    """A tensor in host memory, and where it came from."""

    host: torch.Tensor
    device: torch.device
    # Memory that moves between host and device by itself (bitsandbytes' paged optimizers) looks like host memory, and
    # belongs to the optimizer: the tensor itself is kept, to be written to again.
    paged: torch.Tensor | None = None
    # Whether it is this rank's part of a sharded tensor.
    sharded: bool = False
    # Of a parameter, `requires_grad`: a module takes nothing else for one.
    trained: bool | None = None

    def __deepcopy__(self, _: Any) -> torch.Tensor:
        """An object that holds copies is copied to be put back: with tensors where they were."""
        made = self.host.to(self.device, copy=True)
        return made if self.trained is None else torch.nn.Parameter(made, self.trained)


# What is copied where.
Pair = tuple[TensorCopy, torch.Tensor]


@dataclass(frozen=True, slots=True)
class AssembledCopy:
    """A tensor that is made of others, as quantised moments are of codes and scales; copies of those."""

    kind: Any
    parts: dict[str, Any]
    others: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, _: Any) -> Any:
        return self.put_back(None)

    def put_back(self, live: Any) -> Any:
        """Into the parts of a live tensor, if they are of the same sizes; else a new one."""
        target = local(live) if isinstance(live, torch.Tensor) else None
        there = {name: getattr(target, name, None) for name in self.parts} if type(target) is self.kind else {}
        parts = {name: put_back(there.get(name), part) for name, part in self.parts.items()}
        if all(part is there.get(name) for name, part in parts.items()):
            return live
        return self.kind.__tensor_unflatten__(parts | self.others, self.context, self.size, self.stride)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def save(value: Any, pairs: list[Pair]) -> Any:
    """Gives nested state with copies in place of its tensors, and adds what is to be copied for that."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach() if type(value) in _PLAIN else local(value)
        if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
            return _assembled(tensor, pairs)
        paged = value if getattr(value, "is_paged", False) else None
        trained = value.requires_grad if isinstance(value, torch.nn.Parameter) else None
        kept = TensorCopy(_NOTHING, tensor.device, paged, isinstance(value, DTensor), trained)
        if tensor.numel():
            pairs.append((kept, tensor))
        else:
            kept.host = torch.empty_like(tensor, device="cpu", requires_grad=False)
        return kept
    if isinstance(value, dict):
        return {name: save(inner, pairs) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(save(inner, pairs) for inner in value)
    if type(value).__module__ == "builtins":
        return copy.deepcopy(value)
    # In an object (the projectors of GaLore) tensors lie anywhere. A sharded one is copied with it, where it is: its
    # part would come back without the rest.
    found = (tensor for tensor in tensors_in(value, {}) if not isinstance(tensor, DTensor))
    return copy.deepcopy(value, {id(tensor): save(tensor, pairs) for tensor in found})


def _assembled(tensor: Any, pairs: list[Pair]) -> AssembledCopy:
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    parts = {name: each for name, each in inner.items() if isinstance(each, torch.Tensor)}
    others = {name: each for name, each in inner.items() if name not in parts}
    copies = save(parts, pairs)
    return AssembledCopy(type(tensor), copies, others, context, tensor.size(), tensor.stride())


# Tensors of so few elements are copied together: step counters, biases, weights of norms.
_FEW = 1 << 12
_GATHERED = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32})


def gathered(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Groups what is copied in one piece each: small tensors of a kind together, others alone."""
    alone, together = list[list[Pair]](), dict[Any, list[Pair]]()
    for pair in pairs:
        tensor = pair[1]
        if tensor.numel() > _FEW or tensor.dtype not in _GATHERED or not tensor.is_contiguous():
            alone.append([pair])
        else:
            together.setdefault((tensor.device, tensor.dtype), []).append(pair)
    return alone + list(together.values())


def room_for(pieces: Iterable[Sequence[Pair]]) -> int:
    """Counts the bytes that copies take."""
    return sum(aligned(sum(tensor.nbytes for _, tensor in piece)) for piece in pieces)


def lay_out(pieces: Iterable[Sequence[Pair]], block: HostBlock) -> list[torch.Tensor]:
    """Gives copies their places in host memory; returns those of the pieces."""
    block.clear()
    places = []
    for piece in pieces:
        kept, tensor = piece[0]
        if len(piece) == 1:
            places.append(block.like(tensor))
            kept.host = places[-1]
            continue
        sizes = [tensor.numel() for _, tensor in piece]
        places.append(block.like(tensor.new_empty(sum(sizes), device="meta")))
        for (kept, tensor), part in zip(piece, torch.split(places[-1], sizes), strict=True):
            kept.host = part.view(tensor.shape)
    return places


def whole(piece: Sequence[Pair]) -> torch.Tensor:
    """Gives what is copied in one piece."""
    return piece[0][1] if len(piece) == 1 else torch.cat([tensor.reshape(-1) for _, tensor in piece])


def copy_all(pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], non_blocking: bool) -> None:
    """Copies pieces, each into its place, all together: hundreds cost little more than one."""
    if pieces:
        places, tensors = zip(*pieces, strict=True)
        torch._foreach_copy_(places, tensors, non_blocking=non_blocking)


def word_of(tensor: torch.Tensor) -> torch.dtype:
    """The longest words in which both a tensor and its copy can be read."""
    longest = tensor.numel() > _FEW and tensor.nbytes % 8 == 0
    longest &= tensor.storage_offset() * tensor.element_size() % 8 == 0
    return torch.int64 if longest else INTEGERS[tensor.element_size()]


def put_back(live: Any, saved: Any, like: Any = None) -> Any:
    """Writes saved values into what is there, and makes again what is not there any more, sharded like a parameter."""
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
        if not (saved.sharded and isinstance(like, DTensor)):
            return made
        mesh, placements = like.device_mesh, like.placements
        return DTensor.from_local(made, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    if isinstance(saved, dict):
        result = live if isinstance(live, dict) else {}
        for name in [name for name in result if name not in saved]:
            del result[name]
        for name, value in saved.items():
            result[name] = put_back(result.get(name), value, like)
        return result
    if type(saved) in (list, tuple):
        there = live if type(live) is type(saved) and len(live) == len(saved) else [None] * len(saved)
        return type(saved)(put_back(each, value, like) for each, value in zip(there, saved, strict=True))
    return copy.deepcopy(saved)


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
