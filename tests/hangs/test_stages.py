"""What the watchdog makes of a hang as time goes by, with a clock that tests turn."""

from __future__ import annotations

import linecache
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from constants import settings_among

from self_healing import Action, FailureType, HealingConfig, Incident
from self_healing.healers.assembly import assemble
from self_healing.healers.hangs.threads import collective_in
from self_healing.healers.hangs.watchdog import Watchdog
from self_healing.hf.sections import Heartbeat
from self_healing.ranks.messages import Failure, Position
from self_healing.ranks.session import OtherRanks


@pytest.fixture(autouse=True)
def constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what a test sets."""
    settings_among({"FACTOR": 1.0, "GRACE_SECONDS": 4.0}, monkeypatch.setattr)


class Left(BaseException):
    """The process ended, with an exit code."""


class Watched:
    """A run of two seconds a step, at step 7, that the watchdog looks at once a second; nothing is interrupted."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.now = 0.0
        self.before_exit: list[str] = []
        config = HealingConfig(**{"hang_floor_seconds": 10.0, **settings})
        self.run: Any = assemble(config, directory, run_id="run", wrapped=True)
        self.run.heartbeat = self.heartbeat = Heartbeat(1, clock=lambda: self.now)
        trainer = SimpleNamespace(control=SimpleNamespace(should_training_stop=False))
        self.run.attached = SimpleNamespace(view=SimpleNamespace(step=7, last_step_done=False), trainer=trainer)
        ending = SimpleNamespace(end_process=lambda why, failure, code: self.before_exit.append(why))
        self.watchdog = Watchdog(self.run, ending)
        self.watchdog.training_thread = threading.get_ident()
        self.stopping = threading.Event()
        with self.heartbeat.section("step"):
            self.wait(2.0)

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += self.watchdog._interval
            self.watchdog._look(self.stopping)

    def hang(self, seconds: float) -> None:
        self.heartbeat.enter("step")
        self.wait(seconds)

    @property
    def incidents(self) -> list[Incident]:
        return list(self.run.journal.incidents)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Builds runs, and ends them with the test."""
    begun: list[Watched] = []

    def build(**settings: Any) -> Watched:
        begun.append(Watched(tmp_path, **settings))
        return begun[-1]

    yield build
    for watched in begun:
        watched.watchdog.stop()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process is an exception."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(logging, "shutdown", lambda: None)


def test_a_step_that_compiles_for_a_new_shape_is_no_hang_and_is_told_of_like_the_first_ones(
    watch: Callable[..., Watched],
) -> None:
    watched, found = watch(), list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        for seconds in (290.0, 20.0):
            watched.wait(seconds)
            found.append(len(watched.incidents))
        return graph.forward

    watched.heartbeat.enter("step")
    assert torch.compile(lambda number: number + 1, backend=backend)(torch.ones(2)).sum() == 4
    assert found == [0, 1]
    assert watched.incidents[0].actions == [Action.WRITE_STACKS]


def test_of_ranks_in_different_collectives_none_is_blamed_and_all_say_the_same(
    watch: Callable[..., Watched], exits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Failure] = []
    where = {
        rank: Position(7, "between", 40 + rank, 12.0, -2.0, collective=collective)
        for rank, collective in enumerate(("all_gather", "barrier"))
    }
    monkeypatch.setattr(OtherRanks, "known", True)
    monkeypatch.setattr(OtherRanks, "waited_for", lambda ranks, here: None)
    monkeypatch.setattr(OtherRanks, "positions", lambda ranks, within=0.0: dict(where))
    monkeypatch.setattr(OtherRanks, "first_failure", lambda ranks: told[0] if told else None)
    monkeypatch.setattr(OtherRanks, "tell", lambda ranks, failure: told.append(failure))
    said = []
    for _ in (0, 1):
        with pytest.raises(Left):
            (watched := watch(launcher_restarts="yes")).hang(100.0)
        said += watched.before_exit
        # The first one is gone by the time that the second one looks where the others are.
        where.pop(0, None)
    assert [(each.rank, each.failure) for each in told] == [(None, FailureType.HANG)]
    expected = "the ranks wait in different collectives: rank 0 in all_gather; rank 1 in barrier"
    assert said == [f"nothing moves after step 7: {expected}"] * 2


def test_with_the_callback_alone_the_process_stays(watch: Callable[..., Watched], exits: None) -> None:
    watched = watch(launcher_restarts="yes")
    watched.run.wrapped = False
    watched.hang(100.0)
    assert len(watched.incidents) == 1
    assert watched.before_exit == []


def test_time_in_which_the_whole_process_stood_still_is_no_hang(watch: Callable[..., Watched]) -> None:
    watched = watch(on_hang="notify")
    watched.heartbeat.enter("step")
    watched.wait(1.0)
    watched.now += 1000.0
    watched.wait(8.0)
    assert watched.incidents == []
    watched.wait(4.0)
    assert len(watched.incidents) == 1


def called_from(*places: tuple[str, str]) -> str | None:
    """What is said of a thread that is in native code, called by these lines of these files, the innermost last."""

    def look() -> str | None:
        return collective_in(sys._getframe(1))

    call: Callable[[], str | None] = look
    for number, (file, line) in enumerate(reversed(places)):
        name = f"/venv/{number}/site-packages/{file}"
        linecache.cache[name] = (0, None, ["def function():\n", f"    {line}\n"], name)
        namespace: dict[str, Any] = {"inner": call}
        exec(compile("def function():\n    return inner()", name, "exec"), namespace)
        call = namespace["function"]
    return call()


ENGINE = ("deepspeed/runtime/engine.py", "loss = self.module(*inputs, **kwargs)")
PARAMETERS = "deepspeed/runtime/zero/partition_parameters.py"
MEASURED = ("deepspeed/utils/nvtx.py", "ret_val = func(*args, **kwargs)")


@pytest.mark.parametrize(
    "places",
    [
        [(PARAMETERS, "handle.wait()")],
        [(PARAMETERS, "instrument_w_nvtx(self.__handle.wait)()")],
        [(PARAMETERS, "instrument_w_nvtx(self.__handle.wait)()"), MEASURED],
    ],
    ids=["by itself", "that is measured", "below what is measured"],
)
def test_a_rank_that_waits_for_weights_of_zero_3_is_in_a_collective(places: list[tuple[str, str]]) -> None:
    assert called_from(ENGINE, *places) == "all_gather of weights"


def test_so_is_one_that_waits_for_what_its_own_code_has_begun() -> None:
    assert called_from(("parallel/layers.py", "work.wait()")) == "a collective begun before"


@pytest.mark.parametrize("line", ["os.wait()", "os.waitpid(pid, 0)", "awaited = step.waits(1)"])
def test_what_waits_for_something_else_is_none_either(line: str) -> None:
    assert called_from(("launcher.py", line)) is None
