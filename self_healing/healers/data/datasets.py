"""A dataset that can be indexed, with other samples in place of those that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

from ...data.bad_sample import BadSample, preview_of
from ...data.problems import find_problem
from ...data.proxy import Proxy
from ...data.sample_names import SampleName, describe_name
from ...data.substitutes import candidates, no_substitute
from .guard import MAX_BAD_IN_A_ROW, Guard, LetPass, may_be_the_sample, worker_id


class GuardedDataset(Proxy):
    """Replaces the samples of a dataset that cannot be loaded or are bad once they are."""

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
        used = [self.actual(index) for index in indices] if guard.blocked() else indices
        if guard.names_only:
            return self._load_or_name(used)
        loaded = guard.attempt_load(self._load, used)
        if loaded.error is not None or any(map(find_problem, loaded.value)):
            return self._one_by_one(used, loaded.error)
        guard.names = used
        return loaded.value

    def _load_or_name(self, indices: Sequence[int]) -> Any:
        """Loads samples, and says in the exception which of them raises."""
        guard = self.guard
        loaded = guard.attempt(self._load, indices)
        if loaded.error is None:
            guard.names = indices
            return loaded.value
        alone = [index for index in indices if guard.attempt(self._load, [index]).error is not None]
        named = ", ".join(str(index) for index in alone or indices)
        loaded.error.add_note(
            f"self_healing: raised while the training data were loaded, by the sample with index {named}."
        )
        raise LetPass(loaded.error)

    def _one_by_one(self, indices: Sequence[int], error: BaseException | None) -> list[Any]:
        """Loads samples by themselves after some of them, loaded together, raised or turned out bad."""
        # What has been waited for already is not waited for again, sample by sample.
        patient = error is None or not may_be_the_sample(error)
        # A group holds the same one several times: only the first of them is tried.
        pairs = [self._usable(self.actual(index), patient) for index in indices]
        names = [name for name, _ in pairs]
        if error is not None and names == list(indices):
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
            self._record(bad, name)
            return name, sample
        raise LetPass(no_substitute(bad))

    def _record(self, bad: Sequence[BadSample], replaced_by: int) -> None:
        for sample in bad:
            self.guard.known.add(sample, replaced_by)

    def _substitutes(
        self, index: int, bad: list[BadSample], raised: BaseException | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yields substitutes that can be used, for a sample that may have raised something that is not its fault."""
        suspect = raised is not None and may_be_the_sample(raised)
        try:
            length = len(self.wrapped)
        except TypeError:
            return
        failed = 0
        for candidate in candidates(index, length, self.guard.seed):
            if candidate in self.guard.known.blocked:
                continue
            before = len(bad)
            # One attempt is enough to know whether it is the sample or what it comes through.
            sample, failure = self._load_twice(candidate, bad, patient=not suspect)
            if failure is not None and may_be_the_sample(failure):
                raise LetPass(raised if raised is not None and suspect else failure)
            if len(bad) == before:
                yield candidate, sample
            failed += 1
            if failed >= MAX_BAD_IN_A_ROW:
                return

    def _load_twice(self, index: int, bad: list[BadSample], patient: bool) -> tuple[Any, BaseException | None]:
        """Loads a sample, twice if it raises; one that cannot be used is appended to `bad`, with what it raised."""
        attempts, guard = 1, self.guard
        loaded = guard.attempt_load(self._load, [index], patient=patient)
        if loaded.error is not None and not (patient and may_be_the_sample(loaded.error)):
            first, attempts = loaded.error, 2
            loaded = guard.attempt_load(self._load, [index], patient=patient)
            if loaded.error is None:
                guard.known.loaded_on_retry(describe_name(index), first)
        where = self.describe(index) | {"attempts": attempts}
        if loaded.error is not None:
            bad.append(guard.known.that_raised("loading", loaded.error, preview=self._preview(index), **where))
            return None, loaded.error
        sample = loaded.value[0]
        problem = find_problem(sample)
        if problem is not None:
            bad.append(BadSample.with_problem(problem, preview=preview_of(sample), **where))
        return sample, None

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
        """See [`Supply`]."""
        bad: list[BadSample] = []
        recorded = 0
        for found, sample in self._substitutes(int(name), bad):
            self._record(bad[recorded:], found)
            recorded = len(bad)
            yield found, sample

    def refuse(self, name: SampleName, sample: Any) -> None:
        """See [`Supply`]: it stays in the dataset."""

    def describe(self, name: SampleName) -> dict[str, Any]:
        """See [`Supply`]."""
        return {"dataset_index": int(name), "worker": worker_id()}


def _is_index(index: Any) -> bool:
    return isinstance(index, Integral) and not isinstance(index, bool)
