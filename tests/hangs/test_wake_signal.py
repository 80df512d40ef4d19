"""The signals of a watchdog: which are taken, from whom, and which processes are asked where they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from self_healing.healers.hangs.threads import WakeSignal, own_signals


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
