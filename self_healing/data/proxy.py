"""An object that takes the place of another one."""

from __future__ import annotations

from typing import Any


class Proxy:
    """Reads and sets its attributes on the object it wraps, except for those that a subclass declares as its own."""

    _own: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._own or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
