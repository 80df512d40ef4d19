"""Copies a Hugging Face stream, with each of its functions and sources guarded."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

from datasets import IterableDataset
from datasets.iterable_dataset import (
    ArrowExamplesIterable,
    BufferShuffledExamplesIterable,
    ExamplesIterable,
    FilteredExamplesIterable,
    FormattedExamplesIterable,
    InterleavedShardsExamplesIterable,
    MappedExamplesIterable,
    RebatchedArrowExamplesIterable,
    SkipExamplesIterable,
    StepExamplesIterable,
    TakeExamplesIterable,
    _BaseExamplesIterable,
)

from ...healers.data.guard import Guard
from ...healers.data.hugging_face import GuardedFilter, GuardedMap
from .names import SHARDS, NamedExamples, NamedTables, NamingFormat, ShardOpener


# Tables pass through these on the way from their source to where they become examples; none looks at their columns.
_KEEPS_COLUMNS = (
    RebatchedArrowExamplesIterable,
    InterleavedShardsExamplesIterable,
    BufferShuffledExamplesIterable,
    StepExamplesIterable,
    SkipExamplesIterable,
    TakeExamplesIterable,
)


class Tracked:
    """
    Copy of a stream that only the loader sees: its samples have names, its functions leave out what they cannot map.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.dataset: Any = None
        # `shard:ordinal` of the sample it gave last, and how many functions it has.
        self.key: str | None = None
        self.stages = 0
        self.shards = 0


def guarded(dataset: Any, guard: Guard) -> Tracked | None:
    """
    Guards the functions and sources of a stream; `None` if it is none of Hugging Face's, or one whose rows are tables.
    """
    if type(dataset) is not IterableDataset or guard.names_only:
        return None
    if dataset._ex_iterable.iter_arrow or (dataset._formatting and dataset._formatting.is_table):
        return None
    tracked = Tracked(guard)
    # Not by `copy`, which would share its attributes.
    copied = object.__new__(type(dataset))
    vars(copied).update(vars(dataset))
    copied._ex_iterable = _Noting(_guarded_node(dataset._ex_iterable, tracked), tracked)
    tracked.dataset = copied
    return tracked


def _guarded_node(node: Any, tracked: Tracked) -> Any:
    """Copies a node and those it reads from; sources are numbered and functions counted in the order of the data."""
    node = copy.copy(node)
    if hasattr(node, "ex_iterable"):
        node.ex_iterable = _guarded_node(node.ex_iterable, tracked)
    if hasattr(node, "ex_iterables"):
        node.ex_iterables = [_guarded_node(each, tracked) for each in node.ex_iterables]
    if type(node) in (MappedExamplesIterable, FilteredExamplesIterable):
        _guard_function(node, tracked)
    elif type(node) is FormattedExamplesIterable:
        _name_rows(node)
    elif type(node) in (ExamplesIterable, ArrowExamplesIterable):
        _guard_source(node, tracked)
    return node


def _guard_function(node: Any, tracked: Tracked) -> None:
    stage, tracked.stages = tracked.stages, tracked.stages + 1
    as_table = node.formatting and node.formatting.is_table
    # What a batch's indices are good for cannot be told: left out, a sample would shift those behind it.
    counted = node.batched and node.with_indices
    function = getattr(node, "mask_function", node.function)
    if as_table or counted or inspect.iscoroutinefunction(function) or node.is_batch_accumulate_arrow_table_function:
        return
    node.__class__ = GuardedFilter if type(node) is FilteredExamplesIterable else GuardedMap
    node.healing = tracked.guard, stage


def _name_rows(node: Any) -> None:
    """Has the source of a node that makes examples of tables write the names of its rows into them."""
    if node.formatting and node.formatting.is_table:
        return
    source = node.ex_iterable
    while type(source) in _KEEPS_COLUMNS:
        source = source.ex_iterable
    if source is not node.ex_iterable and type(source) is NamedTables:
        source.in_a_column = True
        node.__class__ = NamingFormat


def _guard_source(node: Any, tracked: Tracked) -> None:
    arrow = type(node) is ArrowExamplesIterable
    name = "generate_tables_fn" if arrow else "generate_examples_fn"
    setattr(node, name, ShardOpener(getattr(node, name), tracked.guard, arrow))
    shards = node.num_shards
    node.kwargs = node.kwargs | {SHARDS: list(range(tracked.shards, tracked.shards + shards))}
    tracked.shards += shards
    node.__class__ = NamedTables if arrow else NamedExamples


class _Noting(_BaseExamplesIterable):  # type: ignore[misc]
    """Notes the name of each example: the last node of a stream."""

    def __init__(self, ex_iterable: Any, tracked: Tracked) -> None:
        super().__init__()
        self.ex_iterable = ex_iterable
        self.tracked = tracked

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for key, example in self.ex_iterable:
            self.tracked.key = str(key)
            yield key, example

    def _init_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.ex_iterable._init_state_dict()
        self._state_dict = state
        return state

    @property
    def is_typed(self) -> bool:
        return bool(self.ex_iterable.is_typed)

    @property
    def features(self) -> Any:
        return self.ex_iterable.features

    @property
    def num_shards(self) -> int:
        return int(self.ex_iterable.num_shards)

    def shuffle_data_sources(self, generator: Any) -> Any:
        return _Noting(self.ex_iterable.shuffle_data_sources(generator), self.tracked)

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> Any:
        return _Noting(self.ex_iterable.shard_data_sources(num_shards, index, contiguous=contiguous), self.tracked)

    def reshard_data_sources(self) -> Any:
        return self
