"""Memory of device and host: what is in use, an error that it ran out, and batch sizes."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import math
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeVar

import psutil
import torch
from transformers import GenerationMixin, Trainer

from ..failures.classify import classify_exception
from ..failures.recipes import FailureType, text_of
from .state import unwrap_optimizer


logger = logging.getLogger("self_healing")


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


def fingerprint_of(trainer: Any) -> dict[str, Any]:
    """Facts that have to be the same for sizes that fitted in one process to fit in another."""
    device, parameters, trained, dtypes = trainer.accelerator.device, 0, 0, set()
    for each in trainer.model.parameters():
        # Under ZeRO-3 there are elements only while they are gathered.
        size = int(getattr(each, "ds_numel", each.numel()))
        parameters += size
        trained += size if each.requires_grad else 0
        dtypes.add(str(each.dtype))
    return {
        "parameters": parameters,
        "trained": trained,
        "dtypes": sorted(dtypes),
        "precision": str(trainer.accelerator.mixed_precision),
        "activation_checkpointing": bool(getattr(trainer.args, "gradient_checkpointing", False)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "memory": memory_of(device),
        "processes": int(trainer.args.world_size),
    }


# ---- out of memory ----


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
    # Whether it was the host's.
    on_host: bool
    # Whether it is to be computed again on this rank, while others wait.
    alone: bool = False


def caught(error: BaseException, device: torch.device, place: Place | None = None) -> OutOfMemory | None:
    """Reads an out-of-memory error; `None` if the exception is none."""
    if not isinstance(error, Exception) or not is_out_of_memory(error):
        return None
    figures = memory_figures(device)
    by_traceback = _place_of(error)
    place = by_traceback if place is None or by_traceback == "vLLM" else place
    frames, asked = traceback.extract_tb(error.__traceback__), _REQUEST.search(text_of(error))
    raised_in = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown"
    requested = None if asked is None else int(float(asked.group(1)) * _UNITS[asked.group(2)])
    on_host = isinstance(error, (MemoryError, OSError)) or "DefaultCPUAllocator" in str(error)
    release_frames(error)
    return OutOfMemory(place, error, requested, figures, raised_in, on_host)


def _place_of(error: BaseException) -> Place:
    generates, backward = False, False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_name
        if _ENGINE.match(frame.f_globals.get("__name__", "")):
            return "vLLM"
        generates |= name in ("generate", "generate_batch", "_generate_single_turn") and _is_of_model(frame)
        backward |= name in ("backward", "_engine_run_backward")
    if generates:
        return "generation"
    return "backward" if backward else "forward"


def _is_of_model(frame: FrameType) -> bool:
    """Whether it runs a method of a model or a trainer: anything may have a function of that name."""
    # Not by the object, which is among the locals: what is read there once is kept, and with it all that did not fit.
    owner = frame.f_globals.get(frame.f_code.co_qualname.partition(".")[0])
    return isinstance(owner, type) and issubclass(owner, (torch.nn.Module, GenerationMixin, Trainer))


def in_evaluation(error: BaseException) -> bool:
    """Whether an exception comes from an evaluation, in the model or outside of it."""
    names = ("evaluate", "evaluation_loop", "prediction_step")
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code.co_name in names and _is_of_model(frame) for frame in frames)


def predictions_pile_up(trainer: Any) -> bool:
    """Whether an evaluation keeps predictions on the device, of more than one batch."""
    args = trainer.args
    none = trainer.compute_metrics is None or args.prediction_loss_only or args.batch_eval_metrics
    return not none and args.eval_accumulation_steps != 1


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


def drop_requests(trainer: Any) -> bool:
    """
    Drops what a call that raised has left in a vLLM engine of this process, which the next call would answer together
    with its own prompts: each row would get the completions of another. Whether nothing is left.
    """
    engine = getattr(getattr(getattr(trainer, "vllm_generation", None), "llm", None), "llm_engine", None)
    if engine is None:
        return True
    try:
        if engine.has_unfinished_requests():
            # Newer versions know them by another name than the one they were given.
            internal = "internal" in inspect.signature(engine.abort_request).parameters
            left = list(engine.output_processor.request_states)
            engine.abort_request(left, **({"internal": True} if internal else {}))
        return not engine.has_unfinished_requests()
    except Exception:
        logger.warning("What a failed call has left in the vLLM engine cannot be dropped.", exc_info=True)
        return False


# ---- settings of a model and an optimizer that take less memory for the same result, until the trainer is given back


def checkpoint_activations(instrument: Any) -> bool:
    """Switches activation checkpointing on, if the model supports it; whether that changed anything."""
    model: Any = instrument.trainer.model
    if _checkpoints(model) or not getattr(model, "supports_gradient_checkpointing", False):
        return False
    inputs_needed_gradients = hasattr(model, "_require_grads_hook")
    _tell(model, "enable", {"use_reentrant": False})
    if not _checkpoints(model):
        return False

    def switch_off() -> None:
        _tell(model, "disable")
        if not inputs_needed_gradients and hasattr(model, "_require_grads_hook"):
            model.disable_input_require_grads()

    instrument.on_detach.append(switch_off)
    return True


# Renamed in transformers 5.2x; the old names warn there.
def _checkpoints(model: Any) -> bool:
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((found for name in names if (found := getattr(model, name, None)) is not None), False))


def _tell(model: Any, what: str, options: dict[str, Any] | None = None) -> None:
    for name in ("activation", "gradient"):
        method = getattr(model, f"{name}_checkpointing_{what}", None)
        if method is not None:
            method(**({} if options is None else {f"{name}_checkpointing_kwargs": options}))
            return


def update_one_by_one(instrument: Any) -> bool:
    """Has an optimizer of torch update parameter by parameter: all at once takes as much memory again as they do."""
    groups = getattr(unwrap_optimizer(instrument.trainer.optimizer), "param_groups", [])
    at_once = [group for group in groups if group.get("foreach", False) is not False and not group.get("fused")]
    for group in at_once:
        instrument.on_detach.append(functools.partial(group.__setitem__, "foreach", group["foreach"]))
        group["foreach"] = False
    return bool(at_once)


# ---- a smaller batch ----


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sizes before and after; their product stays."""

    rows: int
    accumulation: int
    rows_before: int
    accumulation_before: int


def change_batch(trainer: Any, plan: BatchPlan) -> None:
    """Sets the sizes, between two calls of `train()`: the arguments, and what the Trainer has taken from them."""
    trainer.args.per_device_train_batch_size = plan.rows
    trainer.args.gradient_accumulation_steps = plan.accumulation
    # Read from the arguments once, in the constructor.
    trainer._train_batch_size = plan.rows


def smaller_batch(trainer: Any, objective: str, refused: str = "") -> BatchPlan | str:
    """Finds the next smaller size, by the smallest factor that divides it; or says why there is none."""
    args = trainer.args
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    factor = next((factor for factor in range(2, rows + 1) if rows % factor == 0), None)
    if factor is None:
        return f"per_device_train_batch_size is {rows} already"
    if objective == "kto":
        return "KTO subtracts a statistic of the micro-batch"
    if objective == "dpo" and "aot" in str(getattr(trainer, "loss_types", None)):
        return "the loss sorts the micro-batch"
    if "batch normalisation" in refused:
        return refused
    plan = BatchPlan(rows // factor, accumulation * factor, rows, accumulation)
    return _why_other_steps(trainer, plan) or plan


def _why_other_steps(trainer: Any, plan: BatchPlan) -> str:
    """Says why the steps would not hold the same rows; empty if they do."""
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
