"""The signals of a watchdog: which are taken, from whom, and which processes are asked where they are."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

import psutil
import pytest

from self_healing.healers.hangs.threads import WakeSignal, _catches, own_signals


class MadeUpWatchdog:
    """Counts how often it is asked to interrupt."""

    def __init__(self, needed: bool = True) -> None:
        self.needed = needed
        self.interrupts = 0

    def interrupt(self, frame: FrameType | None) -> None:
        self.interrupts += 1


@pytest.fixture
def watchdog() -> MadeUpWatchdog:
    return MadeUpWatchdog()


@pytest.fixture
def waker(watchdog: MadeUpWatchdog) -> Iterator[WakeSignal]:
    waker = WakeSignal(watchdog, own_signals()[-2:])
    yield waker
    waker.give_back()


@pytest.fixture
def own_process_as_worker(monkeypatch: pytest.MonkeyPatch) -> int:
    """This process is taken for the only one that a child of it has started: it answers without being forked."""
    itself = psutil.Process()
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [itself] if recursive else [])
    return itself.pid


def test_the_signals_are_real_time_ones_that_tools_leave_alone() -> None:
    assert own_signals() == list(range(signal.SIGRTMIN + 5, signal.SIGRTMAX))


def test_without_real_time_signals_there_is_one_that_may_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGRTMIN")
    assert own_signals() == [signal.SIGUSR2]


def test_which_signals_a_process_handles_is_read_one_by_one() -> None:
    handled = own_signals()[::3]
    with contextlib.ExitStack() as after:
        for number in handled:
            after.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        assert [number for number in own_signals() if _catches(os.getpid(), number)] == handled
    assert not _catches(0, handled[0])


def test_the_signal_is_passed_on_while_its_watchdog_lives(waker: WakeSignal, watchdog: MadeUpWatchdog) -> None:
    assert signal.getsignal(waker.signal) is waker
    signal.raise_signal(waker.signal)
    assert watchdog.interrupts == 1


@pytest.mark.parametrize("needed", [True, False])
def test_a_signal_is_needed_as_long_as_its_run_goes_on(needed: bool) -> None:
    watchdog = MadeUpWatchdog(needed)
    waker = WakeSignal(watchdog, own_signals()[-2:])
    assert waker.needed is needed
    del watchdog
    assert not waker.needed
    # Nobody is left to be woken: the signal gives itself back.
    signal.raise_signal(waker.signal)
    assert signal.getsignal(waker.signal) == signal.SIG_DFL


def test_one_free_signal_wakes_the_training_thread_and_asks_no_worker(own_process_as_worker: int) -> None:
    watchdog = MadeUpWatchdog()
    waker = WakeSignal(watchdog, own_signals()[-1:])
    assert waker.signal == own_signals()[-1]
    assert waker.worker_signal is None
    assert waker.stacks_of_workers() == {}
    waker.give_back()
    assert signal.getsignal(own_signals()[-1]) == signal.SIG_DFL


def test_a_forked_process_writes_down_where_it_is(waker: WakeSignal, own_process_as_worker: int) -> None:
    for _ in range(2):
        found = waker.stacks_of_workers()
        assert list(found) == [own_process_as_worker]
        # Each answer on its own, though all are written to one file.
        assert found[own_process_as_worker].count("Current thread") == 1
        assert "in stacks_of_workers" in found[own_process_as_worker]


def test_a_process_that_does_not_answer_is_waited_for_about_a_second(
    waker: WakeSignal, own_process_as_worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    assert waker.stacks_of_workers() == {own_process_as_worker: ""}
    assert sum(waited) == pytest.approx(1.05)


def test_a_process_without_a_handler_is_not_asked_for_that_would_end_it(
    waker: WakeSignal, own_process_as_worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: asked.append(pid))
    assert waker.worker_signal is not None
    faulthandler.unregister(waker.worker_signal)
    assert waker.stacks_of_workers() == {}
    assert asked == []


def test_a_process_that_has_ended_since_it_was_listed_is_left_out(
    waker: WakeSignal, own_process_as_worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(pid: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", ended)
    assert waker.stacks_of_workers() == {}


def test_another_program_is_not_asked_whatever_it_does_with_the_signal(waker: WakeSignal) -> None:
    code = f"import signal; signal.signal({waker.worker_signal}, lambda *_: 1 / 0); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert waker.stacks_of_workers() == {}
        _, complaint = process.communicate(b"\n")
    assert (process.returncode, complaint) == (0, b"")


def test_given_back_twice_is_given_back_once(waker: WakeSignal) -> None:
    waker.give_back()
    signal.signal(waker.signal, signal.SIG_IGN)
    waker.give_back()
    with contextlib.ExitStack() as after:
        after.callback(signal.signal, waker.signal, signal.SIG_DFL)
        assert signal.getsignal(waker.signal) == signal.SIG_IGN
    assert waker.worker_stacks is None
