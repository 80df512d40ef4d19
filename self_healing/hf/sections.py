"""Where training is: the sections of a step as they begin and end, and the phase the Trainer is in."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum


# ---- sections: which part of a step is going on, since when, and how long each has taken, for a watchdog ----


BETWEEN = "between"
# Left in the middle, they leave half-updated weights, a torn checkpoint, or a state that is neither old nor new.
NEVER_INTERRUPTED = frozenset({"optimizer", "save", "judge"})
# After the last step there is nothing left to be recovered, and how long it takes is known from no time before.
NEVER_WATCHED = frozenset({"load_best_model"})
# Rare and long: one time is enough to know them by. The others begin with compilation, downloads, workers.
_KNOWN_AFTER_ONE = frozenset({"save", "evaluate", "on_save", "on_epoch_end"})
# Times per step that nothing else is going on.
_BETWEEN_PER_STEP = 4
# Floors that a part may take of which nothing is known: half an hour, longer than most compilations and downloads.
_FLOORS_AT_FIRST = 30.0


@dataclass(slots=True)
class Section:
    """The times that one part of a step has taken."""

    name: str
    learning: int
    times: int = 0
    longest: float = 0.0
    longest_at_first: float = 0.0
    patient: int = 0
    at_least: float = 0.0
    allowed: float = 0.0

    @property
    def known(self) -> bool:
        return self.times >= self.learning


# How often a part of a step (data, forward and backward, optimizer, ...) has to be seen before it is watched.
LEARNING_STEPS = 3


class Heartbeat:
    """Notes signs of life of the training thread: begin and end of each part of a step."""

    def __init__(self, learning_steps: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._learning_steps = LEARNING_STEPS if learning_steps is None else learning_steps
        self.clock = clock
        self.sections: dict[str, Section] = {}
        self._outer: list[Section] = []
        self._lock = threading.Lock()
        self._pauses = 0
        # The newest beat, and seconds since it that do not count: the process stood still, or waited for another rank.
        self.excused: tuple[int, float] = (-1, 0.0)
        # Replaced as a whole, so that another thread never sees the section of one beat with the time of another.
        self.last: tuple[Section, float, int] = (self._section(BETWEEN), clock(), 0)

    def _section(self, name: str) -> Section:
        found = self.sections.get(name)
        if found is None:
            learning = 1 if name in _KNOWN_AFTER_ONE else self._learning_steps
            found = Section(name, learning * _BETWEEN_PER_STEP if name == BETWEEN else learning)
            self.sections[name] = found
        return found

    # ---- the training thread ----

    def enter(self, name: str) -> None:
        """Begins a part of a step; it may lie within another one."""
        # Spelt out here and in `leave`, because each call of a method would cost as much as all of the rest.
        outer, since, beats = self.last
        now = self.clock()
        if now - since > outer.longest:
            self._took_longer(outer, now - since, beats)
        if not self._outer:
            outer.times += 1
            if outer.patient:
                outer.patient -= 1
        self._outer.append(outer)
        self.last = (self.sections.get(name) or self._section(name), now, beats + 1)

    def leave(self) -> None:
        """Ends the part; what it lies within goes on."""
        section, since, beats = self.last
        now = self.clock()
        if now - since > section.longest:
            self._took_longer(section, now - since, beats)
        section.times += 1
        if section.patient:
            section.patient -= 1
        self.last = (self._outer.pop() if self._outer else self._section(BETWEEN), now, beats + 1)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def _took_longer(self, section: Section, seconds: float, beats: int) -> None:
        since, excused = self.excused
        seconds -= excused if since == beats else 0.0
        if section.known or section.learning == 1:
            section.longest = max(section.longest, seconds)
        else:
            section.longest_at_first = max(section.longest_at_first, seconds)

    def begin(self) -> None:
        """Called when `train()` is entered: nothing is going on yet, and each part may take longer once more."""
        self._outer.clear()
        for section in self.sections.values():
            section.patient = _BETWEEN_PER_STEP if section.name == BETWEEN else 1
            section.at_least = 0.0
        self.start_over(self._section(BETWEEN))

    def be_patient(self, name: str, at_least: float = 0.0) -> None:
        """Lets a part take longer the next time than any time before, and `at_least` these seconds."""
        section = self._section(name)
        section.patient, section.at_least = max(section.patient, 1), max(section.at_least, at_least)

    def allow(self, name: str, seconds: float) -> None:
        """Lets a part take these seconds each time, whatever it usually takes."""
        self._section(name).allowed = seconds

    def start_over(self, section: Section | None = None) -> None:
        """Counts the time from now on; what has passed says nothing about how long the part takes."""
        current, _, beats = self.last
        self.last = (section or current, self.clock(), beats + 1)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Marks a wait on purpose, from any thread: nothing that takes long meanwhile is a hang."""
        with self._lock:
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
            self.start_over()

    # ---- the thread that watches ----

    @property
    def waits_on_purpose(self) -> bool:
        return self._pauses > 0

    @property
    def may_be_interrupted(self) -> bool:
        """Whether nothing that is going on would be left in a state that cannot be used."""
        names = {section.name for section in list(self._outer)} | {self.last[0].name}
        return not names & NEVER_INTERRUPTED

    def limit(self, section: Section, factor: float, floor: float) -> float | None:
        """Seconds without a sign of life in a part that are too many; `None` while it is not known."""
        if not section.known or section.name in NEVER_WATCHED:
            return None
        # What only the first times took may come back once (a recompilation), and is not multiplied.
        usual = max(floor, factor * section.longest, 2 * section.longest_at_first, section.allowed)
        return max(factor * usual, section.at_least) if section.patient else usual

    @staticmethod
    def limit_at_first(section: Section, floor: float) -> float:
        """Seconds after which to warn of a part that is not known yet, though it may well be fine."""
        return max(_FLOORS_AT_FIRST * floor, 2 * section.longest_at_first, section.at_least, section.allowed)


# ---- phase: the part of an optimizer step that the Trainer is in ----


class Phase(Enum):
    """The part of an optimizer step that the Trainer is in; verdicts quote the values."""

    IDLE = "before the first step"
    FETCHING = "while batches were fetched"
    COMPUTING = "in forward or backward"
    STEPPING = "inside optimizer.step"
    STEPPED = "after optimizer.step"
