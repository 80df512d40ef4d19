"""Notices a part of a step that takes far too long, interrupts it, or ends the process."""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ...failures.recipes import Action, FailureType, Interruption
from ...hf.dataloader import end_awaited_workers
from ...hf.sections import Section
from ...journal.incident import Incident
from ...ranks.messages import Failure, Position, behind, where_all_are, where_all_wait
from ...run.run import Run
from ...system.processes import EXIT_FOR_RESTART, contained, restarts_on_exit
from .threads import collective_in, compiles, current_frames, keep_stacks, line_of, stacks_of, user_line_of


logger = logging.getLogger("self_healing")


# ---- bounded: work of a thread that must not wait for it for ever: on disks and services that may hang as well ----


def within(seconds: float, work: Callable[[], Any]) -> None:
    """Does something that touches disks or services, and goes on without it where they hang, or where it fails."""
    context = contextvars.copy_context()

    def do() -> None:
        with contained(logger, "The response to a hang failed."):
            context.run(work)

    thread = threading.Thread(target=do, name="self_healing watchdog's hand", daemon=True)
    thread.start()
    thread.join(seconds)


def leave_process(code: int, seconds: float) -> None:
    """Ends the process at once: Python's own end would wait for the thread that hangs."""
    for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        within(seconds, flush)
    os._exit(code)


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
_FLUSHING = 2.0


class TrainingHang(Interruption):
    """Raised in the training thread to wake it from what it waits for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FailureType.HANG)


@dataclass(slots=True)
class _Alarm:
    """A hang that goes on: the beat after which there was none, and when it is looked at next."""

    beats: int
    section: str
    since: float
    limit: float
    known: bool
    incident: Incident | None = None
    next_look: float = 0.0
    interrupted: bool = False
    answered: bool = False


class Watchdog:
    """
    Watches the signs of life of one run, and answers a hang: interrupts the training thread, ends the process, or
    reports it.
    """

    def __init__(self, run: Run, ending: Any) -> None:
        self._run = run
        # `Shutdown`, of a family that this one does not import.
        self._ending = ending
        self._heartbeat = run.heartbeat
        self._interval = min(_POLL, run.config.hang_floor_seconds / 10)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.training_thread = 0
        self._signal: int | None = None
        self._last_look = 0.0
        self._alarm: _Alarm | None = None
        # Of the hang that was interrupted, until the exception has left train().
        self.claimed: Incident | None = None

    # ---- the training thread ----

    def start(self) -> None:
        """Called in the training thread when `train()` begins."""
        if self._run.config.on_hang == "off" or self._thread is not None:
            return
        heartbeat = self._heartbeat
        self.training_thread = threading.get_ident()
        self._alarm, self._last_look = None, heartbeat.clock()
        self._stopping = threading.Event()
        heartbeat.begin()
        self._install_handler()
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
            if self._signal is not None and threading.current_thread() is threading.main_thread():
                signal.signal(self._signal, signal.SIG_DFL)
                self._signal = None
        self._end_alarm()

    def _install_handler(self) -> None:
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_kill"):
            # Python runs signal handlers in the main thread only.
            return
        # The first real-time signals are taken by debuggers and profilers now and then.
        own = range(signal.SIGRTMIN + 5, signal.SIGRTMAX) if hasattr(signal, "SIGRTMIN") else [signal.SIGUSR2]
        self._signal = next((number for number in own if signal.getsignal(number) == signal.SIG_DFL), None)
        if self._signal is not None:
            signal.signal(self._signal, self._interrupt)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        """Called in the training thread by the signal: raises [`TrainingHang`], unless it has moved meanwhile."""
        alarm, heartbeat = self._alarm, self._heartbeat
        if alarm is None or not alarm.interrupted or alarm.answered or heartbeat.waits_on_purpose:
            return
        if heartbeat.last[2] != alarm.beats or not heartbeat.may_be_interrupted:
            return
        alarm.answered = True
        heartbeat.start_over()
        self.claimed = alarm.incident
        ended = end_awaited_workers(frame)
        seconds = heartbeat.clock() - alarm.since
        if alarm.incident is not None:
            alarm.incident.seconds_lost += seconds
            if ended:
                alarm.incident.evidence["workers_ended"] = ended
        raise TrainingHang(f"no sign of life from '{alarm.section}' for {seconds:.0f} s (limit {alarm.limit:.0f} s)")

    def position(self) -> Position:
        """Says where this rank is; callable from any thread."""
        section, since, beats = self._heartbeat.last
        seconds = self._heartbeat.clock() - since
        # Before another attempt nothing is counted, and the attempt has all of its time.
        on_purpose = self._heartbeat.waits_on_purpose
        left = self._limit(section)[0] - (0.0 if on_purpose else seconds - self._excused_since(beats))
        frame = current_frames().get(self.training_thread)
        return Position(
            self._run.step,
            section.name,
            beats,
            max(seconds, 0.0),
            left,
            on_purpose=on_purpose,
            training=self._thread is not None,
            ending=self.at_the_end(),
            collective=collective_in(frame),
            line=None if frame is None else line_of(frame),
            called_from=user_line_of(frame),
        )

    def at_the_end(self) -> bool:
        """Whether all steps are done: what is left of the run may take any time (uploads, the best model)."""
        instrument = self._run.attached
        if instrument is None:
            return False
        return bool(instrument.trainer.control.should_training_stop) or instrument.view.last_step_done

    # ---- the watching thread ----

    def _watch(self, stopping: threading.Event) -> None:
        failed = False
        while not stopping.wait(self._interval):
            try:
                self._look(stopping)
            except Exception:
                if not failed:
                    logger.exception("The watchdog for hangs failed once, and goes on. The bug is ours, not yours.")
                failed = True

    def _look(self, stopping: threading.Event) -> None:
        heartbeat = self._heartbeat
        section, since, beats = heartbeat.last
        now = heartbeat.clock()
        since_last, self._last_look = min(now - self._last_look, now - since), now
        # A look that comes late was kept by what kept the whole process: it was stopped, or the machine was asleep.
        self._excuse(beats, max(since_last - self._interval, 0.0))
        alarm = self._alarm
        if alarm is not None and beats != alarm.beats:
            self._end_alarm()
            return
        if heartbeat.waits_on_purpose:
            return
        elapsed = now - since - self._excused_since(beats)
        if alarm is not None:
            if elapsed >= alarm.next_look:
                self._not_ended_by_interrupt(alarm, elapsed)
            return
        may_wait = elapsed >= min(_MAY_WAIT_FOR, self._run.config.hang_floor_seconds / 4)
        if may_wait and self._run.ranks.waited_for(self.position()) is not None:
            # Another rank is on its way, or heals something: how long that may take is for its own watchdog.
            self._excuse(beats, min(since_last, self._interval))
            return
        limit, known = self._limit(section, elapsed)
        if elapsed > limit:
            self._sound(_Alarm(beats, section.name, since, limit, known), elapsed, stopping)

    def _limit(self, section: Section, elapsed: float = 0.0) -> tuple[float, bool]:
        """
        Gives the seconds that a part may take without a sign of life, and whether that is known from earlier: not of
        one that has gone on for `elapsed` seconds because a shape has come up that it compiles for.
        """
        floor = self._run.config.hang_floor_seconds
        learned = self._heartbeat.limit(section, FACTOR, floor)
        if learned is None or (elapsed > learned and compiles()):
            return self._heartbeat.limit_at_first(section, floor), False
        return learned, True

    def _excuse(self, beats: int, seconds: float) -> None:
        self._heartbeat.excused = beats, self._excused_since(beats) + seconds

    def _excused_since(self, beats: int) -> float:
        of, seconds = self._heartbeat.excused
        return seconds if of == beats else 0.0

    # ---- what is done about it ----

    def _sound(self, alarm: _Alarm, elapsed: float, stopping: threading.Event) -> None:
        # What was interrupted may hang again before it has left train(), in a `finally` or an `except`.
        alarm.incident = self.claimed
        if alarm.incident is None:
            _bounded(lambda: self._write_down(alarm, elapsed))
        self._alarm = alarm
        alarm.next_look = elapsed + GRACE_SECONDS
        able = self._signal is not None and self._run.may_enter_again and self._heartbeat.may_be_interrupted
        if able and self._may_recover(alarm):
            alarm.interrupted = True
            _bounded(lambda: self._acted(alarm, Action.INTERRUPT))
            with self._lock:
                # Both under the lock that `stop` takes: afterwards the signal would end the process.
                if self._signal is not None and not stopping.is_set() and self._heartbeat.last[2] == alarm.beats:
                    signal.pthread_kill(self.training_thread, self._signal)
        elif not self._may_exit(alarm):
            self._leave_alone(alarm)
        if stopping.is_set():
            # It moved, and `train()` ended, while this was being written.
            self._end_alarm()

    def _may_exit(self, alarm: _Alarm) -> bool:
        # With the callback alone nobody counts attempts, and what is slow and no hang would end each process.
        return self._run.wrapped and self._may_recover(alarm) and restarts_on_exit(self._run.config)

    def _may_recover(self, alarm: _Alarm) -> bool:
        """Whether it is to be ended, and known to be a hang: not one of the first times, nor after the last step."""
        return self._run.config.on_hang == "recover" and alarm.known and not self.at_the_end()

    def _not_ended_by_interrupt(self, alarm: _Alarm, elapsed: float) -> None:
        if alarm.answered:
            # On its way out: its workers are ended, its blocks left.
            return
        if self._may_exit(alarm):
            self._leave(alarm, elapsed)
        logger.error(
            "The training thread does not respond to an interrupt: it is blocked in native code. No launcher is "
            "known to restart this job (launcher_restarts), so the process stays as it is. Please stop it and resume "
            "from the newest checkpoint."
        )
        # Should it come back after all, it goes on.
        alarm.interrupted = False
        self._leave_alone(alarm)

    def _leave_alone(self, alarm: _Alarm) -> None:
        alarm.next_look = float("inf")
        _bounded(lambda: self._tell(alarm))

    def _leave(self, alarm: _Alarm, elapsed: float) -> None:
        why = f"hang in '{alarm.section}' for {elapsed:.0f} s, which an interrupt does not end"
        if self._run.ranks.known:
            why = self._tell_ranks(alarm, elapsed)

        def write() -> None:
            self._acted(alarm, Action.EXIT_FOR_RESTART, exit_code=EXIT_FOR_RESTART)
            if alarm.incident is not None:
                alarm.incident.seconds_lost += elapsed
            self._ending.end_process(why, None, EXIT_FOR_RESTART)
            self._tell(alarm)

        _bounded(write)
        leave_process(EXIT_FOR_RESTART, _FLUSHING)

    def _tell_ranks(self, alarm: _Alarm, elapsed: float) -> str:
        """Tells the other ranks which one hangs, so that they end as well; or that it is none of them alone."""
        ranks = self._run.ranks
        first = ranks.first_failure()
        if first is not None and not first.follows:
            # Another one has told it already, and may be gone by now.
            return str(first)
        everywhere = ranks.positions() or {ranks.rank: self.position()}
        if not (found := behind(everywhere)):
            step = min(each.step for each in everywhere.values())
            failure = Failure(None, step, FailureType.HANG, where_all_wait(everywhere))
            ranks.tell(failure)
            return str(failure)
        rank = found[0]
        where = everywhere[rank]
        error = f"hang in '{alarm.section}' for {elapsed:.0f} s: it {where}"
        ranks.tell(Failure(rank, where.step, FailureType.HANG, error, where.section))
        return f"rank {rank}: {error}"

    # ---- writing down ----

    def _write_down(self, alarm: _Alarm, elapsed: float) -> None:
        journal, ranks = self._run.journal, self._run.ranks
        frame = current_frames().get(self.training_thread)
        evidence: dict[str, Any] = {
            "section": alarm.section,
            "seconds": round(elapsed, 3),
            "limit": round(alarm.limit, 3),
            "waits_at": None if frame is None else line_of(frame),
            "called_from": user_line_of(frame),
        }
        alarm.incident = incident = journal.open(self._run.step, "hang", evidence)
        where = evidence["called_from"] or evidence["waits_at"] or "an unknown line"
        found: dict[str, Any] = {"diagnosis": f"The training thread waits at {where}."}
        if ranks.known:
            everywhere = ranks.positions(within=_ASKING)
            found["ranks_waited_for"] = behind(everywhere)
            found["diagnosis"] += f" {where_all_are(everywhere)}"
        told = f"no sign of life from '{alarm.section}' for {elapsed:.0f} s (limit {alarm.limit:.0f} s)"
        path = stacks_of(journal, incident)
        found["stacks"] = str(path)
        journal.diagnosed(incident, FailureType.HANG, f"nothing moves in '{alarm.section}'", found)
        waits = f"{told}\nThe training thread waits at {evidence['waits_at']}"
        keep_stacks(journal, incident, waits, self.training_thread)
        text = "Step %d: %s. %s Stacks of all threads: %s."
        logger.error(text, incident.step, told, found["diagnosis"], path)
        text = f"'{alarm.section}' has not moved for {elapsed:.0f} s; stacks in {path}"
        journal.alert("self_healing: training hangs", text, "error", self._run.step)

    def _acted(self, alarm: _Alarm, action: Action, **result: Any) -> None:
        if alarm.incident is not None:
            self._run.journal.acted(alarm.incident, action.value, **result)

    def _tell(self, alarm: _Alarm) -> None:
        if alarm.incident is not None:
            self._run.journal.dealt_with(alarm.incident)

    def _end_alarm(self) -> None:
        """Called in either thread: the one that comes first says how the hang ended."""
        with self._lock:
            alarm, self._alarm = self._alarm, None
        incident = None if alarm is None or alarm.answered else alarm.incident
        # What was interrupted, and hung once more on its way out, is over when the exception has left train().
        if alarm is None or incident is None or incident is self.claimed or incident.outcome != "open":
            return
        seconds = self._heartbeat.clock() - alarm.since
        incident.seconds_lost += seconds
        _bounded(lambda: self._run.journal.closed(incident, "self_recovered"))
        text = "'%s' goes on by itself after %.0f s. If that is normal, raise hang_floor_seconds."
        logger.warning(text, alarm.section, seconds)


_bounded = functools.partial(within, _BOUND)
