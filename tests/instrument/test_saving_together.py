"""An error on one rank alone, in a save and before the ranks meet in it: no rank waits for another one in vain."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import build_tokenizer, journal, losses, sft_trainer
from constants import only_on_disk
from forked_pairs import run_pair
from strategies import WITH_DEEPSPEED, arguments_of, prepare
from transformers import set_seed
from trl import SFTTrainer

from self_healing import SelfHealingTrainer
from self_healing.checkpoints.vetting import vet


pytestmark = pytest.mark.slow

STRUCK_AT, STEPS = 2, 6
# Less than a hang takes to be noticed.
SECONDS, LAUNCHER = 100.0, {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3"}


def train(directory: Path, rank: int, strategy: str, error: Exception, resume: Any = None) -> dict[str, Any]:
    """Trains where one rank fails before it does anything else in a save of the optimizer state."""
    prepare(strategy)
    set_seed(1234)

    class Failing(SFTTrainer):
        def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
            if self.state.global_step == STRUCK_AT and rank == 1 and resume is None:
                raise error
            super()._save_optimizer_and_scheduler(*args, **kwargs)

    trainer = sft_trainer(
        directory / "run",
        build_tokenizer(),
        trainer_class=Failing,
        max_steps=STEPS,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=2,
        ddp_timeout=1800,
        **arguments_of(strategy),
    )
    only_on_disk()
    SelfHealingTrainer(trainer).train(resume_from_checkpoint=resume)
    return {"steps": trainer.state.global_step, "losses": losses(trainer)}


def stale() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


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
    run = partial(train, strategy=strategy, error=error)
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
