"""Checkpoints that are kept where rotation cannot take them cost no other checkpoint, however small the disk."""

from __future__ import annotations

import errno
import logging
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_same_weights, journal, plain_trainer, weights
from transformers import Trainer, TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.checkpoints.vetting import vet


ROTATING = {
    "max_steps": 40,
    "gradient_accumulation_steps": 1,
    "save_strategy": "steps",
    "save_steps": 8,
    "save_total_limit": 1,
}
Usage = namedtuple("Usage", "total used free")


def taken(directory: Path) -> int:
    """Bytes on the disk: what several hard links lead to counts once."""
    statuses = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum({status.st_ino: status.st_size for status in statuses}.values())


class Volume:
    """A disk of its own for one directory, with room for some checkpoints."""

    def __init__(self, directory: Path, checkpoints: float, monkeypatch: Any, says_how_full: bool = True) -> None:
        self.directory = directory
        self.checkpoints = checkpoints
        self.size = 0
        self.saved: list[int] = []
        if says_how_full:
            usage = shutil.disk_usage

            def of(path: Any) -> Any:
                inside = Path(path).resolve().is_relative_to(directory.resolve())
                return Usage(self.capacity, taken(directory), self.free) if inside and self.size else usage(path)

            monkeypatch.setattr("self_healing.checkpoints.retention.shutil.disk_usage", of)

    @property
    def capacity(self) -> int:
        return int(self.checkpoints * self.size)

    @property
    def free(self) -> int:
        return max(self.capacity - taken(self.directory), 0)

    def trainer(self) -> type[Trainer]:
        volume = self

        class OnIt(Trainer):
            def _save_rng_state(self, output_dir: str) -> None:
                super()._save_rng_state(output_dir)
                volume.size = volume.size or int(1.02 * taken(Path(output_dir)))
                if taken(volume.directory) > volume.capacity:
                    raise OSError(errno.ENOSPC, "No space left on device")

        return OnIt

    def noting(self) -> TrainerCallback:
        saved = self.saved

        class Noting(TrainerCallback):
            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                saved.append(state.global_step)

        return Noting()


def trained(volume: Volume, tokenizer: Any, config: HealingConfig | None, wrapped: bool = False) -> Trainer:
    callbacks = [volume.noting()] + ([SelfHealingCallback(config)] if config is not None and not wrapped else [])
    trainer = plain_trainer(
        volume.directory, tokenizer, trainer_class=volume.trainer(), callbacks=callbacks, **ROTATING
    )
    (SelfHealingTrainer(trainer, config) if wrapped else trainer).train()
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Trainer, Volume]:
    """The plain trainer, on a disk that holds what it needs and no more: the old checkpoint and the new one."""
    with pytest.MonkeyPatch.context() as patch:
        volume = Volume(tmp_path_factory.mktemp("plain"), 2.1, patch)
        return trained(volume, tokenizer, None), volume


@pytest.mark.parametrize(
    ("checkpoints", "says_how_full", "wrapped"),
    [
        (2.1, False, True),
        pytest.param(2.1, True, False, marks=pytest.mark.slow),
        pytest.param(3.3, True, False, marks=pytest.mark.slow),
    ],
)
def test_a_healthy_run_writes_every_checkpoint_that_the_plain_trainer_writes(
    tmp_path: Path,
    tokenizer: Any,
    plain: tuple[Trainer, Volume],
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: float,
    says_how_full: bool,
    wrapped: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="self_healing")
    volume = Volume(tmp_path / "run", checkpoints, monkeypatch, says_how_full)
    # Journal and record lie elsewhere, so that the disk holds checkpoints and nothing else.
    config = HealingConfig(healing_dir=str(tmp_path / "journal"))
    trainer = trained(volume, tokenizer, config, wrapped)
    assert volume.saved == plain[1].saved == [8, 16, 24, 32, 40]
    assert vet(tmp_path / "run" / "checkpoint-40").usable
    assert_same_weights(weights(trainer), weights(plain[0]))
    if says_how_full and checkpoints == 2.1:
        # A user who saves the model at the end has to find the room that was there without this library.
        assert volume.free > volume.size
    elif not says_how_full:
        assert "No space left on device" in caplog.text
        assert "last-known-good/ gave way: checkpoint-8 removed" in caplog.text


@pytest.mark.parametrize(("kept", "expected"), [(2, ["24", "32", "40"]), pytest.param(0, [], marks=pytest.mark.slow)])
def test_as_many_are_kept_as_the_setting_says(
    tmp_path: Path, tokenizer: Any, kept: int, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = plain_trainer(
        tmp_path, tokenizer, callbacks=[SelfHealingCallback({"keep_verified_checkpoints": kept})], **ROTATING
    )
    with caplog.at_level(logging.INFO, logger="self_healing"):
        trainer.train()
    found = sorted(path.name.removeprefix("checkpoint-") for path in tmp_path.glob("last-known-good/*"))
    # The newest of them is the one that waits to be verified.
    assert found == expected
    assert ("keep_verified_checkpoints=0" in caplog.text) == bool(kept)
    assert len(journal(tmp_path, "checkpoints_kept")) == bool(kept)
