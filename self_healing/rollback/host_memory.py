"""Host memory for snapshots: how much of it is free, and blocks of it."""

from __future__ import annotations

import logging
import math
import mmap
import os
import weakref
from pathlib import Path

import psutil
import torch

from .host_copies import DeviceCopies


logger = logging.getLogger("self_healing")

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
