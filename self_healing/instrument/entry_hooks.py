"""The hooks that `train()` itself puts on the model, and takes off only where it ends by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..hf.patching import Replacements


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def entry_hooks_removed_on_exception(trainer: Any) -> Iterator[None]:
    """
    Takes off, if an exception leaves a call of `train()`, what that call put on the model before its first callback
    (NEFTune's noise, the hooks of activation checkpointing and of `debug="underflow_overflow"`).
    """
    model = trainer.model
    before = {key for _, key in _hooks_of(model)}
    replacements = Replacements()
    put_on: list[tuple[dict[int, Any], int]] | None = None

    def new_ones() -> list[tuple[dict[int, Any], int]]:
        return [(hooks, key) for hooks, key in _hooks_of(model) if key not in before]

    def note_and_tell(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal put_on
        put_on = new_ones()
        return original(*args, **kwargs)

    replacements.wrap(trainer.callback_handler, "on_train_begin", note_and_tell)
    try:
        yield
    except BaseException:
        for hooks, key in new_ones() if put_on is None else put_on:
            hooks.pop(key, None)
        raise
    finally:
        replacements.give_back()


def _hooks_of(model: Any) -> Iterator[tuple[dict[int, Any], int]]:
    # With `model_init` each call has a model of its own, and the first one is not made yet.
    for module in model.modules() if isinstance(model, nn.Module) else ():
        for name in _HOOKS:
            hooks = vars(module)[name]
            yield from ((hooks, key) for key, hook in list(hooks.items()) if not _shards(hook))


def _shards(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
