"""Replaces attributes and methods of the run for a while, and gives them back as they were; finds the trainer."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from traceback import walk_stack
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import ProgressCallback, Trainer


logger = logging.getLogger(__name__)


# ---- replacing: replaces attributes of the run's objects for a while, and gives them back as they were ----


class _Replaced(NamedTuple):
    holder: Any
    name: str
    original: Any
    replacement: Any
    # Whether the instance itself had it, and not its class.
    was_set: bool


class Interception(functools.partial[Any]):
    """Stands in for a method of one object, and not of its copies: called with the original as its first argument."""

    holder: Any = None
    name: str = ""

    def __reduce__(self) -> Any:
        # A pickled model is read without this library: there it is a method of its class again.
        return getattr, (self.holder, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied, method = memo.get(id(self.holder)), getattr(type(self.holder), self.name, None)
        # Without a method of the class there is nothing that could be bound to the copy (a compiled call).
        return self.args[0] if copied is None or method is None else types.MethodType(method, copied)


class Replacements(contextlib.AbstractContextManager["Replacements", None]):
    """Replaces attributes of objects, and gives them back, at the latest where its block ends. No class is touched."""

    def __init__(self) -> None:
        self.held: list[_Replaced] = []
        """What is replaced now, in order; empty once all is given back."""

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def put(self, holder: Any, name: str, replacement: Any) -> None:
        self.held.append(_Replaced(holder, name, getattr(holder, name), replacement, name in vars(holder)))
        setattr(holder, name, replacement)

    def wrap(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> Interception:
        """Hands calls of a method to `wrapper(original, *args, **kwargs)` until [`give_back`]."""
        original = getattr(holder, name)
        # Called once in each step or more: without a frame of its own.
        replacement = Interception(wrapper, original)
        functools.update_wrapper(replacement, original)
        # After that: it takes over the attributes of the original, which may be one like it.
        replacement.holder, replacement.name = holder, name
        self.put(holder, name, replacement)
        return replacement

    def original(self, holder: Any, name: str) -> Any:
        """Gives an attribute as it was before it was first replaced."""
        for each in self.held:
            if each.holder is holder and each.name == name:
                return each.original
        return getattr(holder, name)

    def give_back(self, replacements: Iterable[Any] | None = None) -> None:
        """Gives attributes back, the last replaced first."""
        wanted = None if replacements is None else {id(replacement) for replacement in replacements}
        replaced, self.held = self.held, []
        for each in reversed(replaced):
            in_place = vars(each.holder).get(each.name) is each.replacement
            if wanted is not None and not (id(each.replacement) in wanted and in_place):
                self.held.insert(0, each)
            elif each.was_set:
                setattr(each.holder, each.name, each.original)
            else:
                vars(each.holder).pop(each.name, None)


# ---- on exception: a block that hands its exception to a method ----


class OnException:
    """Asks a method about the exception that leaves a block, as often as it is entered."""

    __slots__ = ("_ends_with",)

    def __init__(self, ends_with: Callable[[BaseException], bool]) -> None:
        self._ends_with = ends_with

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return error is not None and self._ends_with(error)


# ---- entry hooks: the hooks that `train()` itself puts on the model, and takes off only where it ends by itself ----


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def entry_hooks_removed_on_exception(trainer: Any) -> Iterator[None]:
    """
    Takes off, if an exception leaves a call of `train()`, what that call put on the model before its first callback
    (NEFTune's noise, the hooks of activation checkpointing and of `debug="underflow_overflow"`).
    """
    # With `model_init` each call has a model of its own, and the one there is is let go of.
    model = trainer.model if trainer.model_init is None else None
    before = {key for _, key in _hooks_of(model)}
    put_on: list[tuple[dict[int, Any], int]] | None = None

    def new_ones() -> list[tuple[dict[int, Any], int]]:
        return [(hooks, key) for hooks, key in _hooks_of(model) if key not in before]

    def note_and_tell(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal put_on
        put_on = new_ones()
        return original(*args, **kwargs)

    with Replacements() as replaced:
        replaced.wrap(trainer.callback_handler, "on_train_begin", note_and_tell)
        try:
            yield
        except BaseException:
            for hooks, key in new_ones() if put_on is None else put_on:
                hooks.pop(key, None)
            raise


def _hooks_of(model: Any) -> Iterator[tuple[dict[int, Any], int]]:
    for module in model.modules() if isinstance(model, nn.Module) else ():
        for name in _HOOKS:
            hooks = vars(module)[name]
            # Those of FSDP are put on once.
            yield from (
                (hooks, key)
                for key, hook in list(hooks.items())
                if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
            )


# ---- discovery: finds the trainer in the call stack: it hands callbacks its state, not itself ----


def find_trainer(callback: Any) -> Trainer | None:
    """
    Finds the trainer whose `train()` is calling the callback right now: the caller of `on_train_begin` is one of its
    methods.
    """
    for frame, _ in walk_stack(sys._getframe(1)):
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer) and callback in candidate.callback_handler.callbacks:
            return candidate
    return None


def is_training(trainer: Trainer, frame: Any) -> bool:
    """Whether a frame was called, however indirectly, by `train()` of a trainer."""
    callers = (each for each, _ in walk_stack(frame))
    return any(each.f_code.co_name == "train" and each.f_locals.get("self") is trainer for each in callers)


def find_resume_path() -> str | None:
    """Finds the checkpoint that the `train()` call under way resumes from."""
    for frame, _ in walk_stack(sys._getframe(1)):
        if isinstance(frame.f_locals.get("self"), Trainer) and "resume_from_checkpoint" in frame.f_locals:
            path = frame.f_locals["resume_from_checkpoint"]
            return str(path) if isinstance(path, (str, os.PathLike)) else None
    return None


# ---- progress bars ----


def remove_progress_bars(trainer: Any) -> None:
    """
    Takes away the bars that callbacks have left on the terminal: entered again, `train()` has them draw new ones,
    which would be drawn below those, and over what is written in between.
    """
    for callback in trainer.callback_handler.callbacks:
        for name in ("prediction_bar", "training_bar") if isinstance(callback, ProgressCallback) else ():
            bar = getattr(callback, name)
            if bar is not None:
                bar.leave = False
                bar.close()
                setattr(callback, name, None)
        if getattr(callback, "rich_group", None) is not None:
            # RichProgressCallback (TRL 1.16), which need not be installed.
            callback.rich_group.stop()
            callback.rich_group = None


def give_batches(trainer: Any, micro_batches: Sequence[Any], items: Any, load_from: str | None) -> None:
    """Has the `train()` of another trainer go over one step's micro-batches, from the weights of a checkpoint."""
    if load_from is not None:
        trainer._load_from_checkpoint(load_from)
    loader: Any = torch.utils.data.DataLoader(list(micro_batches), batch_size=None)  # type: ignore[arg-type]
    trainer.get_train_dataloader = lambda: loader
    # As the step had them: neither counted again, which with several processes would give another number, ...
    items = items.to(trainer.args.device) if isinstance(items, torch.Tensor) else items
    trainer.get_batch_samples = lambda *_: (list(micro_batches), items)
    # ... nor generated again.
    trainer._prepare_inputs = types.MethodType(Trainer._prepare_inputs, trainer)
