"""Notices ranks that are gone, and tells the others where this one is."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..failures.recipes import FailureType
from ..system.processes import Process, State, log_safely
from .messages import Failure, Place, Position, SideChannel, first_of, place_in_job


logger = logging.getLogger("self_healing")


# All times in signs of life that are due meanwhile, by default seconds. Once something has happened, the others are
# listened to as often.
_ALERT = 0.2
# So many seconds lie between two looks at what another thread is waiting for.
_SOON = 0.02
# A process of this machine that is stopped is given up after so many. One of another machine is not given up for its
# silence: a thread that does not get to run (native code holds the interpreter's lock) is no dead process, and nobody
# here can tell the two apart.
_STOPPED = 3.0
# This process has been stopped itself, or starved: what it has not seen meanwhile says nothing.
_STOOD_STILL = 2.0
# What a rank that has not been heard of for longer was doing is not known any more.
_STALE = 10.0
# While this rank waits, the others are asked where they are as often as the store stands it.
_RANKS_AT_ONCE = 50.0
# Without the store nobody can say goodbye: another rank that is gone has to be missed as well, for so many seconds.
_MAY_HAVE_LEFT = 60.0


@dataclass(slots=True)
class _Other:
    """Another rank, as far as it is known."""

    process: Process
    count: int
    heard: float
    position: Position
    left: bool = False
    stopped_since: float | None = None


class OtherRanks:
    """
    Tells the other ranks of the job, beside its collectives, that this one lives, where it is, and what it has failed
    with; and takes in the same of them, in a thread.
    """

    def __init__(self, name: str, interval: float = 1.0) -> None:
        self._name, self._interval = name, interval
        # None of them is listened to: there are none, or this one has said goodbye.
        self._thread: threading.Thread | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.rank = 0
        # What ranks have failed with, this one included, in the order in which it was told.
        self.failures: list[Failure] = []
        # What this rank has told of itself.
        self._own: Failure | None = None
        self._others: dict[int, _Other] = {}
        self._orders: queue.SimpleQueue[tuple[Callable[[SideChannel], None], threading.Event]] = queue.SimpleQueue()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._channel: SideChannel | None = None
        self._lost = False
        self._count = 0
        # Failures that were taken in.
        self._read_failures = 0
        self._last, self._asked = time.monotonic(), 0.0
        self._wanted = False

    # ---- other threads ----

    @property
    def known(self) -> bool:
        """Whether there are other ranks, and they are listened to."""
        return self._thread is not None

    def watch(
        self,
        look: Callable[[], Position],
        on_failure: Callable[[Failure], None],
        place: Place | None = None,
        process: Process | None = None,
    ) -> None:
        """Begins to tell and to listen, or goes on with it."""
        if self._own is not None:
            # train() is entered once more all the same: the code around it has let the exception pass.
            self.leave()
        place = place or place_in_job()
        if self.known or place is None:
            return
        self.rank, self._place = place.rank, place
        self._look, self._on_failure, self._process = look, on_failure, process or Process.this_one()
        self._thread = threading.Thread(
            target=self._run, args=(self._ended,), name="self_healing other ranks", daemon=True
        )
        self._thread.start()

    def tell(self, failure: Failure, within: float = 1.0) -> None:
        """Tells all ranks that one has failed."""
        if not self.known or self._is_told(failure):
            return
        if failure.rank == self.rank:
            self._own = failure
        self.failures.append(failure)
        self._order(lambda channel: channel.append("failures", failure.to_record()), within)

    def leave(self, within: float = 1.0) -> None:
        """Says goodbye: from here on this rank may end, and no other one is watched."""
        if not self.known:
            return
        ended = self._ended

        def say(channel: SideChannel) -> None:
            self._tell_where(channel, leaves=True)
            ended.set()

        self._order(say, within)
        ended.set()
        self._wake.set()
        self._thread = None
        self._begin_anew()

    def first_failure(self, within: float = 0.0) -> Failure | None:
        """Gives the failure that ended the job, as far as it is known."""
        if not self.known:
            return None

        def found() -> bool:
            first = first_of(self.failures)
            return first is not None and not first.follows

        self._until(found, within)
        return first_of(self.failures)

    def positions(self, within: float = 0.0) -> dict[int, Position]:
        """Gives where the ranks are that are known to live, this one among them."""
        if not self.known:
            return {}
        # Of the ranks by now: in the thread others are added meanwhile.
        before = {rank: other.count for rank, other in list(self._others.items())}

        def answered() -> bool:
            self._wanted = True
            return all(other.count > before.get(rank, -1) for rank, other in self._living())

        self._until(answered, within)
        return {rank: other.position for rank, other in self._living()} | {self.rank: self._look()}

    def waited_for(self, here: Position) -> tuple[int, Position] | None:
        """Finds a rank that this one may wait for without being taken for hanging."""
        self._wanted = True
        now = time.monotonic()
        for rank, other in self._living():
            where = other.position
            known = where.training and now - other.heard < _STALE * self._interval
            # Within its own limits: a wait for it is no hang.
            moves = known and where.collective is None and where.left > 0
            if moves and (where.on_purpose or here.collective is not None or where.progress < here.progress):
                return rank, where
        return None

    def _living(self) -> list[tuple[int, _Other]]:
        gone = {failure.rank for failure in self.failures if failure.failure is FailureType.PROCESS_DIED}
        return [(rank, other) for rank, other in list(self._others.items()) if not other.left and rank not in gone]

    def _is_told(self, failure: Failure) -> bool:
        return any(each.rank == failure.rank for each in self.failures)

    def _order(self, order: Callable[[SideChannel], None], within: float) -> None:
        """Has the thread do something with the store."""
        done = threading.Event()
        self._orders.put((order, done))
        self._until(lambda: done.is_set() or self._lost, within)

    def _until(self, happened: Callable[[], bool], within: float) -> None:
        self._wake.set()
        deadline = time.monotonic() + within
        while not happened() and time.monotonic() < deadline:
            time.sleep(_SOON)

    # ---- the thread ----

    def _run(self, ended: threading.Event) -> None:
        try:
            self._channel = SideChannel(self._place, self._name)
        except Exception as error:
            self._lose_store(error)
        while not ended.is_set():
            try:
                self._listen(ended)
            except Exception as error:
                self._lose_store(error)
            # What happens while this thread waits for the store is what it asks for next.
            self._wake.wait(self._interval * (_ALERT if self.failures else 1.0))
            self._wake.clear()

    def _lose_store(self, error: Exception) -> None:
        """Goes on without the store: processes of this machine are looked at as before."""
        if self._lost or self._ended.is_set():
            return
        self._channel, self._lost = None, True
        log_safely(
            logger,
            logging.WARNING,
            "The store of this job cannot be listened to (%s: %s): from here on, what ends other ranks is not known, "
            "but of those on this machine. Training goes on.",
            type(error).__name__,
            str(error).partition("\n")[0],
            # What torch raises says it all; anything else is a mistake of ours.
            exc_info=None if isinstance(error, RuntimeError) else error,
        )

    def _listen(self, ended: threading.Event) -> None:
        now = time.monotonic()
        if now - self._last > self._interval * (1.0 + _STOOD_STILL):
            for other in self._others.values():
                other.heard, other.stopped_since = now, None
        self._last = now
        channel = self._channel
        if channel is not None:
            while not self._orders.empty():
                order, done = self._orders.get()
                try:
                    order(channel)
                finally:
                    done.set()
            if ended.is_set():
                return
            self._tell_where(channel)
            self._read_positions(channel)
            self._take_in_failures(channel)
        # By the time at which this look began: if this process is stopped in the middle of one, the next one knows.
        self._look_at_processes(now)

    def _tell_where(self, channel: SideChannel, leaves: bool = False) -> None:
        self._count += 1
        record: dict[str, Any] = {"count": self._count, "left": leaves, "process": asdict(self._process)}
        with contextlib.suppress(Exception):
            # Looks at what the training thread changes meanwhile.
            record["position"] = asdict(self._look())
        channel.put(f"rank/{self.rank}", record)

    def _read_positions(self, channel: SideChannel) -> None:
        """Reads where the others are: the one behind this one each time, all of them where that is wanted."""
        if not self._others:
            # Until all of them have come.
            self._read(channel, [rank for rank in range(self._place.ranks) if rank != self.rank])
            return
        living = [rank for rank, _ in self._living()]
        now = time.monotonic()
        # Each of them is listened to by one other, in a circle.
        following = min(living, key=lambda rank: (rank - self.rank) % self._place.ranks, default=None)
        pause = 0.0 if self.failures else self._interval * len(living) / _RANKS_AT_ONCE
        if self._wanted and now - self._asked >= pause:
            self._asked, self._wanted = now, False
            self._read(channel, living)
        elif following is not None:
            self._read(channel, [following])

    def _read(self, channel: SideChannel, ranks: list[int]) -> None:
        found = channel.read([f"rank/{rank}" for rank in ranks]) if ranks else None
        now = time.monotonic()
        for rank, record in zip(ranks, found or [], strict=False):
            if rank not in self._others:
                nowhere = Position(0, "", 0, 0.0, 0.0, training=False)
                self._others[rank] = _Other(Process(**record["process"]), -1, now, nowhere)
            other = self._others[rank]
            if record["count"] != other.count:
                other.count, other.heard = record["count"], now
            if "position" in record:
                other.position = Position(**record["position"])
            other.left = record["left"]

    def _take_in_failures(self, channel: SideChannel) -> None:
        told = [Failure.of(record) for record in channel.listed("failures")]
        new, self._read_failures = told[self._read_failures :], len(told)
        for failure in new:
            if failure.rank in self._others and not self._others[failure.rank].left:
                with contextlib.suppress(RuntimeError):
                    self._read(channel, [failure.rank])
            if not self._is_told(failure):
                self.failures.append(failure)
            if failure.rank != self.rank or self._own is None:
                # Of this rank: it was stopped, and the others have given it up.
                self._on_failure(failure)

    def _look_at_processes(self, now: float) -> None:
        """Looks at the processes of this machine."""
        for rank, other in self._living():
            if other.process.machine != self._process.machine:
                continue
            state = other.process.state()
            if state is State.GONE:
                why = "its process is gone without a word: killed, crashed in native code, or ended by os._exit"
                if self._channel is None:
                    why = "its process is gone, and what it may have said before cannot be read"
                self._give_up(rank, why)
            elif state is not State.STOPPED:
                other.stopped_since = None
            elif other.stopped_since is None:
                other.stopped_since = now
            elif now - other.stopped_since >= _STOPPED * self._interval:
                self._give_up(rank, "its process is stopped (SIGSTOP)")

    def _give_up(self, rank: int, why: str) -> None:
        channel, other = self._channel, self._others[rank]
        if channel is not None:
            # It may have said goodbye, or what it failed with, since it was listened to.
            self._read(channel, [rank])
            self._take_in_failures(channel)
        # Where it cannot have said goodbye, it may have ended as it should.
        patience = 0.0 if channel is not None else _MAY_HAVE_LEFT
        where, step = other.position, other.position.step
        with contextlib.suppress(Exception):
            # It has taken part in all steps that are finished here; what it said itself may be a second old.
            step = max(step, self._look().step)
        failure = Failure(rank, step, FailureType.PROCESS_DIED, why, where.section, patience=patience)
        if other.left or self._is_told(failure):
            return
        self.failures.append(failure)
        if channel is not None:
            channel.append("failures", failure.to_record())
        self._on_failure(failure)
