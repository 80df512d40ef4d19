"""`RankHealth`: looks after the ranks of a job while they train, from a thread beside the training thread."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Any

from ..failures import FailureType
from ..instrument import OwnWork
from ..journal.incident import Incident
from ..ranks import Neighbour
from ..ranks.link import ask
from ..run.context import RunContext
from ..run.healer import Healer
from .silence import Silence, SilenceWatch
from .start import check_ranks_at_start
from .stragglers import Straggler, StragglerWatch, Work


logger = logging.getLogger("self_healing")

# Seconds between two looks at the next rank, and how long it has for its answer, as parts of the limit.
_LOOK, _ANSWER = 0.05, 0.1
# The first rank compares all of them every so many seconds, and no more often than so many of them a second.
_COMPARE, _RANKS_A_SECOND = 5.0, 50.0
# Where the run ends, the thread is waited for as long, if it is writing something down.
_STOPPING = 1.0
_WORK = "work"


class RankHealth(Healer):
    """
    Names ranks that do not answer, and ranks that are slower than the others; they are left as they are.

    Each rank asks the next one, and the first one compares the times of all. Nothing is done in the training thread
    but reading the clock around what is measured.

    Args:
        run ([`RunContext`]):
            The run.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._limit = run.config.collective_timeout_check_seconds
        self._silence = SilenceWatch(self._limit)
        self._stragglers = StragglerWatch()
        self._work: OwnWork | None = None
        self._compared, self._asked = 0.0, False
        self._stopping = threading.Event()
        # The thread writes incidents down while none of the training thread ends them all.
        self._lock = threading.Lock()
        self._silent: tuple[Silence, Incident] | None = None
        self._slow: dict[int, Incident] = {}
        self._failed = False

    def attach(self, first: bool) -> None:
        """Checks all ranks before the first step, and looks after them until the instrument is detached."""
        run = self._run
        if self._limit == 0:
            return
        if first and run.instrument.view.world_size > 1:
            check_ranks_at_start(run)
        if not run.ranks.known:
            return
        try:
            self._work = OwnWork(run.instrument)
            self._work.attach()
            run.ranks.also_told[_WORK] = self._told
        except Exception:
            logger.warning("How fast this rank is cannot be measured.", exc_info=True)
        run.instrument.on_detach.append(self._stop)
        self._compared = time.monotonic()
        threading.Thread(target=self._watch, name="self_healing rank health", daemon=True).start()

    def run_ends(self, step: int) -> None:
        self._end()

    def _stop(self) -> None:
        self._end()
        self._run.ranks.also_told.pop(_WORK, None)

    def _end(self) -> None:
        self._stopping.set()
        # The thread may hang where it writes something down, and nothing waits for it then.
        if not self._lock.acquire(timeout=_STOPPING):
            return
        try:
            for incident in self._slow.values():
                self._run.journal.closed(incident, "reported")
            self._slow.clear()
            self._end_silence("reported")
        finally:
            self._lock.release()

    def _told(self) -> dict[str, Any]:
        assert self._work is not None
        return {"host": socket.gethostname(), "times": self._work.told()}

    # ---- the thread ----

    def _watch(self) -> None:
        while not self._stopping.wait(min(1.0, _LOOK * self._limit)):
            try:
                self._look()
            except Exception:
                if not self._failed:
                    self._failed = True
                    logger.exception("The ranks could not be looked after once; it goes on. Please report this.")

    def _look(self) -> None:
        neighbour = self._run.ranks.neighbour()
        answered = neighbour is not None and self._answers(neighbour)
        found = self._silence.look(time.monotonic(), neighbour, answered)
        with self._lock:
            if not self._stopping.is_set():
                self._note_silence(found)
        if self._run.ranks.rank == 0 and self._work is not None:
            self._compare_now_and_then(time.monotonic())

    def _answers(self, neighbour: Neighbour) -> bool:
        if neighbour.address is None:
            return False
        with contextlib.suppress(OSError):
            ask(neighbour.address, _ANSWER * self._limit)
            return True
        return False

    # ---- a rank that does not answer ----

    def _note_silence(self, found: Silence | None) -> None:
        if self._silent is not None and self._silent[0] is not found:
            self._end_silence("self_recovered")
        if found is not None and self._silent is None:
            self._silent = (
                found,
                self._report(
                    "silent_rank",
                    FailureType.SILENT_RANK,
                    found.cause,
                    {"rank": found.rank, "seconds": round(found.seconds, 1), "diagnosis": found.text},
                ),
            )
            logger.warning("Step %d: %s", self._run.step, found.text)

    def _end_silence(self, outcome: str) -> None:
        if self._silent is not None:
            self._run.journal.closed(self._silent[1], outcome)
            self._silent = None

    # ---- a rank that is slower than the others ----

    @property
    def _pause(self) -> float:
        return max(_COMPARE, self._run.instrument.view.world_size / _RANKS_A_SECOND)

    def _compare_now_and_then(self, now: float) -> None:
        if self._asked:
            # In the look before: nothing is waited for, so that no look comes late.
            self._asked = False
            self._compare(now)
        elif now - self._compared >= self._pause:
            self._compared, self._asked = now, True
            self._run.ranks.positions()

    def _compare(self, now: float) -> None:
        told = self._run.ranks.facts(_WORK) | {self._run.ranks.rank: self._told()}
        works = {rank: Work(*each["times"]) for rank, each in told.items()}
        found, over = self._stragglers.take_in(now, self._run.step, works)
        with self._lock:
            if self._stopping.is_set():
                return
            for each in found:
                self._note_straggler(each, told[each.rank]["host"])
            for rank in over:
                if rank in self._slow:
                    self._run.journal.closed(self._slow.pop(rank), "self_recovered")

    def _note_straggler(self, found: Straggler, host: str) -> None:
        doing = {"data": "waiting for batches", "forward": "in forward"}[found.part]
        text = (
            f"Rank {found.rank} ({host}) has been slower than the others since step {found.since_step}: its own work "
            f"takes {found.factor:.1f} times as long, most of it {doing}. Each step takes about "
            f"{100 * found.share:.0f} % longer for that on all ranks."
        )
        evidence = {
            "rank": found.rank,
            "host": host,
            "part": found.part,
            "factor": round(found.factor, 2),
            "share_of_step": round(found.share, 3),
            "since_step": found.since_step,
            "diagnosis": text,
        }
        cause = f"rank {found.rank} is {found.factor:.1f} times slower in {found.part}"
        self._slow[found.rank] = self._report("slow_rank", FailureType.SLOW_RANK, cause, evidence)
        logger.warning("Step %d: %s", self._run.step, text)

    def _report(self, symptom: str, failure: FailureType, cause: str, evidence: dict[str, Any]) -> Incident:
        journal = self._run.journal
        diagnosis = evidence.pop("diagnosis")
        incident = journal.open(self._run.step, symptom, evidence)
        journal.diagnosed(incident, failure, cause, {"diagnosis": diagnosis})
        journal.dealt_with(incident)
        return incident
