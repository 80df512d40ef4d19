"""Replaces the samples of a batch in which no token counts, unless the collator drew that or no data have labels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..healers.data.guard import CallResult, Guard
from ..system.random_state import RandomState
from .bad_sample import BadSample, preview_of
from .copies import copies_of
from .problems import NO_LABELS, comes_without_labels, has_no_labels
from .sample_names import SampleName
from .substitutes import Supply


# Tried in place of each sample: a data set may be full of samples without labels.
_SUBSTITUTES = 3
# Batches in a row for which nothing better was found: it is a wiring bug, and the loss, which is 0, tells.
_GIVE_UP_AFTER = 3


class LabelledSubstitutes:
    """Looks for samples with labels in place of samples without."""

    def __init__(self, collator: Callable[[Any], Any], guard: Guard, supply: Supply) -> None:
        self._collator = collator
        self._guard = guard
        self._supply = supply
        self._failed_searches = 0
        # Known to choose at random what counts.
        self._draws = False

    def found(self) -> None:
        """Counts a batch in which tokens count."""
        self._failed_searches = 0

    def replace(self, samples: list[Any], names: list[SampleName], batch: Any) -> Any:
        """Collates other samples, if there are some with labels; else returns the batch. Draws no random numbers."""
        state = RandomState.capture()
        try:
            return self._replace(samples, names, batch)
        finally:
            state.restore()

    def _replace(self, samples: list[Any], names: list[SampleName], batch: Any) -> Any:
        if self._failed_searches >= _GIVE_UP_AFTER or self._is_drawn(samples):
            return batch
        replaced: list[tuple[BadSample, SampleName]] = []
        for row, name in enumerate(names):
            where = self._supply.describe(name) | {"attempts": 1}
            bad = BadSample.with_problem(NO_LABELS, preview=preview_of(samples[row]), **where)
            found = self._substitute(name)
            if found is not None:
                replaced.append((bad, found[0]))
                samples[row] = found[1]
        collated = self._attempt(samples) if replaced else None
        if collated is None or collated.error is not None or has_no_labels(collated.value):
            self._failed_searches += 1
            return batch
        self._failed_searches = 0
        for bad, instead in replaced:
            self._guard.known.add(bad, instead)
        return collated.value

    def _attempt(self, samples: list[Any]) -> CallResult:
        return self._guard.attempt(lambda: self._collator(copies_of(samples)))

    def _substitute(self, name: SampleName) -> tuple[SampleName, Any] | None:
        refused, found = [], None
        for tried, (other, sample) in enumerate(self._supply.substitutes(name)):
            collated = self._attempt([sample])
            if collated.error is None and not has_no_labels(collated.value):
                found = other, sample
                break
            refused.append((other, sample))
            if tried + 1 >= _SUBSTITUTES:
                break
        for each in reversed(refused):
            self._supply.refuse(*each)
        return found

    def _is_drawn(self, samples: list[Any]) -> bool:
        """Whether the collator drew that no token counts, as in masked language modelling: nothing is wrong then."""
        if all(comes_without_labels(sample) for sample in samples):
            return False
        if not self._draws:
            before = RandomState.capture()
            # One of its own would be drawn from for good.
            self._draws = _has_generator(self._collator) or (
                not has_no_labels(self._attempt(samples).value) or _has_moved(before)
            )
        return self._draws


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
