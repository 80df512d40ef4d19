"""Calls the user's code for samples; counts, retries and replaces those that raise."""

from __future__ import annotations

import copy
import errno
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from ...failures.classify import causes_of, classify_exception, is_error
from ...failures.recipes import FailureType
from .quarantine import BadSample, KnownBadSamples


logger = logging.getLogger("self_healing")


# ---- guard ----


T = TypeVar("T")

# Not the sample's fault: other families heal them.
_NOT_THE_SAMPLE = frozenset(
    {FailureType.NETWORK, FailureType.OUT_OF_MEMORY, FailureType.DISK, FailureType.DEVICE, FailureType.PROCESS_DIED}
)
# Samples in a row that cannot be used, after which it is not the samples.
MAX_BAD_IN_A_ROW = 10


class DataSourceError(RuntimeError):
    """Sample after sample cannot be used: it is not they, but the code or the storage they come through."""


class LetPass(Exception):
    """Carries an exception that the guard does not handle past the guard's own handlers."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


# The value of a call, and the exception that it raised instead.
CallResult = tuple[Any, BaseException | None]


def _nothing(*_: Any) -> None:
    pass


@dataclass(eq=False)
class Guard:
    """State that the guards of one data loader share, and the calls they make."""

    known: KnownBadSamples
    seed: int
    retry: Callable[..., Any] | None = None
    names_only: bool = False
    # Other processes load as well, and find what is not to be used.
    has_workers: bool = False
    # In the training process, called for each sample where many are read to get back to one, and for the first, which
    # tells whether the stream has begun elsewhere than before.
    alive: Callable[[], None] = _nothing
    began: Callable[[Any], Any] = _nothing
    # Loads without guards, also in iterators that were made before.
    off: bool = False
    # Of the samples that are about to be collated.
    names: list[Any] = field(default_factory=list)

    def attempt(
        self, function: Callable[..., Any], *arguments: Any, loads: bool = False, patient: bool = True
    ) -> CallResult:
        """
        Calls code of the data. Where it loads samples, a failure of network, disk or memory may be that of one
        sample: a dead link, a bad sector, a header that asks for too much.
        """
        try:
            return function(*arguments), None
        except BaseException as error:
            failure = error
        # Outside of the handler: each attempt has a context of its own.
        return self.after(failure, function, *arguments, loads=loads, patient=patient)

    def after(
        self,
        failure: BaseException,
        function: Callable[..., Any],
        *arguments: Any,
        loads: bool = False,
        patient: bool = True,
    ) -> CallResult:
        """Goes on after a call of code of the data has raised: calls it again if the network is what failed."""
        if patient and self.retry is not None and classify_exception(failure) is FailureType.NETWORK:
            try:
                return self.call_again(failure, function, *arguments), None
            except BaseException as error:
                failure = error
        if not is_error(failure):
            raise failure
        if not (loads and may_be_the_sample(failure)):
            self.raise_if_not_the_sample(failure)
        return None, failure

    def call_again(self, failure: BaseException, function: Callable[..., T], *arguments: Any) -> T:
        """Makes a call again whose first attempt has ended with a failure of the network."""
        failed = [failure]

        def attempt() -> T:
            if failed:
                raise failed.pop()
            return function(*arguments)

        assert self.retry is not None
        return self.retry(attempt)  # type: ignore[no-any-return]

    def raise_if_not_the_sample(self, error: BaseException) -> None:
        """Returns for an exception that a sample may be to blame for."""
        if isinstance(error, LetPass):
            raise error
        if isinstance(error, DataSourceError) or classify_exception(error) in _NOT_THE_SAMPLE:
            raise LetPass(error) from None

    def contained(self, guarded: Callable[[], T], plain: Callable[[], T]) -> T:
        """Loads with the guard; if the guard itself fails, logs that and loads without it from then on."""
        passed: BaseException | None = None
        try:
            return guarded()
        except LetPass as found:
            passed = found.error
        except StopIteration:
            raise
        except Exception as error:
            self.off = True
            logger.error(
                "self_healing failed while it guarded the data, which are loaded without guards from here on. The "
                "bug is ours, not yours.",
                exc_info=error,
            )
        if passed is not None:
            # Outside of the handler, so that it keeps the cause and context it came with.
            raise passed
        return plain()


def worker_id() -> int | None:
    """Number of the data loader worker this process is; `None` in the training process."""
    info = get_worker_info()
    return None if info is None else int(info.id)


def may_be_the_sample(error: BaseException) -> bool:
    """Whether a failure of network, disk or memory can be that of one sample, with everything else well."""
    failure = classify_exception(error)
    return (
        failure is FailureType.NETWORK
        or (failure is FailureType.OUT_OF_MEMORY and any(isinstance(each, MemoryError) for each in causes_of(error)))
        or (failure is FailureType.DISK and any(getattr(each, "errno", 0) == errno.EIO for each in causes_of(error)))
    )


# ---- proxy ----


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


# ---- copies: datasets and collators may change what they are given in place ----


def copies_of(samples: Any) -> Any:
    """Copies each sample of a list or a tuple."""
    return type(samples)(map(copy_of, samples)) if type(samples) in (list, tuple) else copy_of(samples)


def copy_of(sample: Any) -> Any:
    """Copies a sample whose entries may be taken out or replaced; returns itself if it cannot be copied."""
    try:
        return copy.copy(sample) if isinstance(sample, Mapping | list) else sample
    except Exception:
        return sample


# ---- substitutes ----


def candidates(index: int, length: int, seed: int) -> Iterator[int]:
    """
    Yields the indices of samples that may replace another one: the same in every worker, process and epoch, and drawn
    from no generator that training draws from.
    """
    given = {index % length}
    # Each try finds a new one with at least the share that is left; some more than that end in order.
    drawn = (_drawn(f"{seed}:{index}:{attempt}", length) for attempt in range(20 * MAX_BAD_IN_A_ROW))
    for candidate in itertools.chain(drawn, range(length)):
        if candidate not in given:
            given.add(candidate)
            yield candidate


def _drawn(text: str, length: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % length


def no_substitute(bad: Sequence[BadSample]) -> DataSourceError:
    """The exception for a sample, the first one given, none of whose substitutes can be used."""
    last = "; ".join(str(sample) for sample in bad[-3:])
    return DataSourceError(
        f"{bad[0]}, and none of the {len(bad) - 1} samples tried in its place can be used either: it is not the "
        f"samples but the code or the storage they come through. The last ones: {last}."
    )
