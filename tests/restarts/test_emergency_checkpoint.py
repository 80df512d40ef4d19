"""An emergency checkpoint holds what its step still owed, and at no time is it gone or half written."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import RaisingAt, assert_same_weights, journal, logged, sft_trainer, weights
from transformers import TrainerCallback
from trl import SFTTrainer

from self_healing import HealingConfig, SelfHealingTrainer, find_trusted_checkpoint
from self_healing.checkpoints import emergency
from self_healing.checkpoints.listing import checkpoints_in
from self_healing.checkpoints.marker import load_marker
from self_healing.checkpoints.owed import owed_in
from self_healing.checkpoints.vetting import vet
from self_healing.instrument import Pending


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
        pytest.param("on_log", 4, marks=pytest.mark.slow),
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


def test_at_no_time_of_a_re_entry_is_the_emergency_checkpoint_gone(
    tmp_path: Path, tokenizer: Any, clean: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the directory after each thing that is done to it: what a kill at that moment would leave."""
    moments: list[Path] = []

    def copied() -> None:
        if (tmp_path / "run" / "emergency").exists():
            moments.append(Path(shutil.copytree(tmp_path / "run", tmp_path / f"moment-{len(moments)}")))

    def noting(holder: Any, name: str) -> None:
        original = getattr(holder, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            copied()
            result = original(*args, **kwargs)
            copied()
            return result

        monkeypatch.setattr(holder, name, both)

    def after_the_first(_: float) -> None:
        for holder, name in (
            (SFTTrainer, "_save_optimizer_and_scheduler"),
            (SFTTrainer, "_save_rng_state"),
            (Path, "rename"),
            (shutil, "rmtree"),
        ):
            noting(holder, name)

    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[RaisingAt("on_step_end", 4)], **STEPS)
    SelfHealingTrainer(trainer, sleep=after_the_first).train()
    monkeypatch.undo()

    before_the_end = [moment for moment in moments if (moment / "emergency").exists()][:-2]
    assert len(before_the_end) > 6
    for moment in before_the_end:
        found = find_trusted_checkpoint(moment)
        assert found is not None
        assert Path(found).name == "checkpoint-4"
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    halfway = next(each for each in moments if (each / "emergency" / "beside" / "checkpoint-4").exists())
    resumed = taken_up(halfway, tokenizer)
    assert logged(resumed) == logged(clean)


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


def test_what_is_owed_cannot_be_written_again_and_is_owed_still(
    tmp_path: Path, tokenizer: Any, clean: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(emergency, "write_beside", full)
    left = killed_while_it_waits(tmp_path, tokenizer, "on_step_end", 4)
    assert "it stays as it is" in caplog.text
    resumed = taken_up(left, tokenizer)
    assert logged(resumed) == logged(clean)


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


def test_the_marker_says_what_is_owed(tmp_path: Path, tokenizer: Any) -> None:
    left = killed_while_it_waits(tmp_path, tokenizer, "on_step_end", 4)
    (checkpoint,) = checkpoints_in(left)
    marker = load_marker(checkpoint)
    assert marker is not None
    owed = owed_in(marker["bookkeeping"])
    assert owed is not None
    assert (owed[0].step_end, owed[1].stop) == (True, False)
    assert owed[0].grad_norm > 0


@pytest.mark.parametrize(
    ("bookkeeping", "expected"),
    [
        ({}, None),
        ({"owes_evaluation": False}, None),
        ({"owes": "nonsense"}, None),
        ({"owes": {"pending": {"log": True, "unheard of": 1}}}, Pending(log=True)),
        ({"owes_evaluation": True}, Pending(evaluate=True)),
    ],
)
def test_what_another_version_has_written_is_read_as_far_as_it_goes(
    bookkeeping: dict[str, Any], expected: Pending | None
) -> None:
    found = owed_in(bookkeeping)
    assert (None if found is None else found[0]) == expected
