"""Numbers that are not finite, healed inside the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    TRAINERS,
    OutputFault,
    assert_same_weights,
    journal,
    logged,
    losses,
    sft_trainer,
    slowly,
    weights,
)

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
)
from self_healing.healers.numerics import ladder


def incidents(output_dir: Path) -> list[dict[str, Any]]:
    return journal(output_dir, "outcome")


# ---- transient ----


@pytest.fixture(scope="module", params=[True, *slowly(False)], ids=["filter", "no_filter"])
def clean(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    trainer = sft_trainer(tmp_path_factory.mktemp("clean"), tokenizer, logging_nan_inf_filter=request.param)
    trainer.train()
    return trainer


@pytest.mark.heals("transient", "callback")
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_a_transient_nan_leaves_no_trace_in_weights_and_logs(
    tmp_path: Path, tokenizer: Any, clean: Any, micro_batch: int
) -> None:
    nan_filter = clean.args.logging_nan_inf_filter
    trainer = sft_trainer(
        tmp_path / "faulty", tokenizer, logging_nan_inf_filter=nan_filter, callbacks=[SelfHealingCallback()]
    )
    fault = OutputFault(trainer.model, strike=lambda forward: forward == 5 + micro_batch)
    output = trainer.train()

    assert fault.fired == 1
    assert_same_weights(weights(trainer), weights(clean))
    assert losses(trainer) == pytest.approx(losses(clean), abs=1e-6)
    assert logged(trainer) == logged(clean)
    assert output.training_loss == pytest.approx(clean.state.log_history[-1]["train_loss"], abs=1e-6)
    (incident,) = incidents(tmp_path / "faulty")
    assert incident["failure"] == "nonfinite_transient"
    assert incident["steps_lost"] == 0
    assert incident["outcome"] == "resolved"
    (diagnosed,) = journal(tmp_path / "faulty", "diagnosed")
    assert diagnosed["cause"] == "transient"


@pytest.mark.parametrize("nan_filter", [False, *slowly(True)], ids=["no_filter", "filter"])
def test_a_nan_never_enters_the_running_loss_at_default_logging_steps(
    tmp_path: Path, tokenizer: Any, nan_filter: bool
) -> None:
    arguments = {"logging_steps": 500, "logging_nan_inf_filter": nan_filter}
    clean = sft_trainer(tmp_path / "clean", tokenizer, **arguments)
    expected = clean.train()
    trainer = sft_trainer(tmp_path / "faulty", tokenizer, callbacks=[SelfHealingCallback()], **arguments)
    fault = OutputFault(trainer.model, strike=lambda forward: forward == 6)
    output = trainer.train()
    assert fault.fired == 1
    assert output.training_loss == pytest.approx(expected.training_loss, abs=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"packing": True, "max_length": 32, "gradient_checkpointing": True},
        *slowly(
            {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "max_steps": -1},
            {"max_grad_norm": 0.0, "neftune_noise_alpha": 5.0},
        ),
    ],
    ids=lambda arguments: ",".join(f"{key}={value}" for key, value in arguments.items()),
)
def test_reexecution_is_exact_under_settings_a_user_may_choose(
    tmp_path: Path, tokenizer: Any, arguments: dict[str, Any]
) -> None:
    clean = sft_trainer(tmp_path / "clean", tokenizer, **arguments)
    clean.train()
    trainer = sft_trainer(tmp_path / "faulty", tokenizer, callbacks=[SelfHealingCallback()], **arguments)
    fault = OutputFault(trainer.model, strike=lambda forward: forward == 3)
    trainer.train()
    assert fault.fired == 1
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)


def test_nan_while_a_policy_generates_is_healed_though_it_arrives_as_an_exception(
    tmp_path: Path, tokenizer: Any
) -> None:
    clean = TRAINERS["GRPOTrainer"](tmp_path / "clean", tokenizer)
    clean.train()
    trainer = TRAINERS["GRPOTrainer"](tmp_path / "faulty", tokenizer, callbacks=[SelfHealingCallback()])
    generated = {"forwards": 0, "fired": 0}

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if torch.is_grad_enabled():
            return None
        generated["forwards"] += 1
        if generated["forwards"] != 12:
            return None
        generated["fired"] += 1
        return output * float("nan")

    trainer.model.model.norm.register_forward_hook(spoil)
    trainer.train()
    assert generated["fired"] == 1
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)


# ---- numerical: neither re-execution nor any row explains it ----


@pytest.mark.heals("unexplained", "callback")
def test_an_unexplained_nan_skips_the_step_and_leaves_weights_and_moments_untouched(
    tmp_path: Path, tokenizer: Any
) -> None:
    trainer = sft_trainer(
        tmp_path, tokenizer, max_steps=6, callbacks=[SelfHealingCallback(HealingConfig(max_skipped_fraction=1.0))]
    )
    states: dict[int, Any] = {}

    def remember(optimizer: Any) -> dict[str, torch.Tensor]:
        moments = {
            f"{group}.{key}": value.clone()
            for group, state in enumerate(optimizer.state.values())
            for key, value in state.items()
        }
        return {**weights(trainer), **moments}

    fault = OutputFault(trainer.model, strike=lambda _: trainer.state.global_step == 2)
    original = trainer.callback_handler.on_step_end

    def on_step_end(*args: Any, **kwargs: Any) -> Any:
        states[trainer.state.global_step] = remember(trainer.optimizer.optimizer)
        return original(*args, **kwargs)

    trainer.callback_handler.on_step_end = on_step_end
    trainer.train()

    assert fault.fired > 2
    assert_same_weights(states[3], states[2])
    assert any(not torch.equal(states[4][name], states[3][name]) for name in states[3])
    (incident,) = incidents(tmp_path)
    assert (incident["failure"], incident["steps_lost"]) == ("nonfinite_numerical", 1)
    assert all(torch.isfinite(torch.tensor(losses(trainer))))
    assert trainer.state.log_history[-1]["healing/skipped_steps"] == 1


@pytest.mark.parametrize("wrapped", [False, *slowly(True)], ids=["callback", "wrapper"])
def test_what_neither_patience_nor_a_lower_rate_heals_stops_the_run_with_a_postmortem(
    tmp_path: Path, tokenizer: Any, wrapped: bool
) -> None:
    config = HealingConfig(nan_patience=3, max_lr_reductions=1)
    callbacks = None if wrapped else [SelfHealingCallback(config)]
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=20, gradient_accumulation_steps=1, callbacks=callbacks)
    good = weights(trainer)
    fault = OutputFault(trainer.model, strike=lambda _: trainer.state.global_step >= 2)
    with pytest.raises(UnrecoverableTrainingError, match="3 steps in a row") as caught:
        (SelfHealingTrainer(trainer, config) if wrapped else trainer).train()

    assert fault.fired
    assert str(tmp_path / "postmortem.json") in str(caught.value)
    postmortem = json.loads((tmp_path / "postmortem.json").read_text())
    assert [incident["failure"] for incident in postmortem["chain"]] == ["nonfinite_numerical"] * 5 + ["learning_rate"]
    assert postmortem["chain"][2]["actions"] == ["skip_step", "roll_back", "skip_step", "reduce_learning_rate"]
    assert postmortem["emergency_checkpoint"] == str(tmp_path / "checkpoint-7")
    assert_same_weights(weights(trainer), good)
    # None of its steps is in the weights, and none is counted twice: not one that was skipped and then gone back over.
    assert sum(incident["steps_lost"] for incident in incidents(tmp_path)) == 8


@pytest.mark.slow
def test_skipping_cannot_hide_a_dead_model(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "SKIP_WINDOW", 10)
    config = HealingConfig(nan_patience=3, max_skipped_fraction=0.3)
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=40, callbacks=[SelfHealingCallback(config)])
    fault = OutputFault(trainer.model, strike=lambda _: trainer.state.global_step % 2 == 1)
    with pytest.raises(UnrecoverableTrainingError, match="4 of the last 10 steps were skipped"):
        trainer.train()
    assert fault.fired
    assert trainer.state.global_step <= 8


# ---- other wishes than healing ----


def test_on_nonfinite_raise_stops_before_the_step(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(HealingConfig(on_nonfinite="raise"))])
    fault = OutputFault(trainer.model, strike=lambda forward: forward == 5)
    with pytest.raises(UnrecoverableTrainingError, match="on_nonfinite='raise'"):
        trainer.train()
    assert fault.fired == 1
    assert trainer.state.global_step == 2
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


@pytest.mark.parametrize("word", ["skip", "warn"])
def test_on_nonfinite_skip_skips_without_diagnosis(tmp_path: Path, tokenizer: Any, word: str) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(HealingConfig(on_nonfinite=word))])
    fault = OutputFault(trainer.model, strike=lambda forward: forward == 5)
    trainer.train()
    assert (fault.fired, fault.forwards) == (1, 12)
    assert [incident["steps_lost"] for incident in incidents(tmp_path)] == [1]
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_on_nonfinite_watch_changes_nothing(tmp_path: Path, tokenizer: Any) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer)
    OutputFault(plain.model, strike=lambda forward: forward == 5)
    plain.train()
    trainer = sft_trainer(
        tmp_path / "warned", tokenizer, callbacks=[SelfHealingCallback(HealingConfig(on_nonfinite="watch"))]
    )
    fault = OutputFault(trainer.model, strike=lambda forward: forward == 5)
    trainer.train()
    assert fault.fired == 1
    assert all(
        torch.equal(mine, theirs) or (mine.isnan() == theirs.isnan()).all()
        for mine, theirs in zip(weights(trainer).values(), weights(plain).values(), strict=True)
    )
    assert len(journal(tmp_path / "warned", "detected")) >= 1


def test_buffers_that_a_forward_moves_are_moved_once(tmp_path: Path, tokenizer: Any) -> None:
    def build(name: str, **more: Any) -> tuple[Any, Any]:
        trainer = sft_trainer(tmp_path / name, tokenizer, **more)
        trainer.model.model.norm.register_buffer("seen", torch.zeros(()))
        trainer.model.model.norm.register_forward_hook(lambda module, *_: module.seen.add_(1.0) and None)
        return trainer, trainer.model.model.norm

    clean, counted = build("clean")
    clean.train()
    trainer, norm = build("faulty", callbacks=[SelfHealingCallback()])
    fault = OutputFault(trainer.model, strike=lambda forward: forward in (1, 7))
    trainer.train()
    assert fault.fired == 2
    assert float(norm.seen) == float(counted.seen)


def test_a_scaler_that_looks_for_its_scale_is_left_alone(tmp_path: Path, tokenizer: Any) -> None:
    def build(name: str, **more: Any) -> Any:
        trainer = sft_trainer(tmp_path / name, tokenizer, **more)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        return trainer

    plain = build("plain")
    plain.train()
    trainer = build("healed", callbacks=[SelfHealingCallback()])
    trainer.train()
    assert plain.accelerator.scaler.get_scale() < 2.0**127
    assert trainer.accelerator.scaler.get_scale() == plain.accelerator.scaler.get_scale()
    assert_same_weights(weights(trainer), weights(plain))


def test_overflow_that_outlasts_patience_lowers_the_scale_until_the_run_goes_on(
    tmp_path: Path, tokenizer: Any
) -> None:
    trainer = sft_trainer(
        tmp_path, tokenizer, max_steps=10, callbacks=[SelfHealingCallback(HealingConfig(nan_patience=6))]
    )
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

    def too_large(gradient: torch.Tensor) -> torch.Tensor:
        scale = trainer.accelerator.scaler.get_scale()
        return gradient * float("inf") if trainer.state.global_step >= 2 and scale > 64 else gradient

    trainer.model.model.layers[0].mlp.down_proj.weight.register_hook(too_large)
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 64.0
    assert trainer.state.global_step == 10
    assert len(incidents(tmp_path)) == 2
