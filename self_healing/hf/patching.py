"""Replaces attributes of the run's objects for a while, and gives them back as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class _Replaced(NamedTuple):
    holder: Any
    name: str
    original: Any
    replacement: Any
    # Whether the instance itself had it, and not its class.
    was_set: bool


class Replacements:
    """Replaces attributes of objects, and gives them back. No class is touched."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def put(self, holder: Any, name: str, replacement: Any) -> None:
        """Sets an attribute until [`give_back`]."""
        self._replaced.append(_Replaced(holder, name, getattr(holder, name), replacement, name in vars(holder)))
        setattr(holder, name, replacement)

    def wrap(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Hands calls of a method to `wrapper(original, *args, **kwargs)` until [`give_back`]."""
        original = getattr(holder, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self.put(holder, name, replaced)

    def original(self, holder: Any, name: str) -> Any:
        """Gives an attribute as it was before it was first replaced."""
        for each in self._replaced:
            if each.holder is holder and each.name == name:
                return each.original
        return getattr(holder, name)

    def give_back(self, replacements: Iterable[Any] | None = None) -> None:
        """Gives attributes back, the last replaced first."""
        wanted = None if replacements is None else {id(replacement) for replacement in replacements}
        replaced, self._replaced = self._replaced, []
        for each in reversed(replaced):
            in_place = vars(each.holder).get(each.name) is each.replacement
            if wanted is not None and not (id(each.replacement) in wanted and in_place):
                self._replaced.insert(0, each)
            elif each.was_set:
                setattr(each.holder, each.name, each.original)
            else:
                vars(each.holder).pop(each.name, None)
