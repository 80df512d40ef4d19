"""What there is on this machine and in a directory, and whether the devices of all ranks compute and add up right."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed

from ..ranks import votes
from ..rollback.host_memory import free_host_memory


# Any: torch does not say of all of it that it exports it.
dist: Any = torch.distributed


LIBRARIES = ("torch", "transformers", "accelerate", "trl", "peft", "datasets", "deepspeed", "bitsandbytes", "trackio")
# Says that the driver is loaded, without a process of its own.
_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY = Path("/dev/shm")
# Seconds for all ranks to come, and for one collective.
_MEETING, _COLLECTIVE = 60.0, 60.0


# ---- this machine ----


@dataclass(slots=True)
class Machine:
    """A machine, its accelerator as torch sees it, and the Python on it; sizes are bytes, `None` is not known."""

    python: str = ""
    system: str = ""
    cores: int | None = None
    libraries: dict[str, str | None] = field(default_factory=dict)
    device: str = "cpu"
    # One for each device that is visible.
    devices: list[str] = field(default_factory=list)
    # That torch was built for, and that of NVIDIA's driver.
    cuda: str | None = None
    driver: str | None = None
    memory_free: int | None = None
    memory_total: int | None = None
    shared_memory: int | None = None
    # What the device raised.
    error: str | None = None


def look_at_machine() -> Machine:
    """Looks at this machine."""
    found = Machine(platform.python_version(), platform.platform(), os.cpu_count(), dict.fromkeys(LIBRARIES))
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.libraries[name] = importlib.metadata.version(name)
    if _DRIVER.is_file():
        version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _DRIVER.read_text(encoding="utf-8"))
        found.driver = version[0] if version else None
    found.memory_free, found.memory_total = free_host_memory(), int(psutil.virtual_memory().total)
    found.shared_memory = shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None
    try:
        found.cuda = torch.version.cuda or torch.version.hip
        if torch.accelerator.is_available():
            found.device, count = _own_device().type, torch.accelerator.device_count()
            found.devices = [_name_of(torch.device(found.device, each)) for each in range(count)]
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"
    return found


def _own_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


def _name_of(device: torch.device) -> str:
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device}" if named is None else f"{device} {named(device)}"


# ---- the disk ----


@dataclass(slots=True)
class Disk:
    """The directory that a run writes to; one that is not there yet is judged by the nearest one above it that is."""

    path: str
    exists: bool = True
    why_not_writable: str | None = None
    free: int | None = None
    # Of the largest checkpoint in it.
    checkpoint_bytes: int = 0


def look_at_disk(directory: Path) -> Disk:
    """Looks at the directory of a run, or of its script; makes none, and leaves nothing in it. Never raises."""
    found = Disk(str(directory.parent if directory.is_file() else directory))
    try:
        path = Path(found.path).absolute()
        there = next(each for each in (path, *path.parents) if each.exists())
        found.exists, found.free = there == path, shutil.disk_usage(there).free
        with tempfile.TemporaryDirectory(dir=there, prefix=".self_healing_doctor"):
            pass
        checkpoints = there.glob("checkpoint-*")
        sizes = (sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in checkpoints)
        found.checkpoint_bytes = max(sizes, default=0)
    except OSError as error:
        found.why_not_writable = f"{type(error).__name__}: {error.strerror or error}"
    return found


# ---- all ranks ----


@dataclass(slots=True)
class Job:
    """What was found of all ranks: where each is and what its device raised, what is wrong, and who did not come."""

    rank: int
    ranks: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def works(self) -> bool:
        """Whether all ranks have come, and none is wrong."""
        return not self.wrong and not self.missing and self.error is None


def is_in_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one of several ranks, and has told them where to meet."""
    # Without a local rank it is a shell in the pod of a job, where the others do not come.
    wanted = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in environment for name in wanted) and environment["WORLD_SIZE"] not in ("0", "1")


def look_at_job() -> Job:
    """Meets the other ranks, and looks at all of them. Collective; never raises, and takes half a minute at most."""
    job = Job(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    try:
        store = next(dist.rendezvous("env://", timeout=timedelta(seconds=_MEETING)))[0]
        job.missing = _missing(store, job)
        if not job.missing:
            _look_together(store, job)
    except Exception as error:
        job.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
    finally:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
    return job


def _missing(store: Any, job: Job) -> list[int]:
    keys = [f"self_healing/doctor/{rank}" for rank in range(job.ranks)]
    store.set(keys[job.rank], b"")
    with contextlib.suppress(dist.DistStoreError):
        store.wait(keys, timedelta(seconds=_MEETING))
    return [rank for rank, key in enumerate(keys) if not store.check([key])]


def _look_together(store: Any, job: Job) -> None:
    device, limit = _own_device(), timedelta(seconds=_COLLECTIVE)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.ranks, timeout=limit)
    wrong, error = check_device(device)
    changed = votes.changed_in_sum(_COLLECTIVE, device)
    told: list[Any] = [None] * job.ranks
    row = {"rank": job.rank, "host": socket.gethostname(), "device": _name_of(device), "error": error}
    dist.all_gather_object(told, (row, wrong, changed))
    job.rows = [row for row, _, _ in told]
    computed = {row["rank"]: "its device computes wrong results" for row, wrong, _ in told if wrong}
    seen = Counter(rank for _, _, changed in told for rank in changed)
    arrived = {rank: f"what it sends arrives changed at {times} of {job.ranks} ranks" for rank, times in seen.items()}
    job.wrong = arrived | computed


def check_device(device: torch.device) -> tuple[bool, str | None]:
    """
    Multiplies matrices of small whole numbers, whose product is exact in whatever order it is summed up, in TF32 as
    well, three times. Gives whether one was wrong, and what the device raised. Draws no random numbers.
    """
    side = 512 if device.type == "cpu" else 2048
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            wrong = _multiplies_wrong(device, torch.float32, side, side, 8)
            # Exact up to 256 in bfloat16.
            wrong |= device.type != "cpu" and _multiplies_wrong(device, torch.bfloat16, side, 256, 1)
            return wrong, None
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _multiplies_wrong(device: torch.device, dtype: torch.dtype, side: int, inner: int, largest: int) -> bool:
    def numbers(rows: int, columns: int, down: int, across: int) -> torch.Tensor:
        """Whole numbers from `-largest` to `largest` that repeat neither by rows nor by columns."""
        row, column = torch.arange(rows, device="cpu")[:, None], torch.arange(columns, device="cpu")
        return (row * down + column * across + row * column) % (2 * largest + 1) - largest

    left, right = numbers(side, inner, 7, 13), numbers(inner, side, 11, 5)
    # Each element of the product counts, with a factor of its own column, in one number of its row.
    factors = torch.arange(side, device="cpu") % 7 + 1
    expected = left @ (right @ factors)
    first, second = left.to(device, dtype), right.to(device, dtype)
    products = [(first @ second).cpu().double().to(torch.int64) @ factors for _ in range(3)]
    return not all(torch.equal(product, expected) for product in products)
