"""Names of samples on their way through a stream: `shard:ordinal`, from the source to where it is guarded."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from datasets.iterable_dataset import ArrowExamplesIterable, ExamplesIterable, FormattedExamplesIterable

from ...healers.data.guard import Guard, worker_id
from ...healers.data.sources import SourceReader
from .nodes import KeptNode


# The keyword in which a source is given the numbers of the shards it reads, in the stream it was made from.
SHARDS = "_self_healing_shards"
# The column in which the rows of tables carry their names, from the source to where they become examples: the keys of
# tables get lost when they are cut and shuffled.
_NAMES = "_self_healing_names"
_ORDINAL_BITS = 40


class ShardOpener:
    """Opens a shard of a source, to be read past samples that raise as far as that is possible."""

    def __init__(self, function: Callable[..., Iterator[Any]], guard: Guard, arrow: bool) -> None:
        self._function = function
        self._guard = guard
        self._arrow = arrow

    def __call__(self, **kwargs: Any) -> Iterator[Any]:
        shard = kwargs.pop(SHARDS)[0]

        def where(ordinal: int) -> dict[str, Any]:
            return {"shard": shard, "stream_ordinal": ordinal, "worker": worker_id()}

        size = (lambda given: len(given[1])) if self._arrow else None
        return SourceReader(lambda: iter(self._function(**kwargs)), self._guard, where, size=size)


class _Named(KeptNode):
    """Gives its examples `shard:ordinal` as keys."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for key, example in super().__iter__():
            at = self._state_dict
            if isinstance(at, dict):
                shards = self.kwargs[SHARDS]
                key = f"{shards[at['shard_idx']]}:{at['shard_example_idx'] - 1}"
            yield key, example


class NamedExamples(_Named, ExamplesIterable):  # type: ignore[misc]
    """A source of examples with names."""


class NamedTables(_Named, ArrowExamplesIterable):  # type: ignore[misc]
    """A source of tables whose rows have names."""

    handed_on = ("in_a_column",)
    in_a_column = False

    def _iter_arrow(self) -> Iterator[tuple[Any, Any]]:
        for key, table in super()._iter_arrow():
            at = self._state_dict
            if self.in_a_column and isinstance(at, dict):
                first = self.kwargs[SHARDS][at["shard_idx"]] << _ORDINAL_BITS | at["shard_example_idx"] - len(table)
                table = table.append_column(_NAMES, pa.array(range(first, first + len(table)), pa.int64()))
            yield key, table


class _Stripped:
    """Takes the names out of tables, and notes them in the order of the rows."""

    def __init__(self, ex_iterable: Any, names: deque[str | None]) -> None:
        self._wrapped = ex_iterable
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    @property
    def iter_arrow(self) -> Any:
        return self._iter_arrow

    def _iter_arrow(self) -> Iterator[tuple[Any, Any]]:
        for key, table in self._wrapped._iter_arrow():
            if _NAMES in table.column_names:
                numbers = table[_NAMES].to_pylist()
                ordinals = (1 << _ORDINAL_BITS) - 1
                self._names.extend(f"{number >> _ORDINAL_BITS}:{number & ordinals}" for number in numbers)
                table = table.drop([_NAMES])
            else:
                self._names.extend([None] * len(table))
            yield key, table


class NamingFormat(KeptNode, FormattedExamplesIterable):  # type: ignore[misc]
    """Makes examples of the rows of tables, with their names as keys."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        names: deque[str | None] = deque()
        inner = copy.copy(self)
        inner.ex_iterable = _Stripped(self.ex_iterable, names)
        for key, example in FormattedExamplesIterable.__iter__(inner):
            name = names.popleft() if names else None
            yield key if name is None else name, example
