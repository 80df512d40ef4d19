"""Notices a part of a step that takes far too long, interrupts it, or ends the process."""

from __future__ import annotations

import contextvars
import functools
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any

from ...config.healing_config import HealingConfig
from ...failures.recipes import Action, FailureType, Interruption
from ...hf.dataloader import end_awaited_workers
from ...hf.sections import BETWEEN, Heartbeat, Section
from ...journal.incident import Incident
from ...journal.journal import Journal
from ...ranks.messages import Failure, Position, behind, where_all_are, where_all_wait
from ...ranks.session import OtherRanks
from ...run.healer import Claim, claim_for
from ...system.files import replace_file
from ...system.processes import EXIT_FOR_RESTART, launch_of, restarts_on_exit
from .threads import (
    WakeSignal,
    collective_in,
    compiles,
    current_frames,
    line_of,
    own_signals,
    processor_seconds,
    user_line_of,
    worker_line_in,
    write_stacks,
)


logger = logging.getLogger("self_healing")


# ---- bounded: work of a thread that must not wait for it for ever: on disks and services that may hang as well ----


def within(seconds: float, work: Callable[[], Any]) -> None:
    """Does something that touches disks or services, and goes on without it where they hang, or where it fails."""
    context = contextvars.copy_context()

    def do() -> None:
        try:
            context.run(work)
        except Exception:
            logger.exception("The response to a hang failed.")

    thread = threading.Thread(target=do, name="self_healing watchdog's hand", daemon=True)
    thread.start()
    thread.join(seconds)


# ---- watchdog ----


# A part of a step hangs when it takes more than this many times its longest time so far.
FACTOR = 10.0
# Seconds a step has to respond to the interrupt.
GRACE_SECONDS = 30.0


# How often is looked, in seconds; more often where the shortest hang is short.
_POLL = 1.0
# A disk or a tracker that hangs as well must not keep the watching thread from acting.
_BOUND = 10.0
# Where another rank may be waited for, that is looked for after so many seconds; less where the floor is low.
_MAY_WAIT_FOR = 5.0
# What the others say of where they are, when one hangs, is waited for as long.
_ASKING = 2.5
# Parts of a step that all ranks come to their end of together, and in which nothing is loaded: their floor on several
# ranks, as times of the longest one seen, and as a part of the one that is set.
_IN_STEP = frozenset({"step", "judge", "optimizer"})
_FLOOR_TIMES, _FLOOR_PART = 100.0, 0.25
# Parts in which a callback of the user may compute for long on one of several ranks, where none of them may be
# interrupted: one that does so is no hang, which takes less than so much of a processor.
_CALLBACKS = frozenset({BETWEEN, "log", "on_save", "on_epoch_end"})
_COMPUTES = 0.2
# Beats after which training that was interrupted, and has not left train(), evidently goes on.
_GOES_ON = 50


class TrainingHang(Interruption):
    """Raised in the training thread to wake it from what it waits for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FailureType.HANG)


class _Stage(Enum):
    INTERRUPTED = auto()
    LEAVING = auto()
    ALERTING = auto()


@dataclass(slots=True)
class _Alarm:
    """A hang that goes on: the beat after which there was none, and what is done next, when."""

    beats: int
    section: str
    since: float
    limit: float
    known: bool
    incident: Incident | None = None
    stage: _Stage = _Stage.ALERTING
    deadline: float = 0.0
    pause: float = 0.0
    answered: bool = False


class Watchdog:
    """
    Watches the signs of life of one run, and answers a hang: interrupts the training thread, ends the process, or
    reports it.
    """

    def __init__(
        self,
        config: HealingConfig,
        heartbeat: Heartbeat,
        journal: Journal,
        may_recover: Callable[[], bool],
        before_exit: Callable[[str], None],
        step: Callable[[], int],
        still_training: Callable[[FrameType | None], bool],
        at_the_end: Callable[[], bool],
        over: Callable[[], None],
        counts_attempts: Callable[[], bool],
        ranks: OtherRanks | None = None,
    ) -> None:
        self._config = config
        self._ranks = ranks or OtherRanks(journal.run_id)
        self._heartbeat = heartbeat
        self._journal = journal
        self._may_recover = may_recover
        self._counts_attempts = counts_attempts
        self._before_exit = before_exit
        self._step = step
        self._still_training = still_training
        self._at_the_end = at_the_end
        self._over = over
        self._exits = HangExits(journal.directory, journal.rank)
        self._interval = min(_POLL, config.hang_floor_seconds / 10)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._training_thread = 0
        self._waker: WakeSignal | None = None
        self._last_poll = 0.0
        self._stood: tuple[int, float] = (-1, 0.0)
        self._alarm: _Alarm | None = None
        self._interrupted: tuple[Incident | None, int] | None = None
        # Of the hang that was interrupted, until the exception has left train().
        self._claimed: Incident | None = None
        self._failed = False
        # Of the wait for another rank: the beat after which it began, how long it has taken, whether it was told of.
        self._waited: tuple[int, float, bool] = (-1, 0.0, False)
        # The beat since which it is looked at whether the training thread computes, and seconds then: of the beat, and
        # of its processor.
        self._spent: tuple[int, float, float] = (-1, 0.0, 0.0)
        self._native_thread = 0

    @property
    def _may_wait_for(self) -> float:
        return min(_MAY_WAIT_FOR, self._config.hang_floor_seconds / 4)

    @property
    def running(self) -> bool:
        return self._thread is not None

    @property
    def _signal(self) -> int | None:
        return None if self._waker is None else self._waker.signal

    @property
    def needed(self) -> bool:
        """Whether the run that is watched still goes on."""
        return self.running and self._still_training(current_frames().get(self._training_thread))

    # ---- the training thread ----

    def start(self) -> None:
        """Called in the training thread when `train()` begins."""
        if self._config.on_hang == "off" or self._thread is not None:
            return
        heartbeat = self._heartbeat
        self._training_thread, self._native_thread = threading.get_ident(), threading.get_native_id()
        self._alarm = self._interrupted = None
        self._last_poll = heartbeat.clock()
        self._stopping = threading.Event()
        heartbeat.stood_still = self._stood_still
        heartbeat.begin()
        for section, seconds in self._exits.read(self._config).items():
            heartbeat.has_taken(section, seconds)
        self._install_handlers()
        # With the context of the training thread: trackio keeps its current run there.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._watch, self._stopping), name="self_healing watchdog", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Called in the training thread when `train()` ends, however it does."""
        self._thread = None
        self._stopping.set()
        with self._lock:
            # From here on no signal is sent any more.
            self._remove_handlers()
        self._end_alarm()

    def _install_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_kill"):
            # Python runs signal handlers in the main thread only.
            return
        for number in own_signals():
            left_behind = signal.getsignal(number)
            if isinstance(left_behind, WakeSignal) and not left_behind.needed:
                left_behind.give_back()
        free = [number for number in own_signals() if signal.getsignal(number) == signal.SIG_DFL]
        if free:
            self._waker = WakeSignal(self, free)

    def _remove_handlers(self) -> None:
        if self._waker is not None and threading.current_thread() is threading.main_thread():
            self._waker.give_back()
            self._waker = None

    def interrupt(self, frame: FrameType | None) -> None:
        """Called in the training thread by the signal: raises [`TrainingHang`], unless it has moved meanwhile."""
        alarm, heartbeat = self._alarm, self._heartbeat
        if alarm is None or alarm.stage is not _Stage.INTERRUPTED or alarm.answered or heartbeat.waits_on_purpose:
            return
        if heartbeat.last[2] != alarm.beats or not heartbeat.may_be_interrupted:
            # It has moved while the signal was on its way.
            return
        alarm.answered = True
        heartbeat.start_over()
        self._interrupted = (alarm.incident, heartbeat.last[2])
        self._claimed = alarm.incident
        ended = end_awaited_workers(frame)
        seconds = heartbeat.clock() - alarm.since
        if alarm.incident is not None:
            alarm.incident.seconds_lost += seconds
            if ended:
                alarm.incident.evidence["workers_ended"] = ended
        raise TrainingHang(f"no sign of life from '{alarm.section}' for {seconds:.0f} s (limit {alarm.limit:.0f} s)")

    @property
    def has_claim(self) -> bool:
        """Whether a hang was interrupted, and the exception has not left `train()` yet."""
        return self._claimed is not None

    def claim(self, error: BaseException) -> Claim | None:
        """Claims the exception that the interrupted training was left by."""
        incident, self._claimed = self._claimed, None
        return claim_for(incident, error)

    def position(self) -> Position:
        """Says where this rank is; callable from any thread."""
        heartbeat = self._heartbeat
        section, since, beats = heartbeat.last
        now = heartbeat.clock()
        counted = now - since - self._stood_still(beats, now)
        # Before another attempt nothing is counted, and the attempt has all of its time.
        on_purpose = heartbeat.waits_on_purpose
        limit = self._limit(section, counted)[0]
        frame = current_frames().get(self._training_thread)
        return Position(
            self._step(),
            section.name,
            beats,
            max(counted + self._waited_since(beats), 0.0),
            limit if on_purpose else limit - counted,
            on_purpose=on_purpose,
            training=self.running,
            ending=self._at_the_end(),
            collective=collective_in(frame),
            line=None if frame is None else line_of(frame),
            called_from=user_line_of(frame),
        )

    # ---- the watching thread ----

    def _watch(self, stopping: threading.Event) -> None:
        while not stopping.wait(self._interval):
            try:
                self._look(stopping)
            except Exception:
                if not self._failed:
                    self._failed = True
                    logger.exception("The watchdog for hangs failed once, and goes on. Please report this traceback.")

    def _look(self, stopping: threading.Event) -> None:
        heartbeat = self._heartbeat
        section, since, beats = heartbeat.last
        now = heartbeat.clock()
        with self._lock:
            # Our own poll comes late when the process was stopped, or the machine was asleep; what of that lies before
            # the beat is none of the time since.
            since_last = now - self._last_poll
            late = max(min(since_last - self._interval, now - since), 0.0)
            self._last_poll = now
            before = self._stood[1] if self._stood[0] == beats else 0.0
            self._stood = (beats, before + late)
            elapsed = now - since - self._stood[1] - self._waited_since(beats)
        if self._is_over(section.name, elapsed):
            self._let_go(stopping)
            return
        alarm = self._alarm
        if alarm is not None and beats != alarm.beats:
            self._end_alarm()
            return
        self._look_after_the_interrupted(beats)
        if heartbeat.waits_on_purpose:
            return
        if alarm is not None:
            if elapsed >= alarm.deadline:
                self._next_stage(alarm, elapsed)
            return
        if self._waits_for_another(elapsed, beats, min(since_last - late, now - since)):
            return
        self._look_at_processor(section, beats, elapsed)
        limit, known = self._limit(section, elapsed)
        if elapsed > limit:
            self._sound(_Alarm(beats, section.name, since, limit, known), elapsed, stopping)

    def _limit(self, section: Section, elapsed: float) -> tuple[float, bool]:
        """
        Gives the seconds that a part may take without a sign of life, and whether that is known from earlier: not of
        one that has gone on for `elapsed` seconds because it compiles for a shape that has come up, or computes.
        """
        floor = self._config.hang_floor_seconds
        if section.name in _IN_STEP and self._ranks.known:
            # As many devices wait as there are ranks, and nothing but one of them is waited for.
            floor = min(floor, max(_FLOOR_PART * floor, _FLOOR_TIMES * section.longest))
        learned = self._heartbeat.limit(section, FACTOR, floor)
        if learned is not None and (elapsed <= learned or not (self._computes(section, elapsed) or compiles())):
            return learned, True
        return self._heartbeat.limit_at_first(section, self._config.hang_floor_seconds), False

    def _look_at_processor(self, section: Section, beats: int, elapsed: float) -> None:
        may_be_asked = self._ranks.known and section.name in _CALLBACKS and elapsed >= self._may_wait_for
        if may_be_asked and self._spent[0] != beats:
            self._spent = beats, elapsed, processor_seconds(self._native_thread) or 0.0

    def _computes(self, section: Section, elapsed: float) -> bool:
        """Whether a callback keeps the training thread busy, which on several ranks no other one can tell."""
        beats, since, spent = self._spent
        if section.name not in _CALLBACKS or beats != self._heartbeat.last[2]:
            return False
        now = processor_seconds(self._native_thread)
        return now is not None and now - spent >= _COMPUTES * (elapsed - since)

    def _waits_for_another(self, elapsed: float, beats: int, seconds: float) -> bool:
        """
        Whether another rank is on its way, or heals something: how long that may take is for its own watchdog, and
        the time is not counted here.
        """
        if elapsed < self._may_wait_for:
            return False
        found = self._ranks.waited_for(self.position())
        if found is None:
            return False
        rank, other = found
        told = self._waited[2] and self._waited[0] == beats
        with self._lock:
            waited = self._waited_since(beats) + seconds
            self._waited = (beats, waited, told or waited > self._config.hang_floor_seconds)
        if self._waited[2] and not told:
            logger.warning(
                "Step %d: this rank waits for rank %d, which %s; for at most %.0f s more.",
                self._step(),
                rank,
                other,
                other.left,
            )
        return True

    def _waited_since(self, beats: int) -> float:
        return self._waited[1] if self._waited[0] == beats else 0.0

    def _is_over(self, section: str, elapsed: float) -> bool:
        # Whatever raises leaves the parts it lies in: not asked within a step, however long that takes.
        return section == BETWEEN and elapsed > 2 * self._interval and not self.needed and not self._stopping.is_set()

    def _let_go(self, stopping: threading.Event) -> None:
        """An exception has ended `train()`, and there is no event that says so."""
        stopping.set()
        # What was installed for the main thread stays until it is come by there, and holds on to nothing.
        self._thread = None
        self._end_alarm()
        self._over()

    def _stood_still(self, beats: int, now: float) -> float:
        """Of the time since a beat, what the process did not run; asked for in the training thread."""
        with self._lock:
            stood = self._stood[1] if self._stood[0] == beats else 0.0
            # Once nobody looks any more, no look is late.
            late = 0.0 if self._stopping.is_set() else now - self._last_poll - self._interval
            # Nor does a wait for another rank say how long the part takes.
            waited = self._waited_since(beats)
        return stood + waited + (late if late > self._interval else 0.0)

    def _look_after_the_interrupted(self, beats: int) -> None:
        if self._interrupted is not None and beats - self._interrupted[1] > _GOES_ON:
            # The exception was swallowed on its way, and training goes on: its incident is not asked for any more.
            incident, self._interrupted = self._interrupted[0], None
            self._claimed = None
            if incident is not None:
                _bounded(functools.partial(self._journal.closed, incident, "self_recovered"))

    def _sound(self, alarm: _Alarm, elapsed: float, stopping: threading.Event) -> None:
        again = self._interrupted is not None
        if self._interrupted is not None:
            # What was interrupted hangs again before it has left train(), in a `finally` or an `except`.
            alarm.incident = self._interrupted[0]
        else:
            _bounded(lambda: self._write_down(alarm, elapsed))
        self._alarm = alarm
        alarm.pause = alarm.limit
        if self._may_interrupt(alarm):
            alarm.stage, alarm.deadline = _Stage.INTERRUPTED, elapsed + GRACE_SECONDS
            _bounded(lambda: self._acted(alarm, Action.INTERRUPT))
            self._interrupt(alarm, stopping)
        elif self._may_exit(alarm):
            alarm.stage, alarm.deadline = _Stage.LEAVING, elapsed + GRACE_SECONDS
        else:
            alarm.deadline = elapsed + alarm.pause
            if not again:
                _bounded(lambda: self._tell(alarm))
        if stopping.is_set():
            # It moved, and `train()` ended, while this was being written.
            self._end_alarm()

    def _may_interrupt(self, alarm: _Alarm) -> bool:
        if self._is_only_told(alarm):
            return False
        recover = self._config.on_hang == "recover" and self._signal is not None and self._may_recover()
        return recover and self._heartbeat.may_be_interrupted

    def _may_exit(self, alarm: _Alarm) -> bool:
        if self._is_only_told(alarm):
            return False
        if self._exits.has_left(self._step(), alarm.section) and not self._counts_attempts():
            # The process before this one was ended here already, and the next ones would be as well.
            return False
        return self._config.on_hang == "recover" and restarts_on_exit(self._config)

    def _is_only_told(self, alarm: _Alarm) -> bool:
        """
        Whether it is not known how long it may take: one of the first times of a part, or whatever comes after the
        last step (uploads, the best model, a vote with a rank that is still about them).
        """
        return not alarm.known or self._at_the_end()

    def _interrupt(self, alarm: _Alarm, stopping: threading.Event) -> None:
        with self._lock:
            # Both under the lock that `stop` takes: afterwards the signal would end the process.
            if self._signal is not None and not stopping.is_set() and self._heartbeat.last[2] == alarm.beats:
                signal.pthread_kill(self._training_thread, self._signal)

    def _next_stage(self, alarm: _Alarm, elapsed: float) -> None:
        if alarm.answered:
            # On its way out: its workers are ended, its blocks left.
            return
        if alarm.stage is not _Stage.ALERTING and self._may_exit(alarm):
            self._leave(alarm, elapsed)
        if alarm.stage is _Stage.INTERRUPTED:
            alarm.stage, alarm.deadline = _Stage.ALERTING, elapsed + alarm.pause
            logger.error(
                "The training thread does not respond to an interrupt: it is blocked in native code. No launcher is "
                "known to restart this job (launcher_restarts), or it has restarted it for this very hang before, so "
                "the process stays as it is. Please stop it and resume from the newest checkpoint."
            )
            _bounded(lambda: self._tell(alarm))
            return
        alarm.pause *= 2
        alarm.deadline = elapsed + alarm.pause
        text = f"Still no sign of life from '{alarm.section}' after {elapsed:.0f} s."
        _bounded(lambda: logger.error("%s", text))
        _bounded(lambda: self._journal.alert("self_healing: still hanging", text, "error", self._step()))

    def _leave(self, alarm: _Alarm, elapsed: float) -> None:
        why = f"hang in '{alarm.section}' for {elapsed:.0f} s, which an interrupt does not end"
        if self._ranks.known:
            why = self._tell_ranks(alarm, elapsed)

        def write() -> None:
            self._exits.note_exit(self._step(), alarm.section, elapsed)
            self._acted(alarm, Action.EXIT_FOR_RESTART, exit_code=EXIT_FOR_RESTART)
            if alarm.incident is not None:
                alarm.incident.seconds_lost += elapsed
            self._before_exit(why)
            self._tell(alarm)

        _bounded(write)
        _bounded(logging.shutdown)
        within(2.0, sys.stdout.flush)
        within(2.0, sys.stderr.flush)
        # Nothing of Python's own end may run: it would wait for the thread that hangs.
        os._exit(EXIT_FOR_RESTART)

    def _tell_ranks(self, alarm: _Alarm, elapsed: float) -> str:
        """Tells the other ranks which one hangs, so that they end as well; or that it is none of them alone."""
        first = self._ranks.first_failure()
        if first is not None and not first.follows:
            # Another one has told it already, and may be gone by now.
            return str(first)
        everywhere = self._ranks.positions() or {self._journal.rank: self.position()}
        if not (found := behind(everywhere)):
            step = min(each.step for each in everywhere.values())
            failure = Failure(None, step, FailureType.HANG, where_all_wait(everywhere))
            self._ranks.tell(failure)
            return str(failure)
        rank = found[0]
        where = everywhere[rank]
        error = f"hang in '{alarm.section}' for {elapsed:.0f} s: it {where}"
        self._ranks.tell(Failure(rank, where.step, FailureType.HANG, error, where.section))
        return f"rank {rank}: {error}"

    # ---- writing down ----

    def _write_down(self, alarm: _Alarm, elapsed: float) -> None:
        frames = current_frames()
        frame = frames.get(self._training_thread)
        evidence: dict[str, Any] = {
            "section": alarm.section,
            "seconds": round(elapsed, 3),
            "limit": round(alarm.limit, 3),
            "waits_at": None if frame is None else line_of(frame),
            "called_from": user_line_of(frame),
        }
        journal = self._journal
        alarm.incident = incident = journal.open(self._step(), "hang", evidence)
        path = journal.directory / "hangs" / f"{incident.id}-stacks.txt"
        waker = self._waker
        workers = {} if waker is None else waker.stacks_of_workers()
        written = False
        try:
            headline = (
                f"no sign of life from '{alarm.section}' for {evidence['seconds']} s (limit {evidence['limit']} s)\n"
                f"The training thread waits at {evidence['waits_at']}"
            )
            write_stacks(path, headline, self._training_thread, workers)
            written = True
        except OSError as error:
            logger.warning("The stacks could not be written to %s: %s.", path, error)
        where = evidence["called_from"] or evidence["waits_at"] or "an unknown line"
        found: dict[str, Any] = {"diagnosis": f"The training thread waits at {where}."}
        for pid, stacks in workers.items():
            line, loading = worker_line_in(stacks)
            if loading:
                found.setdefault("workers_wait_at", {})[str(pid)] = line
                found["diagnosis"] += f" Data loader worker {pid} waits at {line}."
        if self._ranks.known:
            everywhere = self._ranks.positions(within=_ASKING)
            found["ranks_waited_for"] = behind(everywhere)
            found["diagnosis"] += f" {where_all_are(everywhere)}"
        if written:
            found["stacks"] = str(path)
        journal.diagnosed(incident, FailureType.HANG, f"nothing moves in '{alarm.section}'", found)
        journal.acted(incident, Action.WRITE_STACKS.value, happened=written, path=str(path))
        logger.error(
            "Step %d: no sign of life from '%s' for %.0f s (limit %.0f s). %s Stacks of all threads: %s.",
            incident.step,
            alarm.section,
            elapsed,
            alarm.limit,
            found["diagnosis"],
            path,
        )
        text = f"'{alarm.section}' has not moved for {elapsed:.0f} s; stacks in {path}"
        journal.alert("self_healing: training hangs", text, "error", self._step())

    def _acted(self, alarm: _Alarm, action: Action, **result: Any) -> None:
        if alarm.incident is not None:
            self._journal.acted(alarm.incident, action.value, **result)

    def _tell(self, alarm: _Alarm) -> None:
        if alarm.incident is not None:
            self._journal.dealt_with(alarm.incident)

    def _end_alarm(self) -> None:
        """Called in either thread: the one that comes first says how the hang ended."""
        with self._lock:
            alarm, self._alarm = self._alarm, None
        if alarm is not None and not alarm.answered:
            self._moves_again(alarm)

    def _moves_again(self, alarm: _Alarm) -> None:
        seconds = self._heartbeat.clock() - alarm.since
        incident = alarm.incident
        # What was interrupted, and hung once more on its way out, is over when the exception has left train().
        interrupted = self._interrupted is not None and incident is self._interrupted[0]
        if incident is None or interrupted or incident.outcome != "open":
            return
        incident.seconds_lost += seconds
        _bounded(functools.partial(self._journal.closed, incident, "self_recovered"))
        logger.warning(
            "'%s' goes on by itself after %.0f s. If that is normal, raise hang_floor_seconds.",
            alarm.section,
            seconds,
        )


_bounded = functools.partial(within, _BOUND)


# ---- exits: keeps the exits of a job because of hangs for its next process: where it hung, and for how long ----


HANGS_FILE = "healing_hangs.json"
# A job that was ended more often than that is told by the newest times.
_KEPT = 50


class HangExits:
    """
    The exits of one job because of hangs, in the run directory: what was no hang but slow must not end it each time.
    """

    def __init__(self, directory: Path, rank: int = 0) -> None:
        self.path = directory / (HANGS_FILE if rank == 0 else f"healing_hangs.rank{rank}.json")
        self._exits: list[dict[str, Any]] = []

    def read(self, config: HealingConfig) -> dict[str, float]:
        """Reads what earlier processes of the same job left."""
        if not (launch_of().started_again or config.launcher_restarts == "yes"):
            # Of another run in the same directory.
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            exits: list[dict[str, Any]] = [
                {"step": int(entry["step"]), "section": str(entry["section"]), "seconds": float(entry["seconds"])}
                for entry in content["exits"]
            ]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            logger.warning("%s cannot be read (%s); how long parts of a step took is learned again.", self.path, error)
            return {}
        self._exits = exits
        longest: dict[str, float] = {}
        for entry in exits:
            longest[entry["section"]] = max(longest.get(entry["section"], 0.0), entry["seconds"])
        return longest

    def has_left(self, step: int, section: str) -> bool:
        """Whether a process of this job was ended at this place before."""
        return any(entry["step"] == step and entry["section"] == section for entry in self._exits)

    def note_exit(self, step: int, section: str, seconds: float) -> None:
        """Writes down where the process is about to be ended, and after how many seconds without a sign of life."""
        exits = [*self._exits, {"step": step, "section": section, "seconds": seconds}][-_KEPT:]
        try:
            replace_file(self.path, json.dumps({"exits": exits}))
        except OSError as error:
            logger.warning("%s cannot be written (%s): the next process knows nothing of this hang.", self.path, error)
