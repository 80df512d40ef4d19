"""Copies tensors from a device to host memory beside what it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch


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
