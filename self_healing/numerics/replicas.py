"""Heals weights that are not the same on all ranks any more: a bit has flipped on one, and shows in no loss."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence

import torch

from .. import consensus
from ..failures import Action, FailureType
from ..instrument import Replicas, Window
from ..rollback.rollback import Rollback
from ..run.context import RunContext
from ..run.dispatch import HealingContext
from ..run.incidents import OpenIncident
from .climb import RollbackClimb
from .healer import NumericsHealer
from .state import NumericsState


logger = logging.getLogger("self_healing")

# The vote in which weights are compared.
SAME = "weights are the same"
# Share of the training time that comparing may take, and optimizer steps from one comparison to the next.
_SHARE, _FEWEST_STEPS, _MOST_STEPS = 0.001, 10, 1000
# How much farther from the weights as they should be those of the rank that was hit must be.
_CLEARLY_FARTHER = 2.0


class ReplicaHealer(NumericsHealer):
    """
    Compares the weights of all ranks every few steps, and where they differ goes back to a trusted state, applies the
    steps since then again, and names the rank that was hit.
    """

    def __init__(self, run: RunContext, numerics: NumericsState, rollback: Rollback, climb: RollbackClimb) -> None:
        super().__init__(run, numerics, rollback)
        self._climb = climb
        self._replicas: Replicas | None = None
        self._off = False
        # The last step at which they were the same.
        self._same_at: int | None = None
        self._next = 0
        # Of the first comparison: when it was, at which step, and how many seconds reading took.
        self._first: tuple[float, int, float] | None = None
        self._interval = _FEWEST_STEPS
        # How often each rank was named.
        self._hit: Counter[int] = Counter()

    def due(self, step: int, suspicious: bool) -> bool:
        """
        Whether the replicas are to be compared in this step, which all ranks have to know alike.

        Args:
            step (`int`):
                Optimizer steps finished.
            suspicious (`bool`):
                Whether the step is not as it should be, on all ranks.
        """
        if self._off or consensus.world_size() == 1 or self.config.on_nonfinite != "heal" or not self.acts:
            return False
        if self._replicas is None:
            self._replicas = Replicas(self.instrument.trainer)
        if not self._replicas.possible:
            self._off = True
            return False
        return (
            step >= self._next
            or self.rollback.states.will_trust(step)
            or self.instrument.view.in_last_step
            or (suspicious and self._same_at is not None)
        )

    def heal(self, window: Window) -> bool:
        """
        Compares the replicas, and heals what it finds. Collective.

        Args:
            window ([`Window`]):
                The step that is judged.

        Returns:
            `bool`: Whether they had come apart.
        """
        assert self._replicas is not None
        sums = self._read(self._replicas, window.step)
        apart = self._replicas.unlike(SAME, sums)
        if not apart:
            self._same_at = window.step
            self._next = window.step + self._interval
            return False
        if self._same_at is None:
            # They were not the same when the run began: each rank trains weights of its own.
            self._off = True
            return False
        found = self.instrument.view.nonfinite_tensors
        if consensus.any_rank("weights are not finite", lambda: bool(found()), self.instrument.view.device):
            # That is seen where the step is judged, and has a name of its own.
            return False
        names = [name for at, name in enumerate(self._replicas.tensors()) if at in set(apart)]
        with self.run.incident(
            window.step, "replicas_differ", {"tensors": names[:20], "tensors_total": len(names)}
        ) as opened:
            self._heal(opened, window, self._replicas, sums, names)
        return True

    def _read(self, replicas: Replicas, step: int) -> torch.Tensor:
        """Reads the weights, and chooses by what that takes how often to."""
        if self._first is None:
            # The first time is not the usual one.
            replicas.sums().tolist()
            began = time.perf_counter()
            sums = replicas.sums()
            sums.tolist()
            self._first = time.perf_counter(), step, time.perf_counter() - began
            return sums
        began, first, seconds = self._first
        if step >= first + _FEWEST_STEPS and self._interval == _FEWEST_STEPS:
            typical = (time.perf_counter() - began) / (step - first)
            device = self.instrument.view.device
            share = consensus.largest("how often weights are compared", [seconds / typical], device)[0]
            self._interval = min(max(math.ceil(share / _SHARE), _FEWEST_STEPS + 1), _MOST_STEPS)
        return replicas.sums()

    def _heal(
        self, opened: OpenIncident, window: Window, replicas: Replicas, sums: torch.Tensor, names: Sequence[str]
    ) -> None:
        incident, step, device = opened.incident, self.instrument.view.step, self.instrument.view.device
        # Before anything is done about it, which may end the run.
        opened.diagnosed(FailureType.REPLICAS_DIFFER, "weights of one rank differ")
        told = consensus.from_every_rank("sums of the weights", (replicas.place, sums.tolist()), device)
        of_ranks = [tuple(each) for _, each in told]
        odd = odd_ranks_by_place([place for place, _ in told], of_ranks)
        found = replicas.apart(names) if odd is None else None
        context = HealingContext(incident, self.instrument, window)
        context.unlike_from = None if self._same_at is None else self._same_at + 1
        context.verdict = "the weights of the ranks are not the same any more"
        if not self.run.budget.spend(step):
            context.verdict += (
                f"; the budget of {self.config.max_recovery_attempts} attempts without progress is spent"
            )
            if self._hit:
                times = (f"rank {rank} ({count} times)" for rank, count in self._hit.most_common(3))
                context.verdict += f"; hit so far: {', '.join(times)}"
            self._name(opened, odd)
            self.actions.apply(Action.STOP, context, self.args)
        if not self.rollback.can_go_back():
            self._off = True
            self._name(opened, odd)
            incident.evidence["why"] = "there is no trusted state to go back to; the ranks go on as they are"
            opened.close("reported")
            return
        self.actions.apply((Action.ROLL_BACK, Action.REPLAY_STEPS), context, self.args)
        self._climb.owe_checkpoint(context.went_back)
        after = replicas.sums()
        if replicas.unlike(SAME, after):
            self._off = True
            self._name(opened, odd)
            incident.evidence["why"] = "the trusted state differs as well; from here on they are not compared"
            opened.close("reported")
            return
        if found is not None and not window.skipped:
            # The weights are those that were compared, as they should have been.
            distance = found.distance_from(replicas.tensors())
            now = consensus.from_every_rank("how far the weights were off", (distance, after.tolist()), device)
            odd = _told_apart(of_ranks, [tuple(each) for _, each in now], [distance for distance, _ in now])
        self._next = window.step + 1
        self._name(opened, odd)
        opened.wait()

    def _name(self, opened: OpenIncident, odd: list[int] | None) -> None:
        """Says which ranks were hit, if that can be told."""
        who = "one rank" if odd is None else f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
        opened.diagnosed(FailureType.REPLICAS_DIFFER, f"weights of {who} differ", {"odd_ranks": odd})
        self._hit.update(odd or ())


def odd_ranks(sums: Sequence[tuple[int, ...]]) -> list[int] | None:
    """
    Finds the ranks whose weights are not those of most.

    Args:
        sums (`Sequence[tuple[int, ...]]`):
            Of each rank.

    Returns:
        `list[int]`: `None` where more than half have no common opinion, as with two ranks.
    """
    most, count = Counter(sums).most_common(1)[0]
    return [rank for rank, each in enumerate(sums) if each != most] if 2 * count > len(sums) else None


def odd_ranks_by_place(places: Sequence[tuple[int, ...]], sums: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Finds the same where not all ranks have the same part of the weights: among those of each place."""
    found: list[int] = []
    for place in dict.fromkeys(places):
        ranks = [rank for rank, each in enumerate(places) if each == place]
        odd = odd_ranks([sums[rank] for rank in ranks])
        if odd is None:
            return None
        found += [ranks[each] for each in odd]
    return sorted(found)


def _told_apart(
    sums: Sequence[tuple[int, ...]], should_be: Sequence[tuple[int, ...]], distances: Sequence[float]
) -> list[int] | None:
    """Tells ranks that were hit from the others by the weights as they should have been."""
    odd = [rank for rank, each in enumerate(sums) if each != should_be[rank]]
    if len(odd) < len(sums):
        return odd
    # The others were moved, too, by gradients of the one that was hit.
    farthest = max(range(len(sums)), key=distances.__getitem__)
    others = max(each for rank, each in enumerate(distances) if rank != farthest)
    return [farthest] if distances[farthest] > _CLEARLY_FARTHER * others else None
