"""`OutOfMemory`: an out-of-memory error as it is caught, without the frames that hold the memory."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Literal, TypeVar

import torch
from transformers import GenerationMixin, Trainer

from ..failures.classify import classify_exception
from ..failures.recipes import FailureType, text_of
from ..instrument.device_memory import free_memory, memory_figures


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
    found = OutOfMemory(place, error, _requested(error), figures, _raised_in(error))
    let_go(error)
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


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown"


def _requested(error: BaseException) -> int | None:
    found = _REQUEST.search(text_of(error))
    return None if found is None else int(float(found.group(1)) * _UNITS[found.group(2)])


def let_go(error: BaseException | None) -> None:
    """
    Clears the frames of an exception and of those it came from, which keep what failed alive as long as the exception
    is: a handler that collects log records keeps it.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def with_room(compute: Callable[[], _T], device: torch.device, give_up: Callable[[], None] | None = None) -> _T:
    """Computes something; where memory runs out in it, frees memory and begins once more."""
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        let_go(error)
    # Outside of the handler: what the failed attempt held is gone.
    if give_up is not None:
        give_up()
    free_memory(device)
    return compute()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    return classify_exception(error) is FailureType.OUT_OF_MEMORY
