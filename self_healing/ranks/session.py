"""Notices ranks that are gone, and tells the others where this one is."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..failures.recipes import FailureType
from ..system.processes import Process, State, log_safely
from .messages import Failure, Place, Position, SideChannel, failure_of_leaving, first_of, place_in_job, waited_for


logger = logging.getLogger("self_healing")


# ---- session: a thread that tells the other ranks that this one lives, and notices when one of them does not ----


# All times in signs of life that are due meanwhile, by default seconds. Once something has happened, the others are
# listened to as often.
_ALERT = 0.2
# A process of this machine that is stopped is given up after so many. One of another machine is not given up for its
# silence: a thread that does not get to run (native code holds the interpreter's lock) is no dead process, and nobody
# here can tell the two apart.
_STOPPED = 3.0
# This process has been stopped itself, or starved: what it has not seen meanwhile says nothing.
_STOOD_STILL = 2.0
# A rank that has left train() is missed where this one has waited in a collective for so many, without a step.
_MISSED = 10.0
# What a rank that has not been heard of for longer was doing is not known any more.
_STALE = 10.0
# While this rank waits, the others are asked where they are as often as the store stands it.
_RANKS_AT_ONCE = 50.0
# Once the store is lost, it is tried again after as long, and each time after twice as long, up to a limit.
_AGAIN, _AGAIN_AT_MOST = 5.0, 60.0
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


class Session:
    """
    Tells the other ranks that this one lives, where it is, and what it has failed with; and takes in the same of them.
    """

    def __init__(
        self,
        place: Place,
        name: str,
        interval: float,
        look: Callable[[], Position],
        on_failure: Callable[[Failure], None],
        process: Process,
    ) -> None:
        self.rank = place.rank
        # In the order in which they were told; those of other ranks and of this one.
        self.failures: list[Failure] = []
        # What this rank has told of itself.
        self.own: Failure | None = None
        self._place, self._name, self._interval = place, name, interval
        self._look, self._on_failure, self._process = look, on_failure, process
        self._others: dict[int, _Other] = {}
        self._unseen = deque(rank for rank in range(place.ranks) if rank != place.rank)
        self._orders: queue.SimpleQueue[Callable[[SideChannel], None]] = queue.SimpleQueue()
        self._wake, self._news, self._ended = threading.Event(), threading.Condition(), threading.Event()
        self._channel: SideChannel | None = None
        self._lost_it = self._told_of_it = False
        # How far this rank has come, and when it was in no collective last, or came further.
        self._progress = (-1, -1)
        self._waits_since = time.monotonic()
        self._count = self._counted = 0
        # Numbers of failures that were counted, and not read yet.
        self._unread: set[int] = set()
        self._last, self._asked = time.monotonic(), 0.0
        self._wanted = False
        self._thread = threading.Thread(target=self._run, name="self_healing other ranks", daemon=True)
        self._thread.start()

    # ---- other threads ----

    def tell(self, failure: Failure, within: float) -> None:
        """As [`OtherRanks.tell`]."""
        if self._is_told(failure):
            return
        if failure.rank == self.rank:
            self.own = failure
        self.failures.append(failure)
        self._order(lambda channel: self._post(channel, failure), within)

    def leave(self, within: float) -> None:
        """As [`OtherRanks.leave`]."""

        def say(channel: SideChannel) -> None:
            self._tell_where(channel, leaves=True)
            self._ended.set()

        self._order(say, within)
        self._ended.set()
        self._wake.set()

    def first_failure(self, within: float) -> Failure | None:
        """As [`OtherRanks.first_failure`]."""

        def found() -> bool:
            first = first_of(self.failures)
            return first is not None and not first.follows

        self._wait_for(found, within)
        first = first_of(self.failures)
        if first is not None and first.follows:
            # What a collective has raised may come of a rank that is in train() no more.
            with contextlib.suppress(Exception):
                return self._left_early() or first
        return first

    def positions(self, within: float) -> dict[int, Position]:
        """As [`OtherRanks.positions`]."""
        # Of the ranks by now: in the thread others are added meanwhile.
        before = {rank: other.count for rank, other in list(self._others.items())}

        def answered() -> bool:
            self._wanted = True
            return all(other.count > before.get(rank, -1) for rank, other in self._living())

        self._wait_for(answered, within)
        return {rank: other.position for rank, other in self._living()} | {self.rank: self._look()}

    def waited_for(self, here: Position) -> tuple[int, Position] | None:
        """As [`OtherRanks.waited_for`]."""
        self._wanted = True
        now = time.monotonic()
        heard = {rank: other.position for rank, other in self._living() if now - other.heard < _STALE * self._interval}
        rank = waited_for(here, heard)
        return None if rank is None else (rank, heard[rank])

    def _living(self) -> list[tuple[int, _Other]]:
        gone = {failure.rank for failure in self.failures if failure.failure is FailureType.PROCESS_DIED}
        return [(rank, other) for rank, other in list(self._others.items()) if not other.left and rank not in gone]

    def _is_told(self, failure: Failure) -> bool:
        return any(each.rank == failure.rank for each in self.failures)

    def _order(self, order: Callable[[SideChannel], None], within: float) -> None:
        done = threading.Event()

        def carry_out(channel: SideChannel) -> None:
            try:
                order(channel)
            finally:
                done.set()

        self._orders.put(carry_out)
        self._wake.set()
        deadline = time.monotonic() + within
        while self._thread.is_alive() and not self._lost_it and time.monotonic() < deadline:
            if done.wait(0.02):
                return

    def _wait_for(self, happened: Callable[[], bool], within: float) -> None:
        self._wake.set()
        with self._news:
            self._news.wait_for(lambda: self._ended.is_set() or happened(), within)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._channel = SideChannel(self._place, self._name)
        except Exception as error:
            self._lost(error)
        while not self._ended.is_set():
            try:
                self._listen()
            except Exception as error:
                self._lost(error)
            with self._news:
                self._news.notify_all()
            # What happens while this thread waits for the store is what it asks for next.
            self._wake.wait(self._interval * (_ALERT if self.failures else 1.0))
            self._wake.clear()
        self._channel = None
        with self._news:
            self._news.notify_all()

    def _lost(self, error: Exception) -> None:
        if not self._told_of_it and not self._ended.is_set():
            self._told_of_it = True
            log_safely(
                logger,
                logging.WARNING,
                "The store of this job cannot be listened to (%s: %s): as long as that lasts, what ends other ranks "
                "is not known, but of those on this machine. Training goes on.",
                type(error).__name__,
                str(error).partition("\n")[0],
                # What torch raises says it all; anything else is a mistake of ours.
                exc_info=None if isinstance(error, RuntimeError) else error,
            )
        tries, lost = self._lost_it, self._channel
        self._channel, self._lost_it = None, True
        if not tries:
            # That takes its time, in which processes of this machine are looked at as before.
            thread = threading.Thread(target=self._try_again, args=(lost,), name="self_healing store", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()

    def _try_again(self, channel: SideChannel | None) -> None:
        """Connects to the store again: ranks on other machines hear nothing of this one meanwhile."""
        pause = _AGAIN
        while not self._ended.wait(pause * self._interval):
            pause = min(2 * pause, _AGAIN_AT_MOST)
            try:
                if channel is None:
                    channel = SideChannel(self._place, self._name)
                else:
                    channel.connect_again()
            except Exception:
                continue
            logger.info("The store of this job is listened to again.")
            self._channel, self._lost_it = channel, False
            return

    def _listen(self) -> None:
        now = time.monotonic()
        if now - self._last > self._interval * (1.0 + _STOOD_STILL):
            for other in self._others.values():
                other.heard, other.stopped_since = now, None
        self._last = now
        channel = self._channel
        if channel is not None:
            while not self._orders.empty():
                self._orders.get()(channel)
            if self._ended.is_set():
                return
            self._tell_where(channel)
            self._meet(channel)
            self._read_positions(channel)
            self._take_in_failures(channel)
        # By the time at which this look began: if this process is stopped in the middle of one, the next one knows.
        self._look_at_processes(now)
        self._miss_those_who_left(now)

    def _tell_where(self, channel: SideChannel, leaves: bool = False) -> None:
        self._count += 1
        record: dict[str, Any] = {"count": self._count, "left": leaves, "process": asdict(self._process)}
        with contextlib.suppress(Exception):
            # Looks at what the training thread changes meanwhile.
            position = self._look()
            record["position"] = position.to_record()
            moved = position.progress != self._progress
            if moved:
                self._progress = position.progress
            if moved or position.collective is None:
                self._waits_since = time.monotonic()
        channel.put(f"rank/{self.rank}", record)

    def _meet(self, channel: SideChannel) -> None:
        """Takes in ranks that were not there yet."""
        while self._unseen:
            rank = self._unseen[0]
            if channel.read([f"rank/{rank}"]) is None:
                # Most of them come together: they are asked for one by one only until one is missing. Next time begins
                # with another one, as that one may never come: it cannot reach the store.
                self._unseen.rotate(-1)
                return
            self._unseen.popleft()
            self._read(channel, [rank])

    def _read_positions(self, channel: SideChannel) -> None:
        """Reads where the others are: the one behind this one each time, all of them where that is wanted."""
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
            self._take_in(rank, record, now)

    def _take_in(self, rank: int, record: Mapping[str, Any], now: float) -> None:
        other, position = self._others.get(rank), record.get("position")
        if other is None:
            where = Position(0, "", 0, 0.0, 0.0, training=False) if position is None else Position.of(position)
            self._others[rank] = _Other(Process(**record["process"]), record["count"], now, where, record["left"])
            return
        if record["count"] != other.count:
            other.count, other.heard = record["count"], now
        if position is not None:
            other.position = Position.of(position)
        other.left = record["left"]

    def _take_in_failures(self, channel: SideChannel) -> None:
        told = channel.add("failures", 0)
        self._unread.update(range(self._counted + 1, told + 1))
        self._counted = max(self._counted, told)
        for number in sorted(self._unread):
            found = channel.read([f"failure/{number}"])
            if found is None:
                # Not written yet; or never, by a rank that was killed between the two.
                continue
            self._unread.discard(number)
            failure = Failure.of(found[0])
            if failure.rank in self._others and not self._others[failure.rank].left:
                with contextlib.suppress(RuntimeError):
                    self._read(channel, [failure.rank])
            if not self._is_told(failure):
                self.failures.append(failure)
            if failure.rank != self.rank or self.own is None:
                # Of this rank: it was stopped, and the others have given it up.
                self._on_failure(failure)

    def _post(self, channel: SideChannel, failure: Failure) -> None:
        number = channel.add("failures", 1)
        channel.put(f"failure/{number}", failure.to_record())

    def _look_at_processes(self, now: float) -> None:
        """Looks at the processes of this machine."""
        for rank, other in self._living():
            if not self._is_here(other):
                continue
            state = other.process.state()
            if state is State.GONE:
                why = "its process is gone without a word: killed, crashed in native code, or ended by os._exit"
                self._give_up(rank, why)
            elif state is not State.STOPPED:
                other.stopped_since = None
            elif other.stopped_since is None:
                other.stopped_since = now
            elif now - other.stopped_since >= _STOPPED * self._interval:
                self._give_up(rank, "its process is stopped (SIGSTOP)")

    def _miss_those_who_left(self, now: float) -> None:
        """Gives up a rank that has left `train()` in good order, and that this one waits for in a collective."""
        channel = self._channel
        if channel is None or now - self._waits_since < _MISSED * self._interval:
            return
        failure = self._left_early()
        if failure is None:
            return
        self.failures.append(failure)
        self._post(channel, failure)
        self._on_failure(failure)

    def _left_early(self) -> Failure | None:
        """Finds a rank that has left `train()` without a failure while this one trains on."""
        left = {rank: other.position for rank, other in list(self._others.items()) if other.left}
        for failure in self.failures:
            left.pop(-1 if failure.rank is None else failure.rank, None)
        here = self._look()
        if not left or here.ending:
            return None
        rank = min(left)
        # It has taken part in all steps that are finished here.
        return failure_of_leaving(rank, max(left[rank].step, here.step))

    def _is_here(self, other: _Other) -> bool:
        return other.process.machine == self._process.machine

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
            self._post(channel, failure)
        self._on_failure(failure)


# ---- others: the other ranks of the job, beside its collectives ----


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
