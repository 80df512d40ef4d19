"""A block that hands its exception to a method."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


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
