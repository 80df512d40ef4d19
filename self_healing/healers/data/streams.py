"""
Streams without the samples that cannot be read, mapped or put into a batch; the next one takes the place of each.

An iterator that a generator feeds is dead once something in it has raised. Of Hugging Face streams the functions are
therefore guarded one by one, each above a source that lives on; any other source is asked for its next sample, and
opened again where it has died.

Read against datasets 5.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from .guard import Guard, LetPass, Proxy, worker_id
from .quarantine import BadSample, SampleName, describe_name, find_problem, place
from .sources import SourceReader


try:
    from . import hugging_face
except ImportError:
    # Not installed, or its parts have other names: streams are guarded from the outside.
    hugging_face = None  # type: ignore[assignment]


class GuardedStream(Proxy, IterableDataset):  # type: ignore[type-arg]
    """Leaves out the samples of an iterable dataset that cannot be used."""

    _own = frozenset({"wrapped", "guard", "live"})

    def __init__(self, wrapped: Any, guard: Guard) -> None:
        self.wrapped = wrapped
        self.guard = guard
        self.live: LiveStream | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"live": None}

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getitem__(self, key: Any) -> Any:
        return self.wrapped[key]

    def __iter__(self) -> Iterator[Any]:
        if self.guard.off:
            return iter(self.wrapped)
        self.guard.names = None
        self.live = LiveStream(self.wrapped, self.guard)
        return self.live

    # ---- for the collator ----

    def substitutes(self, name: SampleName) -> Iterator[tuple[SampleName, Any]]:
        """See [`Supply`]."""
        while self.live is not None:
            try:
                drawn = self.live.draw()
            except StopIteration:
                return
            yield drawn

    def refuse(self, name: SampleName, sample: Any) -> None:
        """See [`Supply`]: it is the next one again."""
        if self.live is not None:
            self.live.put_back(name, sample)

    def describe(self, name: SampleName) -> dict[str, Any]:
        """See [`Supply`]."""
        return place(str(name)) | {"worker": worker_id()}


class LiveStream:
    """Gives the samples of a stream, once."""

    def __init__(self, dataset: Any, guard: Guard) -> None:
        self._dataset = dataset
        self._guard = guard
        self._tracked = hugging_face.guarded(dataset, guard) if hugging_face is not None else None
        self._reading = SourceReader(self._open, guard, self._where, self._advance_by, apart=self._is_apart)
        self._back: deque[tuple[SampleName, Any]] = deque()
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        guard = self._guard
        if guard.off:
            return self._plain()
        return guard.contained(self._next, self._plain)

    def _next(self) -> Any:
        name, sample = self.draw()
        if self._guard.names is None:
            self._guard.names = []
        self._guard.names.append(name)  # type: ignore[attr-defined]
        return sample

    def _plain(self) -> Any:
        """Goes on without the guard, from where it stands."""
        if self._back:
            return self._back.popleft()[1]
        if self._reading.source is None:
            self._reading.source = self._open()
        return next(self._reading.source)

    def draw(self) -> tuple[SampleName, Any]:
        """Draws the next sample that can be used, and its name."""
        if self._back:
            return self._back.popleft()
        guard, tracked = self._guard, self._tracked
        if guard.names_only:
            return self._named_only()
        if not self._begun:
            guard.blocked()
        while True:
            sample = next(self._reading)
            if not self._begun:
                self._begun = True
                guard.began(sample)
                if tracked is not None:
                    # The stream itself is asked where it stands, by the loader and by checkpoints.
                    self._dataset._state_dict = tracked.dataset._state_dict
            name = self._name(self._reading.ordinal - 1)
            if guard.known.blocked and tracked is not None and name in guard.known.blocked:
                continue
            problem = find_problem(sample)
            if problem is None:
                return name, sample
            guard.known.add(BadSample.with_problem(problem, attempts=1, **self._at(name)))

    def _named_only(self) -> tuple[SampleName, Any]:
        try:
            sample = next(self._reading)
        except StopIteration:
            raise
        except Exception as raised:
            error = raised.error if isinstance(raised, LetPass) else raised
            name = describe_name(self._name(self._reading.ordinal))
            error.add_note(f"self_healing: raised while the training data were streamed, at {name}.")
            raise LetPass(error) from None
        if self._reading.ordinal == 1:
            self._guard.began(sample)
        return self._name(self._reading.ordinal - 1), sample

    def put_back(self, name: SampleName, sample: Any) -> None:
        """Gives this sample next."""
        self._back.appendleft((name, sample))

    def _open(self) -> Iterator[Any]:
        return iter(self._dataset if self._tracked is None else self._tracked.dataset)

    def _is_apart(self) -> bool:
        """Whether it can be opened a second time while it is read, because its position is in its iterator."""
        return self._reading.source is not self._dataset and not hasattr(self._dataset, "state_dict")

    def _advance_by(self) -> Iterator[Any] | None:
        """Opens the stream where it says it stands; `None` if it does not say."""
        if self._tracked is not None:
            state = self._tracked.dataset.state_dict()
            self._tracked = hugging_face.guarded(self._dataset, self._guard)
            if self._tracked is None:
                return None
            self._tracked.dataset.load_state_dict(state)
            return self._open()
        if not hasattr(self._dataset, "state_dict") or not hasattr(self._dataset, "load_state_dict"):
            return None
        self._dataset.load_state_dict(self._dataset.state_dict())
        return self._open()

    def _name(self, ordinal: int) -> str:
        """Name of the sample that was given last, the nth of this pass."""
        if self._tracked is not None and self._tracked.key is not None:
            return f"{self._tracked.key}@{self._tracked.stages}"
        return f"{worker_id() or 0}:{ordinal}"

    def _where(self, ordinal: int) -> dict[str, Any]:
        return self._at(self._name(ordinal))

    @staticmethod
    def _at(name: str) -> dict[str, Any]:
        return place(name) | {"worker": worker_id()}
