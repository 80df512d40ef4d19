"""A second fault, or a kill, that strikes a remedy while it is at work: the run ends as if it had not."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    RaisingForward,
    assert_same_weights,
    job_result,
    journal,
    logged,
    lost_connection,
    sft_trainer,
    start_job,
    weights,
)

from self_healing import SelfHealingTrainer
from self_healing.checkpoints.marker import checkpoints_in
from self_healing.checkpoints.vetting import vet


RUN = {"max_steps": 6}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    trainer = sft_trainer(tmp_path_factory.mktemp("undisturbed"), tokenizer, **RUN)
    trainer.train()
    return trainer


def nan(trainer: Any) -> None:
    """A weight in memory is NaN from here on."""
    trainer.model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan


def runs_out(_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def raises(_: Any) -> None:
    raise RuntimeError("a copy failed")


def disconnects(_: Any) -> None:
    raise lost_connection()


FAULTS = {"nan": nan, "oom": runs_out, "exception": raises, "lost connection": disconnects}


class StrikingOnce:
    """Does something once to a trainer that is interrupted, before or after a method of it."""

    def __init__(
        self, trainer: Any, method: str, fault: Callable[[Any], None], interrupted: Callable[[], bool], after: bool
    ) -> None:
        self.fired = 0
        original = getattr(trainer, method)

        def strike() -> None:
            if interrupted() and not self.fired:
                self.fired += 1
                fault(trainer)

        def struck(*arguments: Any, **named: Any) -> Any:
            if not after:
                strike()
            result = original(*arguments, **named)
            if after:
                strike()
            return result

        setattr(trainer, method, struck)


def run_struck(
    directory: Path,
    tokenizer: Any,
    method: str,
    fault: Callable[[Any], None],
    after: bool,
    sleep: Callable[[float], Any] = lambda _: None,
) -> Any:
    trainer = sft_trainer(directory, tokenizer, **RUN)
    first = RaisingForward(trainer.model, lambda forward: forward == 8, lost_connection)
    struck = StrikingOnce(trainer, method, fault, lambda: first.fired > 0, after)
    SelfHealingTrainer(trainer, sleep=sleep).train()
    assert (first.fired, struck.fired) == (1, 1)
    return trainer


def assert_no_trace(trainer: Any, undisturbed: Any, directory: Path) -> None:
    assert_same_weights(weights(trainer), weights(undisturbed))
    assert logged(trainer) == logged(undisturbed)
    assert sum(event["steps_lost"] for event in journal(directory, "outcome")) == 0


SAVING = ("save_model", "_save_optimizer_and_scheduler", "_save_rng_state")
LOADING = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state")


def struck_anywhere(methods: tuple[str, ...], quick: tuple[str, str, str]) -> list[Any]:
    """Every method of the remedy, struck by every fault before and after it."""
    cells = [(method, when, fault) for method in methods for when in ("before", "after") for fault in FAULTS]
    return [cell if cell == quick else pytest.param(*cell, marks=pytest.mark.slow) for cell in cells]


@pytest.mark.parametrize(("method", "when", "fault"), struck_anywhere(SAVING, ("save_model", "before", "nan")))
def test_an_emergency_checkpoint_outlasts_a_second_fault(
    tmp_path: Path, tokenizer: Any, undisturbed: Any, method: str, when: str, fault: str
) -> None:
    assert_no_trace(run_struck(tmp_path, tokenizer, method, FAULTS[fault], when == "after"), undisturbed, tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_what_turned_nan_while_it_was_saved_is_not_left_to_the_next_process(tmp_path: Path, tokenizer: Any) -> None:
    left = tmp_path / "left"

    def die(_: float) -> None:
        shutil.copytree(tmp_path / "run", left)

    run_struck(tmp_path / "run", tokenizer, "save_model", nan, after=False, sleep=die)
    (checkpoint,) = checkpoints_in(left)
    verdict = vet(checkpoint)
    assert verdict.usable, verdict.reason


@pytest.mark.parametrize(
    ("method", "when", "fault"), struck_anywhere(LOADING, ("_load_optimizer_and_scheduler", "after", "nan"))
)
def test_a_re_entry_outlasts_a_second_fault(
    tmp_path: Path, tokenizer: Any, undisturbed: Any, method: str, when: str, fault: str
) -> None:
    assert_no_trace(run_struck(tmp_path, tokenizer, method, FAULTS[fault], when == "after"), undisturbed, tmp_path)


# ---- a kill, and the job is started again ----

REMEDIES: dict[str, dict[str, Any]] = {
    "looking for the row": {"poison": 3},
    "going back": {
        "first": "corrupted weights",
        "at": 15,
        "config": {"snapshot_interval": 2, "snapshot_verify_steps": 2},
    },
    "an emergency checkpoint": {"first": "lost connection", "at": 12},
}
# By what the process is doing when it is killed: the nth forward, or change of a file.
KILLS = [
    pytest.param("looking for the row", "forward", 5, marks=pytest.mark.slow),
    pytest.param("going back", "forward", 5, marks=pytest.mark.slow),
    ("an emergency checkpoint", "file", 12),
]


@pytest.fixture(scope="module")
def without_a_kill(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a run with the first fault alone ends with; one process is enough for it."""

    @functools.cache
    def result_of(remedy: str) -> dict[str, Any]:
        job = tmp_path_factory.mktemp("without a kill") / "job"
        assert start_job(job, {}, REMEDIES[remedy]) == 0
        return job_result(job)

    return result_of


@pytest.mark.parametrize(("remedy", "moment", "nth"), KILLS)
@pytest.mark.parametrize("again", ["by hand", pytest.param("by a launcher", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_while_it_heals_ends_as_if_it_had_not_been(
    tmp_path: Path,
    until_it_ends: Callable[..., list[int]],
    without_a_kill: Callable[[str], dict[str, Any]],
    remedy: str,
    moment: str,
    nth: int,
    again: str,
) -> None:
    job = tmp_path / "job"
    started = {"launcher": "none", "resume": "auto"} if again == "by hand" else {"launcher": "torchrun"}
    assert until_it_ends(job, 3, kill=[moment, nth], **started, **REMEDIES[remedy]) == [-9, 0]
    expected, result = without_a_kill(remedy), job_result(job)
    assert result["weights"] == expected["weights"]
    assert result["losses"] == expected["losses"]
    assert result["steps"] == expected["steps"]
    assert {incident["outcome"] for incident in result["incidents"]} == {"resolved"}
