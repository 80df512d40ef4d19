"""Reading a source past samples that raise, as far as its iterator allows it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from .data import BadSample, describe_name, what_was_raised
from .failures import FailureType, classify_exception
from .sample_guard import SUBSTITUTES, DataSourceError, Guard, LetPass


class Reading:
    """
    Reads a source to its end, past samples that raise.

    Args:
        open_source (`Callable[[], Iterator]`):
            Opens it at its beginning.
        guard ([`Guard`]):
            What the guards of the loader share.
        where (`Callable[[int], dict]`):
            What a [`BadSample`] says about the place of the nth sample.
        advance (`Callable[[], Iterator | None]`, *optional*):
            Opens it where it stands after a failure, which is behind the sample if the source counts it before it
            raises. Without it, the source is opened at its beginning, and what it has given already is skipped.
        size (`Callable[[Any], int]`, *optional*):
            How many samples something it gives holds. Defaults to one.
    """

    def __init__(
        self,
        open_source: Callable[[], Iterator[Any]],
        guard: Guard,
        where: Callable[[int], dict[str, Any]],
        advance: Callable[[], Iterator[Any] | None] | None = None,
        size: Callable[[Any], int] | None = None,
    ) -> None:
        self._open = open_source
        self._guard = guard
        self._where = where
        self._advance = advance
        self._size = size
        self.source: Iterator[Any] | None = None
        # Samples so far, those left out among them, and what was given or raised so far.
        self.ordinal = 0
        self._position = 0
        self._left_out: set[int] = set()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        failure: Exception | None = None
        if self.source is None:
            self.source = self._guard.call(self._open)
        try:
            given = next(self.source)
        except StopIteration:
            raise
        except Exception as error:
            failure = error
        if failure is not None:
            given = self._recover(failure)
        self._position += 1
        self.ordinal += 1 if self._size is None else self._size(given)
        return given

    def _recover(self, error: Exception) -> Any:
        """What comes after a failure: the sample itself, at the second attempt, or the one behind it."""
        if self._guard.retry is not None and classify_exception(error) is FailureType.NETWORK:
            # Not asked again but opened anew: it is most often a generator, which is dead.
            return self._guard.call_again(error, self._again)
        self._guard.passes(error)
        failed: list[BadSample] = []
        while True:
            failed.append(BadSample("loading", **what_was_raised(error), **self._where(self.ordinal + len(failed))))
            if len(failed) > SUBSTITUTES:
                raise LetPass(_cannot_be_passed(failed, error))
            assert self.source is not None
            if not inspect.isgenerator(self.source):
                try:
                    given = next(self.source)
                except StopIteration:
                    if not _in_a_generator(error):
                        # It lives, and the one that raised was its last.
                        self._leave_out(failed)
                        raise
                except Exception as again:
                    self._guard.passes(again)
                    error = again
                    continue
                else:
                    self._leave_out(failed)
                    return given
            behind = None if self._advance is None else self._advance()
            if behind is None:
                given = self._tried_again(failed, error)
                self._guard.findings.loaded_after_all(describe_name(failed[-1].name), error)
                return given
            self.source = behind
            try:
                given = next(self.source)
            except StopIteration:
                self._leave_out(failed)
                raise
            except Exception as again:
                self._guard.passes(again)
                error = again
            else:
                self._leave_out(failed)
                return given

    def _leave_out(self, failed: list[BadSample]) -> None:
        for bad in failed:
            self._left_out.add(self._position)
            self._position += 1
            self.ordinal += 1
            self._guard.findings.add(bad)

    def _again(self) -> Any:
        """The sample that raised, from the source opened anew and brought to where it was."""
        source = self._open()
        if source is self.source:
            raise StopIteration
        for position in range(self._position):
            try:
                next(source)
            except StopIteration:
                raise
            except Exception:
                if position not in self._left_out or inspect.isgenerator(source):
                    raise
        given = next(source)
        self.source = source
        return given

    def _tried_again(self, failed: list[BadSample], error: Exception) -> Any:
        try:
            return self._again()
        except StopIteration:
            pass
        except Exception as again:
            self._guard.passes(again)
        raise LetPass(_cannot_be_passed(failed, error))


def _in_a_generator(error: BaseException) -> bool:
    """Whether an exception came through a generator, which is dead then."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
            return True
        trace = trace.tb_next
    return False


def _cannot_be_passed(failed: list[BadSample], error: Exception) -> DataSourceError:
    again = f", and so did the {len(failed) - 1} after it" if len(failed) > 1 else ", twice"
    source = DataSourceError(
        f"The stream raised at {failed[0]}{again}, and cannot be read past it: what has raised there is the source "
        "itself, and its iterator ends with that. Please repair or remove the sample, or move the code that raises "
        "from the source into a function given to `map`, where a sample can be left out."
    )
    source.__cause__ = error
    return source


def place(name: str) -> dict[str, Any]:
    """Shard, ordinal and stage in the name of a sample; of several that were mapped together, those of the first."""
    found = re.match(r"(\d+):(\d+)(?:_.*?)?(?:@(\d+))?$", name)
    if found is None:
        return {"shard": None, "stream_ordinal": None}
    shard, ordinal, stage = found.groups()
    place = {"shard": int(shard), "stream_ordinal": int(ordinal)}
    return place if stage is None else place | {"stage": int(stage)}


def is_simple(key: Any) -> bool:
    """Whether a name is that of one sample, and neither unknown nor that of several that were mapped together."""
    return re.fullmatch(r"\d+:\d+", str(key)) is not None
