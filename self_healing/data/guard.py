"""
Samples that cannot be loaded or put into a batch: found, tried once more, and replaced.

The guards stand where the exception comes from, in the data loader or its workers: further up it would end the
generator of the loader. They know no trainer, can be pickled, and only pass calls on as long as nothing raises.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ..classify import classify_exception, is_error
from ..failures import FailureType
from ..random_state import RandomState
from .quarantine import (
    BadSample,
    Findings,
    SampleName,
    describe_name,
    preview_of,
    what_was_raised,
)


logger = logging.getLogger("self_healing")

T = TypeVar("T")

# Not the sample's fault: somebody else deals with it.
_PASSED_ON = frozenset(
    {
        FailureType.NETWORK,
        FailureType.OUT_OF_MEMORY,
        FailureType.DISK,
        FailureType.DEVICE,
        FailureType.PROCESS_DIED,
    }
)
# Samples in a row that cannot be used either, after which it is not the samples.
SUBSTITUTES = 10
# Others that are tried in place of a sample in which nothing counts: a data set may be full of them.
_LABEL_SUBSTITUTES = 3
# Batches in a row in which nothing counts, and for which nothing better was found: it is a wiring bug, and the loss,
# which is 0, tells.
_GIVE_UP_AFTER = 3
_NOTHING_COUNTS = -100
_CAUSES = 10
# Whose generators a collator may draw from.


class DataSourceError(RuntimeError):
    """Sample after sample cannot be used: it is not they, but the code or the storage they come through."""


class LetPass(Exception):
    """Carries an exception that is not the guard's to deal with past the guard's own handlers."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Guard:
    """
    What the guards of one data loader share.

    Args:
        findings ([`Findings`]):
            Where bad samples are told, and which are known.
        seed (`int`):
            Of the run; which sample stands in for which depends on nothing else.
        retry (`Callable`, *optional*):
            Makes a call of dataset or collator again, as `retry(function)`, when the network has failed.
        names_only (`bool`, *optional*, defaults to `False`):
            Whether bad samples are only named in the exception they raise.
    """

    def __init__(
        self,
        findings: Findings,
        seed: int,
        retry: Callable[..., Any] | None = None,
        names_only: bool = False,
    ) -> None:
        self.findings = findings
        self.seed = seed
        self.retry = retry
        self.names_only = names_only
        # A sign of life where many samples are read to get back to one; in the training process somebody listens.
        self.alive: Callable[[], None] = _nobody_listens
        self.off = False
        # Of the samples that are about to be collated.
        self.names: Sequence[SampleName] | None = None

    def stand_down(self) -> None:
        """From here on everything is passed on, also by iterators that were made before."""
        self.off = True

    def call(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The one place where code of the data is called; if the network is what fails, again."""
        try:
            return function(*arguments, **named)
        except Exception as error:
            if self.retry is None or classify_exception(error) is not FailureType.NETWORK:
                raise
            failure = error
        # Outside of the handler: each attempt has a context of its own.
        return self.call_again(failure, function, *arguments, **named)

    def call_again(self, failure: BaseException, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """What is done after a failure of the network, which was the first attempt."""
        failed = [failure]

        def attempt() -> T:
            if failed:
                raise failed.pop()
            return function(*arguments, **named)

        assert self.retry is not None
        return self.retry(attempt)  # type: ignore[no-any-return]

    def attempt(self, function: Callable[..., T], *arguments: Any) -> CallResult:
        """
        What a call gives, or what it raises.

        Raises:
            LetPass: For an exception that says nothing about a sample.
        """
        try:
            return CallResult(self.call(function, *arguments))
        except BaseException as error:
            if not is_error(error):
                raise
            self.passes(error)
            return CallResult(None, error)

    def passes(self, error: BaseException) -> None:
        """
        Lets an exception pass that says nothing about a sample.

        Raises:
            LetPass: With it.
        """
        if isinstance(error, LetPass):
            raise error
        if isinstance(error, DataSourceError) or classify_exception(error) in _PASSED_ON:
            raise LetPass(error) from None

    def attempt_one(self, function: Callable[..., T], *arguments: Any, patient: bool = True) -> CallResult:
        """
        The same for what may be the sample's fault or not: a dead link, a bad sector, a header that asks for too much.

        Args:
            function (`Callable`):
                What to call, with the further arguments.
            patient (`bool`, *optional*, defaults to `True`):
                Whether it is called again when the network fails.

        Raises:
            LetPass: For an exception that says nothing about a sample.
        """
        try:
            return CallResult(self.call(function, *arguments) if patient else function(*arguments))
        except BaseException as error:
            if not is_error(error):
                raise
            if not may_be_the_sample(error):
                self.passes(error)
            return CallResult(None, error)

    def contained(self, guarded: Callable[[], T], plain: Callable[[], T]) -> T:
        """A failure of the guard itself is logged, and the data are loaded without it from then on."""
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
                "self_healing failed while it guarded the data; they are loaded without it from here on. Please "
                "report this traceback.",
                exc_info=error,
            )
        if passed is not None:
            # Outside of the handler, so that it keeps the cause and context it came with.
            raise passed
        return plain()

    def known(self) -> dict[SampleName, str]:
        """What is not to be used. Workers ask what others have found."""
        if get_worker_info() is not None:
            self.findings.learn()
        return self.findings.blocked


def _nobody_listens() -> None:
    pass


@dataclass(slots=True)
class CallResult:
    """What a call gave, or what it raised."""

    value: Any
    error: BaseException | None = None


class Supply(Protocol):
    """Where substitutes come from."""

    def substitutes(self, name: SampleName) -> Iterator[tuple[SampleName, Any]]:
        """Samples in place of another one, with their names, in an order that depends on it alone."""

    def refuse(self, name: SampleName, sample: Any) -> None:
        """A substitute that was not wanted after all."""

    def describe(self, name: SampleName) -> dict[str, Any]:
        """What a [`BadSample`] says about where a sample is."""


def worker_id() -> int | None:
    """The data loader worker this is; `None` in the training process."""
    info = get_worker_info()
    return None if info is None else int(info.id)


def may_be_the_sample(error: BaseException) -> bool:
    """Whether an exception is that of a service, a disk or a host which may be well but for this one sample."""
    failure = classify_exception(error)
    if failure is FailureType.NETWORK:
        return True
    cause: BaseException | None = error
    # A chain of causes may be closed to a ring.
    for _ in range(_CAUSES):
        if cause is None:
            break
        if failure is FailureType.OUT_OF_MEMORY and isinstance(cause, MemoryError):
            return True
        if failure is FailureType.DISK and isinstance(cause, OSError) and cause.errno == errno.EIO:
            return True
        cause = cause.__cause__
    return False


def shallow_copy(sample: Any) -> Any:
    """A copy of what may be changed in place by whoever is given it: keys taken out, entries put in."""
    if type(sample) is dict:
        return sample.copy()
    if not isinstance(sample, Mapping | list):
        return sample
    try:
        return copy.copy(sample)
    except Exception:
        return sample


def _copies(samples: Any) -> Any:
    return [shallow_copy(sample) for sample in samples] if isinstance(samples, list) else shallow_copy(samples)


def _own_labels_count_nothing(sample: Any) -> bool:
    """Whether a sample comes with labels, and all of them are masked."""
    labels = sample.get("labels") if isinstance(sample, Mapping) else None
    if labels is None:
        return False
    try:
        return bool((torch.as_tensor(labels) == _NOTHING_COUNTS).all())
    except (TypeError, ValueError, RuntimeError):
        return False


def is_empty(sample: Any) -> bool:
    """Whether a sample is a sequence of length 0."""
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
    shape = getattr(ids, "shape", None)
    if shape is not None:
        return len(shape) > 0 and shape[-1] == 0
    return isinstance(ids, list | tuple) and not ids


def counts_nothing(batch: Any) -> bool:
    """Whether a batch has labels for its tokens, and all of them are masked."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.ndim < 2 or labels.numel() == 0:
        return False
    if labels.is_floating_point() or labels.device.type != "cpu":
        # On a device, asking would make the host wait for it.
        return False
    return int(labels.max()) == _NOTHING_COUNTS


def candidates(index: int, length: int, seed: int) -> Iterator[int]:
    """
    The samples that may stand in for another one: the same in every worker, process and epoch, and drawn from no
    generator that training draws from.

    Args:
        index (`int`):
            Of the sample.
        length (`int`):
            Of the data.
        seed (`int`):
            Of the run.
    """
    given = {index % length}
    # Each try finds a new one with at least the share that is left; some more than that end in order.
    for attempt in range(20 * SUBSTITUTES):
        digest = hashlib.blake2b(f"{seed}:{index}:{attempt}".encode(), digest_size=8).digest()
        candidate = int.from_bytes(digest, "big") % length
        if candidate not in given:
            given.add(candidate)
            yield candidate
    for candidate in range(length):
        if candidate not in given:
            yield candidate


class PassesThrough:
    """Stands in for an object: whatever is not its own business is asked of, and set on, that object."""

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


class GuardedDataset(PassesThrough):
    """
    A dataset that can be indexed, with another sample in place of each one that cannot be used.

    Args:
        wrapped (`Any`):
            The dataset.
        guard ([`Guard`]):
            What it shares with the collator.
    """

    _own = frozenset({"wrapped", "guard"})

    def __init__(self, wrapped: Any, guard: Guard) -> None:
        self.wrapped = wrapped
        self.guard = guard

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getitem__(self, index: Any) -> Any:
        if self.guard.off or not _is_index(index):
            return self.wrapped[index]
        return self.guard.contained(lambda: self._fetch([index])[0], lambda: self.wrapped[index])

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        if self.guard.off or not all(_is_index(index) for index in indices):
            return list(self._load(indices))
        fetched: list[Any] = self.guard.contained(lambda: self._fetch(indices), lambda: self._load(indices))
        return fetched

    def _load(self, indices: Sequence[Any]) -> Any:
        # As torch's fetcher does it.
        together = getattr(self.wrapped, "__getitems__", None)
        if together is None:
            return [self.wrapped[index] for index in indices]
        loaded = together(indices)
        return list(loaded) if isinstance(loaded, Iterator) else loaded

    def _fetch(self, indices: Sequence[int]) -> Any:
        guard = self.guard
        blocked = guard.known()
        used = [self.actual(index) for index in indices] if blocked else indices
        if guard.names_only:
            loaded = guard.attempt(self._load, used)
            if loaded.error is not None:
                self._name(loaded.error, used)
                raise LetPass(loaded.error)
            return loaded.value
        loaded = guard.attempt_one(self._load, used)
        if loaded.error is not None or any(is_empty(sample) for sample in loaded.value):
            # What has been waited for already is not waited for again, sample by sample.
            patient = loaded.error is None or not may_be_the_sample(loaded.error)
            # A group holds the same one several times: only the first of them is tried.
            pairs = [self._usable(self.actual(index), patient) for index in used]
            if loaded.error is not None and all(name == index for (name, _), index in zip(pairs, used, strict=True)):
                guard.findings.loaded_after_all(f"One of the samples {list(used)}", loaded.error)
            used, samples = [name for name, _ in pairs], [sample for _, sample in pairs]
        else:
            samples = loaded.value
        guard.names = used
        return samples

    def _name(self, error: BaseException, indices: Sequence[int]) -> None:
        """Says in the exception which sample it was."""
        alone = [index for index in indices if self.guard.attempt(self._load, [index]).error is not None]
        named = ", ".join(str(index) for index in alone or indices)
        error.add_note(f"self_healing: raised while the training data were loaded, by the sample with index {named}.")

    def _usable(self, index: int, patient: bool) -> tuple[int, Any]:
        """A sample, or the first of its substitutes that can be used."""
        bad: list[BadSample] = []
        sample, raised = self._twice(index, bad, patient)
        if not bad:
            return index, sample
        for name, sample in self._substitutes(index, bad, raised):
            self._tell(bad, name)
            return name, sample
        raise LetPass(_no_substitute(bad))

    def _tell(self, bad: Sequence[BadSample], replaced_by: int) -> None:
        for sample in bad:
            self.guard.findings.add(_with(sample, replaced_by=replaced_by))

    def _substitutes(
        self, index: int, bad: list[BadSample], raised: BaseException | None = None
    ) -> Iterator[tuple[int, Any]]:
        """What stands in for a sample, which may have raised something that is perhaps not its fault."""
        suspect = raised is not None and may_be_the_sample(raised)
        try:
            length = len(self.wrapped)
        except TypeError:
            return
        failed = 0
        for candidate in candidates(index, length, self.guard.seed):
            if candidate in self.guard.findings.blocked:
                continue
            before = len(bad)
            # One attempt is enough to know whether it is the sample or what it comes through.
            sample, failure = self._twice(candidate, bad, patient=not suspect)
            if failure is not None and may_be_the_sample(failure):
                raise LetPass(raised if raised is not None and suspect else failure)
            if len(bad) == before:
                yield candidate, sample
            failed += 1
            if failed >= SUBSTITUTES:
                return

    def _twice(self, index: int, bad: list[BadSample], patient: bool) -> tuple[Any, BaseException | None]:
        """A sample, tried once more if it raises; added to the bad ones, with what it raised, if it cannot be used."""
        attempts, guard = 1, self.guard
        loaded = guard.attempt_one(self._load, [index], patient=patient)
        if loaded.error is not None and not (patient and may_be_the_sample(loaded.error)):
            first, attempts = loaded.error, 2
            loaded = guard.attempt_one(self._load, [index], patient=patient)
            if loaded.error is None:
                guard.findings.loaded_after_all(describe_name(index), first)
        where = self.describe(index) | {"attempts": attempts}
        if loaded.error is not None:
            preview = self._preview(index)
            raised = BadSample("loading", preview=preview, **what_was_raised(loaded.error), **where)
            bad.append(guard.findings.as_written(raised))
            return None, loaded.error
        sample = loaded.value[0]
        if is_empty(sample):
            text = "a sequence of length 0"
            bad.append(BadSample("empty", "", text, preview=preview_of(sample), **where))
        return sample, None

    def _preview(self, index: int) -> str | None:
        """What there is to see of a sample that raises: of Hugging Face datasets, what it was before the transform."""
        try:
            return preview_of(self.wrapped.with_format(None)[int(index)])
        except Exception:
            return None

    def actual(self, index: int) -> int:
        """The sample that is used for an index, as far as is known."""
        blocked = self.guard.findings.blocked
        if index not in blocked:
            return index
        # Drawn anew and not remembered: a worker that is started later comes to the same.
        usable = (other for other in candidates(index, len(self.wrapped), self.guard.seed) if other not in blocked)
        return next(usable, index)

    # ---- for the collator ----

    def substitutes(self, name: SampleName) -> Iterator[tuple[SampleName, Any]]:
        """See [`Supply`]."""
        bad: list[BadSample] = []
        told = 0
        for found, sample in self._substitutes(int(name), bad):
            self._tell(bad[told:], found)
            told = len(bad)
            yield found, sample

    def refuse(self, name: SampleName, sample: Any) -> None:
        """See [`Supply`]."""

    def describe(self, name: SampleName) -> dict[str, Any]:
        """See [`Supply`]."""
        return {"dataset_index": int(name), "worker": worker_id()}


class GuardedCollator(PassesThrough):
    """
    A collator that is given another sample in place of each one it cannot put into a batch, and for which a batch in
    which no token counts is a matter of the data.

    Args:
        wrapped (`Callable`):
            The collator.
        guard ([`Guard`]):
            What it shares with the dataset.
        supply ([`Supply`]):
            The guarded dataset.
    """

    _own = frozenset({"wrapped", "guard", "supply", "in_vain", "draws"})

    def __init__(self, wrapped: Callable[[Any], Any], guard: Guard, supply: Supply) -> None:
        self.wrapped = wrapped
        self.guard = guard
        self.supply = supply
        self.in_vain = 0
        # Known to choose at random what counts.
        self.draws = False

    def __call__(self, samples: Any) -> Any:
        if self.guard.off:
            return self.wrapped(samples)
        # Many collators change the samples they are given, which no second attempt could stand.
        kept = _copies(samples)
        return self.guard.contained(lambda: self._collate(samples, kept), lambda: self.wrapped(kept))

    def _on_copies(self, samples: Any) -> Any:
        return self.wrapped(_copies(samples))

    def _collate(self, given: Any, samples: Any) -> Any:
        """Of the samples as they were given, and as they are kept for another attempt."""
        guard = self.guard
        names, guard.names = guard.names, None
        first = [given]
        # What it is given is what it would be given without the guard; if the network fails, copies after that.
        collated = guard.attempt(lambda: self.wrapped(first.pop()) if first else self._on_copies(samples))
        if collated.error is None and (guard.names_only or not counts_nothing(collated.value)):
            self.in_vain = 0
            return collated.value
        if names is None or not isinstance(samples, list) or len(names) != len(samples):
            if collated.error is not None:
                raise LetPass(collated.error)
            return collated.value
        if collated.error is None:
            return self._undisturbed(lambda: self._with_labels(list(samples), list(names), collated.value))
        if guard.names_only:
            bad = self._culprits(samples) or range(len(samples))
            named = ", ".join(str(names[row]) for row in bad)
            collated.error.add_note(f"self_healing: raised by the collator, for the sample with index {named}.")
            raise LetPass(collated.error)
        again = guard.attempt(self._on_copies, samples)
        if again.error is None:
            guard.findings.loaded_after_all(f"The batch of the samples {list(names)}", collated.error)
            return again.value
        return self._without_culprits(list(samples), list(names), collated.error)

    def _without_culprits(self, samples: list[Any], names: list[SampleName], error: BaseException) -> Any:
        dropped: list[int] = []
        culprits = self._culprits(samples, names)
        for row in culprits:
            # What was raised first is what happened; only of several each has its own.
            alone = self.guard.attempt(self._on_copies, [samples[row]]).error if len(culprits) > 1 else None
            bad = [self._bad(names[row], samples[row], alone or error)]
            found = self._substitute(names[row], bad)
            if found is None and (len(bad) > SUBSTITUTES or len(dropped) + 1 == len(samples)):
                raise LetPass(_no_substitute(bad))
            for each in bad:
                self._tell(each, names[row] if found is None else found[0])
            if found is None:
                # The stream has come to its end: its last batch is a shorter one.
                dropped.append(row)
            else:
                names[row], samples[row] = found
        samples = [sample for row, sample in enumerate(samples) if row not in dropped]
        collated = self.guard.attempt(self._on_copies, samples)
        if collated.error is not None:
            raise LetPass(collated.error if culprits else error)
        return collated.value

    def _culprits(self, samples: list[Any], names: list[SampleName] | None = None) -> list[int]:
        """
        The rows that raise by themselves or, if none does, the one in whose place another one does not or, if there is
        none to be had, the one without which the others do not.
        """
        rows = range(len(samples))
        alone = [row for row in rows if self._raises([samples[row]])]
        if alone or len(samples) < 2:
            return alone
        for row in rows if names is not None else ():
            if self._fits_with_another(samples, names[row], row):  # type: ignore[index]
                return [row]
        # Of two, each would fit as well without the other.
        for row in rows if len(samples) > 2 else ():
            if not self._raises([*samples[:row], *samples[row + 1 :]]):
                return [row]
        return []

    def _raises(self, samples: list[Any]) -> bool:
        return self.guard.attempt(self._on_copies, samples).error is not None

    def _fits_with_another(self, samples: list[Any], name: SampleName, row: int) -> bool:
        found = next(self.supply.substitutes(name), None)
        if found is None:
            return False
        fits = not self._raises([*samples[:row], found[1], *samples[row + 1 :]])
        self.supply.refuse(*found)
        return fits

    def _substitute(self, name: SampleName, bad: list[BadSample]) -> tuple[SampleName, Any] | None:
        for tried, (found, sample) in enumerate(self.supply.substitutes(name)):
            error = self.guard.attempt(self._on_copies, [sample]).error
            if error is None:
                return found, sample
            bad.append(self._bad(found, sample, error))
            if tried + 1 >= SUBSTITUTES:
                break
        return None

    @staticmethod
    def _undisturbed(function: Callable[[], T]) -> T:
        """Without a trace in the generators the run draws from."""
        state = RandomState.capture()
        try:
            return function()
        finally:
            state.restore()

    def _by_chance(self, samples: list[Any]) -> bool:
        """Whether it was drawn that nothing counts, as in masked language modelling, and is nothing wrong."""
        if all(_own_labels_count_nothing(sample) for sample in samples):
            return False
        if not self.draws:
            before = RandomState.capture()
            # One of its own would be drawn from for good.
            self.draws = _has_generator(self.wrapped) or (
                not counts_nothing(self.guard.attempt(self._on_copies, samples).value) or _has_moved(before)
            )
        return self.draws

    def _with_labels(self, samples: list[Any], names: list[SampleName], batch: Any) -> Any:
        """None of the tokens counts: other samples, if there are some in which some do; else the batch as it is."""
        if self.in_vain >= _GIVE_UP_AFTER or self._by_chance(samples):
            return batch
        replaced: list[tuple[BadSample, SampleName]] = []
        for row, name in enumerate(names):
            text = "all labels are -100: none of its tokens counts"
            bad = BadSample("no_labels", "", text, preview=preview_of(samples[row]), **self._where(name, attempts=1))
            found = self._substitute_with_labels(name)
            if found is not None:
                replaced.append((bad, found[0]))
                samples[row] = found[1]
        collated = self.guard.attempt(self._on_copies, samples) if replaced else CallResult(None)
        if not replaced or collated.error is not None or counts_nothing(collated.value):
            self.in_vain += 1
            return batch
        self.in_vain = 0
        for bad, instead in replaced:
            self._tell(bad, instead)
        return collated.value

    def _substitute_with_labels(self, name: SampleName) -> tuple[SampleName, Any] | None:
        refused, found = [], None
        for tried, (other, sample) in enumerate(self.supply.substitutes(name)):
            collated = self.guard.attempt(self._on_copies, [sample])
            if collated.error is None and not counts_nothing(collated.value):
                found = other, sample
                break
            refused.append((other, sample))
            if tried + 1 >= _LABEL_SUBSTITUTES:
                break
        for each in reversed(refused):
            self.supply.refuse(*each)
        return found

    def _bad(self, name: SampleName, sample: Any, error: BaseException) -> BadSample:
        bad = BadSample("collation", preview=preview_of(sample), **what_was_raised(error), **self._where(name, 2))
        return self.guard.findings.as_written(bad)

    def _where(self, name: SampleName, attempts: int) -> dict[str, Any]:
        return self.supply.describe(name) | {"attempts": attempts}

    def _tell(self, bad: BadSample, instead: SampleName) -> None:
        self.guard.findings.add(_with(bad, replaced_by=instead) if isinstance(instead, int) else bad)


def _has_generator(collator: Any) -> bool:
    held = getattr(collator, "__dict__", {}).values()
    return any(isinstance(each, torch.Generator | np.random.Generator | random.Random) for each in held)


def _has_moved(before: RandomState) -> bool:
    """Whether a generator of the run has been drawn from."""
    now = RandomState.capture()
    return (
        now.python != before.python
        or not torch.equal(now.cpu, before.cpu)
        or any(not np.array_equal(one, other) for one, other in zip(now.numpy, before.numpy, strict=True))
    )


def _is_index(index: Any) -> bool:
    return isinstance(index, Integral) and not isinstance(index, bool)


def _with(sample: BadSample, replaced_by: int) -> BadSample:
    return replace(sample, replaced_by=replaced_by)


def _no_substitute(bad: Sequence[BadSample]) -> DataSourceError:
    last = "; ".join(str(sample) for sample in bad[-3:])
    return DataSourceError(
        f"{bad[0]}, and none of the {len(bad) - 1} samples tried in its place can be used either: it is not the "
        f"samples but the code or the storage they come through. The last ones: {last}."
    )
