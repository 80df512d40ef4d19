"""Copying state from a device to host memory beside what it computes, and the memory that is copied to."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


logger = logging.getLogger("self_healing")

_CACHE_LINE = 64
# Not shared with processes that are forked later; Windows knows no such thing.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
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
    """What a kind of device can do beside computing."""

    def stream(self, device: torch.device) -> SideStream:
        """A stream for copies from a device."""

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
    """
    What a kind of device can do beside computing.

    Args:
        kind (`str`):
            The type of a [`torch.device`].

    Returns:
        `None` where copies are made at once, as they are from the CPU.
    """
    return _CudaCopies() if kind == "cuda" else None


# Of this process, and those of the process it was forked from: they are the process's because a fork copies all of it,
# whatever owns a block.
_blocks: weakref.WeakSet[HostBlock] = weakref.WeakSet()
_of_the_parent: list[HostBlock] = []
if hasattr(os, "register_at_fork"):
    # They are not there in a forked process, and what lies there instead must not be unmapped when they are let go.
    os.register_at_fork(after_in_child=lambda: _of_the_parent.extend(_blocks))


class HostBlock:
    """
    Host memory in one piece, no larger than it is asked for, and given back with the last tensor in it.

    Beside the heap: among the activations on it, which come and go in every step, tensors that stay would keep the
    allocator from reusing what was freed; it gives pages back to the system and takes them again, up to 12 ms of a
    step of 130 ms. And not by torch's allocator of pinned memory, which takes the next power of two, and keeps it for
    later when it is freed.

    Args:
        nbytes (`int`):
            Its size: the sum of [`aligned`] sizes.
        copies ([`DeviceCopies`], *optional*):
            Of the devices it is copied to from.

    Raises:
        MemoryError: There is not as much.
    """

    def __init__(self, nbytes: int, copies: DeviceCopies | None = None) -> None:
        try:
            self._memory = mmap.mmap(-1, nbytes, **_PRIVATE)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{nbytes} bytes of host memory for a snapshot: {error}") from error
        self.nbytes = nbytes
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
        """An uninitialised tensor in it, of a tensor's shape, dtype and, if it is dense, strides."""
        offset, self._used = self._used, self._used + aligned(tensor)
        flat = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


def aligned(tensor: torch.Tensor) -> int:
    """Bytes a dense copy of a tensor takes in a [`HostBlock`]."""
    return math.ceil(tensor.numel() * tensor.element_size() / _CACHE_LINE) * _CACHE_LINE
