"""What there is on this machine: versions, device, precision, memory, disk. A probe that fails is an answer, too."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil


_T = TypeVar("_T")

LIBRARIES = ("torch", "transformers", "accelerate", "trl", "peft", "datasets", "deepspeed", "bitsandbytes", "trackio")
# Says that the driver is loaded, without a process of its own.
_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """
    The accelerator, as torch sees it.

    Args:
        kind (`str`):
            `"cpu"`, `"cuda"`, `"mps"`, `"xpu"`, ...
        names (`list[str]`):
            One for each that is visible.
        free (`int`, *optional*), total (`int`, *optional*):
            Memory of the first, in bytes.
        bf16 (`bool`, *optional*):
            Whether it computes in bfloat16; `None` if that cannot be known.
        cuda (`str`, *optional*):
            The version that torch was built with: CUDA's, or ROCm's.
        driver (`str`, *optional*):
            Of NVIDIA, as far as the system tells.
    """

    kind: str = "cpu"
    names: list[str] = field(default_factory=list)
    free: int | None = None
    total: int | None = None
    bf16: bool | None = None
    cuda: str | None = None
    driver: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """
    The directory that a run writes to.

    Args:
        path (`str`):
            As it was given.
        exists (`bool`):
            Whether it is there; else the rest is of the nearest directory above it that is.
        why_not_writable (`str`, *optional*):
            What writing a file there raised; `None` if it can be written.
        hard_links (`bool`):
            Whether files in it can have two names.
        free (`int`, *optional*):
            Bytes.
        checkpoint_bytes (`int`):
            Size of the largest checkpoint in it; 0 if there is none.
    """

    path: str
    exists: bool = True
    why_not_writable: str | None = None
    hard_links: bool = True
    free: int | None = None
    checkpoint_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """
    A machine, and the Python on it.

    Args:
        python (`str`), system (`str`), cores (`int`, *optional*):
            Versions, and the processors that this process may use.
        libraries (`dict[str, str | None]`):
            Version by name of the distribution; `None` if it is not installed.
        device ([`Device`]):
            The accelerator.
        memory_free (`int`, *optional*), memory_total (`int`, *optional*):
            Of the host, in bytes; free is what this process may take, in a container or beside other ranks.
        shared_memory (`int`, *optional*):
            Size of `/dev/shm`, through which data loader workers hand batches over.
        ignored_signals (`list[str]`):
            Of those that ask a process to leave, the ones that this process was started to ignore.
        unknown (`dict[str, str]`):
            Probes that failed, with what they raised.
    """

    python: str = ""
    system: str = ""
    cores: int | None = None
    libraries: dict[str, str | None] = field(default_factory=dict)
    device: Device = field(default_factory=Device)
    memory_free: int | None = None
    memory_total: int | None = None
    shared_memory: int | None = None
    ignored_signals: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)


class _Probes:
    """Runs probes, none of which may raise; what they raised is kept."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def __call__(self, what: str, probe: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return probe()
        except Exception as error:
            self.failed[what] = f"{type(error).__name__}: {error}"
            return otherwise


def look_at_machine() -> Machine:
    """Looks at this machine. Takes the time of importing torch, and never raises."""
    probe = _Probes()
    device = probe("device", lambda: _device(probe), Device(driver=probe("driver", _driver, None)))
    nothing: tuple[int | None, int | None] = (None, None)
    memory = probe("memory", _memory, nothing)
    return Machine(
        python=platform.python_version(),
        system=probe("system", platform.platform, "?"),
        cores=probe("cores", lambda: len(os.sched_getaffinity(0)), os.cpu_count()),
        libraries=probe("libraries", lambda: {name: _version(name) for name in LIBRARIES}, {}),
        device=device,
        memory_free=memory[0],
        memory_total=memory[1],
        shared_memory=probe("shared memory", _shared_memory, None),
        ignored_signals=probe("signals", _ignored_signals, []),
        unknown=probe.failed,
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(probe: _Probes) -> Device:
    import torch

    cuda = torch.version.cuda or torch.version.hip
    driver = probe("driver", _driver, None)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return Device(cuda=cuda, driver=driver, bf16=True)
    kind = accelerator.type
    module: Any = torch.get_device_module(kind)
    called = getattr(module, "get_device_name", lambda _: kind)
    supported = getattr(module, "is_bf16_supported", None)
    free, total = probe("device memory", module.mem_get_info, (None, None)) if kind != "mps" else (None, None)
    return Device(
        kind=kind,
        names=probe("names of devices", lambda: [str(called(each)) for each in range(_devices())], [kind]),
        free=free,
        total=total,
        bf16=None if supported is None else probe("bf16", lambda: bool(supported()), None),
        cuda=cuda,
        driver=driver,
    )


def _devices() -> int:
    import torch

    return torch.accelerator.device_count()


def _driver() -> str | None:
    """Version of the driver of NVIDIA; `None` if there is none."""
    if _DRIVER.is_file():
        found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", _DRIVER.read_text(encoding="utf-8"))
        return found[1] if found else None
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False)
    lines = told.stdout.split()
    return lines[0] if told.returncode == 0 and lines else None


def _memory() -> tuple[int | None, int | None]:
    from ..rollback.host_memory import free_host_memory

    return free_host_memory(), int(psutil.virtual_memory().total)


def _shared_memory() -> int | None:
    return shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None


def _ignored_signals() -> list[str]:
    wanted = [name for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    return [name for name in wanted if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN]


def look_at_place(directory: Path) -> Place:
    """Looks at the directory of a run, or of its script; makes none, and leaves nothing in it. Never raises."""
    try:
        directory = directory.parent if directory.is_file() else directory
        there = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    except OSError as error:
        return Place(path=str(directory), exists=False, why_not_writable=str(error), hard_links=False)
    probe = _Probes()
    why, links = None, False
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".self_healing_doctor") as scratch:
            file = Path(scratch, "a")
            file.touch()
            links = probe("links", lambda: _linked(file), False)
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror or error}"
    return Place(
        path=str(directory),
        exists=there == directory.absolute(),
        why_not_writable=why,
        hard_links=links,
        free=probe("disk", lambda: shutil.disk_usage(there).free, None),
        checkpoint_bytes=probe("checkpoints", lambda: _largest_checkpoint(there), 0),
    )


def _linked(file: Path) -> bool:
    file.with_name("b").hardlink_to(file)
    return True


def _largest_checkpoint(directory: Path) -> int:
    checkpoints = directory.glob("checkpoint-*")
    sizes = (sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in checkpoints)
    return max(sizes, default=0)
