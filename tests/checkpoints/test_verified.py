"""What is called verified was looked at, all of it; and what a fault has touched is not resumed from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    POISON_WORD,
    EvalLoss,
    assert_same_weights,
    best_model_trainer,
    journal,
    sft_trainer,
    tiny_model,
    weights,
)
from followed_checkpoints import following
from transformers import TrainerCallback

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    UnrecoverableTrainingError,
    find_trusted_checkpoint,
)
from self_healing.checkpoints.choice import vet_all
from self_healing.checkpoints.marker import load_marker, write_marker
from self_healing.checkpoints.vetting import vet
from self_healing.rollback import ring as batches_module


# So seldom that checkpoints are verified before a snapshot is.
SELDOM = {"snapshot_interval": 50}
SAVING = {
    "max_steps": 28,
    "gradient_accumulation_steps": 1,
    "save_strategy": "steps",
    "save_steps": 8,
    "save_total_limit": 2,
}

Strike = Callable[[Any, Any], None]


class SilentFault(TrainerCallback):
    """Puts NaN where no loss shows it, once a step is finished."""

    def __init__(self, strike: Strike, step: int) -> None:
        self.strike, self.step = strike, step

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                self.strike(model, optimizer)


def unread_row(tokenizer: Any) -> Strike:
    def strike(model: Any, optimizer: Any) -> None:
        model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(POISON_WORD)] = float("nan")

    return strike


def moment_of_the_unread_row(tokenizer: Any) -> Strike:
    def strike(model: Any, optimizer: Any) -> None:
        # With this one the row does not move any more, and nothing else changes.
        moments = optimizer.state[model.model.embed_tokens.weight]["exp_avg_sq"]
        moments[tokenizer.convert_tokens_to_ids(POISON_WORD)] = float("inf")

    return strike


def trainer_for(directory: Path, tokenizer: Any, *callbacks: Any, **arguments: Any) -> Any:
    model = tiny_model(tokenizer)
    model.register_buffer("statistics", torch.zeros(3))
    trainer = sft_trainer(directory, tokenizer, model=model, callbacks=list(callbacks), **arguments)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, torch.Tensor]:
    return weights(
        trainer_for(tmp_path_factory.mktemp("plain"), tokenizer, max_steps=28, gradient_accumulation_steps=1)
    )


@pytest.mark.parametrize("where", [unread_row, pytest.param(moment_of_the_unread_row, marks=pytest.mark.slow)])
def test_nan_that_no_loss_shows_is_healed_before_it_is_saved(
    tmp_path: Path, tokenizer: Any, undisturbed: dict[str, torch.Tensor], where: Any
) -> None:
    healing = SelfHealingCallback(HealingConfig(**SELDOM))
    trainer = trainer_for(tmp_path, tokenizer, healing, SilentFault(where(tokenizer), 14), **SAVING)

    assert_same_weights(weights(trainer), undisturbed)
    assert all(verdict.usable for verdict in vet_all(tmp_path)), [verdict.reason for verdict in vet_all(tmp_path)]
    assert find_trusted_checkpoint(tmp_path) == str(tmp_path / "checkpoint-28")
    (outcome,) = journal(tmp_path, "outcome")
    assert (outcome["step"], outcome["outcome"], outcome["steps_lost"]) == (16, "resolved", 0)


@pytest.fixture(scope="module")
def only_reported(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Nothing is healed: the NaN stays in the weights and goes into the checkpoints of steps 16, 24 and 28."""
    directory = tmp_path_factory.mktemp("reported")
    healing = SelfHealingCallback(HealingConfig(on_nonfinite="watch", **SELDOM))
    trainer_for(directory, tokenizer, healing, SilentFault(unread_row(tokenizer), 14), **SAVING)
    return directory


def test_a_checkpoint_that_holds_nan_is_suspect_and_never_verified(only_reported: Path) -> None:
    standing = {str(Path(each.path).relative_to(only_reported)): each.standing for each in vet_all(only_reported)}
    assert standing == {
        "checkpoint-24": "suspect",
        "checkpoint-28": "suspect",
        "last-known-good/checkpoint-8": "verified",
    }
    assert find_trusted_checkpoint(only_reported) == str(only_reported / "last-known-good" / "checkpoint-8")


def test_a_model_that_is_not_finite_is_not_the_best(tmp_path: Path, tokenizer: Any) -> None:
    healing = SelfHealingCallback(HealingConfig(on_nonfinite="watch"))
    fault = SilentFault(unread_row(tokenizer), 4)
    trainer = best_model_trainer(tmp_path, tokenizer, EvalLoss(rises=False), healing, fault)
    trainer.train()

    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_a_best_checkpoint_that_is_torn_is_not_loaded(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    last: dict[str, torch.Tensor] = {}

    class Tearing(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            last.update({name: value.detach().clone() for name, value in model.state_dict().items()})
            if state.global_step == state.max_steps:
                file = tmp_path / "checkpoint-2" / "model.safetensors"
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    trainer = best_model_trainer(tmp_path, tokenizer, EvalLoss(rises=True), SelfHealingCallback(), Tearing())
    trainer.train()
    assert trainer.state.best_model_checkpoint is None
    assert_same_weights(weights(trainer), last)
    (told,) = journal(tmp_path, "best_model_passed_over")
    assert told["path"] == str(tmp_path / "checkpoint-2")
    assert "keeps the weights of the last step" in caplog.text


@pytest.mark.parametrize("applied_again", [True, False])
def test_a_state_healed_at_the_end_is_written_where_no_good_checkpoint_is_left(
    tmp_path: Path, tokenizer: Any, applied_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the steps since the trusted state could not be applied again, the checkpoints of that time are suspect."""
    if not applied_again:
        monkeypatch.setattr(batches_module, "_LARGEST_TAPE", 0)

    class AtTheVeryEnd(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # As strategies do that write when they see fit: there is none of the last step.
            control.should_save = state.global_step == 8

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            with torch.no_grad():
                model.model.norm.weight[0] = float("nan")

    config = HealingConfig(snapshot_interval=6, snapshot_verify_steps=3)
    trainer_for(tmp_path, tokenizer, AtTheVeryEnd(), SelfHealingCallback(config), max_steps=10)

    assert vet(tmp_path / "checkpoint-8").standing == ("unverified" if applied_again else "suspect")
    expected = "checkpoint-8" if applied_again else "checkpoint-10"
    assert find_trusted_checkpoint(tmp_path) == str(tmp_path / expected)
    assert (load_marker(tmp_path / expected) or {})["finite"] is True


def test_nan_in_what_no_snapshot_holds_ends_the_run_at_the_save(tmp_path: Path, tokenizer: Any) -> None:
    def frozen(model: Any, optimizer: Any) -> None:
        model.model.norm.weight[0] = float("nan")

    model = tiny_model(tokenizer)
    model.model.norm.weight.requires_grad_(False)
    # It takes no part in what is computed.
    model.model.norm.forward = lambda hidden: hidden
    callbacks = [SelfHealingCallback(HealingConfig(**SELDOM)), SilentFault(frozen, 14)]
    with pytest.raises(UnrecoverableTrainingError, match=r"no trusted state is any better: model\.norm\.weight"):
        # No checkpoint holds it either.
        sft_trainer(tmp_path, tokenizer, model=model, callbacks=callbacks, **{**SAVING, "save_steps": 16}).train()
    assert not list(tmp_path.glob("checkpoint-*"))


# ---- the parts ----


def a_checkpoint(directory: Path, step: int, finite: bool | None = True) -> Path:
    checkpoint = directory / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(8))
    write_marker(checkpoint, "run", step, {}, emergency=False, finite=finite)
    return checkpoint


def standing_of(checkpoint: Path) -> str:
    marker = load_marker(checkpoint)
    assert marker is not None
    return str(marker["standing"])


def test_going_back_to_an_older_state_makes_verified_ones_suspect_up_to_the_fault(tmp_path: Path) -> None:
    keeper = following(tmp_path)
    for step in (2, 4, 6, 8):
        keeper.saved(a_checkpoint(tmp_path, step), step)
    keeper.verify_up_to(4)
    assert keeper.distrust(2, 6, "run-001") == (6,)
    assert keeper.distrust(2, 6, "run-002", verified=True) == (4,)
    found = {step: standing_of(tmp_path / f"checkpoint-{step}") for step in (2, 4, 6, 8)}
    assert found == {2: "verified", 4: "suspect", 6: "suspect", 8: "unverified"}
