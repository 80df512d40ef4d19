"""A collator that is given other samples in place of those it cannot put into a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..healers.data.guard import MAX_BAD_IN_A_ROW, CallResult, Guard, LetPass
from .bad_sample import BadSample, preview_of
from .copies import copies_of
from .labels import LabelledSubstitutes
from .problems import has_no_labels
from .proxy import Proxy
from .sample_names import SampleName
from .substitutes import Supply, no_substitute


class GuardedCollator(Proxy):
    """Replaces the samples for which a collator raises, and those of a batch in which no token counts."""

    _own = frozenset({"wrapped", "guard", "supply", "labelled_substitutes"})

    def __init__(self, wrapped: Callable[[Any], Any], guard: Guard, supply: Supply) -> None:
        self.wrapped = wrapped
        self.guard = guard
        self.supply = supply
        self.labelled_substitutes = LabelledSubstitutes(wrapped, guard, supply)

    def __call__(self, samples: Any) -> Any:
        if self.guard.off:
            return self.wrapped(samples)
        # Many collators change the samples they are given, which no second attempt could stand.
        kept = copies_of(samples)
        return self.guard.contained(lambda: self._collate(samples, kept), lambda: self.wrapped(kept))

    def _attempt(self, samples: Any) -> CallResult:
        return self.guard.attempt(lambda: self.wrapped(copies_of(samples)))

    def _collate(self, given: Any, kept: Any) -> Any:
        """Collates samples as they are given; `kept` are copies of them for further attempts."""
        guard = self.guard
        names, guard.names = guard.names, None
        first = [given]
        # What it is given is what it would be given without the guard; if the network fails, copies after that.
        collated = guard.attempt(lambda: self.wrapped(first.pop() if first else copies_of(kept)))
        if collated.error is None and (guard.names_only or not has_no_labels(collated.value)):
            self.labelled_substitutes.found()
            return collated.value
        if names is None or not isinstance(kept, list) or len(names) != len(kept):
            if collated.error is not None:
                raise LetPass(collated.error)
            return collated.value
        if collated.error is None:
            return self.labelled_substitutes.replace(list(kept), list(names), collated.value)
        if guard.names_only:
            bad = self._culprits(kept) or range(len(kept))
            named = ", ".join(str(names[row]) for row in bad)
            collated.error.add_note(f"self_healing: raised by the collator, for the sample with index {named}.")
            raise LetPass(collated.error)
        again = self._attempt(kept)
        if again.error is None:
            guard.known.loaded_on_retry(f"The batch of the samples {list(names)}", collated.error)
            return again.value
        return self._without_culprits(list(kept), list(names), collated.error)

    def _without_culprits(self, samples: list[Any], names: list[SampleName], error: BaseException) -> Any:
        dropped: list[int] = []
        culprits = self._culprits(samples, names)
        for row in culprits:
            # What was raised first is what happened; only of several each has its own.
            alone = self._attempt([samples[row]]).error if len(culprits) > 1 else None
            bad = [self._bad(names[row], samples[row], alone or error)]
            found = self._substitute(names[row], bad)
            if found is None and (len(bad) > MAX_BAD_IN_A_ROW or len(dropped) + 1 == len(samples)):
                raise LetPass(no_substitute(bad))
            for each in bad:
                self.guard.known.add(each, names[row] if found is None else found[0])
            if found is None:
                # The stream has come to its end: its last batch is a shorter one.
                dropped.append(row)
            else:
                names[row], samples[row] = found
        samples = [sample for row, sample in enumerate(samples) if row not in dropped]
        collated = self._attempt(samples)
        if collated.error is not None:
            raise LetPass(collated.error if culprits else error)
        return collated.value

    def _culprits(self, samples: list[Any], names: list[SampleName] | None = None) -> list[int]:
        """
        Finds the rows that raise by themselves or, if none does, the one in whose place another one does not or, if
        there is none to be had, the one without which the others do not.
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
        return self._attempt(samples).error is not None

    def _fits_with_another(self, samples: list[Any], name: SampleName, row: int) -> bool:
        found = next(self.supply.substitutes(name), None)
        if found is None:
            return False
        fits = not self._raises([*samples[:row], found[1], *samples[row + 1 :]])
        self.supply.refuse(*found)
        return fits

    def _substitute(self, name: SampleName, bad: list[BadSample]) -> tuple[SampleName, Any] | None:
        for tried, (found, sample) in enumerate(self.supply.substitutes(name)):
            error = self._attempt([sample]).error
            if error is None:
                return found, sample
            bad.append(self._bad(found, sample, error))
            if tried + 1 >= MAX_BAD_IN_A_ROW:
                break
        return None

    def _bad(self, name: SampleName, sample: Any, error: BaseException) -> BadSample:
        where = self.supply.describe(name) | {"attempts": 2}
        return self.guard.known.that_raised("collation", error, preview=preview_of(sample), **where)
