"""Samples that take the place of bad ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ..healers.data.guard import MAX_BAD_IN_A_ROW, DataSourceError
from .bad_sample import BadSample
from .sample_names import SampleName


class Supply(Protocol):
    """Source of substitutes for the collator: the guarded dataset or stream."""

    def substitutes(self, name: SampleName) -> Iterator[tuple[SampleName, Any]]:
        """Yields samples to take the place of another one, with their names, in an order that depends on it alone."""

    def refuse(self, name: SampleName, sample: Any) -> None:
        """Gives back a substitute that is not used."""

    def describe(self, name: SampleName) -> dict[str, Any]:
        """The fields of a [`BadSample`] that say where a sample is."""


def candidates(index: int, length: int, seed: int) -> Iterator[int]:
    """
    Yields the indices of samples that may replace another one: the same in every worker, process and epoch, and drawn
    from no generator that training draws from.
    """
    given = {index % length}
    # Each try finds a new one with at least the share that is left; some more than that end in order.
    for attempt in range(20 * MAX_BAD_IN_A_ROW):
        digest = hashlib.blake2b(f"{seed}:{index}:{attempt}".encode(), digest_size=8).digest()
        candidate = int.from_bytes(digest, "big") % length
        if candidate not in given:
            given.add(candidate)
            yield candidate
    for candidate in range(length):
        if candidate not in given:
            yield candidate


def no_substitute(bad: Sequence[BadSample]) -> DataSourceError:
    """The exception for a sample, the first one given, none of whose substitutes can be used."""
    last = "; ".join(str(sample) for sample in bad[-3:])
    return DataSourceError(
        f"{bad[0]}, and none of the {len(bad) - 1} samples tried in its place can be used either: it is not the "
        f"samples but the code or the storage they come through. The last ones: {last}."
    )
