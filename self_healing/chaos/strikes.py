"""`Strikes`: which faults strike now, how often each has, and what is written down of it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .faults import ANY, KINDS, Fault, FaultError, keys_of
from .ledger import Ledger, Strike
from .schedule import strike_ranks, strike_steps


logger = logging.getLogger("self_healing.chaos")

# What is wrong with the data is so for whoever reads it: one rank finds it, and from then on all of them meet it.
_OF_THE_DATA = frozenset({"bad_sample", "poison_samples"})
# Before steps are drawn.
_NEVER = 2**62


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
        among (`"any"`, `int` or `Sequence[int]`):
            Ranks that those strike which name none.

    Raises:
        `FaultError`: if these are no ranks.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        seed: int,
        ledger: Ledger,
        min_gap: int | None,
        among: str | int | Sequence[int] = ANY,
    ) -> None:
        named = [among] if isinstance(among, int) else [] if among == ANY else among
        whole = [isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in named]
        if not all(whole) or (among != ANY and not whole):
            raise FaultError(f"ranks={among!r}: please give {ANY!r}, a rank (from 0), or a list of ranks.")
        self.faults = tuple(faults)
        self.keys = keys_of(faults)
        self.seed = seed
        self.ledger = ledger
        self.min_gap = min_gap
        self._among = among
        self.rank = 0
        self.steps: tuple[int, ...] = (_NEVER,) * len(self.faults)
        self.ranks: tuple[int, ...] = (0,) * len(self.faults)
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

    def draw(self, max_steps: int, rank: int, ranks: int, loads: bool) -> None:
        """
        Draws the steps and the ranks of those at random.

        Args:
            max_steps (`int`):
                Of the run.
            rank (`int`), ranks (`int`):
                This one, of so many.
            loads (`bool`):
                Whether each rank loads its own samples; otherwise the first one loads those of all.
        """
        self.steps = strike_steps(self.faults, max_steps, self.seed, self.min_gap)
        drawn = strike_ranks(self.faults, ranks, self.seed, self._among)
        places = [self._place(fault) for fault in self.faults]
        self.ranks = tuple(
            0 if place == "data" and not loads else each for place, each in zip(places, drawn, strict=True)
        )
        self.rank = self.ledger.rank = rank

    def read_ledger(self) -> list[Strike]:
        """Takes over what earlier processes of this rehearsal have done, of all ranks, once, and gives it."""
        if self._replayed:
            return []
        self._replayed = True
        strikes = self._take_over()
        if strikes:
            logger.warning(
                "Chaos: %d strikes are on record in %s and do not come again. For another rehearsal, name another "
                "ledger.",
                len(strikes),
                self.ledger.path,
            )
        return strikes

    def found_by_others(self) -> list[Strike]:
        """Takes over what other ranks have meanwhile found to be wrong with the data, and gives all that struck."""
        unknown = any(
            fault.kind in _OF_THE_DATA
            and self.ranks[number] != self.rank
            and self.step > self.steps[number]
            and self.count(number) < (fault.limit or 1)
            for number, fault in enumerate(self.faults)
        )
        return self._take_over() if unknown else []

    def _take_over(self) -> list[Strike]:
        known = {key: number for number, key in enumerate(self.keys)}
        strikes = self.ledger.strikes()
        for strike in strikes:
            number = known.get(strike.fault)
            if number is not None:
                row = self._struck[number]
                row[0], row[1] = max(int(row[0]), strike.count), max(int(row[1]), strike.step)
                row[2] = strike.detail.get("index", int(row[2]))
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
            if self.ranks[number] != self.rank:
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
            logger.warning("Chaos: %s strikes at step %d (rank %d).", self.keys[number], step, self.rank)
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
