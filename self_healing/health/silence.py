"""`SilenceWatch`: notices that another rank does not answer, by when it was heard of last, and on which way."""

from __future__ import annotations

from dataclasses import dataclass

from ..processes import State
from ..ranks import Neighbour


# Of the limit: what is tolerated before a rank is named, so that it is named within the limit; and how old the last
# sign of life may be of one that lives.
_TOLERATED, _FRESH = 0.75, 0.375
# Of the limit: a look that comes later than that says nothing, because this process has not run meanwhile.
_LATE = 0.25


@dataclass(frozen=True, slots=True)
class Silence:
    """
    A rank that does not answer.

    Args:
        rank (`int`), cut_off (`bool`):
            Which one, and whether it lives, by what it says over the store, and only the way to it is cut.
        seconds (`float`):
            For how long.
        text (`str`):
            That in words.
    """

    rank: int
    cut_off: bool
    seconds: float
    text: str

    @property
    def cause(self) -> str:
        """What it is, in a few words."""
        return f"rank {self.rank} {'cannot be reached' if self.cut_off else 'is silent'}"


class SilenceWatch:
    """
    Decides whether the rank that this one listens to is silent. Called every so often with what is known of it.

    Args:
        limit (`float`):
            Seconds within which a rank that does not answer is named.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.found: Silence | None = None
        self._rank: int | None = None
        # When it answered last, if it ever has; what came before is not counted; when was looked last.
        self._answered: float | None = None
        self._since = self._looked = 0.0

    def look(self, now: float, neighbour: Neighbour | None, answered: bool) -> Silence | None:
        """
        Takes in what is known.

        Args:
            now (`float`):
                By `time.monotonic`.
            neighbour ([`Neighbour`], *optional*):
                The rank that this one listens to.
            answered (`bool`):
                Whether it has answered when it was asked just now.

        Returns:
            [`Silence`]: `None` while the rank answers, by one way or the other.
        """
        late, self._looked = now - self._looked > self._limit * _LATE, now
        if neighbour is None or neighbour.rank != self._rank:
            self._rank = None if neighbour is None else neighbour.rank
            self.found = self._answered = None
            self._since = now
        if late:
            self._since = now
        if answered:
            self._answered = now
        if neighbour is not None:
            self._judge(now, neighbour)
        return self.found

    def _judge(self, now: float, neighbour: Neighbour) -> None:
        ways = []
        unheard = now - max(neighbour.heard, self._since)
        # Where the store does not answer this rank, it says nothing of others.
        if now - neighbour.listened < self._limit * _FRESH:
            ways.append(unheard)
        # A way that has never been open may be closed on purpose.
        unreached = None if self._answered is None else now - max(self._answered, self._since)
        if unreached is not None:
            ways.append(unreached)
        if not ways:
            return
        tolerated, fresh = self._limit * _TOLERATED, self._limit * _FRESH
        if min(ways) >= tolerated:
            if self.found is None or self.found.cut_off:
                self.found = Silence(neighbour.rank, False, min(ways), _of_silent(neighbour, min(ways)))
        elif unreached is not None and unreached >= tolerated and unheard < fresh:
            if self.found is None or not self.found.cut_off:
                self.found = Silence(neighbour.rank, True, unreached, _of_cut_off(neighbour, unreached))
        elif (unreached is None or unreached < fresh) and min(ways) < fresh:
            self.found = None


def _of_silent(neighbour: Neighbour, seconds: float) -> str:
    text = f"Nothing was heard of rank {neighbour.rank} for {seconds:.0f} s, and it does not answer when it is asked. "
    if neighbour.state is State.STOPPED:
        text += "Its process is stopped (SIGSTOP). "
    elif neighbour.state is State.RUNS:
        text += (
            "Its process is there, but none of its threads gets to run: native code holds the GIL, or the machine "
            "is out of memory or of processor time. "
        )
    elif neighbour.state is None:
        text += "It is on another machine, which hangs or is cut off, or its process does not run. "
    return f"{text}Before, it {neighbour.position}."


def _of_cut_off(neighbour: Neighbour, seconds: float) -> str:
    return (
        f"Rank {neighbour.rank} could not be reached for {seconds:.0f} s, though it says over the store of the job "
        f"that it lives: the network between this machine and {neighbour.machine.partition(' ')[0]} is cut, or lets "
        "only small packets through. Collectives between the two may not return."
    )
