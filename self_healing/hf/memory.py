"""Memory of device and host: what is in use, an error that it ran out, and batch sizes."""

from __future__ import annotations

import gc
import math
import re
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Literal, TypeVar

import psutil
import torch
from transformers import GenerationMixin, Trainer

from ..failures.classify import classify_exception
from ..failures.recipes import FailureType, text_of


def free_memory(device: torch.device) -> None:
    """Gives back Python's cycles, and then what the allocator of the device keeps for later."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def memory_figures(device: torch.device) -> dict[str, int]:
    """The memory in use, in bytes."""
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
    Bytes that tensors take on a device, the most they have taken, and resident memory of this process; NaN where it
    cannot be told. Waits for no device.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    taken, peak = getattr(module, "memory_allocated", None), getattr(module, "max_memory_allocated", None)
    return (
        math.nan if taken is None else float(taken(device)),
        math.nan if peak is None else float(peak(device)),
        float(psutil.Process().memory_info().rss),
    )


def memory_of(device: torch.device) -> int | None:
    """Bytes of a CUDA device; `None` of any other."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


_T = TypeVar("_T")

Place = Literal["forward", "backward", "generation", "vLLM", "evaluation", "optimizer step"]

_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# An engine in this process, and what TRL does to hand it weights and prompts.
_ENGINE = re.compile(r"(?:vllm|trl\.generation)(?:\.|$)")
# "Tried to allocate 2.50 GiB" (CUDA, ROCm, XPU, MPS); "you tried to allocate 1234 bytes" (CPU).
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(B|bytes|KiB|MiB|GiB|TiB)\b")


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An out-of-memory error, without the frames that hold the memory."""

    place: Place
    error: Exception
    requested: int | None
    figures: dict[str, int]
    raised_in: str
    alone: bool = False

    @property
    def on_host(self) -> bool:
        """Whether the memory that ran out was the host's."""
        text = str(self.error)
        return isinstance(self.error, (MemoryError, OSError)) or "DefaultCPUAllocator" in text


def caught(error: Exception, device: torch.device, place: Place | None = None) -> OutOfMemory | None:
    """Reads an out-of-memory error; `None` if the exception is none."""
    if not is_out_of_memory(error):
        return None
    figures = memory_figures(device)
    by_traceback = _place_of(error)
    place = by_traceback if place is None or by_traceback == "vLLM" else place
    frames, asked = traceback.extract_tb(error.__traceback__), _REQUEST.search(text_of(error))
    raised_in = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown"
    requested = None if asked is None else int(float(asked.group(1)) * _UNITS[asked.group(2)])
    found = OutOfMemory(place, error, requested, figures, raised_in)
    release_frames(error)
    return found


def _place_of(error: BaseException) -> Place:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(_ENGINE.match(frame.f_globals.get("__name__", "")) for frame in frames):
        return "vLLM"
    if any(_generates(frame) for frame in frames):
        return "generation"
    names = {frame.f_code.co_name for frame in frames}
    return "backward" if names & {"backward", "_engine_run_backward"} else "forward"


def _generates(frame: FrameType) -> bool:
    """Whether it is a model that generates, or a trainer's call of it: anything may have a function of that name."""
    if frame.f_code.co_name not in ("generate", "generate_batch", "_generate_single_turn"):
        return False
    # Not by the object, which is among the locals: what is read there once is kept, and with it all that did not fit.
    owner = frame.f_globals.get(frame.f_code.co_qualname.partition(".")[0])
    return isinstance(owner, type) and issubclass(owner, (torch.nn.Module, GenerationMixin, Trainer))


def release_frames(error: BaseException | None) -> None:
    """Clears the frames of an exception and of those it came from: a handler that collects log records keeps them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def retry_after_freeing(
    compute: Callable[[], _T], device: torch.device, give_up: Callable[[], None] | None = None
) -> _T:
    """Computes something; where memory runs out in it, frees memory and begins once more."""
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        release_frames(error)
    # Outside of the handler: what the failed attempt held is gone.
    if give_up is not None:
        give_up()
    free_memory(device)
    return compute()


def is_out_of_memory(error: BaseException) -> bool:
    return classify_exception(error) is FailureType.OUT_OF_MEMORY


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sizes before and after; their product stays."""

    rows: int
    accumulation: int
    rows_before: int
    accumulation_before: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def change_batch(trainer: Any, plan: BatchPlan) -> None:
    """Sets the sizes, between two calls of `train()`: the arguments, and what the Trainer has taken from them."""
    trainer.args.per_device_train_batch_size = plan.rows
    trainer.args.gradient_accumulation_steps = plan.accumulation
    # Read from the arguments once, in the constructor.
    trainer._train_batch_size = plan.rows
