"""Intercepts a method of one model, and not of its copies."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch


class Interception:
    """Stands in for a method of one model."""

    def __init__(
        self, model: torch.nn.Module, name: str, original: Callable[..., Any], wrapper: Callable[..., Any]
    ) -> None:
        # Before its own attributes, as it takes over those of the original, which may be one like it.
        functools.update_wrapper(self, original)
        self._model, self._name, self._original, self._wrapper = model, name, original, wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(self._original, *args, **kwargs)

    def __reduce__(self) -> Any:
        # A pickled model is read without this library: there it is a method of its class again.
        return getattr, (self._model, self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied, method = memo.get(id(self._model)), getattr(type(self._model), self._name, None)
        # Without a method of the class there is nothing that could be bound to the copy (a compiled call).
        return self._original if copied is None or method is None else types.MethodType(method, copied)
