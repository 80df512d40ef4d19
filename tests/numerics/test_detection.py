"""Detection on real trainers: what is reported, what is held back, what is healed, and what is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    GradientFault,
    OutputFault,
    assert_same_weights,
    dpo_trainer,
    journal,
    plain_trainer,
    sft_trainer,
    weights,
)
from transformers import Trainer, TrainerCallback

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
)
from self_healing.healers.numerics import clipping


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in directory.glob("checkpoint-*"))


class LossOffset:
    """Adds to the loss of chosen steps, without touching gradients: what the trainer sees, not what it trains."""

    def __init__(self, trainer: Any, offset: Callable[[int], float]) -> None:
        self.trainer = trainer
        original = trainer.compute_loss

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            nats = offset(trainer.state.global_step) if trainer.model.training else 0.0
            if isinstance(result, tuple):
                return (result[0] + nats, *result[1:])
            return result + nats

        trainer.compute_loss = compute_loss


STEADY = {"max_steps": 50, "gradient_accumulation_steps": 1, "learning_rate": 1e-4}


# ---- loss spikes and divergence ----


def test_a_loss_spike_is_an_incident_that_closes_by_itself_and_no_checkpoint_is_written_meanwhile(
    tmp_path: Path, tokenizer: Any
) -> None:
    saved: list[int] = []

    class Saved(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert (tmp_path / f"checkpoint-{state.global_step}" / "trainer_state.json").is_file()
            saved.append(state.global_step)

    trainer = sft_trainer(
        tmp_path, tokenizer, callbacks=[SelfHealingCallback(), Saved()], save_strategy="steps", save_steps=10, **STEADY
    )
    LossOffset(trainer, lambda step: 20.0 if step in (39, 40) else 0.0)
    trainer.train()
    # Steps 39 and 40 are away, and five steps in a row have to be back.
    assert checkpoints(tmp_path) == saved == [10, 20, 30, 46, 50]
    (detected,) = journal(tmp_path, "detected")
    assert (detected["symptom"], detected["step"]) == ("loss_spike", 39)
    evidence = detected["evidence"]
    assert evidence["value"] > 20 > evidence["baseline"] > 0
    assert evidence["z"] > evidence["threshold"] == 8.0
    (outcome,) = journal(tmp_path, "outcome")
    assert (outcome["outcome"], outcome["failure"], outcome["steps_lost"]) == ("self_recovered", "loss_spike", 0)


@pytest.mark.slow
def test_the_best_evaluation_so_far_vouches_for_its_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    class Scores(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            metrics["eval_loss"] = {20: 3.0, 40: 1.0, 60: 2.0}[state.global_step]

    trainer = sft_trainer(
        tmp_path,
        tokenizer,
        callbacks=[SelfHealingCallback(), Scores()],
        trainer_kwargs={"eval_dataset": sft_trainer(tmp_path, tokenizer).train_dataset.select(range(4))},
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="steps",
        save_steps=20,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        **STEADY | {"max_steps": 60},
    )
    LossOffset(trainer, lambda step: 20.0 if step == 39 else 0.0)
    trainer.train()
    assert 40 in checkpoints(tmp_path)
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (40, 1.0)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-40")


@pytest.mark.slow
def test_a_loss_that_neither_comes_back_nor_settles_does_not_hold_checkpoints_for_ever(
    tmp_path: Path, tokenizer: Any
) -> None:
    config = HealingConfig(divergence_patience=10, on_divergence="warn")
    arguments = {**STEADY, "max_steps": 100, "save_strategy": "steps", "save_steps": 10}
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(config)], **arguments)
    LossOffset(trainer, lambda step: 0.0 if step < 30 else (20.0 if step % 2 else 2000.0))
    trainer.train()
    assert checkpoints(tmp_path) == [10, 20, 30, 64, 70, 80, 90, 100]
    (outcome,) = journal(tmp_path, "outcome")
    assert (outcome["outcome"], outcome["settled"]) == ("unresolved", False)


def test_a_slow_rise_is_a_divergence_and_can_end_the_run(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(
        tmp_path,
        tokenizer,
        callbacks=[SelfHealingCallback(HealingConfig(on_divergence="stop"))],
        save_strategy="steps",
        save_steps=10,
        **STEADY,
    )
    LossOffset(trainer, lambda step: max(0.0, 0.3 * (step - 30)))
    with pytest.raises(UnrecoverableTrainingError, match="has risen and stays up") as raised:
        trainer.train()
    assert raised.value.failure == "divergence"
    assert 30 < trainer.state.global_step < 50
    postmortem = json.loads((tmp_path / "postmortem.json").read_text())
    assert postmortem["failure"] == "divergence"
    # The weights are what is wrong: resuming from them would end here again.
    assert postmortem["emergency_checkpoint"] is None
    assert "checkpoint-30" in postmortem["resume_with"]
    assert checkpoints(tmp_path) == [10, 20, 30]
    assert trainer.compute_loss.__name__ == "compute_loss"
    assert "training_step" not in vars(trainer)


# ---- gradients ----


@pytest.mark.heals("gradient_spike", "callback")
def test_a_passing_gradient_spike_is_undone_bitwise(tmp_path: Path, tokenizer: Any) -> None:
    """A bit flip that leaves the gradient finite: gone when the step is computed again."""
    plain = sft_trainer(tmp_path / "plain", tokenizer, **STEADY)
    plain.train()
    trainer = sft_trainer(tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback()], **STEADY)
    fault = GradientFault(trainer.model, lambda n: n == 41, value=1e3)
    trainer.train()
    assert fault.fired == 1
    assert_same_weights(weights(trainer), weights(plain))
    (diagnosed,) = journal(tmp_path / "healed", "diagnosed")
    assert (diagnosed["failure"], diagnosed["step"]) == ("spike_transient", 40)
    (outcome,) = journal(tmp_path / "healed", "outcome")
    assert (outcome["outcome"], outcome["steps_lost"]) == ("resolved", 0)


@pytest.mark.heals("gradient_spike", "callback")
def test_a_gradient_spike_that_comes_again_is_cut_to_the_usual_size(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], max_grad_norm=1e6, **STEADY)
    GradientFault(trainer.model, lambda _: trainer.state.global_step == 40, value=1e3)
    handed: list[float] = []

    class Handed(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            handed.append(float(torch.nn.utils.get_total_norm(gradients)))

    trainer.add_callback(Handed())
    trainer.train()
    (action,) = journal(tmp_path, "action")
    assert (action["action"], action["norm"] > 100) == ("clip_gradient", True)
    assert handed[40] == pytest.approx(action["clipped_to"], rel=1e-3)
    assert min(handed[:40]) < handed[40] < max(handed[:40])
    (outcome,) = journal(tmp_path, "outcome")
    assert (outcome["outcome"], outcome["steps_lost"]) == ("resolved", 0)
    assert journal(tmp_path, "diagnosed")[0]["evidence"]["again"]["grad_norm"] > 100


def test_an_explosion_in_the_first_steps_is_left_out(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], **{**STEADY, "max_steps": 5})
    GradientFault(trainer.model, lambda _: trainer.state.global_step == 2, value=1e6)
    trainer.train()
    assert [event["symptom"] for event in journal(tmp_path, "detected")] == ["gradient_explosion"]
    assert [event["action"] for event in journal(tmp_path, "action")] == ["skip_step"]


def test_gradients_of_a_loss_of_the_users_own_are_judged_by_those_of_the_run(tmp_path: Path, tokenizer: Any) -> None:
    def summed(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        # Its gradients are above the limit that is meant for a mean.
        return 1e5 * outputs["logits"].float().logsumexp(-1).square().sum()

    trainer = plain_trainer(
        tmp_path,
        tokenizer,
        callbacks=[SelfHealingCallback()],
        trainer_kwargs={"compute_loss_func": summed},
        **{**STEADY, "learning_rate": 1e-7},
    )
    fault = GradientFault(trainer.model, lambda n: n == 41, value=1e12)
    trainer.train()
    assert fault.fired == 1
    assert [event["symptom"] for event in journal(tmp_path, "detected")] == ["gradient_spike"]
    assert [event["action"] for event in journal(tmp_path, "action")] == ["use_reexecuted_step"]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert min(norms) > 1e4


# ---- a run that does nothing ----


def zero_loss(trainer: Any) -> None:
    original = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: original(*args, **kwargs) * 0.0


def test_a_loss_of_exactly_zero_ends_the_run_and_says_why(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], **STEADY)
    zero_loss(trainer)
    with pytest.raises(UnrecoverableTrainingError, match=r"exactly 0\.0.*labels -100"):
        trainer.train()
    assert trainer.state.global_step == 19


# ---- objectives ----


@pytest.mark.slow
def test_a_trainer_with_a_loss_of_its_own_gets_the_safe_subset(tmp_path: Path, tokenizer: Any) -> None:
    class Contrastive(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs) - 50.0

    base = plain_trainer(tmp_path, tokenizer)
    trainer = Contrastive(
        model=base.model,
        args=base.args,
        train_dataset=base.train_dataset,
        processing_class=tokenizer,
        callbacks=[SelfHealingCallback()],
    )
    trainer.args.max_steps = 30
    trainer.train()
    started = journal(tmp_path)[0]
    assert started["objective"] == "unknown"
    assert set(started["detectors"]) == {"nonfinite", "loss_spike", "divergence"}
    # A loss with a sign has no logarithm: said once, and that is all.
    assert [event["symptom"] for event in journal(tmp_path, "noticed")] == ["signed_loss"]
    assert journal(tmp_path, "detected") == []


# ---- metric rules, through the callback ----


def detach_policy(trainer: Any) -> None:
    """The loss does not reach the parameters, which is what a wrongly wrapped model does."""
    for parameter in trainer.model.parameters():
        parameter.register_hook(torch.zeros_like)


@pytest.mark.heals("red_flag", "callback", partly="reported, or stopped, or rolled back, as the rule says")
def test_dpo_that_does_not_train_is_stopped_with_the_remedy(tmp_path: Path, tokenizer: Any) -> None:
    trainer = dpo_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], dropout=0.0, max_steps=40)
    detach_policy(trainer)
    with pytest.raises(UnrecoverableTrainingError) as raised:
        trainer.train()
    assert raised.value.failure == "red_flag"
    assert "dpo not training" in str(raised.value)
    assert 20 <= trainer.state.global_step < 40
    assert (tmp_path / "postmortem.json").is_file()


@pytest.mark.slow
def test_on_red_flag_warn_lets_the_run_go_on(tmp_path: Path, tokenizer: Any) -> None:
    config = HealingConfig(on_red_flag="warn")
    trainer = dpo_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(config)], dropout=0.0, max_steps=25)
    detach_policy(trainer)
    trainer.train()
    assert trainer.state.global_step == 25
    assert "rule:dpo_not_training" in {event["symptom"] for event in journal(tmp_path, "detected")}


def test_a_rule_of_the_users_own_is_merged_in(tmp_path: Path, tokenizer: Any) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[loss_too_low]\nmetric = "loss"\nobjectives = ["sft"]\nhealthy = "above 0"\n'
        'red_flag = [{is = "above", value = 0.0}]\nsteps = 3\naction = "stop"\nseverity = "error"\n'
        'diagnosis = "It is a loss."\nremedy = "None."\nsource = "the test"\n'
    )
    config = HealingConfig(rules_file=str(rules))
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(config)], **STEADY)
    with pytest.raises(UnrecoverableTrainingError, match=r"It is a loss\."):
        trainer.train()
    assert trainer.state.global_step == 3


# ---- what the run is made of changes ----


class Unfreezing(TrainerCallback):
    """All but the head is frozen until a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.model.requires_grad_(False)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            model.model.requires_grad_(True)


@pytest.mark.slow
def test_layers_that_are_unfrozen_make_no_gradient_spike(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipping, "WARMUP_STEPS", 39)
    arguments = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0, "learning_rate": 3e-3, "max_steps": 50}
    plain = sft_trainer(tmp_path / "plain", tokenizer, callbacks=[Unfreezing(40)], **arguments)
    plain.train()
    healed = sft_trainer(
        tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback(), Unfreezing(40)], **arguments
    )
    healed.train()
    norms = [entry["grad_norm"] for entry in plain.state.log_history if "grad_norm" in entry]
    assert min(norms[40:42]) > 4 * max(norms[30:40])
    assert journal(tmp_path / "healed", "detected") == []
    assert_same_weights(weights(healed), weights(plain))


def test_the_report_is_that_of_the_last_run_whoever_started_it(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=2)
    healer = SelfHealingTrainer(trainer)
    assert healer.get_report().healthy
    fault = OutputFault(trainer.model, lambda n: n == 2)
    trainer.train()
    assert fault.fired == 1
    assert len(healer.get_report().incidents) == 1

    anew = SelfHealingTrainer(sft_trainer(tmp_path, tokenizer))
    assert len(anew.get_report().incidents) == 1, "from the disk"

    trainer.remove_callback(SelfHealingCallback)
    again = OutputFault(trainer.model, lambda n: n == 2)
    healer.train()
    assert again.fired == 1
    assert [incident["outcome"] for incident in healer.get_report().incidents] == ["resolved"]
    assert all(bool(value.isfinite().all()) for value in weights(trainer).values())
