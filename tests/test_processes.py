"""What is known of another process of this machine."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from self_healing.system.processes import Process, State


def wait_for(process: Process, state: State) -> None:
    for _ in range(1000):
        if process.state() is state:
            return
        time.sleep(0.01)
    raise AssertionError(f"not {state} in ten seconds")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as started:
        yield started
        started.kill()


def of(child: subprocess.Popen[bytes]) -> Process:
    return Process.of(child.pid)


def test_a_process_runs_is_stopped_and_runs_on(child: subprocess.Popen[bytes]) -> None:
    process = of(child)
    assert process.state() is State.RUNS
    os.kill(child.pid, signal.SIGSTOP)
    wait_for(process, State.STOPPED)
    os.kill(child.pid, signal.SIGCONT)
    wait_for(process, State.RUNS)


def test_a_killed_process_is_gone_before_anybody_has_asked_for_its_exit_code(child: subprocess.Popen[bytes]) -> None:
    process = of(child)
    child.kill()
    wait_for(process, State.GONE)
    child.wait()
    assert process.state() is State.GONE


def test_another_process_by_the_same_number_is_not_taken_for_it() -> None:
    here = Process.this_one()
    assert here.state() is State.RUNS
    assert dataclasses.replace(here, began=here.began - 100).state() is State.GONE


def test_a_process_is_the_same_after_the_clock_was_set(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, created = of(child), psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + 3600.0)
    assert process.state() is State.RUNS
