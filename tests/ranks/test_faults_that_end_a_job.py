"""
A fault on one rank ends all of them within seconds, and the job, started again, comes to the same end: under DDP,
FSDP2 and ZeRO, whatever the fault.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from strategies import STRATEGIES, WITH_DEEPSPEED, ZERO
from struck_job import SAVE_STEPS, SAVED_AFTER, STEPS, STRUCK_AFTER


# From the fault to the end of the last rank, in seconds.
BOUND = 10.0


@dataclass(frozen=True, slots=True)
class Fault:
    """
    What strikes one rank, and what is to be seen of it.

    Args:
        failure (`str`), error (`str`):
            As the postmortems of all ranks have it.
        after (`int`, *optional*):
            Steps finished when it strikes.
        soon (`bool`, *optional*, defaults to `True`):
            Whether all ranks end within ten seconds. A hang has to be one first.
        leaves_word (`bool`, *optional*, defaults to `True`):
            Whether the struck rank writes a postmortem as well.
        split (`bool`, *optional*, defaults to `False`):
            Whether calls are split from then on, so that sums are rounded in another order.
    """

    failure: str
    error: str
    after: int = STRUCK_AFTER
    soon: bool = True
    leaves_word: bool = True
    split: bool = False


BUG = Fault("user_code", "ValueError: only here")
GONE = Fault("process_died", "its process is gone", leaves_word=False)
HANGS = Fault("hang", "hang in 'step'", soon=False)
FAULTS = {
    "model": BUG,
    "collator": Fault("user_code", "only here"),
    "callback": BUG,
    "evaluation": Fault("user_code", "ValueError: only here", after=8),
    "reward": BUG,
    "oom_once": Fault("out_of_memory", "OutOfMemoryError: CUDA out of memory", split=True),
    "oom_above_4_rows": Fault("out_of_memory", "OutOfMemoryError: CUDA out of memory", after=0, split=True),
    "optimizer_memory": Fault("out_of_memory", "OutOfMemoryError: CUDA out of memory"),
    "worker": Fault("process_died", "DataLoader worker"),
    "lost_device": Fault("device", "CUDA error: an illegal memory access"),
    "sigkill": GONE,
    "sigkill_while_saving": Fault("process_died", "its process is gone", after=SAVED_AFTER, leaves_word=False),
    "hang": HANGS,
    "native_hang": HANGS,
    "sigterm": Fault("preempted", "SIGTERM"),
    "sigstop": Fault("process_died", "its process is stopped (SIGSTOP)", leaves_word=False),
    "sigkill_in_last_step": Fault("process_died", "its process is gone", after=STEPS, leaves_word=False),
    "callback_before_update": BUG,
}
# After these each rank has its last finished step in memory, or on disk; after others all have some state before it.
NOTHING_DONE_AGAIN = {
    "model",
    "collator",
    "callback",
    "evaluation",
    "reward",
    "oom_once",
    "oom_above_4_rows",
    "worker",
    "sigterm",
}
# Where each rank has a part of the state, it cannot be compared with the others what a rank has applied by itself.
NOTHING_DONE_AGAIN_UNDER = {"ddp": NOTHING_DONE_AGAIN | {"callback_before_update"}}
# Healed where it happens, while the other rank waits: nothing ends.
IN_PLACE = {(fault, strategy) for fault in ("oom_once", "oom_above_4_rows") for strategy in ("ddp", "zero1", "zero2")}
QUICK = {("sigkill", "ddp")}
NOT_YET: dict[tuple[str, str], str] = {}


def marks_of(fault: str, strategy: str) -> list[pytest.MarkDecorator]:
    marks = [] if (fault, strategy) in QUICK else [pytest.mark.slow]
    if strategy in ZERO:
        marks.append(WITH_DEEPSPEED)
    if (fault, strategy) in NOT_YET:
        marks.append(pytest.mark.xfail(strict=True, reason=NOT_YET[fault, strategy]))
    return marks


CELLS = [
    # Which of the two is struck goes back and forth.
    pytest.param(fault, strategy, (row + column) % 2, id=f"{fault}-{strategy}", marks=marks_of(fault, strategy))
    for (row, fault), (column, strategy) in itertools.product(enumerate(FAULTS), enumerate(STRATEGIES))
]


class Launcher:
    """Starts the job on two ranks, as often as it is told to."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._references: dict[tuple[str, str, float], dict[str, Any]] = {}

    def start(self, directory: Path, **request: Any) -> dict[str, Any]:
        directory.mkdir(exist_ok=True)
        log = directory / "launcher.txt"
        assert Forked("struck_job.py", directory, json.dumps(request), out=log, err=log).wait() == 0, log.read_text()
        outcome: dict[str, Any] = json.loads((directory / "outcome.json").read_text())
        return outcome

    def without_a_fault(self, strategy: str, trainer: str, dropout: float) -> dict[str, Any]:
        """The same job that nothing happens to, once for each kind."""
        kind = strategy, trainer, dropout
        if kind not in self._references:
            directory = self._directory / "-".join(map(str, kind))
            options = {"strategy": strategy, "trainer": trainer, "dropout": dropout}
            outcome = self.start(directory, fault=None, on=0, start=0, **options)
            assert outcome["codes"] == [0, 0], log_of(directory)
            assert outcome["ranks"][0]["steps"] == STEPS
            assert outcome["ranks"][0]["trained_as"] == strategy.partition("_")[0]
            self._references[kind] = outcome["ranks"][0]
        return self._references[kind]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("jobs"))


def log_of(directory: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in sorted(directory.glob("log.*.txt")))


def steps_done_again(directory: Path, rank: int) -> int:
    steps = (directory / f"steps.{rank}").read_text().split()
    return len(steps) - len(set(steps))


def postmortem(directory: Path, rank: int) -> Any:
    path = directory / "run" / ("postmortem.json" if rank == 0 else f"postmortem.rank{rank}.json")
    return json.loads(path.read_text())


def is_named_by_all(directory: Path, fault: Fault, on: int) -> None:
    """The postmortem of every rank that could write one names the first rank, its step and its error."""
    for rank in (0, 1) if fault.leaves_word else (1 - on,):
        told = postmortem(directory, rank)
        first = told["ranks"]["first_failure"]
        assert (first["rank"], first["step"], first["failure"]) == (on, fault.after, fault.failure)
        assert fault.error in first["error"]
        assert f"rank {on}" in told["verdict"] or rank == on


def comes_to_the_same_end(
    outcome: dict[str, Any], plain: dict[str, Any], directory: Path, fault: Fault, strategy: str
) -> None:
    """As the run that nothing happened to, and with the same weights on all ranks."""
    assert outcome["codes"] == [0, 0], log_of(directory)
    _, bf16 = ZERO.get(strategy, (0, False))
    # AdamW moves a weight whose gradient is next to nothing by as much as any.
    rounding, of_sums = (1e-3, 1e-2) if bf16 else (1e-5, 1e-5)
    for result in outcome["ranks"]:
        assert result["steps"] == STEPS
        assert result["weights"] == outcome["ranks"][0]["weights"]
        if fault.split:
            assert result["losses"] == pytest.approx(plain["losses"], rel=rounding)
            assert result["sums"] == pytest.approx(plain["sums"], rel=10 * rounding, abs=of_sums)
        else:
            assert result["weights"] == plain["weights"]
            assert result["losses"] == plain["losses"]


@pytest.mark.parametrize(("fault", "strategy", "on"), CELLS)
def test_a_fault_on_one_rank_ends_all_and_the_next_start_comes_to_the_same_end(
    launcher: Launcher, tmp_path: Path, fault: str, strategy: str, on: int, record_property: Callable[[str, Any], None]
) -> None:
    struck, directory = FAULTS[fault], tmp_path / "job"
    trainer, dropout = "grpo" if fault == "reward" else "sft", 0.0 if struck.split else 0.1
    plain = launcher.without_a_fault(strategy, trainer, dropout)
    request = {"strategy": strategy, "fault": fault, "on": on, "trainer": trainer, "dropout": dropout}
    first = launcher.start(directory, start=0, **request)
    if (fault, strategy) in IN_PLACE:
        comes_to_the_same_end(first, plain, directory, struck, strategy)
        assert first["ranks"][on]["struck"]
        assert [steps_done_again(directory, rank) for rank in (0, 1)] == [0, 0]
        return
    # A process that is stopped does not end by itself; that is for whoever has stopped it, or the launcher.
    assert first["hung"] == ([on] if fault == "sigstop" else []), log_of(directory)
    fault_came = json.loads((directory / "struck").read_text())["time"]
    seconds = max(ended for ended in first["ended"] if ended is not None) - fault_came
    record_property("seconds from the fault to the end of the last rank", round(seconds, 1))
    assert seconds < BOUND or not struck.soon, log_of(directory)
    if fault == "sigterm":
        assert first["codes"] == [143, 143], log_of(directory)
    else:
        assert first["codes"][1 - on] == 75, log_of(directory)
        is_named_by_all(directory, struck, on)

    second = launcher.start(directory, start=1, **request)
    comes_to_the_same_end(second, plain, directory, struck, strategy)
    assert not any(result["struck"] for result in second["ranks"])
    again = [steps_done_again(directory, rank) for rank in (0, 1)]
    record_property("steps done again", max(again))
    if fault in NOTHING_DONE_AGAIN_UNDER.get(strategy, NOTHING_DONE_AGAIN):
        assert again == [0, 0]
    else:
        assert again == [SAVE_STEPS] * 2 if fault == "sigkill_while_saving" else max(again) <= SAVE_STEPS
