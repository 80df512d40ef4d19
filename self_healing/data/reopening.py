"""Opens a source again, and reads it to where it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..failures.classify import is_error
from ..healers.data.guard import DataSourceError, Guard
from ..system.random_state import RandomState
from .bad_sample import BadSample
from .copies import shallow_copy


class CannotBeReopened(Exception):
    """A source that is its own iterator, or is shorter than before."""


class Reopener:
    """Opens a source again, with the random states it was first opened with, and reads it to where it was."""

    def __init__(self, open_source: Callable[[], Iterator[Any]], guard: Guard, place: Callable[[], str]) -> None:
        self._open = open_source
        self._guard = guard
        self._place = place
        # What was given or raised so far, and the positions of what was left out.
        self._position = 0
        self._left_out: set[int] = set()
        # What was given last, and the generators at the first opening: opened again, the source has to give the same.
        self._last: Any = None
        self._random: RandomState | None = None

    def open(self) -> Iterator[Any]:
        """Opens the source for the first time."""
        self._random = RandomState.capture()
        return self._guard.call(self._open)

    def was_given(self, given: Any) -> None:
        """Notes something the source has given."""
        self._position += 1
        # Code that is given it may change it.
        self._last = _kept(given)

    def was_left_out(self) -> None:
        """Notes something that is left out."""
        self._left_out.add(self._position)
        self._position += 1

    def read_again(self, source: Iterator[Any] | None) -> tuple[Iterator[Any], Any]:
        """Reads once more what an iterator raised for."""
        before = RandomState.capture()
        try:
            again = self._brought_back(source)
            return again, next(again)
        finally:
            before.restore()

    def outcomes(self, failed: list[BadSample], given: Any, source: Iterator[Any] | None) -> list[Any]:
        """Finds out what became of samples for which an iterator raised and went on."""
        before = RandomState.capture()
        came: list[Any] = []
        try:
            again = self._brought_back(source)
            for bad in failed:
                try:
                    sample = next(again)
                except StopIteration:
                    break
                except BaseException as error:
                    if not is_error(error):
                        raise
                    came.append(bad)
                else:
                    if _is_same(sample, given):
                        return came
                    came.append(sample)
            # Where it does not come to that one, it is not the same stream again, and tells nothing.
            return came if _is_same(next(again, None), given) else [*failed]
        except BaseException as error:
            if not is_error(error):
                raise
            return [*failed]
        finally:
            before.restore()

    def _brought_back(self, current: Iterator[Any] | None) -> Iterator[Any]:
        """Opens the source again, with the generators it had, and reads it to where it was."""
        if self._random is not None:
            self._random.restore()
        source = self._open()
        if source is current:
            raise CannotBeReopened
        last = None
        for position in range(self._position):
            self._guard.alive()
            try:
                given = next(source)
            except StopIteration:
                raise CannotBeReopened from None
            except BaseException as error:
                if not is_error(error) or position not in self._left_out or inspect.isgenerator(source):
                    raise
            else:
                last = last if position in self._left_out else given
        if self._position > len(self._left_out) and not _is_same(_kept(last), self._last):
            raise DataSourceError(
                f"The stream raised at {self._place()}, and gives other samples than before when it is opened anew: "
                "some would be trained on twice and others never. Please let it draw its order from a generator of "
                "its own, seeded in `__iter__`, or move the code that raises into a function given to `map`, where a "
                "sample can be left out."
            )
        return source


def _kept(given: Any) -> Any:
    """Copies what is given away."""
    return tuple(shallow_copy(each) for each in given) if type(given) is tuple else shallow_copy(given)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two samples are, as far as they can be compared, the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if getattr(type(one), "__eq__", None) is getattr(object, "__eq__", None):
        return True
    try:
        if hasattr(one, "shape") and one.shape != other.shape:
            return False
        equal = one == other
        # Not a number is not equal to itself.
        return equal or bool(one != one) if isinstance(equal, bool) else bool((equal | (one != one)).all())
    except Exception:
        return True
