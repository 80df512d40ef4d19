"""Which checkpoint a run resumes from, and which ones are still there when it has to."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same_weights, journal, sft_trainer, weights
from followed_checkpoints import following
from test_vetting import DAMAGED_RANDOM_STATES, DAMAGES, as_just_written

from self_healing import SelfHealingCallback, SelfHealingTrainer
from self_healing.checkpoints.choice import (
    CheckpointError,
    find_trusted_checkpoint,
)
from self_healing.checkpoints.marker import checkpoints_in, set_standing, write_marker
from self_healing.checkpoints.retention import RunCheckpoints
from self_healing.checkpoints.vetting import vet


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


@pytest.fixture(scope="module")
def anew(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, torch.Tensor]:
    """The weights of a plain Trainer that starts anew."""
    trainer = sft_trainer(tmp_path_factory.mktemp("anew"), tokenizer, **LATER)
    trainer.train()
    return weights(trainer)


def later(directory: Path, tokenizer: Any) -> SelfHealingTrainer:
    return SelfHealingTrainer(sft_trainer(directory, tokenizer, **LATER))


def damage(checkpoint: Path, name: str = "no optimizer state") -> None:
    DAMAGES[name][0](checkpoint)


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


# ---- the callback alone: the Trainer takes what it is told to ----


@pytest.mark.heals(
    "damaged_checkpoint",
    "callback",
    partly="refused before the first step, with the newest good one; what the Trainer cannot load it raises on",
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


@pytest.mark.parametrize("wrapped", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["wrapper", "callback"])
def test_a_resume_gets_over_a_random_state_that_cannot_be_loaded(
    run: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, wrapped: bool
) -> None:
    DAMAGED_RANDOM_STATES["garbage"](run / "checkpoint-6")
    trainer = sft_trainer(run, tokenizer, callbacks=None if wrapped else [SelfHealingCallback()], **LATER)
    (SelfHealingTrainer(trainer) if wrapped else trainer).train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    assert [each["resumed_from"] for each in journal(run, "run_started")][-1] == str(run / "checkpoint-6")
    told = f"{run / 'checkpoint-6' / 'rng_state.pth'} cannot be loaded"
    assert told in caplog.text
    assert "and is taken for missing: training goes on" in caplog.text


def test_the_callback_says_where_it_trains_on_from_what_is_suspect(
    run: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    set_standing(run / "checkpoint-6", "suspect", "run-001")
    sft_trainer(run, tokenizer, callbacks=[SelfHealingCallback()], **LATER).train(resume_from_checkpoint=True)
    assert (
        f"Resuming from {run / 'checkpoint-6'} anyway: it was written in a stretch that was rolled back or "
        f"went bad; the newest good one is {run / 'checkpoint-4'}" in caplog.text
    )


@pytest.mark.parametrize("place", ["emergency", pytest.param("last-known-good", marks=pytest.mark.slow)])
def test_true_finds_what_lies_beside_the_regular_ones(
    run: Path, tokenizer: Any, resumed_from_4: dict[str, torch.Tensor], place: str
) -> None:
    (run / place).mkdir()
    (run / "checkpoint-4").rename(run / place / "checkpoint-4")
    shutil.rmtree(run / "checkpoint-6")
    healer = later(run, tokenizer)
    healer.train(resume_from_checkpoint=True)
    assert_same_weights(weights(healer.trainer), resumed_from_4)


def test_true_with_none_that_is_usable_names_each_with_its_reason(run: Path, tokenizer: Any) -> None:
    names = ["NaN weight", "truncated weights", "no schedule"]
    for step, name in zip((2, 4, 6), names, strict=True):
        damage(run / f"checkpoint-{step}", name)
    with pytest.raises(CheckpointError) as caught:
        later(run, tokenizer).train(resume_from_checkpoint=True)
    for step, name in zip((2, 4, 6), names, strict=True):
        assert f"checkpoint-{step}: {DAMAGES[name][1]}" in str(caught.value)
    assert isinstance(caught.value, ValueError)


# ---- "auto", a path, nothing ----


def test_auto_starts_anew_in_an_empty_directory(
    tmp_path: Path, tokenizer: Any, anew: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    healer = later(tmp_path / "run", tokenizer)
    with caplog.at_level(logging.WARNING, logger="self_healing"):
        healer.train(resume_from_checkpoint="auto")
    assert_same_weights(weights(healer.trainer), anew)
    assert not [record for record in caplog.records if record.name.startswith("self_healing")]


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


# ---- in which order ----


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


# ---- RunCheckpoints ----


def follow(run: Path, *steps: int, **options: Any) -> RunCheckpoints:
    keeper = following(run, **options)
    for step in steps:
        keeper.saved(run / f"checkpoint-{step}", step)
    return keeper


def test_a_checkpoint_that_rotation_has_taken_is_not_followed_any_longer(run: Path) -> None:
    keeper = follow(run, 2, 4)
    shutil.rmtree(run / "checkpoint-4")
    keeper.saved(run / "checkpoint-6", 6)
    # The first one is kept where rotation does not come.
    assert keeper.waiting == [2, 6]


# ---- a step the run comes by a second time ----


@pytest.mark.parametrize("kept", [True, False])
def test_a_checkpoint_killed_while_it_is_written_again_is_not_taken_for_a_whole_one(run: Path, kept: bool) -> None:
    keeper = following(run)
    if kept:
        keeper.saved(run / "checkpoint-4", 4)
    keeper.about_to_save(4)
    shutil.copy(run / "checkpoint-2" / "model.safetensors", run / "checkpoint-4" / "model.safetensors")
    assert not vet(run / "checkpoint-4").usable
    assert vet(run / "last-known-good" / "checkpoint-4").usable == kept


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
