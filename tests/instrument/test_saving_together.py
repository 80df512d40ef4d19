"""An error on one rank alone, in a save and before the ranks meet in it: no rank waits for another one in vain."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from conftest import build_tokenizer, journal, losses, sft_trainer
from constants import only_on_disk
from forked_pairs import run_pair
from strategies import WITH_DEEPSPEED, ZERO, arguments_of, prepare, trained_as
from transformers import set_seed
from trl import SFTTrainer

from self_healing import SelfHealingTrainer
from self_healing.checkpoints.vetting import vet


pytestmark = pytest.mark.slow

STRUCK_AT, STEPS = 2, 6
# Less than a hang takes to be noticed.
SECONDS, LAUNCHER = 100.0, {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3"}
PLACES = {"model": "save_model", "optimizer": "_save_optimizer_and_scheduler", "checkpoint": "_save_checkpoint"}


def failing(original: Callable[..., Any], strikes: Callable[[Any], bool], error: Exception) -> Callable[..., Any]:
    """A method that raises before it does anything else."""

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == STRUCK_AT and strikes(self):
            raise error
        return original(self, *args, **kwargs)

    return save


def train(
    directory: Path, rank: int, strategy: str, on: int, error: Exception, place: str, whose: str, resume: Any = None
) -> dict[str, Any]:
    """Trains where one rank fails in a class of the user's own, or in the Trainer itself."""
    prepare(strategy)
    set_seed(1234)
    name = PLACES[place]
    own: Any = type("Own", (SFTTrainer,), {})
    holder = own if whose == "own" else transformers.Trainer
    setattr(holder, name, failing(getattr(holder, name), lambda trainer: rank == on and resume is None, error))
    trainer = sft_trainer(
        directory / "run",
        build_tokenizer(),
        trainer_class=own,
        max_steps=STEPS,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=2,
        ddp_timeout=1800,
        **arguments_of(strategy),
    )
    only_on_disk()
    SelfHealingTrainer(trainer).train(resume_from_checkpoint=resume)
    return {"steps": trainer.state.global_step, "losses": losses(trainer), "trained_as": trained_as(trainer)}


def stale() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize(
    ("strategy", "place", "on"),
    [
        ("ddp", "checkpoint", 1),
        ("fsdp2_full", "model", 0),
        ("fsdp2_full", "optimizer", 1),
        ("fsdp2_full", "checkpoint", 0),
        ("fsdp2_sharded", "optimizer", 0),
        pytest.param("zero1", "optimizer", 0, marks=WITH_DEEPSPEED),
        pytest.param("zero2", "optimizer", 1, marks=WITH_DEEPSPEED),
        pytest.param("zero3", "model", 1, marks=WITH_DEEPSPEED),
        pytest.param("zero3", "optimizer", 0, marks=WITH_DEEPSPEED),
    ],
)
def test_all_ranks_give_the_save_up_and_train_on(tmp_path: Path, strategy: str, place: str, on: int) -> None:
    run = partial(train, strategy=strategy, on=on, error=stale(), place=place, whose="own")
    outcome = run_pair(tmp_path, run, SECONDS)
    assert outcome["hung"] == [], outcome["last"]
    assert [rank.get("steps") for rank in outcome["ranks"]] == [STEPS, STEPS], outcome["ranks"]
    assert outcome["ranks"][0]["trained_as"] == (strategy if strategy in ZERO else strategy.partition("_")[0])
    (incident,) = journal(tmp_path / "run", "detected")
    assert incident["evidence"]["message"].endswith(f"(rank {on})")
    assert "Stale file handle" in incident["evidence"]["message"]
    (closed,) = journal(tmp_path / "run", "outcome")
    assert (closed["failure"], closed["outcome"], closed["missing"]) == ("disk", "resolved", [STRUCK_AT])
    assert not (tmp_path / "run" / f"checkpoint-{STRUCK_AT}").exists()
    assert vet(tmp_path / "run" / "checkpoint-4").whole


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        ("fsdp2_full", stale()),
        ("fsdp2_full", ValueError("a mistake")),
        pytest.param("zero3", stale(), marks=WITH_DEEPSPEED),
    ],
)
def test_one_that_cannot_meet_the_others_ends_the_job_and_the_next_start_begins_anew(
    tmp_path: Path, strategy: str, error: Exception
) -> None:
    run = partial(train, strategy=strategy, on=1, error=error, place="optimizer", whose="Trainer's")
    launcher = {**LAUNCHER, "TORCHELASTIC_RESTART_COUNT": "0"}
    first = run_pair(tmp_path, run, SECONDS, launcher=launcher)
    assert first["hung"] == [], first["last"]
    assert 0 not in first["codes"]
    assert str(error) in first["ranks"][1]["error"]
    assert not vet(tmp_path / "run" / f"checkpoint-{STRUCK_AT}").usable

    # As scripts ask who find a checkpoint there.
    second = run_pair(tmp_path, partial(run, resume=True), SECONDS, launcher=launcher)
    assert [rank.get("steps") for rank in second["ranks"]] == [STEPS, STEPS], second["ranks"]
    assert len(second["ranks"][0]["losses"]) == STEPS
    (passed_over,) = journal(tmp_path / "run", "checkpoint_passed_over")
    assert passed_over["step"] == STRUCK_AT
