"""Keeps states of a run in host memory: candidates, the trusted ones, and the one it began with."""

from __future__ import annotations

from typing import Any

import torch

from ..hf.state import LiveState
from .copied_state import size_of
from .host_copies import SideStream
from .host_memory import HostBlock, free_host_memory
from .shared_states import SharedStates
from .snapshots import Snapshot


# Share of the free host memory that new buffers may take: the data loaders and the next checkpoint need some, too.
_SHARE_OF_FREE_MEMORY = 0.8


class SnapshotRing:
    """
    Holds the candidate, trusted generations and the state a run began with.

    Buffers are allocated once and used again by later snapshots. Where host memory is short, fewer generations are
    kept; where not even one fits beside a candidate, none are ([`shrink`] tells).

    Args:
        generations (`int`, *optional*, defaults to 2):
            Trusted states that are kept, beside the one the run began with.
        shared ([`SharedStates`], *optional*):
            Lets them outlive the process.
    """

    def __init__(self, generations: int = 2, shared: SharedStates | None = None) -> None:
        self.generations = generations
        self._shared = shared
        self.candidate: Snapshot | None = None
        self.initial: Snapshot | None = None
        self.trusted: list[Snapshot] = []
        self._spare: list[Snapshot] = []
        self._streams: dict[torch.device, SideStream] = {}
        # The tensors of the newest one, and the state that this process leaves to the next.
        self.taken_of: LiveState | None = None
        self.left: Snapshot | None = None
        # Whether each copy is waited for at once: something writes to the state between two updates.
        self.waits = False

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(snapshot.nbytes for snapshot in self.snapshots())

    def snapshots(self) -> list[Snapshot]:
        """Lists all snapshots, including those whose memory is only kept to be used again."""
        held = [*self.trusted, *self._spare, self.candidate, self.initial]
        return [snapshot for snapshot in held if snapshot is not None]

    # ---- taking ----

    def fits(self, live: LiveState) -> bool:
        """Whether there is host memory for one more state, or that of a snapshot not needed any more."""
        if self.candidate is not None or self._spare:
            reused = self.candidate or self._spare[-1]
            return size_of(live) - reused.nbytes <= _SHARE_OF_FREE_MEMORY * free_host_memory()
        return size_of(live) <= _SHARE_OF_FREE_MEMORY * free_host_memory()

    def shrink(self) -> bool:
        """Makes room for a candidate by giving up the oldest generation; `False` if that would leave none."""
        if len(self.trusted) > 1:
            self._retire(self.trusted.pop(0))
        elif self.initial is not None and self.trusted:
            self._retire(self.initial)
            self.initial = None
        else:
            return False
        self.generations = max(len(self.trusted), 1)
        return True

    def take(self, live: LiveState, step: int, extras: dict[str, Any]) -> Snapshot:
        """
        Copies the state as it is into a new candidate, in place of one that was not promoted.

        Args:
            live ([`LiveState`]):
                The tensors.
            step (`int`):
                Optimizer steps finished.
            extras (`dict`):
                Kept with it.
        """
        if self.candidate is not None:
            self._retire(self.candidate)
            self.candidate = None
        snapshot = self._spare.pop() if self._spare else Snapshot()
        snapshot.step = snapshot.as_of = step
        snapshot.extras, snapshot.torn = extras, False
        try:
            new_block = HostBlock if self._shared is None else self._shared.new_block
            self.taken_of = live
            snapshot.take(live, self._streams, self.waits, new_block)
        except BaseException:
            self._retire(snapshot)
            raise
        self.candidate = snapshot
        return snapshot

    def hold(self, snapshot: Snapshot, live: LiveState, extras: dict[str, Any]) -> None:
        """Makes a state that is in memory already the candidate; otherwise as [`take`]."""
        snapshot.extras, snapshot.as_of = extras, snapshot.step
        self.taken_of, self.candidate = live, snapshot

    def join(self) -> None:
        """Has the devices wait, before the state is changed, for copies that are still under way."""
        for snapshot in self.snapshots():
            snapshot.join()

    def wait(self) -> None:
        """Waits for all copies that are under way."""
        for snapshot in self.snapshots():
            snapshot.wait()

    # ---- trusting ----

    def promote(self) -> None:
        """Trusts the candidate; the oldest generation gives its memory to the next one."""
        if self.candidate is None:
            return
        self.trusted.append(self.candidate)
        self.candidate = None
        if len(self.trusted) > self.generations:
            self._retire(self.trusted.pop(0))

    def begin_with_candidate(self) -> None:
        """Keeps the candidate as the state the run began with."""
        self.initial, self.candidate = self.candidate, None

    def forget_initial(self) -> None:
        """Gives the memory of the state the run began with to later ones."""
        if self.initial is not None and self.trusted:
            self._retire(self.initial)
            self.initial = None

    def discard(self) -> None:
        """Drops the candidate."""
        if self.candidate is not None:
            self.candidate.wait()
            self._retire(self.candidate)
            self.candidate = None

    def distrust(self, snapshot: Snapshot) -> None:
        """Drops a trusted state and every newer one."""
        kept = [each for each in self.trusted if each.step < snapshot.step]
        for dropped in [each for each in self.trusted if each not in kept]:
            self._retire(dropped)
        self.trusted = kept

    def _retire(self, snapshot: Snapshot) -> None:
        """Its memory is used again by a later one; what was kept with it, a batch among it, is not needed any more."""
        snapshot.extras = {}
        if not snapshot.pool:
            # Of an earlier process, whose memory is given back.
            return
        if self._shared is not None:
            self._shared.revoke(snapshot)
            if self._shared.active and not self._shared.holds(snapshot):
                # It was taken before there was a place for it that outlives the process.
                return
        self._spare.append(snapshot)

    # ---- going back ----

    def restore(self, snapshot: Snapshot, live: LiveState) -> None:
        """
        Writes a state into the live tensors ([`Snapshot.restore`]).

        Copies of what is overwritten, into any snapshot, are waited for before.
        """
        self.wait()
        snapshot.restore(live)

    def release(self) -> None:
        """Gives all host memory back."""
        self.wait()
        if self._shared is not None:
            for snapshot in self.snapshots():
                self._shared.revoke(snapshot)
        self.candidate = self.initial = self.left = self.taken_of = None
        self.trusted, self._spare, self._streams = [], [], {}
