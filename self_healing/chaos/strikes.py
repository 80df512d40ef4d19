"""`Strikes`: which faults strike now, how often each has, and what is written down of it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .faults import KINDS, Fault, keys_of
from .ledger import Ledger, Strike
from .schedule import strike_steps


logger = logging.getLogger("self_healing.chaos")


class Strikes:
    """
    Decides which faults strike now. A strike is in the ledger before it strikes.

    Args:
        faults (`Sequence[Fault]`):
            All of them. They are known by their number in it.
        seed (`int`):
            Of everything that is drawn at random.
        ledger ([`Ledger`]):
            What has struck.
        min_gap (`int`, *optional*):
            Fewest steps between two faults at random.
    """

    def __init__(self, faults: Sequence[Fault], seed: int, ledger: Ledger, min_gap: int | None) -> None:
        self.faults = tuple(faults)
        self.keys = keys_of(faults)
        self.seed = seed
        self.ledger = ledger
        self.min_gap = min_gap
        self.steps: tuple[int, ...] = ()
        # Whether the trainer has reward functions: a network error without `where` strikes there.
        self.has_rewards = False
        # Shared with data loader workers, which are forked with a copy of everything else: the steps that are
        # finished; per fault the number of strikes, the step of the last one, and the index of a bad sample.
        self._clock = _shared(torch.zeros(1, dtype=torch.long))
        self._struck = _shared(torch.tensor([[0, -1, -1]] * len(self.faults)))
        self.lock = multiprocessing.RLock()
        self._replayed = False

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return int(self._clock[0])

    @step.setter
    def step(self, finished: int) -> None:
        self._clock[0] = finished

    def draw_steps(self, max_steps: int) -> None:
        """Draws the steps of those at random."""
        self.steps = strike_steps(self.faults, max_steps, self.seed, self.min_gap)

    def read_ledger(self) -> list[Strike]:
        """Takes over what earlier processes of this rehearsal have done, once, and gives it."""
        if self._replayed:
            return []
        self._replayed = True
        known = {key: number for number, key in enumerate(self.keys)}
        strikes = self.ledger.strikes()
        for strike in strikes:
            number = known.get(strike.fault)
            if number is not None:
                row = self._struck[number]
                row[0], row[1] = max(int(row[0]), strike.count), max(int(row[1]), strike.step)
                row[2] = strike.detail.get("index", int(row[2]))
        if strikes:
            logger.warning(
                "Chaos: %d strikes are on record in %s and do not come again. For another rehearsal, name another "
                "ledger.",
                len(strikes),
                self.ledger.path,
            )
        return strikes

    def count(self, number: int) -> int:
        """Gives the number of times a fault has struck."""
        return int(self._struck[number, 0])

    def bad_index(self, number: int) -> int:
        """Gives the index of a bad sample, once it is known; -1 before."""
        return int(self._struck[number, 2])

    def note_bad_index(self, number: int, index: int) -> None:
        """Keeps the index of a bad sample, for the workers as well."""
        self._struck[number, 2] = index

    def wanted(self, kind: str) -> bool:
        """Whether a kind of fault was asked for."""
        return any(fault.kind == kind for fault in self.faults)

    def at(self, place: str) -> bool:
        """Whether any fault strikes at a place."""
        return any(self._place(fault) == place for fault in self.faults)

    def _place(self, fault: Fault) -> str:
        if fault.kind == "bad_sample":
            return "data"
        if fault.kind in ("network_error", "slow_step", "hang"):
            where = str(fault.get("where"))
            if where != "auto":
                return where
            return "reward" if self.has_rewards else "forward"
        return "forward"

    def due(self, kind: str, place: str | None = None) -> Iterator[int]:
        """Gives the faults of a kind that strike now, by number."""
        step = self.step
        for number, fault in enumerate(self.faults):
            if fault.kind != kind or (place is not None and self._place(fault) != place):
                continue
            count, last = int(self._struck[number, 0]), int(self._struck[number, 1])
            if step < self.steps[number] or (fault.limit is not None and count >= fault.limit):
                continue
            if fault.limit is None or KINDS[kind].counts_calls or step > last:
                yield number

    @contextlib.contextmanager
    def strike(self, number: int, **detail: Any) -> Iterator[dict[str, Any]]:
        """Writes down a strike and then, unless the process is gone, what came of it (`effect` in what it gives)."""
        step, fault = self.step, self.faults[number]
        count = int(self._struck[number, 0]) + 1
        self._struck[number, 0], self._struck[number, 1] = count, step
        # One that always strikes is written down the first time: nothing new comes of the rest.
        told = fault.limit is not None or count == 1
        if told:
            self.ledger.strike(self.keys[number], fault.kind, step, count, detail)
            logger.warning("Chaos: %s strikes at step %d.", self.keys[number], step)
        result: dict[str, Any] = {"effect": True}
        try:
            yield result
        finally:
            if told:
                effect = bool(result.pop("effect"))
                self.ledger.effect(self.keys[number], count, effect, result)

    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """Leaves out a fault that fails by a mistake of ours, or of the disk the ledger is on."""
        try:
            yield
        except Exception:
            logger.exception("Chaos: a fault failed to strike at step %d and is left out.", self.step)


def _shared(values: Any) -> torch.Tensor:
    """Shares the numbers with processes that are forked from this one."""
    shared: torch.Tensor = values.share_memory_()
    return shared
