"""A best checkpoint that cannot be loaded at the end gives way to another one; the run is never lost with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EvalLoss, assert_same_weights, best_model_trainer, journal, weights
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from self_healing import SelfHealingCallback, SelfHealingTrainer


def half_cut(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def one_nan(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


class Damage(TrainerCallback):
    """Changes checkpoints of some steps, in the regular place and in `last-known-good/`, once the last is written."""

    def __init__(self, change: Any, *steps: int) -> None:
        self.change, self.steps = change, steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            for step in self.steps:
                for checkpoint in Path(args.output_dir).glob(f"**/checkpoint-{step}"):
                    self.change(checkpoint)


def trained(directory: Path, tokenizer: Any, *callbacks: TrainerCallback, wrapped: bool = True) -> Any:
    """The evaluation of step 2 is the best, and that of step 6 the worst."""
    own = [] if wrapped else [SelfHealingCallback()]
    trainer = best_model_trainer(directory, tokenizer, EvalLoss(rises=True), *own, *callbacks)
    (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    return trainer


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "wrapped"),
    [(half_cut, True), (one_nan, False)],
)
def test_the_next_best_is_loaded(
    tmp_path: Path, tokenizer: Any, change: Any, wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trained(tmp_path, tokenizer, Damage(change, 2), wrapped=wrapped)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (4.0, 4)
    assert_same_weights(weights(trainer), weights_in(tmp_path / "checkpoint-4"))
    (told,) = journal(tmp_path, "best_model_passed_over")
    assert (told["path"], told["instead"]) == (str(tmp_path / "checkpoint-2"), str(tmp_path / "checkpoint-4"))
    assert "checkpoint-2, is not loaded" in caplog.text


def test_without_any_the_weights_of_the_last_step_stay(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    last: dict[str, torch.Tensor] = {}

    class Last(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            last.update({name: value.detach().clone() for name, value in model.state_dict().items()})

    trainer = trained(tmp_path, tokenizer, Last(), Damage(half_cut, 2, 4, 6))
    assert trainer.state.best_model_checkpoint is None
    assert_same_weights(weights(trainer), last)
    assert "they are those of the last step" in caplog.text


def test_a_loading_that_fails_before_it_wrote_anything_costs_nothing(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("safetensors.torch.load_file", unreadable)
    trainer = trained(tmp_path, tokenizer)
    monkeypatch.undo()
    assert_same_weights(weights(trainer), weights_in(tmp_path / "checkpoint-6"))
