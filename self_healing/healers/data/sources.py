"""Reads on past samples that raise, as far as the iterator of their source allows it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any

from ...failures.classify import classify_exception, is_error
from ...failures.recipes import FailureType
from ...system.random_state import RandomState
from ..inspection import columns_of, digest_of
from .guard import MAX_BAD_IN_A_ROW, DataSourceError, Guard, LetPass, copy_of
from .quarantine import BadSample, describe_name


logger = logging.getLogger("self_healing")


@dataclass(eq=False)
class SourceReader:
    """Reads a source to its end, past samples that raise."""

    _open: Callable[[], Iterator[Any]]
    _guard: Guard
    _where: Callable[[int], dict[str, Any]]
    _size: Callable[[Any], int] | None = None
    # Of a stream whose samples go into batches, which need names: the first part of those.
    _shard: int | None = None
    source: Iterator[Any] | None = None
    # Samples so far, those left out among them.
    ordinal: int = 0
    # What was given or left out so far, in pieces that may hold several samples, and which of them was left out.
    _position: int = 0
    _left_out: set[int] = field(default_factory=set)
    # What was given last, and the generators at the first opening: opened again, the source has to give the same.
    _last: Any = None
    _random: RandomState | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        guard = self._guard
        if self.source is None or guard.off:
            return self._otherwise()
        try:
            given = next(self.source)
        except StopIteration:
            raise
        except BaseException as error:
            if not is_error(error):
                raise
            failure: BaseException | None = error
        else:
            failure = None
        if failure is not None:
            # Outside of the handler: each attempt has a context of its own.
            given = self._recover(failure)
        self.ordinal += 1 if self._size is None else self._size(given)
        self._position += 1
        if self._shard is not None:
            if self._last is None:
                self._begins(given)
            guard.names.append(f"{self._shard}:{self.ordinal - 1}")
        # Code that is given it may change it.
        self._last = given.copy() if type(given) is dict else copy_of(given)
        return given

    def _otherwise(self) -> Any:
        """Gives the first sample, or any where nothing is guarded any more."""
        if self.source is not None:
            return next(self.source)
        if self._guard.off:
            self.source = self._open()
        else:
            self._random = RandomState.capture()
            self.source, error = self._guard.attempt(self._open)
            if error is not None:
                raise LetPass(error)
        return next(self)

    def _begins(self, first: Any) -> None:
        """Called with the first sample that goes into a batch."""

    def _recover(self, error: BaseException) -> Any:
        """Goes on after a failure: with the sample behind it or, at the second attempt, with the sample itself."""
        if self._guard.retry is not None and classify_exception(error) is FailureType.NETWORK:
            return self._reconnected(error)
        if self._guard.names_only:
            error.add_note(f"self_healing: raised while the training data were streamed, at {self._place()}.")
            raise LetPass(error)
        failed: list[BadSample] = []
        while True:
            self._guard.raise_if_not_the_sample(error)
            where = self._where(self.ordinal + len(failed))
            failed.append(self._guard.known.that_raised("loading", error, **where))
            if len(failed) > MAX_BAD_IN_A_ROW:
                raise LetPass(_cannot_be_passed(failed, error))
            if inspect.isgenerator(self.source):
                return self._tried_again(failed, error)
            try:
                assert self.source is not None
                behind = next(self.source)
            except StopIteration:
                # What feeds it is dead.
                return self._tried_again(failed, error)
            except BaseException as again:
                if not is_error(again):
                    raise
                error = again
            else:
                self._leave_out(failed)
                return behind

    def _leave_out(self, failed: list[BadSample]) -> None:
        for bad in failed:
            self._left_out.add(self._position)
            self._position += 1
            self.ordinal += 1
            self._guard.known.add(bad)

    def _reconnected(self, error: BaseException) -> Any:
        """Reads on once the network is back."""
        try:
            return self._guard.call_again(error, self._read_again)
        except StopIteration:
            raise
        except Exception as again:
            # Of the source, not of the guard.
            raise LetPass(again) from None

    def _tried_again(self, failed: list[BadSample], error: BaseException) -> Any:
        try:
            given = self._read_again()
        except StopIteration:
            pass
        except BaseException as again:
            if not is_error(again):
                raise
            self._guard.raise_if_not_the_sample(again)
        else:
            self._guard.known.loaded_on_retry(describe_name(failed[-1].name), error)
            return given
        if not any(frame.f_code.co_flags & inspect.CO_GENERATOR for frame, _ in walk_tb(error.__traceback__)):
            # No generator has died of it: it was the last sample.
            self._leave_out(failed)
            logger.warning("%s raised, and the stream ended with it: please check that it was the last.", failed[-1])
            raise StopIteration
        raise LetPass(_cannot_be_passed(failed, error))

    def _read_again(self) -> Any:
        """Opens the source again, with the generators it had, and reads on from where it was."""
        before = RandomState.capture()
        try:
            if self._random is not None:
                self._random.restore()
            source = self._open()
            # One that is its own iterator stands where it stood.
            if source is not self.source:
                self._bring_forward(source)
            self.source = source
            return next(source)
        finally:
            before.restore()

    def _bring_forward(self, source: Iterator[Any]) -> None:
        last = None
        for position in range(self._position):
            self._guard.alive()
            try:
                given = next(source)
            except StopIteration:
                raise self._not_the_same() from None
            except BaseException as error:
                if not is_error(error) or position not in self._left_out or inspect.isgenerator(source):
                    raise
            else:
                last = last if position in self._left_out else given
        given_before = self._position > len(self._left_out)
        if given_before and digest_of(columns_of(last)) != digest_of(columns_of(self._last)):
            raise self._not_the_same()

    def _place(self) -> str:
        return describe_name(BadSample("", "", "", **self._where(self.ordinal)).name)

    def _not_the_same(self) -> DataSourceError:
        return DataSourceError(
            f"The stream raised at {self._place()}, and gives other samples than before when it is opened anew: "
            "some would be trained on twice and others never. Please let it draw its order from a generator of "
            "its own, seeded in `__iter__`, or move the code that raises into a function given to `map`, where a "
            "sample can be left out."
        )


def _cannot_be_passed(failed: list[BadSample], error: BaseException) -> DataSourceError:
    again = f", and so did the {len(failed) - 1} after it" if len(failed) > 1 else ", twice"
    source = DataSourceError(
        f"The stream raised at {failed[0]}{again}, and cannot be read past it: what has raised there is the source "
        "itself, and its iterator ends with that. Please repair or remove the sample, or move the code that raises "
        "from the source into a function given to `map`, where a sample can be left out."
    )
    source.__cause__ = error
    return source
