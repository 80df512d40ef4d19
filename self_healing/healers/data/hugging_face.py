"""Functions of `map` and `filter`, made to leave out the examples they raise for. Read against datasets 5.2."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from datasets.iterable_dataset import FilteredExamplesIterable, MappedExamplesIterable

from ...data.bad_sample import BadSample, preview_of
from ...data.hugging_face.nodes import KeptNode
from ...data.sample_names import is_simple, place
from ...failures.classify import is_error
from .guard import MAX_BAD_IN_A_ROW, DataSourceError, Guard, LetPass, worker_id


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
