"""An emergency checkpoint holds what its step still owed, and at no time is it gone or half written."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    RaisingAt,
    assert_same_weights,
    journal,
    logged,
    plain_trainer,
    sft_trainer,
    weights,
)
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl import SFTTrainer

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.checkpoints.vetting import vet


STEPS = {"max_steps": 6, "logging_steps": 2}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    trainer = sft_trainer(tmp_path_factory.mktemp("clean"), tokenizer, **STEPS)
    trainer.train()
    return trainer


def killed_while_it_waits(directory: Path, tokenizer: Any, event: str, step: int, **arguments: Any) -> Path:
    """What a process leaves that is killed after its emergency checkpoint, while it waits for another attempt."""
    left = directory / "killed"

    def wait(_: float) -> None:
        shutil.copytree(directory / "run", left)

    trainer = sft_trainer(directory / "run", tokenizer, callbacks=[RaisingAt(event, step)], **{**STEPS, **arguments})
    SelfHealingTrainer(trainer, sleep=wait).train()
    return left


def taken_up(directory: Path, tokenizer: Any, **arguments: Any) -> Any:
    trainer = sft_trainer(directory, tokenizer, **{**STEPS, **arguments})
    SelfHealingTrainer(trainer).train(resume_from_checkpoint="auto")
    return trainer


@pytest.mark.parametrize(
    ("event", "step"),
    [
        ("on_step_end", 4),
        pytest.param("on_step_end", 6, marks=pytest.mark.slow),
        pytest.param("on_step_begin", 3, marks=pytest.mark.slow),
    ],
)
def test_the_next_process_logs_what_the_interrupted_step_still_owed(
    tmp_path: Path, tokenizer: Any, clean: Any, event: str, step: int
) -> None:
    resumed = taken_up(killed_while_it_waits(tmp_path, tokenizer, event, step), tokenizer)
    assert logged(resumed) == logged(clean)
    assert_same_weights(weights(resumed), weights(clean))


def test_the_next_process_stops_where_the_run_was_to_stop(tmp_path: Path, tokenizer: Any) -> None:
    class Enough(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 4

    def wait(_: float) -> None:
        shutil.copytree(tmp_path / "run", tmp_path / "killed")

    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[Enough(), RaisingAt("on_log", 4)], **STEPS)
    SelfHealingTrainer(trainer, sleep=wait).train()
    assert trainer.state.global_step == 4
    resumed = taken_up(tmp_path / "killed", tokenizer)
    assert resumed.state.global_step == 4
    assert logged(resumed) == logged(trainer)


def test_a_second_exception_in_one_step_does_not_cost_the_checkpoint_of_the_first(
    tmp_path: Path, tokenizer: Any
) -> None:
    class FullTheSecondTime(SFTTrainer):
        saves = 0

        def _save_rng_state(self, output_dir: str) -> None:
            self.saves += 1
            if self.saves == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            super()._save_rng_state(output_dir)

    faults = [RaisingAt("on_step_begin", 3), RaisingAt("on_step_begin", 3)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=faults, trainer_class=FullTheSecondTime, **STEPS)
    left: list[bool] = []

    def wait(_: float) -> None:
        left.append(vet(tmp_path / "emergency" / "checkpoint-3").usable)

    SelfHealingTrainer(trainer, HealingConfig(max_recovery_attempts=9), sleep=wait).train()
    assert left[0]
    assert [path for path in left if not path] == []


@pytest.mark.slow
def test_kept_checkpoints_give_way_to_an_emergency_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    class FullOnce(SFTTrainer):
        def _save_rng_state(self, output_dir: str) -> None:
            # One of them shares all it holds with a regular one, and would free nothing.
            if "emergency" in output_dir and len(list(tmp_path.glob("last-known-good/checkpoint-*"))) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            super()._save_rng_state(output_dir)

    arguments = {"max_steps": 24, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    faults = [RaisingAt("on_step_begin", 22)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=faults, trainer_class=FullOnce, **arguments)
    healer = SelfHealingTrainer(trainer, sleep=lambda _: None)
    healer.train()
    assert healer.get_report().steps_lost == 0
    (saved,) = [event for event in journal(tmp_path, "action") if event["action"] == "emergency_checkpoint"]
    assert saved["happened"]


class Remembering(TrainerCallback, ExportableState):
    def state(self) -> dict[str, Any]:
        return {"args": {"value": 7}, "attributes": {}}


def test_a_stateful_callback_that_came_late_costs_no_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    class Bringing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.add_callback(Remembering())

    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[Bringing()], save_strategy="steps", save_steps=2)
    SelfHealingTrainer(trainer).train()
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["Remembering"]["args"]["value"] == 7
