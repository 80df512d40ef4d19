"""`OtherRanks`: the other ranks of the job, beside its collectives."""

from __future__ import annotations

from collections.abc import Callable

from ..system.processes import Process
from .channel import Place, place_in_job
from .messages import Failure, Position
from .session import Session


class OtherRanks:
    """
    The other ranks of the job, as far as they tell: that they live, where they are, and what one of them has failed
    with.
    """

    def __init__(self, name: str, interval: float = 1.0) -> None:
        self._name, self._interval = name, interval
        self._session: Session | None = None

    @property
    def known(self) -> bool:
        """Whether there are other ranks, and they are listened to."""
        return self._session is not None

    @property
    def rank(self) -> int:
        """This rank; 0 where there is no other."""
        return 0 if self._session is None else self._session.rank

    @property
    def failures(self) -> list[Failure]:
        """What ranks have failed with, this one included, in the order in which it was told."""
        return [] if self._session is None else list(self._session.failures)

    def watch(
        self,
        look: Callable[[], Position],
        on_failure: Callable[[Failure], None],
        place: Place | None = None,
        process: Process | None = None,
    ) -> None:
        """Begins to tell and to listen, or goes on with it."""
        if self._session is not None and self._session.own is not None:
            # train() is entered once more all the same: the code around it has let the exception pass.
            self.leave()
        place = place or place_in_job()
        if self._session is None and place is not None:
            process = process or Process.this_one()
            self._session = Session(place, self._name, self._interval, look, on_failure, process)

    def tell(self, failure: Failure, within: float = 1.0) -> None:
        """Tells all ranks that one has failed."""
        if self._session is not None:
            self._session.tell(failure, within)

    def leave(self, within: float = 1.0) -> None:
        """Says goodbye: from here on this rank may end, and no other one is watched."""
        session, self._session = self._session, None
        if session is not None:
            session.leave(within)

    def first_failure(self, within: float = 0.0) -> Failure | None:
        """Gives the failure that ended the job, as far as it is known."""
        return None if self._session is None else self._session.first_failure(within)

    def positions(self, within: float = 0.0) -> dict[int, Position]:
        """Gives where the ranks are that are known to live, this one among them."""
        return {} if self._session is None else self._session.positions(within)

    def waited_for(self, here: Position) -> tuple[int, Position] | None:
        """Finds a rank that this one may wait for without being taken for hanging."""
        return None if self._session is None else self._session.waited_for(here)
