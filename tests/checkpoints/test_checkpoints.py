"""Which checkpoint a run resumes from, and which ones are still there when it has to."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same_weights, journal, sft_trainer, weights
from followed_checkpoints import following
from test_vetting import DAMAGED_RANDOM_STATES, DAMAGES, SILENT_DAMAGES, as_just_written
from transformers import TrainerCallback

from self_healing import SelfHealingCallback, SelfHealingTrainer
from self_healing.checkpoints.choice import (
    CheckpointError,
    check_resumed,
    find_trusted_checkpoint,
    newest_checkpoint_of,
)
from self_healing.checkpoints.marker import checkpoints_in, load_marker, read_marker, set_standing, write_marker
from self_healing.checkpoints.retention import RunCheckpoints
from self_healing.checkpoints.vetting import Verdict, breach_of_marker, vet


SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
LATER = {"max_steps": 8}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A run with checkpoints at 2, 4 and 6; nobody writes to it."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    sft_trainer(directory, tokenizer, callbacks=[SelfHealingCallback()], **SAVING).train()
    return as_just_written(directory)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def resumed_from_4(
    finished: Path, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any
) -> dict[str, torch.Tensor]:
    """The weights of a plain Trainer that resumed from step 4."""
    trainer = sft_trainer(tmp_path_factory.mktemp("plain"), tokenizer, **LATER)
    trainer.train(resume_from_checkpoint=str(finished / "checkpoint-4"))
    return weights(trainer)


def later(directory: Path, tokenizer: Any) -> SelfHealingTrainer:
    return SelfHealingTrainer(sft_trainer(directory, tokenizer, **LATER))


def damage(checkpoint: Path, name: str = "no optimizer state") -> None:
    DAMAGES[name][0](checkpoint)


def standings(run: Path) -> dict[str, str]:
    return {str(checkpoint.relative_to(run)): vet(checkpoint).standing for checkpoint in checkpoints_in(run)}


# ---- resume_from_checkpoint=True ----


@pytest.mark.heals("damaged_checkpoint", "wrapper")
@pytest.mark.parametrize(
    "name",
    [
        "truncated weights",
        "no optimizer state",
        "half-written state",
        "NaN weight",
        "killed while saving",
        "empty directory",
        "a file",
    ],
)
def test_true_resumes_from_the_newest_that_can_be_trusted(
    run: Path, tokenizer: Any, resumed_from_4: dict[str, torch.Tensor], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(run / "checkpoint-6", name)
    reason = vet(run / "checkpoint-6").reason
    assert reason.startswith(DAMAGES[name][1])
    healer = later(run, tokenizer)
    healer.train(resume_from_checkpoint=True)
    assert_same_weights(weights(healer.trainer), resumed_from_4)
    assert f"{run / 'checkpoint-6'} is passed over: {reason}." in caplog.messages
    (passed_over,) = journal(run, "checkpoint_passed_over")[-1:]
    assert (passed_over["path"], passed_over["reason"]) == (str(run / "checkpoint-6"), reason)
    (chosen,) = journal(run, "checkpoint_chosen")[-1:]
    assert (chosen["path"], chosen["step"]) == (str(run / "checkpoint-4"), 4)


def test_damage_that_loads_without_a_word_is_passed_over(
    run: Path, tokenizer: Any, resumed_from_4: dict[str, torch.Tensor]
) -> None:
    SILENT_DAMAGES["flipped bit of a mantissa"][1](run / "checkpoint-6")
    healer = later(run, tokenizer)
    healer.train(resume_from_checkpoint="auto")
    assert_same_weights(weights(healer.trainer), resumed_from_4)


def test_the_checksums_of_large_checkpoints_follow_while_the_run_goes_on(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("self_healing.checkpoints.marker._AT_ONCE", 0)
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], save_total_limit=1, **SAVING)
    trainer.train()
    assert "crc32" in (load_marker(tmp_path / "checkpoint-6") or {})
    plain = sft_trainer(tmp_path / "plain", tokenizer, **SAVING)
    plain.train()
    assert_same_weights(weights(trainer), weights(plain))


# ---- the callback alone: the Trainer takes what it is told to ----


@pytest.mark.heals(
    "damaged_checkpoint", "callback", partly="refused before the first step; the newest good one is named"
)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("optimizer.pt", "optimizer.pt is gone; the marker healing.json names it"),
        pytest.param("scheduler.pt", "scheduler.pt is gone", marks=pytest.mark.slow),
    ],
)
def test_the_callback_refuses_what_lacks_a_file(run: Path, tokenizer: Any, name: str, reason: str) -> None:
    (run / "checkpoint-6" / name).unlink()
    trainer = sft_trainer(run, tokenizer, callbacks=[SelfHealingCallback()], **LATER)
    with pytest.raises(CheckpointError, match=reason) as caught:
        trainer.train(resume_from_checkpoint=True)
    assert f"resume_from_checkpoint={str(run / 'checkpoint-4')!r}" in str(caught.value)
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("damage", ["empty", pytest.param("truncated", marks=pytest.mark.slow), "garbage"])
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapper", "callback"])
def test_a_resume_gets_over_a_random_state_that_cannot_be_loaded(
    run: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, wrapped: bool, damage: str
) -> None:
    DAMAGED_RANDOM_STATES[damage](run / "checkpoint-6")
    trainer = sft_trainer(run, tokenizer, callbacks=None if wrapped else [SelfHealingCallback()], **LATER)
    (SelfHealingTrainer(trainer) if wrapped else trainer).train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    assert [each["resumed_from"] for each in journal(run, "run_started")][-1] == str(run / "checkpoint-6")
    told = f"{run / 'checkpoint-6' / 'rng_state.pth'} cannot be loaded"
    assert told in caplog.text
    assert "and is taken for missing: training goes on" in caplog.text


@pytest.mark.parametrize("damage", ["flipped bit of a mantissa", "another number in the state"])
def test_what_is_not_what_was_written_breaks_its_marker(run: Path, damage: str) -> None:
    name, inflict = SILENT_DAMAGES[damage]
    assert breach_of_marker(run / "checkpoint-6") is None
    inflict(run / "checkpoint-6")
    with pytest.raises(CheckpointError, match=f"{name} is not what was written"):
        check_resumed(run / "checkpoint-6", run)


def test_the_callback_says_where_it_trains_on_from_what_is_suspect(
    run: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    set_standing(run / "checkpoint-6", "suspect", "run-001")
    sft_trainer(run, tokenizer, callbacks=[SelfHealingCallback()], **LATER).train(resume_from_checkpoint=True)
    assert (
        f"Resuming from {run / 'checkpoint-6'} anyway: it was written in a stretch that was rolled back or "
        f"went bad; the newest good one is {run / 'checkpoint-4'}" in caplog.text
    )


def test_a_plain_checkpoint_has_no_marker_to_break(run: Path) -> None:
    checkpoint = run / "checkpoint-6"
    (checkpoint / "healing.json").unlink()
    (checkpoint / "optimizer.pt").unlink()
    assert check_resumed(checkpoint, run) is None


def test_true_passes_over_what_is_suspect(run: Path, tokenizer: Any, resumed_from_4: dict[str, torch.Tensor]) -> None:
    set_standing(run / "checkpoint-6", "suspect", "run-001")
    healer = later(run, tokenizer)
    healer.train(resume_from_checkpoint=True)
    assert_same_weights(weights(healer.trainer), resumed_from_4)


@pytest.mark.parametrize("place", ["emergency", "last-known-good"])
def test_true_finds_what_lies_beside_the_regular_ones(
    run: Path, tokenizer: Any, resumed_from_4: dict[str, torch.Tensor], place: str
) -> None:
    (run / place).mkdir()
    (run / "checkpoint-4").rename(run / place / "checkpoint-4")
    shutil.rmtree(run / "checkpoint-6")
    healer = later(run, tokenizer)
    healer.train(resume_from_checkpoint=True)
    assert_same_weights(weights(healer.trainer), resumed_from_4)


def test_true_without_any_is_an_error_that_says_what_to_do(tmp_path: Path, tokenizer: Any) -> None:
    healer = later(tmp_path / "run", tokenizer)
    with pytest.raises(CheckpointError) as caught:
        healer.train(resume_from_checkpoint=True)
    assert f"There is no checkpoint in {tmp_path / 'run'}" in str(caught.value)
    assert 'resume_from_checkpoint="auto"' in str(caught.value)
    assert healer.trainer.state.global_step == 0


@pytest.mark.parametrize("left", ["no state", "empty directory"])
def test_true_begins_anew_where_a_run_has_never_finished_a_checkpoint(
    run: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, left: str
) -> None:
    before = later(run, tokenizer)
    before.train()
    for folder in ("checkpoint-4", "checkpoint-6", "last-known-good"):
        shutil.rmtree(run / folder, ignore_errors=True)
    damage(run / "checkpoint-2", left)
    (run / "checkpoint-2" / "healing.json").unlink(missing_ok=True)
    healer = later(run, tokenizer)
    healer.train(resume_from_checkpoint=True)
    assert_same_weights(weights(healer.trainer), weights(before.trainer))
    assert f"No checkpoint in {run} can be resumed from; the run starts anew." in caplog.messages


def test_true_where_no_run_has_been_is_an_error_all_the_same(run: Path, tokenizer: Any) -> None:
    for path in run.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run / "checkpoint-2").mkdir()
    with pytest.raises(CheckpointError, match="No valid checkpoint found"):
        later(run, tokenizer).train(resume_from_checkpoint=True)


def test_true_with_none_that_is_usable_names_each_with_its_reason(run: Path, tokenizer: Any) -> None:
    names = ["NaN weight", "truncated weights", "no schedule"]
    for step, name in zip((2, 4, 6), names, strict=True):
        damage(run / f"checkpoint-{step}", name)
    with pytest.raises(CheckpointError) as caught:
        later(run, tokenizer).train(resume_from_checkpoint=True)
    for step, name in zip((2, 4, 6), names, strict=True):
        assert f"checkpoint-{step}: {DAMAGES[name][1]}" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_the_trainer_is_its_own_after_an_error(run: Path, tokenizer: Any) -> None:
    healer = later(run, tokenizer)
    with pytest.raises(CheckpointError):
        healer.train(resume_from_checkpoint=str(run / "elsewhere"))
    assert healer.train().global_step == 8


# ---- "auto", a path, nothing ----


def test_auto_resumes_where_it_can(run: Path, tokenizer: Any, resumed_from_4: dict[str, torch.Tensor]) -> None:
    damage(run / "checkpoint-6")
    healer = later(run, tokenizer)
    healer.train(resume_from_checkpoint="auto")
    assert_same_weights(weights(healer.trainer), resumed_from_4)


def test_auto_starts_anew_in_an_empty_directory(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clean = sft_trainer(tmp_path / "clean", tokenizer, **LATER)
    clean.train()
    healer = later(tmp_path / "run", tokenizer)
    with caplog.at_level(logging.WARNING, logger="self_healing"):
        healer.train(resume_from_checkpoint="auto")
    assert_same_weights(weights(healer.trainer), weights(clean))
    assert not [record for record in caplog.records if record.name.startswith("self_healing")]


def test_auto_says_so_if_it_starts_anew_over_bad_checkpoints(
    run: Path, tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clean = sft_trainer(tmp_path / "clean", tokenizer, **LATER)
    clean.train()
    for step in (2, 4, 6):
        damage(run / f"checkpoint-{step}", "NaN weight")
    healer = later(run, tokenizer)
    healer.train(resume_from_checkpoint="auto")
    assert_same_weights(weights(healer.trainer), weights(clean))
    assert f"No checkpoint in {run} can be resumed from; the run starts anew." in caplog.messages


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_taken_if_it_is_usable(
    run: Path, tokenizer: Any, resumed_from_4: dict[str, torch.Tensor], kind: Any
) -> None:
    healer = later(run, tokenizer)
    healer.train(resume_from_checkpoint=kind(run / "checkpoint-4"))
    assert_same_weights(weights(healer.trainer), resumed_from_4)


def test_a_path_that_is_not_usable_is_an_error_that_names_one_that_is(run: Path, tokenizer: Any) -> None:
    damage(run / "checkpoint-6", "NaN weight")
    healer = later(run, tokenizer)
    with pytest.raises(CheckpointError) as caught:
        healer.train(resume_from_checkpoint=str(run / "checkpoint-6"))
    assert f"{run / 'checkpoint-6'} cannot be resumed from: model.layers.1.mlp" in str(caught.value)
    assert f"resume_from_checkpoint={str(run / 'checkpoint-4')!r}" in str(caught.value)
    assert healer.trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        ("missing", "Can't find a valid checkpoint at {requested}"),
        (True, "No valid checkpoint found in output directory"),
    ],
)
def test_a_missing_checkpoint_is_told_in_the_words_of_transformers(
    tmp_path: Path, tokenizer: Any, requested: Any, words: str
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer)
    with pytest.raises(ValueError, match=words.format(requested=requested)):
        trainer.train(resume_from_checkpoint=requested)
    with pytest.raises(ValueError, match=words.format(requested=requested)):
        SelfHealingTrainer(trainer).train(resume_from_checkpoint=requested)


@pytest.mark.parametrize("nothing", [None, False])
def test_without_a_request_nothing_is_looked_at(run: Path, tokenizer: Any, nothing: Any) -> None:
    healer = later(run, tokenizer)
    seen = len(journal(run))
    assert healer.train(resume_from_checkpoint=nothing).metrics["train_loss"] > 0
    assert healer.trainer.state.log_history[0]["step"] == 1
    assert not [event for event in journal(run)[seen:] if event["kind"].startswith("checkpoint_")]


# ---- in which order ----


def test_newest_first_and_of_the_same_step_the_regular_one(run: Path) -> None:
    for place, steps in (("emergency", (4, 7)), ("last-known-good", (2, 4))):
        for step in steps:
            shutil.copytree(run / "checkpoint-2", run / place / f"checkpoint-{step}")
            write_marker(run / place / f"checkpoint-{step}", "run", step, {}, emergency=False)
    assert [str(checkpoint.relative_to(run)) for checkpoint in checkpoints_in(run)] == [
        "emergency/checkpoint-7",
        "checkpoint-6",
        "checkpoint-4",
        "emergency/checkpoint-4",
        "last-known-good/checkpoint-4",
        "checkpoint-2",
        "last-known-good/checkpoint-2",
    ]


@pytest.mark.parametrize("kept_by", ["this library", "the plain trainer"])
def test_what_an_earlier_run_kept_comes_last(run: Path, kept_by: str) -> None:
    """The directory is used again from the start: the earlier run came further, but is not the one to go on with."""
    (run / "last-known-good").mkdir()
    (run / "checkpoint-6").rename(run / "last-known-good" / "checkpoint-6")
    assert find_trusted_checkpoint(run) == str(run / "last-known-good" / "checkpoint-6")
    if kept_by == "this library":
        write_marker(run / "checkpoint-4", "later run", 4, {}, emergency=False)
    else:
        (run / "checkpoint-4" / "healing.json").unlink()
        (run / "checkpoint-4" / "trainer_state.json").touch()
    assert [checkpoint.name for checkpoint in checkpoints_in(run)] == ["checkpoint-4", "checkpoint-2", "checkpoint-6"]


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert [checkpoint.name[11:] for checkpoint in checkpoints_in(tmp_path)] == ["100", "10", "9"]


def test_older_ones_are_not_looked_at(run: Path) -> None:
    damage(run / "checkpoint-6")
    damage(run / "checkpoint-2")
    passed_over: list[Verdict] = []
    assert find_trusted_checkpoint(run, passed_over) == str(run / "checkpoint-4")
    assert [Path(verdict.path).name for verdict in passed_over] == ["checkpoint-6"]


def test_no_directory_has_no_checkpoints(tmp_path: Path) -> None:
    assert find_trusted_checkpoint(tmp_path / "elsewhere") is None


def test_a_recovery_takes_the_newest_of_its_own_run_that_is_usable(run: Path) -> None:
    own = read_marker(run / "checkpoint-6")
    assert own is not None
    assert newest_checkpoint_of(own["run"], str(run)) == str(run / "checkpoint-6")
    damage(run / "checkpoint-6", "NaN weight")
    assert newest_checkpoint_of(own["run"], str(run)) == str(run / "checkpoint-4")
    write_marker(run / "checkpoint-4", "another run", 4, {}, emergency=False)
    assert newest_checkpoint_of(own["run"], str(run)) == str(run / "checkpoint-2")
    set_standing(run / "checkpoint-2", "suspect")
    assert newest_checkpoint_of(own["run"], str(run)) is None


# ---- standing ----


def test_a_standing_is_changed_without_touching_what_links_to_it(run: Path, tmp_path: Path) -> None:
    os.link(run / "checkpoint-4" / "healing.json", tmp_path / "linked.json")
    set_standing(run / "checkpoint-4", "verified")
    assert json.loads((tmp_path / "linked.json").read_text())["standing"] == "unverified"
    marker = read_marker(run / "checkpoint-4")
    assert marker is not None
    assert marker["standing"] == "verified"


def test_a_standing_leaves_the_order_of_rotation_alone(run: Path) -> None:
    """The Trainer deletes the directory that was changed longest ago."""
    os.utime(run / "checkpoint-2", (1_000_000, 1_000_000))
    set_standing(run / "checkpoint-2", "verified")
    assert (run / "checkpoint-2").stat().st_mtime == 1_000_000


def test_a_checkpoint_without_a_marker_gets_no_standing(run: Path) -> None:
    (run / "checkpoint-4" / "healing.json").unlink()
    set_standing(run / "checkpoint-4", "verified")
    assert vet(run / "checkpoint-4").standing == "unmarked"


# ---- RunCheckpoints ----


class Keeping(TrainerCallback):
    """Calls a keeper as a run does: a checkpoint is good when `verify` steps came after it, until `bad_from`."""

    def __init__(self, keeper: RunCheckpoints, verify: int, bad_from: int = 1000) -> None:
        self.keeper, self.verify, self.bad_from = keeper, verify, bad_from

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < self.bad_from:
            self.keeper.verify_up_to(state.global_step - self.verify)
        if control.should_save:
            self.keeper.about_to_save(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_marker(checkpoint, "run", state.global_step, {}, emergency=False, finite=True)
        self.keeper.saved(checkpoint, state.global_step)


def follow(run: Path, *steps: int, **options: Any) -> RunCheckpoints:
    keeper = following(run, **options)
    for step in steps:
        keeper.saved(run / f"checkpoint-{step}", step)
    return keeper


def test_a_checkpoint_of_the_plain_trainer_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "model.safetensors").touch()
    follow(tmp_path, 2).verify_up_to(2)
    assert not caplog.records
    assert not (tmp_path / "last-known-good").exists()


@pytest.mark.parametrize("limit", [1, 2])
def test_the_last_good_one_survives_a_long_bad_stretch(tmp_path: Path, tokenizer: Any, limit: int) -> None:
    keeper = following(tmp_path)
    keeping = Keeping(keeper, verify=3, bad_from=6)
    arguments = {**SAVING, "max_steps": 16, "save_total_limit": limit}
    sft_trainer(tmp_path, tokenizer, callbacks=[keeping], **arguments).train()
    keeper.distrust(2, 100, "run-001")
    regular = [f"checkpoint-{step}" for step in (16, 14)[:limit]]
    expected = dict.fromkeys(regular, "suspect") | {"last-known-good/checkpoint-2": "verified"}
    assert standings(tmp_path) == expected
    assert find_trusted_checkpoint(tmp_path) == str(tmp_path / "last-known-good" / "checkpoint-2")


def test_a_checkpoint_is_out_of_reach_before_it_is_verified(run: Path) -> None:
    follow(run, 2, 4, 6)
    for step in (2, 4, 6):
        shutil.rmtree(run / f"checkpoint-{step}")
    assert standings(run) == {"last-known-good/checkpoint-2": "unverified"}
    assert vet(run / "last-known-good" / "checkpoint-2").usable


def test_a_link_takes_no_space(run: Path) -> None:
    follow(run, 2)
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        assert (run / "last-known-good" / "checkpoint-2" / name).samefile(run / "checkpoint-2" / name)
    marker = "checkpoint-2/healing.json"
    assert not (run / "last-known-good" / marker).samefile(run / marker)


def test_healthy_steps_verify_what_came_before_them(run: Path) -> None:
    follow(run, 2, 4, 6).verify_up_to(5)
    assert standings(run) == {
        "checkpoint-6": "unverified",
        "last-known-good/checkpoint-6": "unverified",
        "checkpoint-4": "verified",
        "last-known-good/checkpoint-4": "verified",
        "checkpoint-2": "verified",
        "last-known-good/checkpoint-2": "verified",
    }


def test_older_generations_are_let_go(run: Path) -> None:
    keeper = follow(run, 2, generations=1)
    keeper.verify_up_to(2)
    keeper.saved(run / "checkpoint-4", 4)
    assert sorted(path.name for path in keeper.directory.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    keeper.verify_up_to(4)
    assert sorted(path.name for path in keeper.directory.iterdir()) == ["checkpoint-4"]
    keeper.saved(run / "checkpoint-6", 6)
    keeper.distrust(4, 100, "run-001")
    keeper.verify_up_to(9)
    assert sorted(path.name for path in keeper.directory.iterdir()) == ["checkpoint-4"]


def test_what_an_earlier_run_kept_goes_last(run: Path) -> None:
    earlier = follow(run, 6)
    earlier.verify_up_to(6)
    shutil.rmtree(run / "checkpoint-6")
    for step in (2, 4):
        write_marker(run / f"checkpoint-{step}", "later run", step, {}, emergency=False, finite=True)
    keeper = follow(run, 2)
    keeper.verify_up_to(2)
    assert sorted(path.name for path in keeper.directory.iterdir()) == ["checkpoint-2", "checkpoint-6"]
    keeper.saved(run / "checkpoint-4", 4)
    keeper.verify_up_to(4)
    assert sorted(path.name for path in keeper.directory.iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_what_came_after_the_trusted_step_is_suspect(run: Path) -> None:
    keeper = follow(run, 2, 4, 6)
    keeper.verify_up_to(2)
    keeper.distrust(4, 100, "run-001")
    assert standings(run) == {
        "checkpoint-6": "suspect",
        "checkpoint-4": "unverified",
        "checkpoint-2": "verified",
        "last-known-good/checkpoint-2": "verified",
    }
    assert vet(run / "checkpoint-6").reason.endswith("(incident run-001)")
    keeper.verify_up_to(100)
    assert standings(run)["checkpoint-6"] == "suspect"


def test_after_a_bad_stretch_the_next_one_is_out_of_reach_again(run: Path) -> None:
    keeper = follow(run, 2, 4)
    keeper.distrust(0, 100, "run-001")
    keeper.saved(run / "checkpoint-6", 6)
    assert [path.name for path in keeper.directory.iterdir()] == ["checkpoint-6"]


def test_one_that_waits_is_not_let_go_with_the_older_ones(run: Path) -> None:
    keeper = follow(run, 2, 4, 6, generations=1)
    keeper.verify_up_to(2)
    keeper.verify_up_to(4)
    assert sorted(path.name for path in keeper.directory.iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_a_verified_one_is_not_distrusted_any_more(run: Path) -> None:
    keeper = follow(run, 2, 4)
    keeper.verify_up_to(4)
    keeper.distrust(0, 100, "run-001")
    assert set(standings(run).values()) == {"verified", "unverified"}


def test_checkpoints_of_another_run_are_left_as_they_are(run: Path) -> None:
    keeper = follow(run, 4)
    keeper.verify_up_to(3)
    keeper.distrust(3, 100, "run-001")
    assert standings(run) == {"checkpoint-6": "unverified", "checkpoint-4": "suspect", "checkpoint-2": "unverified"}


def test_what_a_run_resumed_from_is_verified_by_its_healthy_steps(run: Path) -> None:
    follow(run, 4)
    keeper = following(run)
    keeper.saved(run / "last-known-good" / "checkpoint-4", 4)
    keeper.verify_up_to(4)
    assert vet(run / "last-known-good" / "checkpoint-4").standing == "verified"


def test_what_a_run_resumed_from_is_not_removed_for_want_of_a_marker(run: Path) -> None:
    follow(run, 4)
    kept = run / "last-known-good" / "checkpoint-4"
    (kept / "healing.json").unlink()
    following(run).saved(kept, 4)
    assert vet(kept).usable


def test_what_is_kept_stays_so_when_a_run_resumes_from_it(run: Path) -> None:
    follow(run, 4).verify_up_to(4)
    keeper = follow(run, 4)
    shutil.rmtree(run / "checkpoint-4")
    assert vet(keeper.directory / "checkpoint-4").standing == "verified"


# ---- a step the run comes by a second time ----


def test_a_checkpoint_written_again_does_not_touch_the_one_that_is_kept(run: Path, tokenizer: Any) -> None:
    follow(run, 4).verify_up_to(4)
    kept = run / "last-known-good" / "checkpoint-4"
    before = {file.name: file.read_bytes() for file in kept.iterdir()}
    arguments = {**SAVING, "max_grad_norm": 0.01}
    trainer = sft_trainer(run, tokenizer, callbacks=[Keeping(following(run), verify=100)], **arguments)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert {file.name: file.read_bytes() for file in kept.iterdir()} == before
    assert (run / "checkpoint-4" / "model.safetensors").read_bytes() != before["model.safetensors"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_checkpoint_killed_while_it_is_written_again_is_not_taken_for_a_whole_one(run: Path, kept: bool) -> None:
    keeper = following(run)
    if kept:
        keeper.saved(run / "checkpoint-4", 4)
    keeper.about_to_save(4)
    shutil.copy(run / "checkpoint-2" / "model.safetensors", run / "checkpoint-4" / "model.safetensors")
    assert not vet(run / "checkpoint-4").usable
    assert vet(run / "last-known-good" / "checkpoint-4").usable == kept


def test_about_to_save_for_the_first_time_does_nothing(run: Path) -> None:
    following(run).about_to_save(8)
    assert not (run / "checkpoint-8").exists()


# ---- file systems ----


def no_links(*_: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_without_hard_links_none_is_kept_and_that_is_told_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    keeper = follow(run, 2, 4)
    keeper.verify_up_to(4)
    assert not any(keeper.directory.iterdir())
    (told,) = caplog.messages
    assert told == "Keeping a checkpoint failed; training goes on. [Errno 1] Operation not permitted"


def test_a_full_disk_is_told_once_and_stops_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    keeper = follow(run, 2, 4)
    (told,) = caplog.messages
    assert "No space left on device" in told
    assert not any(keeper.directory.iterdir())
    monkeypatch.undo()
    keeper.saved(run / "checkpoint-6", 6)
    assert vet(run / "last-known-good" / "checkpoint-6").usable


def test_a_checkpoint_that_was_rotated_away_is_no_trouble(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = follow(run, 2, 4, 6)
    for step in (2, 4, 6):
        shutil.rmtree(run / f"checkpoint-{step}")
    keeper.verify_up_to(4)
    keeper.distrust(4, 100, "run-001")
    assert standings(run) == {"last-known-good/checkpoint-2": "verified"}
    assert not caplog.messages


@pytest.mark.parametrize("at", [1, 5, "rename"])
def test_a_process_killed_while_it_pins_leaves_nothing_that_looks_like_a_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch, at: int | str
) -> None:
    keeper = following(run)
    link, calls = os.link, [0]

    def killed_at(source: Any, target: Any) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        link(source, target)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    if at == "rename":
        monkeypatch.setattr(Path, "rename", killed)
    else:
        monkeypatch.setattr(os, "link", killed_at)
    with pytest.raises(KeyboardInterrupt):
        keeper.saved(run / "checkpoint-6", 6)
    monkeypatch.undo()
    assert len(list(keeper.directory.iterdir())) == 1
    assert [checkpoint.parent for checkpoint in checkpoints_in(run)] == [run] * 3
    follow(run, 4)
    assert [path.name for path in keeper.directory.iterdir()] == ["checkpoint-4"]


def test_what_is_verified_is_not_written_again(run: Path) -> None:
    keeper = follow(run, 2)
    keeper.verify_up_to(2)
    before = (run / "checkpoint-2" / "healing.json").stat().st_ino
    for step in range(1000):
        keeper.verify_up_to(step)
    assert (run / "checkpoint-2" / "healing.json").stat().st_ino == before
