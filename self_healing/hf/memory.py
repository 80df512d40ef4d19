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


# ---- device memory: reads and frees the memory of device and host ----


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


# ---- out of memory: an out-of-memory error as it is caught, without the frames that hold the memory ----


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
    """Tells the part of a training step: generation by a model or by vLLM, the backward, or else the forward."""
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
    """
    Clears the frames of an exception and of those it came from, which keep what failed alive as long as the exception
    is: a handler that collects log records keeps it.
    """
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
    """Whether an exception says that memory ran out."""
    return classify_exception(error) is FailureType.OUT_OF_MEMORY


# ---- batch size ----


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sizes before and after; their product stays."""

    rows: int
    accumulation: int
    rows_before: int
    accumulation_before: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class CannotReduce(Exception):
    """Raised where a smaller batch would change what is trained; the message says why."""


def smaller_batch(trainer: Any, objective: str, refused: str = "") -> BatchPlan:
    """Finds the next smaller size, by the smallest factor that divides it."""
    args = trainer.args
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    factor = next((factor for factor in range(2, rows + 1) if rows % factor == 0), None)
    if factor is None:
        raise CannotReduce(f"per_device_train_batch_size is {rows} already")
    plan = BatchPlan(rows // factor, accumulation * factor, rows, accumulation)
    kinds = getattr(trainer, "loss_types", None) or []
    if objective == "kto":
        raise CannotReduce("KTO subtracts a statistic of the micro-batch")
    if objective == "dpo" and any(str(kind).startswith("aot") for kind in kinds):
        raise CannotReduce("the loss sorts the micro-batch")
    coupled = "batch normalisation" in refused or "depend on each other" in refused
    if why := (refused if coupled else "") or _why_not(trainer, plan):
        raise CannotReduce(why)
    return plan


def _why_not(trainer: Any, plan: BatchPlan) -> str:
    args = trainer.args
    if hasattr(args, "num_generations"):
        return "generations are made for batches of the size there is"
    if args.n_gpu > 1:
        return "several devices share the batch of this process"
    if args.train_sampling_strategy == "group_by_length":
        return "rows are grouped by length within batches, and would come in another order"
    loader = trainer.callback_handler.train_dataloader
    try:
        before = len(loader)
        total = len(trainer.train_dataset)
    except TypeError:
        return "the data are a stream: a resume could not tell where it stood"
    if getattr(getattr(loader, "batch_sampler", None), "batch_size", plan.rows_before) != plan.rows_before:
        return "the batches do not come in the size of per_device_train_batch_size"
    rounded = math.floor if args.dataloader_drop_last else math.ceil
    share = total / (trainer.accelerator.num_processes or 1)
    if before != rounded(share / plan.rows_before):
        return "it is not known how the data become batches"
    after = rounded(share / plan.rows)
    if math.ceil(before / plan.accumulation_before) != math.ceil(after / plan.accumulation):
        return "an epoch would have another number of optimizer steps"
    return ""


def change_batch(trainer: Any, plan: BatchPlan) -> None:
    """Sets the sizes, between two calls of `train()`: the arguments, and what the Trainer has taken from them."""
    trainer.args.per_device_train_batch_size = plan.rows
    trainer.args.gradient_accumulation_steps = plan.accumulation
    # Read from the arguments once, in the constructor.
    trainer._train_batch_size = plan.rows
