"""Heals weights that are not the same on all ranks any more: a bit has flipped on one, and shows in no loss."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from ...failures.recipes import FailureType
from ...hf.replicas import DIGEST_PARTS, Group, Replicas, SumsOfGroups, are_apart, copies_of, distance_between, unlike
from ...hf.step import Window
from ...ranks import votes
from ...run.healer import HealingContext
from ...run.incidents import OpenIncident
from ...run.run import Run
from ...system import processes
from .healer import NumericsHealer


logger = logging.getLogger("self_healing")

# Optimizer steps from one comparison to the next. A step reads all weights several times, and comparing once or twice.
_EVERY = 50
# How much farther from the weights as they should be those of the rank that was hit must be.
_CLEARLY_FARTHER = 2.0


class ReplicaHealer(NumericsHealer):
    """
    Compares weights that several ranks keep, every few steps, and where they differ goes back to a trusted state,
    applies the steps since then again, and names the rank that was hit.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._replicas: Replicas | None = None
        self.off = processes.world_size() == 1
        # The last step at which they were the same.
        self.same_at: int | None = None
        self._next = 0
        # How often each rank was named.
        self._hit: Counter[int] = Counter()

    # ---- comparing: what is known here is the same on all ranks ----

    def due(self, step: int) -> bool:
        """Whether weights are to be compared in this step."""
        if self.off or self.config.on_nonfinite != "heal" or not self.acts:
            return False
        if self._replicas is None:
            self._replicas = Replicas(self.run.instrument.trainer)
            self.off = not self._replicas.possible
        if self.off or self.same_at is None:
            return not self.off
        return step >= self._next or self.rollback.states.will_trust(step) or self.run.instrument.view.in_last_step

    def compared_since(self, step: int) -> bool:
        """
        Whether a state of the run can be trusted: a bit that had flipped in weights or moments by then would have been
        seen. Always, where nothing is compared.
        """
        # Moments show in weights after the next update.
        return self.off or self._replicas is None or (self.same_at is not None and self.same_at > step)

    def digest(self) -> torch.Tensor:
        """Reads the weights of this rank: [`Replicas.digest`]."""
        assert self._replicas is not None
        return self._replicas.digest()

    def apart(self) -> bool:
        """Compares them at once. Collective."""
        found = votes.sum_over_ranks("weights are the same", self.digest(), self.run.instrument.view.device)
        return are_apart(found[:DIGEST_PARTS])

    def note(self, step: int, apart: bool) -> None:
        """Notes what a comparison has found."""
        self._next = step + (1 if apart else _EVERY)
        if not apart:
            self.same_at = step

    # ---- healing: all ranks have to come ----

    def heal(self, window: Window) -> bool:
        """Heals weights that were found to differ. Collective."""
        assert self._replicas is not None
        of_ranks = self._sums_of_ranks("sums of the weights")
        apart = unlike(of_ranks)
        names = sorted({name for of_group in apart.values() for name in of_group})
        if self.same_at is None:
            # They were not the same when the run began: each rank trains weights of its own.
            self._replicas.leave_out(names)
            logger.info("%d weights are not the same on all ranks from the start, and not compared.", len(names))
            return False
        found = self.run.instrument.view.nonfinite_tensors()
        if votes.any_rank("weights are not finite", bool(found), self.run.instrument.view.device):
            # That is seen where the step is judged, and has a name of its own.
            return False
        if not apart:
            # What was read wrong was right when it was read again.
            return False
        with self.run.incident(
            window.step, "replicas_differ", {"tensors": names[:20], "tensors_total": len(names)}
        ) as opened:
            self._heal(opened, window, of_ranks, apart)
        return True

    def _sums_of_ranks(self, question: str) -> list[SumsOfGroups]:
        assert self._replicas is not None
        return votes.from_every_rank(question, self._replicas.sums(), self.run.instrument.view.device)

    def _heal(
        self,
        opened: OpenIncident,
        window: Window,
        of_ranks: Sequence[SumsOfGroups],
        apart: Mapping[Group, Sequence[str]],
    ) -> None:
        assert self._replicas is not None
        step, device = self.run.instrument.view.step, self.run.instrument.view.device
        odd = odd_by_majority(of_ranks, apart)
        # Before anything is done about it, which may end the run.
        self._name(opened, odd)
        before = copies_of(self._replicas.tensors(), apart) if odd is None else None
        context = HealingContext(opened.incident, self.run.instrument, window)
        context.unlike_from = None if self.same_at is None else self.same_at + 1
        context.verdict = "the weights of the ranks are not the same any more"
        rung, spent = self.numerics.ladder.climb(FailureType.REPLICAS_DIFFER, step, frozenset())
        if spent:
            context.verdict += f"; {spent}"
            if self._hit:
                times = (f"rank {rank} ({count} times)" for rank, count in self._hit.most_common(3))
                context.verdict += f"; hit so far: {', '.join(times)}"
            self.actions.apply(rung.actions, context, self.args)
        if not self.rollback.can_go_back():
            self._give_up(opened, "there is no trusted state to go back to; the ranks go on as they are")
            return
        self.actions.apply(rung.actions, context, self.args)
        self.climb.owe_checkpoint(context.went_back)
        after = self._sums_of_ranks("sums of the weights gone back to")
        if unlike(after):
            self._give_up(opened, "the trusted state differs as well; from here on they are not compared")
            return
        if before is not None and not window.skipped:
            # The weights are those that were compared, as they should have been.
            distance = distance_between(before, self._replicas.tensors())
            distances = votes.from_every_rank("how far the weights were off", distance, device)
            self._name(opened, outlier_by_distance(of_ranks, after, distances, apart))
        opened.wait()

    def _give_up(self, opened: OpenIncident, why: str) -> None:
        self.off = True
        opened.incident.evidence["why"] = why
        opened.close("reported")

    def _name(self, opened: OpenIncident, odd: list[int] | None) -> None:
        """Says which ranks were hit, if that can be told."""
        who = "one rank" if odd is None else f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
        named = {} if odd is None else {"odd_ranks": odd}
        opened.diagnosed(FailureType.REPLICAS_DIFFER, f"weights of {who} differ", named)
        self._hit.update(odd or ())


def odd_by_majority(of_ranks: Sequence[SumsOfGroups], apart: Mapping[Group, Sequence[str]]) -> list[int] | None:
    """Finds the ranks whose weights are not those of most that keep the same."""
    odd: set[int] = set()
    for group, names in apart.items():
        most, count = Counter(_of_group(of_ranks, group, names)).most_common(1)[0]
        if 2 * count <= len(group):
            return None
        odd.update(rank for rank, each in zip(group, _of_group(of_ranks, group, names), strict=True) if each != most)
    return sorted(odd)


def outlier_by_distance(
    of_ranks: Sequence[SumsOfGroups],
    after: Sequence[SumsOfGroups],
    distances: Sequence[float],
    apart: Mapping[Group, Sequence[str]],
) -> list[int] | None:
    """Tells ranks that were hit from the others by the weights as they should have been."""
    odd: set[int] = set()
    for group, names in apart.items():
        pairs = zip(group, _of_group(of_ranks, group, names), _of_group(after, group, names), strict=True)
        hit = [rank for rank, was, should_be in pairs if was != should_be]
        if len(hit) == len(group):
            # The others were moved, too, by gradients of the one that was hit.
            farthest = max(group, key=distances.__getitem__)
            others = max(distances[rank] for rank in group if rank != farthest)
            if distances[farthest] <= _CLEARLY_FARTHER * others:
                return None
            hit = [farthest]
        odd.update(hit)
    return sorted(odd)


def _of_group(of_ranks: Sequence[SumsOfGroups], group: Group, names: Sequence[str]) -> list[tuple[int | None, ...]]:
    return [tuple(of_ranks[rank].get(group, {}).get(name) for name in names) for rank in group]
