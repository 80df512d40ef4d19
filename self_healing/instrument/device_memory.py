"""Reads and frees the memory of device and host."""

from __future__ import annotations

import gc
import math

import psutil
import torch


def free_memory(device: torch.device) -> None:
    """
    Gives back what nothing refers to: Python's cycles, and then what the allocator of the device keeps for later.
    """
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def memory_figures(device: torch.device) -> dict[str, int]:
    """Reads the memory in use, in bytes."""
    found = {"host_used": psutil.Process().memory_info().rss, "host_available": psutil.virtual_memory().available}
    if device.type == "cuda":
        statistics = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "allocated": statistics.get("allocated_bytes.all.current", 0),
            "reserved": statistics.get("reserved_bytes.all.current", 0),
            "peak": statistics.get("allocated_bytes.all.peak", 0),
            "free": free,
            "total": total,
            "alloc_retries": statistics.get("num_alloc_retries", 0),
        }
    return found


def memory_taken(device: torch.device) -> tuple[float, float, float]:
    """
    Reads bytes that tensors take on a device, the most they have taken, and resident memory of this process; NaN where
    it cannot be told. Takes some tens of microseconds, and waits for no device.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    taken, peak = (getattr(module, name, None) for name in ("memory_allocated", "max_memory_allocated"))
    return (
        math.nan if taken is None else float(taken(device)),
        math.nan if peak is None else float(peak(device)),
        float(psutil.Process().memory_info().rss),
    )


def memory_of(device: torch.device) -> int | None:
    """Reads how many bytes a CUDA device has; `None` of any other."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


class DeviceRoom:
    """Reads how much memory of a CUDA device this process holds, and may still have."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        """Bytes that tensors hold now."""
        return torch.cuda.memory_allocated(self._device)

    def left(self) -> int:
        """Bytes that could be taken beyond them: free on the device, or kept by the allocator, and allowed."""
        free, total = torch.cuda.mem_get_info(self._device)
        # Not there in older versions of torch.
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(self._device)
        return min(free + torch.cuda.memory_reserved(self._device), int(total * fraction)) - self.held()


def room_of(device: torch.device) -> DeviceRoom | None:
    """Gives the reader of a device's memory; `None` where it cannot be read."""
    return DeviceRoom(device) if device.type == "cuda" else None


def alloc_retries(device: torch.device) -> int:
    """Counts how often `cudaMalloc` failed at first: the memory is nearly full, and the step waits for it."""
    return 0 if device.type != "cuda" else int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def record_memory_history(device: torch.device) -> None:
    """Has the allocator record its history from here on, for [`write_memory_snapshot`]."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000)


def write_memory_snapshot(path: str, device: torch.device) -> bool:
    """Writes the allocator's history (https://docs.pytorch.org/memory_viz); whether there is one."""
    if device.type != "cuda":
        return False
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
    return True
