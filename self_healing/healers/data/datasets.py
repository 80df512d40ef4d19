"""Guards for datasets with an index, and for collators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

from ...failures.classify import is_error
from .guard import (
    MAX_BAD_IN_A_ROW,
    CallResult,
    Guard,
    LetPass,
    Proxy,
    candidates,
    copies_of,
    may_be_the_sample,
    no_substitute,
    worker_id,
)
from .quarantine import BadSample, SampleName, describe_name, preview_of


# ---- dataset ----


class GuardedDataset(Proxy):
    """Replaces the samples of a dataset with an index that cannot be loaded."""

    _own = frozenset({"wrapped", "guard"})

    def __init__(self, wrapped: Any, guard: Guard) -> None:
        self.wrapped = wrapped
        self.guard = guard

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0] if _is_index(index) else self.wrapped[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        guard, used = self.guard, indices
        if guard.off:
            return list(self._load(indices))
        if guard.has_workers or guard.known.blocked:
            used = guard.contained(lambda: self._used_for(indices), lambda: indices)
        try:
            # As torch's fetcher does it.
            together = getattr(self.wrapped, "__getitems__", None)
            loaded: list[Any] = self._load(used) if together is None else together(used)
        except BaseException as error:
            if not is_error(error) or not all(map(_is_index, indices)):
                raise
            failure = error
        else:
            guard.names = used
            return loaded
        # Outside of the handler: each attempt has a context of its own.
        return guard.contained(lambda: self._recovered(indices, used, failure), lambda: self._load(indices))

    def _used_for(self, indices: list[Any]) -> list[Any]:
        if self.guard.has_workers:
            self.guard.known.read_new_lines()
        return [self.actual(index) if _is_index(index) else index for index in indices]

    def _load(self, indices: Sequence[Any]) -> Any:
        together = getattr(self.wrapped, "__getitems__", None)
        return [self.wrapped[index] for index in indices] if together is None else together(indices)

    def _recovered(self, indices: list[Any], used: list[Any], failure: BaseException) -> Any:
        """The samples, or substitutes, after they have raised when they were loaded together."""
        guard = self.guard
        loaded, error = guard.after(failure, self._load, used, loads=not guard.names_only)
        if error is None:
            guard.names = used
            return loaded
        if not guard.names_only:
            return self._one_by_one(used, error)
        alone = [index for index in used if guard.attempt(self._load, [index])[1] is not None]
        named = ", ".join(str(index) for index in alone or used)
        error.add_note(f"self_healing: raised while the training data were loaded, by the sample with index {named}.")
        raise LetPass(error)

    def _one_by_one(self, indices: Sequence[int], error: BaseException) -> list[Any]:
        """Loads samples by themselves after some of them, loaded together, raised."""
        # What has been waited for already is not waited for again, sample by sample.
        patient = not may_be_the_sample(error)
        # A group holds the same one several times: only the first of them is tried.
        pairs = [self._usable(self.actual(index), patient) for index in indices]
        names = [name for name, _ in pairs]
        if names == list(indices):
            self.guard.known.loaded_on_retry(f"One of the samples {list(indices)}", error)
        self.guard.names = names
        return [sample for _, sample in pairs]

    def _usable(self, index: int, patient: bool) -> tuple[int, Any]:
        """A sample, or the first of its substitutes that can be used."""
        bad: list[BadSample] = []
        sample, raised = self._load_twice(index, bad, patient)
        if not bad:
            return index, sample
        for name, sample in self._substitutes(index, bad, raised):
            self.guard.known.add(*bad, replaced_by=name)
            return name, sample
        raise LetPass(no_substitute(bad))

    def _substitutes(
        self, index: int, bad: list[BadSample], raised: BaseException | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yields substitutes that can be used, for a sample that may have raised something that is not its fault."""
        suspect = raised is not None and may_be_the_sample(raised)
        try:
            length = len(self.wrapped)
        except TypeError:
            return
        drawn = (each for each in candidates(index, length, self.guard.seed) if each not in self.guard.known.blocked)
        for candidate in itertools.islice(drawn, MAX_BAD_IN_A_ROW):
            # One attempt is enough to know whether it is the sample or what it comes through.
            sample, failure = self._load_twice(candidate, bad, patient=not suspect)
            if failure is None:
                yield candidate, sample
            elif may_be_the_sample(failure):
                raise LetPass(raised if raised is not None and suspect else failure)

    def _load_twice(self, index: int, bad: list[BadSample], patient: bool) -> tuple[Any, BaseException | None]:
        """Loads a sample, twice if it raises; one that cannot be used is appended to `bad`, with what it raised."""
        attempts, guard = 1, self.guard
        loaded, error = guard.attempt(self._load, [index], loads=True, patient=patient)
        if error is not None and not (patient and may_be_the_sample(error)):
            first, attempts = error, 2
            loaded, error = guard.attempt(self._load, [index], loads=True, patient=patient)
            if error is None:
                guard.known.loaded_on_retry(describe_name(index), first)
        if error is not None:
            where = self.describe(index) | {"attempts": attempts}
            bad.append(guard.known.that_raised("loading", error, preview=self._preview(index), **where))
            return None, error
        return loaded[0], None

    def _preview(self, index: int) -> str | None:
        """Shows a sample that raises: in Hugging Face datasets, as it is before the transform."""
        try:
            return preview_of(self.wrapped.with_format(None)[int(index)])
        except Exception:
            return None

    def actual(self, index: int) -> int:
        """The sample that is used for an index, as far as is known."""
        blocked = self.guard.known.blocked
        if index not in blocked:
            return index
        # Computed and not remembered: a worker that is started later comes to the same.
        usable = (other for other in candidates(index, len(self.wrapped), self.guard.seed) if other not in blocked)
        return next(usable, index)

    # ---- for the collator ----

    def substitutes(self, name: SampleName) -> Iterator[tuple[SampleName, Any]]:
        bad: list[BadSample] = []
        for found, sample in self._substitutes(int(name), bad):
            self.guard.known.add(*bad, replaced_by=found)
            bad.clear()
            yield found, sample

    def put_back(self, substitute: tuple[SampleName, Any]) -> None:
        """Nothing: it is there still."""

    def describe(self, name: SampleName) -> dict[str, Any]:
        return {"dataset_index": int(name), "worker": worker_id()}


def _is_index(index: Any) -> bool:
    return isinstance(index, Integral) and not isinstance(index, bool)


# ---- collator ----


class GuardedCollator(Proxy):
    """Replaces the samples for which a collator raises."""

    _own = frozenset({"wrapped", "guard", "supply"})

    def __init__(self, wrapped: Callable[[Any], Any], guard: Guard, supply: Any) -> None:
        # The guarded dataset or stream: it has samples to take the place of others.
        self.wrapped = wrapped
        self.guard = guard
        self.supply = supply

    def __call__(self, samples: Any) -> Any:
        guard = self.guard
        if guard.off:
            return self.wrapped(samples)
        names, guard.names = guard.names, []
        # Many collators change the samples they are given, which no second attempt could stand.
        try:
            # What nearly all samples are; no function of Python is called for each.
            kept = list(map(dict.copy, samples)) if type(samples) is list else copies_of(samples)
        except TypeError:
            kept = copies_of(samples)
        try:
            return self.wrapped(samples)
        except BaseException as error:
            if not is_error(error):
                raise
            failure = error
        return guard.contained(lambda: self._recovered(kept, names, failure), lambda: self.wrapped(kept))

    def _attempt(self, samples: Any) -> CallResult:
        return self.guard.attempt(self._collate_copies, samples)

    def _collate_copies(self, samples: Any) -> Any:
        return self.wrapped(copies_of(samples))

    def _recovered(self, samples: Any, names: list[SampleName], failure: BaseException) -> Any:
        """Collates copies of the samples, or substitutes for some of them, after they themselves have raised."""
        guard = self.guard
        collated, error = guard.after(failure, self._collate_copies, samples)
        if error is None:
            return collated
        if not isinstance(samples, list) or len(names) != len(samples):
            raise LetPass(error)
        if guard.names_only:
            bad = self._culprits(samples) or range(len(samples))
            named = ", ".join(str(names[row]) for row in bad)
            error.add_note(f"self_healing: raised by the collator, for the sample with index {named}.")
            raise LetPass(error)
        collated, again = self._attempt(samples)
        if again is None:
            guard.known.loaded_on_retry(f"The batch of the samples {list(names)}", error)
            return collated
        return self._without_culprits(list(samples), list(names), error)

    def _without_culprits(self, samples: list[Any], names: list[SampleName], error: BaseException) -> Any:
        dropped: list[int] = []
        culprits = self._culprits(samples, names)
        for row in culprits:
            # What was raised first is what happened; only of several each has its own.
            alone = self._attempt([samples[row]])[1] if len(culprits) > 1 else None
            bad = [self._bad(names[row], samples[row], alone or error)]
            found = self._substitute(names[row], bad)
            if found is None and (len(bad) > MAX_BAD_IN_A_ROW or len(dropped) + 1 == len(samples)):
                raise LetPass(no_substitute(bad))
            self.guard.known.add(*bad, replaced_by=names[row] if found is None else found[0])
            if found is None:
                # The stream has come to its end: its last batch is a shorter one.
                dropped.append(row)
            else:
                names[row], samples[row] = found
        samples = [sample for row, sample in enumerate(samples) if row not in dropped]
        collated, raised = self._attempt(samples)
        if raised is not None:
            raise LetPass(raised if culprits else error)
        return collated

    def _culprits(self, samples: list[Any], names: list[SampleName] | None = None) -> list[int]:
        """Finds the rows that raise by themselves or, if none does, the one in whose place another one does not."""
        rows = range(len(samples))
        alone = [row for row in rows if self._attempt([samples[row]])[1] is not None]
        if alone or len(samples) < 2 or names is None:
            return alone
        return [row for row in rows if self._fits_with_another(samples, names[row], row)][:1]

    def _fits_with_another(self, samples: list[Any], name: SampleName, row: int) -> bool:
        found = next(self.supply.substitutes(name), None)
        if found is None:
            return False
        self.supply.put_back(found)
        return self._attempt([*samples[:row], found[1], *samples[row + 1 :]])[1] is None

    def _substitute(self, name: SampleName, bad: list[BadSample]) -> tuple[SampleName, Any] | None:
        for tried, (found, sample) in enumerate(self.supply.substitutes(name)):
            _, error = self._attempt([sample])
            if error is None:
                return found, sample
            bad.append(self._bad(found, sample, error))
            if tried + 1 >= MAX_BAD_IN_A_ROW:
                break
        return None

    def _bad(self, name: SampleName, sample: Any, error: BaseException) -> BadSample:
        where = self.supply.describe(name) | {"attempts": 2}
        return self.guard.known.that_raised("collation", error, preview=preview_of(sample), **where)
