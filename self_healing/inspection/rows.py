"""Reads rows of a dataset for a check: spread over all of it, limited in number and in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


_MAX_STREAMED_ROWS = 1_000
# Rows fetched at once, as a data loader would: enough to be quick, few enough to hold decoded images.
_ROWS_AT_ONCE = 64
# Slow storage must not hold up a run for hours because of a check.
_TIME_LIMIT = 30.0


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a row that raised when it was read."""

    error: Exception


def read_rows(dataset: Any, max_rows: int) -> Iterator[tuple[int, Any]]:
    """Reads rows with their indices; a row that raises as [`Unreadable`]."""
    if dataset is None or isinstance(dataset, (Mapping, str)):
        raise TypeError(
            f"Rows cannot be read from a {type(dataset).__name__}; please give one dataset, such as "
            'dataset["train"], or a list of rows.'
        )
    # Abstract torch datasets have a `__getitem__` that only raises.
    streamed = isinstance(dataset, torch.utils.data.IterableDataset)
    if not streamed and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return _indexed_rows(dataset, max_rows)
    if hasattr(dataset, "__next__"):
        raise TypeError(
            f"{type(dataset).__name__} is an iterator: the rows read from it would be missing from training. Please "
            "give a dataset that iter() can read again from its beginning."
        )
    if not hasattr(dataset, "__iter__"):
        raise TypeError(f"{type(dataset).__name__} has neither a length and indices, nor can it be iterated over.")
    return _streamed_rows(dataset, min(max_rows, _MAX_STREAMED_ROWS))


def _indexed_rows(dataset: Any, max_rows: int) -> Iterator[tuple[int, Any]]:
    indices = _spread(len(dataset), max_rows)
    batches = [indices[start : start + _ROWS_AT_ONCE] for start in range(0, len(indices), _ROWS_AT_ONCE)]
    began = time.monotonic()
    # In several sweeps, so that what was seen is from everywhere if time runs out.
    for batch in [batch for sweep in range(8) for batch in batches[sweep::8]]:
        yield from zip(batch, _read(dataset, batch), strict=True)
        if time.monotonic() - began > _TIME_LIMIT:
            return


def _spread(size: int, wanted: int) -> list[int]:
    """Picks one index from each of `wanted` equal stretches, at a place that keeps step with no period in the data."""
    if size <= wanted:
        return list(range(size))
    golden = (math.sqrt(5) - 1) / 2
    edges = [part * size // wanted for part in range(wanted + 1)]
    return [edges[part] + int(math.modf(part * golden)[0] * (edges[part + 1] - edges[part])) for part in range(wanted)]


def _read(dataset: Any, indices: list[int]) -> list[Any]:
    """Reads rows as a data loader does; one by one if that raises, to tell which it is."""
    together: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
    if together is not None:
        try:
            rows = together(indices)
            if len(rows) == len(indices):
                return rows
        except Exception:
            pass
    return [_read_one(dataset, index) for index in indices]


def _read_one(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        return Unreadable(error)


def _streamed_rows(dataset: Any, max_rows: int) -> Iterator[tuple[int, Any]]:
    began = time.monotonic()
    iterator = iter(dataset)
    try:
        for index in range(max_rows):
            try:
                row = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                # A stream that has raised does not go on.
                yield index, Unreadable(error)
                return
            yield index, row
            if time.monotonic() - began > _TIME_LIMIT:
                return
    finally:
        # Not left to the garbage collector: files are open in it, and random states may be drawn from.
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
