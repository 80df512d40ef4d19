"""Chooses how many steps lie between two snapshots, by what they cost."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from statistics import median

from ..config.healing_config import HealingConfig
from .snapshots import Snapshot


# Closer snapshots would be no older than what verification takes anyway.
_LEAST_STEPS = 5
# One copy that was held up by something else must not leave the run without a newer state for hundreds of steps: the
# next one, at most this many times as far away, says what copies cost.
_MOST_GROWTH = 10


@dataclass(frozen=True, slots=True)
class IntervalChoice:
    """An interval, and why it was chosen."""

    steps: int
    seconds: float
    share_of_step: float


class SnapshotInterval:
    """
    Times steps and copies, and says when a snapshot is due: as soon as copies stay within their share of the time.
    """

    def __init__(self, config: HealingConfig) -> None:
        self._config = config
        self._steps = config.snapshot_interval or _LEAST_STEPS
        # The step of the last snapshot, or of the last rollback.
        self.last_taken = 0
        self._chosen: int | None = None
        self._step_began: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._copy_seconds: deque[float] = deque(maxlen=5)
        # The shortest of the copies into new memory, which take several times as long, and are few.
        self._first_copy_seconds = math.inf

    def entry_begins(self) -> None:
        """Forgets when the last step began: `train()` is entered (again)."""
        self._step_began = None

    def step_begins(self, step: int) -> bool:
        """Takes the time of the step before; returns whether a snapshot is due."""
        now = time.perf_counter()
        if self._step_began is not None:
            self._step_seconds.append(now - self._step_began)
        self._step_began = now
        return step - self.last_taken >= self._steps

    def copied(self) -> None:
        """Leaves the copy that was just made out of the time of the step it is held against."""
        self._step_began = time.perf_counter()

    @property
    def typical_step(self) -> float:
        """Seconds that a step takes on this rank; infinite before there was one."""
        return median(self._step_seconds) if self._step_seconds else math.inf

    def share_of_step(self, snapshot: Snapshot) -> float:
        """Measures what the copy into a snapshot cost on this rank, in steps."""
        seconds = snapshot.seconds + snapshot.writing_seconds
        if snapshot.allocated:
            self._first_copy_seconds = min(self._first_copy_seconds, seconds)
        else:
            self._copy_seconds.append(seconds)
        return self._typical_copy() / self.typical_step

    def _typical_copy(self) -> float:
        return median(self._copy_seconds) if self._copy_seconds else self._first_copy_seconds

    def choose(self, share: float) -> IntervalChoice | None:
        """Chooses the interval by what copies cost."""
        steps = self._config.snapshot_interval
        if not steps:
            steps = max(math.ceil(share / self._config.snapshot_overhead_budget), _LEAST_STEPS)
            steps = min(steps, _MOST_GROWTH * self._steps)
        # Near enough is left as it is: the measurement varies, and the journal is read by people.
        if self._chosen is not None and 0.5 <= steps / self._steps <= 2:
            return None
        self._steps = self._chosen = steps
        return IntervalChoice(steps, self._typical_copy(), share)
