"""
Streams without the samples that cannot be read, mapped or put into a batch; the next one takes the place of each.

An iterator that a generator feeds is dead once something in it has raised. Each function of `map` and `filter` in a
Hugging Face stream (read against datasets 5.2) is therefore wrapped, so that it leaves out what it raises for; any
other source is asked for its next sample, and opened again where it has died.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from ...failures.classify import is_error
from .guard import MAX_BAD_IN_A_ROW, Guard, LetPass, Proxy, copy_of, no_substitute, worker_id
from .quarantine import BadSample, SampleName, preview_of
from .sources import SourceReader


try:
    from datasets import IterableDataset as HuggingFaceStream
    from datasets.iterable_dataset import (
        ArrowExamplesIterable,
        ExamplesIterable,
        FilteredExamplesIterable,
        MappedExamplesIterable,
        identity_func,
    )
except ImportError:
    # Not installed, or its parts have other names: streams are guarded from the outside.
    HuggingFaceStream, MappedExamplesIterable = (), object


# ---- what the loader reads ----


_NO_SAMPLE = object()


@dataclass
class GivenLast:
    """How many samples a stream has given, and the last of them, those that were not trained on among them."""

    samples: deque[tuple[SampleName, Any]]
    count: int = 0


class GuardedStream(Proxy, IterableDataset):  # type: ignore[type-arg]
    """Leaves out the samples of an iterable dataset that cannot be used."""

    _own = frozenset({"wrapped", "guard", "live", "given"})

    def __init__(self, wrapped: Any, guard: Guard, given: GivenLast | None = None) -> None:
        self.wrapped = wrapped
        self.guard = guard
        self.live: LiveStream | None = None
        # Those of a Hugging Face stream begin again whenever it is opened.
        self.given = None if isinstance(wrapped, HuggingFaceStream) else given

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"live": None}

    def __len__(self) -> int:
        return len(self.wrapped)

    def __iter__(self) -> Iterator[Any]:
        self.guard.names = []
        self.live = LiveStream(self.wrapped, self.guard)
        return self.live if self.given is None else self._read_on(self.live, self.given)

    def _read_on(self, live: LiveStream, given: GivenLast) -> Iterator[Any]:
        """
        Reads a stream that may go on where it stands when it is opened again: what it has given is given again first,
        to be skipped as far as it was trained on.
        """
        guard = self.guard
        first = [*itertools.islice(live, 1)]
        stands = live.elsewhere if first else guard.began(None)
        if stands and given.samples:
            guard.names.clear()
            live.ordinal += given.count
            skipped = itertools.repeat(given.samples[0], given.count - len(given.samples))
            for name, sample in itertools.chain(skipped, [*given.samples]):
                guard.names.append(name)
                yield copy_of(sample)
            guard.names += [f"{live._shard}:{live.ordinal - 1}" for _ in first]
        else:
            given.samples.clear()
            given.count = 0
        for sample in itertools.chain(first, live):
            given.samples.append((guard.names[-1], copy_of(sample)))
            given.count += 1
            yield sample

    # ---- for the collator ----

    def substitutes(self, name: SampleName) -> Iterator[tuple[SampleName, Any]]:
        # To the end of the stream: drawing never gives `None`.
        return iter(()) if self.live is None else iter(self.live.draw, None)

    def put_back(self, substitute: tuple[SampleName, Any]) -> None:
        """Gives a substitute that was only tried once more, before the next sample."""
        assert self.live is not None, "it has given it"
        self.live.tried.append(substitute)

    def describe(self, name: SampleName) -> dict[str, Any]:
        return _where(int(str(name).partition(":")[2]))


class LiveStream(SourceReader):
    """Gives the samples of a stream, once."""

    def __init__(self, dataset: Any, guard: Guard) -> None:
        super().__init__(self._opened, guard, _where, _shard=worker_id() or 0)
        self._dataset = self._read = dataset
        # Whether it has begun with another sample than before.
        self.elsewhere: Any = False
        self.tried: list[tuple[SampleName, Any]] = []

    def draw(self) -> tuple[SampleName, Any]:
        """Draws the next sample that can be used, and its name."""
        if self.tried:
            return self.tried.pop()
        try:
            sample = next(self)
        except StopIteration:
            raise
        except Exception as error:
            raise LetPass(error) from None
        return self._guard.names.pop(), sample

    def _otherwise(self) -> Any:
        try:
            return super()._otherwise()
        except LetPass as passed:
            error = passed.error
        raise error

    def _recover(self, error: BaseException) -> Any:
        recover = super()._recover
        return self._guard.contained(lambda: recover(error), self._otherwise)

    def _begins(self, first: Any) -> None:
        self.elsewhere = self._guard.began(first)
        if self._read is not self._dataset:
            # The stream itself is asked where it stands, by the loader and by checkpoints.
            self._dataset._state_dict = self._read._state_dict

    def _opened(self) -> Iterator[Any]:
        dataset, guard = self._dataset, self._guard
        if isinstance(dataset, HuggingFaceStream) and not guard.names_only and not guard.off:
            self._read = guard.contained(lambda: _guarded(dataset, guard), lambda: dataset)
        return iter(self._read)


def _where(ordinal: int, stage: int | None = None) -> dict[str, Any]:
    worker = worker_id()
    return {"shard": worker or 0, "stream_ordinal": ordinal, "stage": stage, "worker": worker}


# ---- the functions of a Hugging Face stream ----


def _guarded(dataset: Any, guard: Guard) -> Any:
    """Copies a stream, each of its functions and sources in a wrapper; none where its rows are tables."""
    if dataset._ex_iterable.iter_arrow or (dataset._formatting and dataset._formatting.is_table):
        return dataset
    # Not by `copy`, which would share its attributes.
    copied = object.__new__(type(dataset))
    vars(copied).update(vars(dataset), _ex_iterable=_guarded_node(dataset._ex_iterable, guard, itertools.count()))
    return copied


def _guarded_node(node: Any, guard: Guard, stages: Iterator[int]) -> Any:
    node = copy.copy(node)
    if hasattr(node, "ex_iterable"):
        node.ex_iterable = _guarded_node(node.ex_iterable, guard, stages)
    if hasattr(node, "ex_iterables"):
        node.ex_iterables = [_guarded_node(each, guard, stages) for each in node.ex_iterables]
    if type(node) in (MappedExamplesIterable, FilteredExamplesIterable):
        _guard_function(node, guard, stages)
    elif type(node) is ExamplesIterable:
        node.generate_examples_fn = _opener(node.generate_examples_fn, guard)
    elif type(node) is ArrowExamplesIterable:
        node.generate_tables_fn = _opener(node.generate_tables_fn, guard, size=lambda given: len(given[1]))
    return node


def _guard_function(node: Any, guard: Guard, stages: Iterator[int]) -> None:
    function = getattr(node, "mask_function", node.function)
    as_table = node.formatting and node.formatting.is_table
    if as_table or function is identity_func or inspect.iscoroutinefunction(function):
        return
    guarded = GuardedFunction(node, function, guard, next(stages))
    node.input_columns = None
    if type(node) is FilteredExamplesIterable:
        node.mask_function = guarded
        node.function = partial(node.function.func, guarded, **node.function.keywords)
    else:
        node.function = guarded
        node.__class__ = GuardedMap


# In place of the result of a function of `map` that is given one row, for which it raises.
_LEFT_OUT = "_self_healing_left_out"


class GuardedMap(MappedExamplesIterable):  # type: ignore[misc]
    """Applies a [`GuardedFunction`]."""

    def _iter(self) -> Iterator[tuple[Any, Any]]:
        return (pair for pair in super()._iter() if _LEFT_OUT not in pair[1])

    def shuffle_data_sources(self, generator: Any) -> Any:
        return self._again(super().shuffle_data_sources(generator))

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> Any:
        return self._again(super().shard_data_sources(num_shards, index, contiguous=contiguous))

    def _again(self, node: Any) -> Any:
        node.__class__ = type(self)
        return node


class GuardedFunction:
    """Calls a function of `map` or `filter`, and leaves out the rows for which it raises twice."""

    def __init__(self, node: Any, function: Callable[..., Any], guard: Guard, stage: int) -> None:
        self._function = function
        self._guard = guard
        self._stage = stage
        self._filters = type(node) is FilteredExamplesIterable
        self._batched: bool = node.batched
        self._columns: list[str] | None = node.input_columns
        self._removed = frozenset(node.remove_columns or ())
        self._rows = 0
        self._bad_in_a_row: list[BadSample] = []

    def __call__(self, given: dict[str, Any], *indices: Any, **named: Any) -> Any:
        first = self._rows
        count = len(next(iter(given.values()), ())) if self._batched else 1
        self._rows += count
        try:
            result = self._apply(given, indices, named)
        except BaseException as error:
            if not is_error(error):
                raise
            failure = error
        else:
            self._bad_in_a_row.clear()
            return result
        return self._recovered(failure, given, indices, named, range(count), first)

    def _recovered(
        self, failure: BaseException, given: dict[str, Any], indices: Any, named: Any, rows: range, first: int
    ) -> Any:
        """The result without the rows that the function raises for, after it has raised for a first time."""
        guard = self._guard
        result, error = guard.after(failure, self._apply, given, indices, named)
        if error is not None:
            result, error = guard.attempt(self._apply, given, indices, named)
            if error is None:
                guard.known.loaded_on_retry("A sample of the stream", failure)
            elif self._batched:
                return self._without_culprits(given, indices, named, error, rows, first)
            else:
                self._leave_out(given, first, error)
                return False if self._filters else {_LEFT_OUT: True}
        self._bad_in_a_row.clear()
        return result

    def _without_culprits(
        self, batch: dict[str, Any], indices: Any, named: Any, error: BaseException, rows: range, first: int
    ) -> Any:
        left, attempt = list[int](), self._guard.attempt
        for row in rows:
            alone = _of_rows([row], batch, indices)
            _, raised = attempt(self._apply, *alone, named)
            if raised is None:
                left.append(row)
                self._bad_in_a_row.clear()
            else:
                self._leave_out({name: values[0] for name, values in alone[0].items()}, first + row, raised)
        kept, numbers = _of_rows(left, batch, indices)
        empty: Any = [] if self._filters else kept
        result, raised = attempt(self._apply, kept, numbers, named) if left else (empty, None)
        if len(left) == len(rows) or raised is not None:
            raise LetPass(raised or error)
        if self._filters:
            mask = iter(result)
            return [row in left and next(mask) for row in rows]
        # Columns that stay as they were have to be as long as the others.
        return {name: kept[name] for name in kept if not left or name not in self._removed} | dict(result)

    def _leave_out(self, row: dict[str, Any], ordinal: int, error: BaseException) -> None:
        known, where = self._guard.known, _where(ordinal, self._stage)
        bad = known.that_raised("loading", error, preview=preview_of(row), **where)
        known.add(bad)
        self._bad_in_a_row.append(bad)
        if len(self._bad_in_a_row) > MAX_BAD_IN_A_ROW:
            raise LetPass(no_substitute(self._bad_in_a_row))

    def _apply(self, given: dict[str, Any], indices: Any, named: dict[str, Any]) -> Any:
        # A copy for each attempt: functions may change what they are given.
        given = dict(given)
        arguments = [given] if self._columns is None else [given[name] for name in self._columns]
        result = self._function(*arguments, *indices, **named)
        if result is given and not self._filters:
            # As `map` does it with a function that returns what it is given.
            return {name: value for name, value in given.items() if name not in self._removed}
        return result


def _of_rows(rows: list[int], batch: dict[str, Any], indices: Any) -> tuple[dict[str, Any], list[list[int]]]:
    columns = {
        name: [values[row] for row in rows] if isinstance(values, list) else values[rows]
        for name, values in batch.items()
    }
    return columns, [[each[row] for row in rows] for each in indices]


def _opener(
    function: Callable[..., Iterator[Any]], guard: Guard, size: Callable[[Any], int] | None = None
) -> Callable[..., Iterator[Any]]:
    """Opens the shards of a source, each to be opened again where it fails once."""
    shards = itertools.count()

    def open_shard(**kwargs: Any) -> Iterator[Any]:
        at = {"shard": next(shards), "worker": worker_id()}
        return SourceReader(lambda: iter(function(**kwargs)), guard, lambda n: at | {"stream_ordinal": n}, size)

    return open_shard
