"""A checkpoint that is whole, finite and damaged is left behind, and a sound one is never blamed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TEXTS, OutputFault, assert_same_weights, journal, sft_trainer, weights
from safetensors.torch import load_file, save_file

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
)
from self_healing.checkpoints.marker import load_marker, standing_of, write_marker
from self_healing.healers.numerics.detectors import panel
from self_healing.healers.numerics.detectors.progress import VanishingGradientDetector


STEPS = {"max_steps": 16, "save_strategy": "steps", "save_steps": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    """A run that nothing happened to."""
    trainer = sft_trainer(tmp_path_factory.mktemp("whole"), tokenizer, **STEPS)
    SelfHealingTrainer(trainer).train()
    return trainer


@pytest.fixture
def run_dir(whole: Any, tmp_path: Path) -> Path:
    """What it had written by step 12."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole.args.output_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoint-16")
    shutil.rmtree(run_dir / "last-known-good")
    return run_dir


def flip_exponent(values: torch.Tensor) -> None:
    """The highest bit of the exponent of the largest value: it is finite, and huge."""
    flat = values.view(-1)
    flat.view(torch.int32)[flat.abs().argmax()] ^= 1 << 30
    assert flat.isfinite().all()


def damage_weights(checkpoint: Path, name: str = "lm_head.weight") -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    flip_exponent(tensors[name])
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    mark_as_whole(checkpoint)


def damage_a_weight_whose_output_is_normalised(checkpoint: Path) -> None:
    damage_weights(checkpoint, "model.layers.1.mlp.up_proj.weight")


def damage_moments(checkpoint: Path) -> None:
    content = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    for state in content["state"].values():
        flip_exponent(state["exp_avg"])
    torch.save(content, checkpoint / "optimizer.pt")
    mark_as_whole(checkpoint)


def mark_as_whole(checkpoint: Path) -> None:
    """As if the damage had been there when it was written: nothing that is held against the marker shows it."""
    marker = load_marker(checkpoint)
    assert marker is not None
    write_marker(
        checkpoint, marker["run"], marker["step"], marker["bookkeeping"], emergency=False, standing="verified"
    )


def actions(run_dir: Path) -> list[str]:
    return [event["action"] for event in journal(run_dir, "action")]


DAMAGES = [damage_weights, damage_a_weight_whose_output_is_normalised, damage_moments]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_left_for_the_one_before_it(
    whole: Any,
    run_dir: Path,
    tokenizer: Any,
    damage: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(panel, "VanishingGradientDetector", partial(VanishingGradientDetector, steps=3))
    damage(run_dir / "checkpoint-12")
    resumed = sft_trainer(run_dir, tokenizer, **STEPS)
    SelfHealingTrainer(resumed, HealingConfig()).train(resume_from_checkpoint="auto")

    assert_same_weights(weights(resumed), weights(whole))
    assert [event["resumed_from"][-13:] for event in journal(run_dir, "run_started")[1:]] == [
        "checkpoint-12",
        "/checkpoint-8",
    ]
    assert "reduce_learning_rate" not in actions(run_dir)
    *_, outcome = journal(run_dir, "outcome")
    assert (outcome["failure"], outcome["outcome"]) == ("damaged_checkpoint", "resolved")


def test_the_callback_alone_stops_and_names_the_older_one(whole: Any, run_dir: Path, tokenizer: Any) -> None:
    damage_weights(run_dir / "checkpoint-12")
    resumed = sft_trainer(run_dir, tokenizer, callbacks=[SelfHealingCallback()], **STEPS)
    with pytest.raises(UnrecoverableTrainingError, match=r"The checkpoint to resume from: .*checkpoint-8") as raised:
        resumed.train(resume_from_checkpoint=str(run_dir / "checkpoint-12"))

    assert raised.value.failure == "damaged_checkpoint"
    assert standing_of(str(run_dir / "checkpoint-12")) == "suspect"
    # Whoever starts it again goes on from there.
    again = sft_trainer(run_dir, tokenizer, **STEPS)
    SelfHealingTrainer(again).train(resume_from_checkpoint="auto")
    assert_same_weights(weights(again), weights(whole))


def test_no_checkpoint_is_blamed_for_what_is_wrong_with_all_of_them(run_dir: Path, tokenizer: Any) -> None:
    resumed = sft_trainer(run_dir, tokenizer, **STEPS)
    OutputFault(resumed.model, lambda _: True)
    with pytest.raises(UnrecoverableTrainingError) as raised:
        SelfHealingTrainer(resumed).train(resume_from_checkpoint="auto")

    assert raised.value.failure != "damaged_checkpoint"
    assert standing_of(str(run_dir / "checkpoint-12")) == "unverified"


def test_no_checkpoint_is_blamed_for_harder_data(run_dir: Path, tokenizer: Any) -> None:
    harder = [" ".join(reversed(text)) for text in TEXTS]
    resumed = sft_trainer(run_dir, tokenizer, texts=harder, callbacks=[SelfHealingCallback()], **STEPS)
    resumed.train(resume_from_checkpoint=str(run_dir / "checkpoint-12"))
    assert standing_of(str(run_dir / "checkpoint-12")) != "suspect"
