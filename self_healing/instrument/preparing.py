"""Looks at, changes or replaces the micro-batch that a trainer prepares, for one call of `training_step`."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def preparing(trainer: Any, change: Callable[[Any], Any], prepared: Any = None) -> Iterator[None]:
    """Passes what `_prepare_inputs` of a trainer returns through `change`, once."""
    original, was_set = trainer._prepare_inputs, "_prepare_inputs" in vars(trainer)
    changed = False

    @functools.wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        nonlocal changed
        batch = original(*args, **kwargs) if prepared is None or changed else copy.copy(prepared)
        if changed:
            return batch
        changed = True
        return change(batch)

    trainer._prepare_inputs = prepare
    try:
        yield
    finally:
        if was_set:
            trainer._prepare_inputs = original
        else:
            del trainer._prepare_inputs
