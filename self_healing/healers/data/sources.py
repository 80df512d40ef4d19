"""Reads on past samples that raise."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...failures.classify import classify_exception, is_error
from ...failures.recipes import FailureType
from ...system.random_state import RandomState
from .guard import MAX_BAD_IN_A_ROW, CallResult, DataSourceError, Guard, LetPass, shallow_copy
from .quarantine import BadSample, describe_name


# ---- reading: reads a source past samples that raise, as far as its iterator allows it ----


# Failures of one iterator after which its source is read again up to there, to see what became of the sample. Later it
# is known to be past what it raised for.
_CHECKED = 3


class SourceReader:
    """Reads a source to its end, past samples that raise."""

    def __init__(
        self,
        open_source: Callable[[], Iterator[Any]],
        guard: Guard,
        where: Callable[[int], dict[str, Any]],
        advance: Callable[[], Iterator[Any] | None] | None = None,
        size: Callable[[Any], int] | None = None,
        apart: Callable[[], bool] | None = None,
    ) -> None:
        self._guard = guard
        self._where = where
        self._advance = advance
        self._size = size
        self._apart = apart
        self._reopener = Reopener(open_source, guard, self._place)
        self.source: Iterator[Any] | None = None
        # Samples so far, those left out among them.
        self.ordinal = 0
        # What comes before anything the source gives: samples, and those that are left out between them.
        self._next: deque[Any] = deque()
        self._checked = 0
        self._stays = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        failure: BaseException | None = None
        if self.source is None:
            self.source = self._reopener.open()
        while self._next:
            given = self._next.popleft()
            if not isinstance(given, BadSample):
                return self._give(given)
            self._leave_out([given])
        try:
            given = next(self.source)
        except StopIteration:
            raise
        except BaseException as error:
            if not is_error(error):
                raise
            failure = error
        return self._give(given if failure is None else self._recover(failure))

    def _give(self, given: Any) -> Any:
        self.ordinal += 1 if self._size is None else self._size(given)
        self._reopener.was_given(given)
        return given

    def _recover(self, error: BaseException) -> Any:
        """Goes on after a failure: with the sample itself, at the second attempt, or with the one behind it."""
        if self._guard.retry is not None and classify_exception(error) is FailureType.NETWORK:
            return self._reconnected(error)
        if self._guard.names_only:
            raise error
        self._guard.raise_if_not_the_sample(error)
        failed: list[BadSample] = []
        while True:
            where = self._where(self.ordinal + len(failed))
            failed.append(self._guard.known.that_raised("loading", error, **where))
            if len(failed) > MAX_BAD_IN_A_ROW:
                raise LetPass(_cannot_be_passed(failed, error))
            if not inspect.isgenerator(self.source):
                try:
                    result = self._read_on()
                except StopIteration:
                    if not _in_a_generator(error):
                        # It lives, and the one that raised was its last.
                        self._leave_out(failed)
                        raise
                else:
                    if result.error is None:
                        return self._after(failed, result.value, error)
                    error = result.error
                    continue
            behind = None if self._advance is None else self._advance()
            if behind is None:
                given = self._tried_again(failed, error)
                self._guard.known.loaded_on_retry(describe_name(failed[-1].name), error)
                return given
            self.source = behind
            try:
                result = self._read_on()
            except StopIteration:
                self._leave_out(failed)
                raise
            if result.error is None:
                self._leave_out(failed)
                return result.value
            error = result.error

    def _read_on(self) -> CallResult:
        """Reads on after a failure."""
        assert self.source is not None
        try:
            return CallResult(next(self.source))
        except StopIteration:
            raise
        except BaseException as error:
            if not is_error(error):
                raise
            self._guard.raise_if_not_the_sample(error)
            return CallResult(None, error)

    def _reconnected(self, error: BaseException) -> Any:
        """Reads on once the network is back."""
        source = self.source
        assert source is not None
        # Most often it is a generator, which is dead, and opened again; where that is impossible it is asked again.
        alive = not inspect.isgenerator(source) and self._is_shared()
        failure: BaseException | None = None
        try:
            return self._guard.call_again(error, (lambda: next(source)) if alive else self._again)
        except StopIteration:
            raise
        except CannotBeReopened:
            failed = self._guard.known.that_raised("loading", error, **self._where(self.ordinal))
            failure = _cannot_be_passed([failed], error)
        except Exception as again:
            failure = again
        # Of the source, not of the guard.
        raise LetPass(failure)

    def _leave_out(self, failed: list[BadSample]) -> None:
        for bad in failed:
            self._reopener.was_left_out()
            self.ordinal += 1
            self._guard.known.add(bad)

    def _after(self, failed: list[BadSample], given: Any, error: BaseException) -> Any:
        """
        Goes on after failures of an iterator that lives on: it may be past the samples it raised for, and give the one
        behind them, or not, and give the first of them.
        """
        came: list[Any] = [] if self._stays else failed
        if not self._stays and self._checked < _CHECKED:
            self._checked += 1
            if not self._is_shared():
                came = self._reopener.outcomes(failed, given, self.source)
            self._stays = not came
        if any(each is not bad for each, bad in zip(came, failed, strict=False)) or len(came) < len(failed):
            self._guard.known.loaded_on_retry(describe_name(failed[0].name), error)
        self._next.extend([*came, given])
        while isinstance(self._next[0], BadSample):
            self._leave_out([self._next.popleft()])
        return self._next.popleft()

    def _is_shared(self) -> bool:
        """Whether opening the source again would disturb the iterator that is read."""
        return self._apart is not None and not self._apart()

    def _place(self) -> str:
        return describe_name(BadSample("", "", "", **self._where(self.ordinal)).name)

    def _again(self) -> Any:
        """Reads once more what the source raised for."""
        self.source, given = self._reopener.read_again(self.source)
        return given

    def _tried_again(self, failed: list[BadSample], error: BaseException) -> Any:
        try:
            return self._again()
        except (StopIteration, CannotBeReopened):
            pass
        except BaseException as again:
            if not is_error(again):
                raise
            self._guard.raise_if_not_the_sample(again)
        raise LetPass(_cannot_be_passed(failed, error))


def _in_a_generator(error: BaseException) -> bool:
    """Whether an exception came through a generator, which is dead then."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
            return True
        trace = trace.tb_next
    return False


def _cannot_be_passed(failed: list[BadSample], error: BaseException) -> DataSourceError:
    again = f", and so did the {len(failed) - 1} after it" if len(failed) > 1 else ", twice"
    source = DataSourceError(
        f"The stream raised at {failed[0]}{again}, and cannot be read past it: what has raised there is the source "
        "itself, and its iterator ends with that. Please repair or remove the sample, or move the code that raises "
        "from the source into a function given to `map`, where a sample can be left out."
    )
    source.__cause__ = error
    return source


# ---- reopening: opens a source again, and reads it to where it was ----


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
