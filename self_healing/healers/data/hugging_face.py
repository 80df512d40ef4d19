"""Guards Hugging Face streams from the inside."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
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

from ...failures.classify import is_error
from .guard import MAX_BAD_IN_A_ROW, DataSourceError, Guard, LetPass, worker_id
from .quarantine import BadSample, is_simple, place, preview_of
from .sources import SourceReader


# ---- nodes: nodes of a stream that stay guarded when they make others of their kind, for shards or workers ----


class KeptNode(_BaseExamplesIterable):  # type: ignore[misc]
    """Hands its class and what it was given for guarding to the nodes it makes of itself."""

    handed_on: tuple[str, ...] = ()

    def _hand_on(self, node: Any) -> Any:
        if node is not self:
            node.__class__ = type(self)
            for name in self.handed_on:
                setattr(node, name, getattr(self, name))
        return node

    def shuffle_data_sources(self, generator: Any) -> Any:
        return self._hand_on(super().shuffle_data_sources(generator))

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> Any:
        return self._hand_on(super().shard_data_sources(num_shards, index, contiguous=contiguous))

    def reshard_data_sources(self) -> Any:
        # Numbered already: the shards stay what they are.
        return self


# ---- functions: functions of `map` and `filter`, made to leave out the examples they raise for ----


class _Feed:
    """Feeds examples to a function."""

    def __init__(self, ex_iterable: Any, known: Callable[[Any], bool], on_success: Callable[[], None]) -> None:
        self._wrapped = ex_iterable
        self._on_success = on_success
        self._known = known
        self._source: Iterator[Any] | None = None
        self._again: deque[tuple[Any, Any]] = deque()
        # What the function is, or was last, applied to, and whether that went well.
        self.taken: list[tuple[Any, Any]] = []
        self.applied = False
        self.error: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        return self._wrapped.load_state_dict(state) if self._source is None else state

    def __iter__(self) -> Iterator[Any]:
        if self._source is None:
            self._source = iter(self._wrapped)
        return self

    def __next__(self) -> Any:
        assert self._source is not None
        if self.applied:
            self.applied = False
            self.taken.clear()
            self._on_success()
        while True:
            if self._again:
                item = self._again.popleft()
            else:
                try:
                    item = next(self._source)
                except StopIteration:
                    raise
                except BaseException as error:
                    self.error = error
                    raise
            if not self._known(item[0]):
                self.taken.append(item)
                return item

    def take_back(self) -> list[tuple[Any, Any]]:
        """Takes back what the function was applied to when it raised."""
        self.applied = False
        taken, self.taken = self.taken, []
        return taken

    def put_back(self, examples: list[tuple[Any, Any]]) -> None:
        """Gives these examples next."""
        self._again.extendleft(reversed(examples))


class _LeavingOut(MappedExamplesIterable):  # type: ignore[misc]
    """Applies a function, and leaves out the examples for which it raises twice."""

    # The guard, and the number of the function in its stream.
    healing: tuple[Guard, int]

    def _iter(self) -> Iterator[tuple[Any, Any]]:
        guard = self.healing[0]
        again: BaseException | None = None
        bad: list[BadSample] = []

        def on_success() -> None:
            nonlocal again
            bad.clear()
            if again is not None:
                guard.known.loaded_on_retry("A sample of the stream", again)
                again = None

        feed = _Feed(self.ex_iterable, lambda key: not self.with_indices and self._is_known(key), on_success)

        def applied(*args: Any, **kwargs: Any) -> Any:
            if self.with_indices and self._is_known(feed.taken[-1][0]):
                raise _Known
            result = guard.call(self.function, *args, **kwargs)
            feed.applied = True
            return result

        inner = copy.copy(self)
        inner.ex_iterable = feed
        inner.function = applied
        while True:
            failure: BaseException | None = None
            try:
                for _, example in MappedExamplesIterable._iter(inner):
                    # In place of a number of its own, the name of what it was made of.
                    first, last = feed.taken[0][0], feed.taken[-1][0]
                    yield first if len(feed.taken) == 1 else f"{first}_{last}", example
                return
            except _Known:
                feed.take_back()
                continue
            except BaseException as error:
                if error is feed.error or not is_error(error):
                    raise
                guard.raise_if_not_the_sample(error)
                failure = error
            examples = feed.take_back()
            if not examples:
                raise LetPass(failure)
            if again is None:
                again = failure
                self._step_back(len(examples))
                feed.put_back(examples)
                continue
            again = None
            culprits = self._culprits(examples)
            if not culprits:
                raise LetPass(failure)
            bad.extend(self._leave_out(key, example, failure) for key, example in culprits)
            if len(bad) > MAX_BAD_IN_A_ROW:
                raise LetPass(_too_many(bad))
            left = {id(example) for _, example in culprits}
            feed.put_back([each for each in examples if id(each[1]) not in left])

    def _leave_out(self, key: Any, example: Any, error: BaseException) -> BadSample:
        guard, stage = self.healing
        bad = guard.known.that_raised(
            "loading", error, **place(f"{key}@{stage}"), preview=preview_of(example), worker=worker_id()
        )
        guard.known.add(bad)
        return bad

    def _step_back(self, examples: int) -> None:
        """Has a function that is given indices see the same index again at the second attempt."""
        if self._state_dict and not self.batched:
            self._state_dict["previous_state_example_idx"] -= examples

    def _culprits(self, examples: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Finds the examples that raise by themselves or, if none does, the one without which the others do not."""
        if len(examples) == 1:
            return examples
        alone = [each for each in examples if self._raises([each])]
        if alone:
            return alone
        for number, each in enumerate(examples):
            if not self._raises([*examples[:number], *examples[number + 1 :]]):
                return [each]
        return []

    def _raises(self, examples: list[tuple[Any, Any]]) -> bool:
        """Whether the function raises for these examples."""
        trial = copy.copy(self)
        trial._state_dict = None
        trial.ex_iterable = examples
        trial.drop_last_batch = False
        try:
            for _ in MappedExamplesIterable._iter(trial):
                pass
        except BaseException as error:
            if not is_error(error):
                raise
            self.healing[0].raise_if_not_the_sample(error)
            return True
        return False

    def _is_known(self, key: Any) -> bool:
        blocked = self.healing[0].known.blocked
        return bool(blocked) and is_simple(key) and self._name(key) in blocked

    def _name(self, key: Any) -> str:
        return f"{key}@{self.healing[1]}"


def _too_many(bad: list[BadSample]) -> DataSourceError:
    last = "; ".join(str(each) for each in bad[-3:])
    return DataSourceError(
        f"{len(bad)} samples of the stream in a row could not be mapped: it is not the samples but the function or "
        f"the storage. The last ones: {last}."
    )


class _Known(Exception):
    """An example that is known to raise."""


class GuardedMap(KeptNode, _LeavingOut):
    """Guarded function of `map`."""

    handed_on = ("healing",)


class GuardedFilter(KeptNode, FilteredExamplesIterable, _LeavingOut):  # type: ignore[misc]
    """Guarded function of `filter`."""

    handed_on = ("healing",)


# ---- guarding: copies a Hugging Face stream, with each of its functions and sources guarded ----


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


# ---- names ----


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
