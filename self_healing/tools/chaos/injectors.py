"""Injects faults into the model, the data, the calls and the files of a trainer."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import inspect
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from ...hf.state import local
from .faults import Schedule


logger = logging.getLogger("self_healing.chaos")


# ---- the model ----


class ModelFaults:
    """Injects faults into the forward, the gradients and the weights of a trainer's model."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._trainer: Any = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._weight = ""
        self._unhook: Callable[[], None] = lambda: None

    def attach(self, trainer: Any, undo: contextlib.ExitStack) -> None:
        """Hooks the model, until `undo` is closed."""
        self._trainer, model = trainer, trainer.model
        module = output_module(model)
        undo.callback(module.register_forward_pre_hook(self._before_forward).remove)
        undo.callback(module.register_forward_hook(self._after_forward).remove)
        if self._schedule.has("poison_samples"):
            for outer in (each for each in model.modules() if each is model or _takes_ids(each)):
                undo.callback(outer.register_forward_pre_hook(self._keep_inputs, with_kwargs=True).remove)
            undo.callback(self._inputs.clear)
        if self._schedule.has("nan_gradient", "inf_gradient") and (weights := trained_weights(model)):
            middle = weights[len(weights) // 2]
            owner, _, self._weight = next(n for n, each in model.named_parameters() if each is middle).rpartition(".")
            undo.callback(model.get_submodule(owner).register_forward_pre_hook(self._hook_gradient).remove)
            undo.callback(lambda: self._unhook())

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        wait(self._schedule, "forward")
        for number in self._schedule.due("sigterm", "sigkill"):
            with self._schedule.strike(number):
                os.kill(os.getpid(), getattr(signal, self._schedule.faults[number].kind.upper()))
        for number in self._schedule.due("oom"):
            with self._schedule.strike(number):
                _run_out_of_memory(self._trainer.accelerator.device)
        lose_connection(self._schedule, "forward")

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return None
        for number in self._schedule.due("nan_loss"):
            with self._schedule.strike(number, module=type(module).__name__) as result:
                spoiled = changed(output, lambda tensor: tensor * float("nan"))
                result["effect"] = spoiled is not None
                output = output if spoiled is None else spoiled
        bad = torch.tensor(self._bad_rows(), dtype=torch.long)
        if len(bad):
            return changed(output, lambda tensor: tensor.index_fill(0, bad.to(tensor.device), float("nan")))
        return output

    def _bad_rows(self) -> list[int]:
        due = list(self._schedule.due("poison_samples"))
        poison = self._schedule.poison
        if not due and not poison:
            return []
        rows = rows_of(self._inputs)
        for number in due:
            fault = self._schedule.faults[number]
            candidates = [row for row, tokens in rows if fault.token is None or fault.token in tokens]
            if fault.token is None or candidates:
                key, count = self._schedule.keys[number], len(self._schedule.strikes_of(number))
                rng = random.Random(f"{self._schedule.seed} {key} {count}")
                chosen = rng.sample(candidates, min(int(fault.get("rows")), len(candidates)))
                with self._schedule.strike(number, rows=chosen) as result:
                    poison.update(chosen)
                    result["effect"] = bool(chosen)
        return [place for place, (row, _) in enumerate(rows) if row in poison]

    def _keep_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps what the outermost model was called with; one further inside only where it has the tokens."""
        given = kwargs if not args else {"input_ids": args[0], **kwargs}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        if "input_ids" in tensors or not self._inputs or not _takes_ids(module):
            self._inputs.clear()
            self._inputs.update(tensors)

    def _hook_gradient(self, module: nn.Module, inputs: Any) -> None:
        # FSDP2 computes with a gathered weight, and only that one sees a gradient.
        weight = getattr(module, self._weight)
        if weight.requires_grad:
            self._unhook()
            self._unhook = weight.register_hook(self._on_gradient).remove

    def _on_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        spoiled = None
        for number in self._schedule.due("nan_gradient", "inf_gradient"):
            with self._schedule.strike(number):
                spoiled = gradient.clone()
                spoiled.reshape(-1)[0] = float(self._schedule.faults[number].kind[:3])
        return spoiled

    def change_weights(self) -> None:
        """Strikes weights between two steps."""
        for number in self._schedule.due("corrupted_weights", "scrambled_layer"):
            with self._schedule.strike(number) as result, torch.no_grad():
                weights = trained_weights(self._trainer.model)
                if self._schedule.faults[number].kind == "corrupted_weights":
                    # One that every row goes through: not the embedding, which comes first.
                    weight = local(weights[len(weights) // 2])
                    weight.view(-1)[:1] = float("nan")
                else:
                    weight = local(weights[-1])
                    generator = torch.Generator().manual_seed(self._schedule.seed + number)
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.mul_(50).add_(noise.to(weight.device, weight.dtype))
                # A rank may hold nothing of it.
                result["effect"] = weight.numel() > 0


def output_module(model: nn.Module) -> nn.Module:
    """
    The module whose output all of the loss comes from: the last norm after the blocks, else the last block, else the
    last layer with weights. Not the head: TRL computes the loss from `lm_head.weight`, past it.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        return [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))][-1]
    blocks = max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))
    inside, modules = set(blocks.modules()), list(model.modules())
    after = [module for module in modules[modules.index(blocks) :] if module not in inside]
    norms = [module for module in after if "norm" in type(module).__name__.lower() and not list(module.children())]
    return norms[-1] if norms else blocks[-1]


def trained_weights(model: nn.Module) -> list[nn.Parameter]:
    """Trained weights of floating type, matrices if there are any."""
    trained = [each for each in model.parameters() if each.requires_grad and each.is_floating_point() and each.numel()]
    return [weight for weight in trained if weight.ndim > 1] or trained


def changed(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The output of a layer with its first tensor changed; `None` where that is none."""
    if isinstance(output, (tuple, list)) and output:
        first = changed(output[0], change)
        return None if first is None else type(output)([first, *output[1:]])
    return change(output) if isinstance(output, torch.Tensor) and output.is_floating_point() else None


def rows_of(inputs: Mapping[str, torch.Tensor]) -> list[tuple[str, frozenset[int]]]:
    """What identifies each row of a batch, however it is padded, and its tokens."""
    ids = inputs.get("input_ids")
    if ids is None or ids.ndim != 2:
        rows = next((value.tolist() for value in inputs.values() if value.ndim > 0), [])
        return [(_identity(row), frozenset()) for row in rows]
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape != ids.shape:
        mask = torch.ones_like(ids)
    tokens = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
    return [(_identity(row), frozenset(row)) for row in tokens]


def _identity(row: Any) -> str:
    return hashlib.sha256(repr(row).encode()).hexdigest()[:16]


def _takes_ids(module: nn.Module) -> bool:
    return hasattr(module, "get_input_embeddings") and hasattr(module, "config")


def _run_out_of_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.empty(4 * torch.cuda.get_device_properties(device).total_memory, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.14 GiB of which 1.21 GiB is "
        "free. Including non-PyTorch memory, this process has 77.92 GiB memory in use. (rehearsed by "
        "self_healing.chaos)"
    )


# ---- the data ----


class SampleError(ValueError):
    """Raised by a bad sample."""


def guard_dataset(schedule: Schedule, dataset: Any, undo: contextlib.ExitStack) -> None:
    """Gives the dataset object a class of its own, below whatever guards it, until `undo` is closed."""
    cls = type(dataset)

    def loading(name: str) -> Callable[[Any, Any], Any]:
        def load(self: Any, index: Any) -> Any:
            _on_loading(schedule, index)
            return getattr(cls, name)(self, index)

        return load

    methods = {name: loading(name) for name in ("__getitem__", "__getitems__") if hasattr(cls, name)}
    try:
        if isinstance(dataset, torch.utils.data.IterableDataset):
            raise TypeError("who guards a stream takes it to pieces, and would not see this class")
        dataset.__class__ = type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})
        undo.callback(setattr, dataset, "__class__", cls)
    except TypeError:
        logger.warning("Chaos cannot break the data: a %s takes no faults. Please use a Dataset.", cls.__name__)


def _on_loading(schedule: Schedule, indices: Any) -> None:
    if isinstance(indices, (str, slice)):
        return
    wait(schedule, "data")
    lose_connection(schedule, "data")
    wanted = [int(index) for index in indices] if hasattr(indices, "__iter__") else [int(indices)]
    for number, fault in enumerate(schedule.faults):
        if fault.kind != "bad_sample" or not wanted or schedule.step.value < schedule.steps[number]:
            continue
        with schedule.lock:
            struck, bad = schedule.strikes_of(number), fault.index
            if bad is None and struck:
                bad = struck[0].detail["index"]
            elif bad is None and schedule.ranks[number] == schedule.rank:
                bad = wanted[0]
            if bad in wanted and (fault.limit is None or len(struck) < fault.limit):
                with schedule.strike(number, index=bad):
                    raise SampleError(f"sample {bad} cannot be decoded (rehearsed by self_healing.chaos)")


# ---- calls ----


def lose_connection(schedule: Schedule, place: str) -> None:
    """Raises if a network error strikes at a place."""
    for number in schedule.due("network_error", place=place):
        with schedule.strike(number, where=place):
            raise ConnectionError(errno.ECONNRESET, "Connection reset by peer (rehearsed by self_healing.chaos)")


def wait(schedule: Schedule, place: str) -> None:
    """Waits if a slow step or a hang strikes at a place."""
    for number in schedule.due("slow_step", "hang", place=place):
        seconds = float(schedule.faults[number].get("seconds"))
        # Nothing but an exception out of a signal handler ends the one in Python earlier.
        pause = threading.Event().wait if schedule.faults[number].get("wait") == "python" else wait_in_c
        with schedule.strike(number, where=place, seconds=seconds):
            pause(seconds)


def wait_in_c(seconds: float) -> None:
    """Waits inside of one C call (on Linux): handlers of signals in Python do not run before it returns."""
    # Not a sleep, which a signal ends; a mutex that the thread holds already is waited for to the end. Zeros are
    # PTHREAD_MUTEX_INITIALIZER; larger than the type is anywhere.
    library, mutex, until = ctypes.CDLL(None), ctypes.create_string_buffer(128), time.time() + seconds
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, ctypes.byref((ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))))


def plain_rewards(trainer: Any) -> list[Any]:
    """The reward functions that a network error can strike: no models, and none that is `async`."""
    functions = getattr(trainer, "reward_funcs", [])
    return [each for each in functions if not isinstance(each, nn.Module) and not inspect.iscoroutinefunction(each)]


def guard_rewards(schedule: Schedule, trainer: Any, undo: contextlib.ExitStack) -> None:
    """Lets network errors strike the first reward function, until `undo` is closed."""
    plain = plain_rewards(trainer)
    if not plain:
        logger.warning("Chaos: %s has no reward functions to break.", type(trainer).__name__)
        return

    @functools.wraps(plain[0])
    def broken(*args: Any, **kwargs: Any) -> Any:
        lose_connection(schedule, "reward")
        return plain[0](*args, **kwargs)

    place = trainer.reward_funcs.index(plain[0])
    trainer.reward_funcs[place] = broken
    undo.callback(trainer.reward_funcs.__setitem__, place, plain[0])


# ---- files ----


def guard_saving(schedule: Schedule, trainer: Any, undo: contextlib.ExitStack) -> None:
    """Lets a full disk strike a trainer's saves, until `undo` is closed."""
    original = trainer.save_model

    @functools.wraps(original)
    def save_model(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        done = original(output_dir, *args, **kwargs)
        for number in schedule.due("disk_full"):
            directory = str(output_dir or trainer.args.output_dir)
            with schedule.strike(number, directory=directory):
                # As a full disk leaves it: what this rank writes of the weights half written, and nothing after it.
                _cut_off(Path(directory), schedule.rank, others=schedule.rank == 0)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)
        return done

    undo.callback(vars(trainer).pop, "save_model", None)
    trainer.save_model = save_model


def tear_checkpoint(schedule: Schedule, number: int, output_dir: str) -> None:
    """Cuts off the weights of the newest checkpoint; waits for the first one where there is none."""
    newest = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    # Its state is written last: another rank may still be about it.
    if newest is None or not Path(newest, "trainer_state.json").exists():
        return
    # Another rank may be removing it.
    with schedule.strike(number, checkpoint=newest) as result, contextlib.suppress(FileNotFoundError):
        result["effect"] = False
        result["effect"] = _cut_off(Path(newest), schedule.rank)
    if schedule.faults[number].get("then") == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)


def _cut_off(checkpoint: Path, rank: int, others: bool = True) -> bool:
    """Leaves half of this rank's shard, or of the weights; in a file of its own: hard links elsewhere stay whole."""
    files = [*checkpoint.glob(f"pytorch_model_fsdp_*/__{rank}_*.distcp")]
    if not files and others:
        files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.bin")]
    if not files:
        return False
    largest = max(files, key=lambda path: path.stat().st_size)
    whole, part = largest.read_bytes(), largest.with_name(largest.name + ".part")
    part.write_bytes(whole[: len(whole) // 2])
    part.replace(largest)
    return True
