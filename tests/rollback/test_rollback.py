"""Bad state got into the weights: back to state that is known to be good, and on to the end of the run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import (
    POISON_WORD,
    EvalLoss,
    WeightFault,
    a_few_nans,
    assert_same_weights,
    best_model_trainer,
    grpo_trainer,
    journal,
    logged,
    losses,
    plain_trainer,
    sft_trainer,
    tiny_model,
    weights,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from self_healing import (
    HealingConfig,
    HealingReport,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
)
from self_healing.checkpoints.choice import vet_all
from self_healing.healers.numerics.detectors import panel
from self_healing.healers.numerics.detectors.progress import VanishingGradientDetector


def scrambled_layer(model: Any) -> None:
    weight = model.lm_head.weight
    weight.mul_(50).add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight.device))


def held_out_loss(trainer: Any) -> float:
    return float(trainer.evaluate(trainer.train_dataset)["eval_loss"])


def snapshot_interval(directory: Path) -> int:
    """As journalled, the largest there was."""
    return max(event["interval"] for event in journal(directory, "snapshots"))


def rollbacks(directory: Path) -> list[dict[str, Any]]:
    return [event for event in journal(directory, "action") if event["action"] == "roll_back"]


CONVERGED = {
    "max_steps": 90,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "eval_strategy": "no",
}


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    trainer = plain_trainer(tmp_path_factory.mktemp("plain"), tokenizer, **CONVERGED)
    trainer.train()
    return held_out_loss(trainer)


class TestCorruptedWeights:
    @pytest.mark.heals("corrupted_weights", "callback")
    def test_are_rolled_back_and_the_run_ends_where_it_would_have(
        self, tmp_path: Path, tokenizer: Any, fault_free: float
    ) -> None:
        fault = WeightFault(a_few_nans, 60)
        trainer = plain_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(), fault], **CONVERGED)
        trainer.train()

        assert fault.fired == [60]
        assert trainer.state.global_step == CONVERGED["max_steps"]
        assert held_out_loss(trainer) == fault_free
        (outcome,) = journal(tmp_path, "outcome")
        assert (outcome["failure"], outcome["outcome"]) == ("corrupted_state", "resolved")
        assert outcome["steps_lost"] == 0
        verify = HealingConfig().snapshot_verify_steps
        assert 0 < rollbacks(tmp_path)[0]["lost"] <= snapshot_interval(tmp_path) + verify + 1

    @pytest.mark.slow
    def test_that_come_back_every_time_climb_the_ladder_and_end_the_run(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = sft_trainer(
            tmp_path,
            tokenizer,
            callbacks=[SelfHealingCallback(HealingConfig(snapshot_interval=5))],
            max_steps=60,
            save_strategy="steps",
            save_steps=5,
        )

        def corrupt(module: Any, inputs: Any) -> None:
            # Also when the step is applied again.
            if trainer.state.global_step >= 30:
                trainer.model.model.layers[0].mlp.down_proj.weight.data.view(-1)[:3] = float("nan")

        trainer.model.model.norm.register_forward_pre_hook(corrupt)
        with pytest.raises(UnrecoverableTrainingError, match="NaN or Inf again after each of 3 rollbacks") as caught:
            trainer.train()

        assert caught.value.failure == "corrupted_state"
        assert [event.get("state") for event in rollbacks(tmp_path)][:3] == ["newest", "older", "disk"]

    @pytest.mark.slow
    def test_where_no_loss_shows_them_are_found_when_a_snapshot_is_verified(
        self, tmp_path: Path, tokenizer: Any
    ) -> None:
        def in_a_row_no_batch_reads(model: Any) -> None:
            model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(POISON_WORD)] = float("nan")

        plain = sft_trainer(tmp_path / "plain", tokenizer, max_steps=40)
        plain.train()
        healed = sft_trainer(
            tmp_path / "healed",
            tokenizer,
            callbacks=[
                SelfHealingCallback(HealingConfig(snapshot_interval=5)),
                WeightFault(in_a_row_no_batch_reads, 14),
            ],
            max_steps=40,
        )
        healed.train()

        assert_same_weights(weights(healed), weights(plain))
        (outcome,) = journal(tmp_path / "healed", "outcome")
        assert outcome["failure"] == "corrupted_state"
        assert outcome["step"] < 30, "not only at the end of the run"

    def test_in_a_frozen_base_model_end_the_run(self, tmp_path: Path, tokenizer: Any) -> None:
        base = tiny_model(tokenizer)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))

        def in_the_base(model: Any) -> None:
            model.get_base_model().model.layers[0].mlp.down_proj.weight.view(-1)[0] = float("nan")

        trainer = sft_trainer(
            tmp_path,
            tokenizer,
            model=model,
            callbacks=[SelfHealingCallback(), WeightFault(in_the_base, 17)],
            max_steps=20,
        )
        with pytest.raises(UnrecoverableTrainingError, match=r"down_proj\.weight; frozen parameters"):
            trainer.train()


class TestScrambledLayer:
    @pytest.mark.heals("divergence", "callback")
    @pytest.mark.parametrize(
        "strikes_at", [60, *(pytest.param(step, marks=pytest.mark.slow) for step in (61, 62, 63))]
    )
    def test_is_noticed_by_the_loss_and_rolled_back(
        self, tmp_path: Path, tokenizer: Any, fault_free: float, strikes_at: int
    ) -> None:
        fault = WeightFault(scrambled_layer, strikes_at)
        # A snapshot every ten steps: the fault strikes right before one, and 1 to 3 steps after it.
        config = HealingConfig(snapshot_interval=10)
        trainer = plain_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(config), fault], **CONVERGED)
        trainer.train()

        (back,) = rollbacks(tmp_path)
        assert back["to_step"] < strikes_at, "the candidate that holds the fault, or was not verified, is not used"
        assert held_out_loss(trainer) == fault_free, "the steps since the fault were applied again"
        outcome = next(each for each in journal(tmp_path, "outcome") if each["failure"] == "divergence")
        detected = back["step"] - strikes_at + 1
        assert outcome["steps_lost"] <= snapshot_interval(tmp_path) + config.snapshot_verify_steps + detected
        assert outcome["outcome"] == "resolved"


class TestDeadWeights:
    def test_without_a_gradient_are_rolled_back_if_trusted_ones_have_one(
        self, tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level("INFO", "self_healing")
        monkeypatch.setattr(panel, "VanishingGradientDetector", partial(VanishingGradientDetector, steps=5))

        def out_of_reach(model: Any) -> None:
            # The final norm's output no longer depends on anything: the loss is that of chance, and stays there.
            model.model.norm.weight.zero_()
            model.lm_head.weight.zero_()

        fault = WeightFault(out_of_reach, 5)
        config = HealingConfig(on_spike="warn")
        trainer = sft_trainer(
            tmp_path, tokenizer, callbacks=[SelfHealingCallback(config), fault], max_steps=30, optim="sgd"
        )
        trainer.train()

        outcome = next(event for event in journal(tmp_path, "outcome") if event["failure"] == "divergence")
        assert outcome["outcome"] == "resolved"
        assert float(trainer.model.lm_head.weight.detach().abs().sum()) > 0
        assert "There is no gradient with these weights, and there is one with trusted ones" in caplog.text
        assert "The loss has risen" not in caplog.text


class TestLearningRateFarTooHigh:
    STEPS: ClassVar[dict[str, int]] = {"max_steps": 400}
    WELL_TUNED: ClassVar[dict[str, float]] = {"adamw_torch": 3e-3, "sgd": 0.3}

    @staticmethod
    def final(trainer: Any) -> float:
        tail = losses(trainer)[-20:]
        return sum(tail) / len(tail)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("optim", "rate"), [("adamw_torch", 3.0), ("adamw_torch", 30.0), ("sgd", 30.0), ("sgd", 300.0)]
    )
    def test_is_brought_down_until_the_run_learns(
        self, tmp_path: Path, tokenizer: Any, optim: str, rate: float
    ) -> None:
        good = sft_trainer(
            tmp_path / "good", tokenizer, optim=optim, learning_rate=self.WELL_TUNED[optim], **self.STEPS
        )
        good.train()
        unhealed = sft_trainer(
            tmp_path / "unhealed",
            tokenizer,
            optim=optim,
            learning_rate=rate,
            logging_nan_inf_filter=False,
            **self.STEPS,
        )
        unhealed.train()
        assert not self.final(unhealed) <= 2 * self.final(good), "the setup has to fail without healing"

        wrapper = SelfHealingTrainer(
            sft_trainer(tmp_path / "healed", tokenizer, optim=optim, learning_rate=rate, **self.STEPS)
        )
        wrapper.train()

        assert self.final(wrapper.trainer) <= 1.3 * self.final(good)
        report = wrapper.get_report()
        assert 1 <= report.lr_reductions <= HealingConfig().max_lr_reductions
        assert report.learning_rate_scale < 1

    @pytest.mark.heals("learning_rate", "callback")
    def test_in_the_first_steps_the_run_goes_back_to_where_it_began(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = sft_trainer(
            tmp_path,
            tokenizer,
            callbacks=[SelfHealingCallback()],
            learning_rate=3.0,
            max_steps=60,
            gradient_accumulation_steps=1,
            lr_scheduler_type="constant",
        )
        trainer.train()

        first = rollbacks(tmp_path)[0]
        assert (first["state"], first["to_step"]) == ("initial", 0)
        cut = next(event for event in journal(tmp_path, "action") if event["action"] == "reduce_learning_rate")
        assert cut["learning_rate"] < 0.1
        assert losses(trainer)[-1] < 4.5
        assert HealingReport.from_run_dir(tmp_path).lr_reductions == cut["reductions"]

    def test_too_few_reductions_end_in_a_verdict_and_not_in_garbage(self, tmp_path: Path, tokenizer: Any) -> None:
        config = HealingConfig(max_lr_reductions=1)
        trainer = sft_trainer(
            tmp_path, tokenizer, callbacks=[SelfHealingCallback(config)], learning_rate=30.0, max_steps=100
        )
        with pytest.raises(UnrecoverableTrainingError, match="learning rate") as caught:
            trainer.train()

        assert caught.value.failure == "learning_rate"
        postmortem = json.loads((tmp_path / "postmortem.json").read_text())
        assert postmortem["failure"] == "learning_rate"
        assert "check_data" in postmortem["chain"][-1]["evidence"]


class TestRedFlag:
    @pytest.mark.heals("red_flag", "callback", partly="reported, or stopped, or rolled back, as the rule says")
    def test_whose_action_is_to_roll_back_does(self, tmp_path: Path, tokenizer: Any) -> None:
        rules = tmp_path / "rules.toml"
        rules.write_text(
            '[mine]\nmetric = "learning_rate"\nobjectives = ["sft"]\nhealthy = "low"\n'
            'red_flag = [{ is = "above", value = 0.0006 }]\nsteps = 6\nobservations = 6\n'
            'severity = "error"\naction = "rollback"\ndiagnosis = "It is there."\nremedy = "None."\n'
        )
        trainer = sft_trainer(
            tmp_path / "run",
            tokenizer,
            callbacks=[SelfHealingCallback(HealingConfig(rules_file=str(rules)))],
            max_steps=20,
        )
        trainer.train()

        assert [event["action"] for event in journal(tmp_path / "run", "action")][:3] == [
            "roll_back",
            "skip_step",
            "reduce_learning_rate",
        ]
        assert trainer.state.global_step == 20


class TestNewestState:
    @pytest.mark.parametrize(("build", "state", "lost"), [(grpo_trainer, "disk", 13), (sft_trainer, "initial", 0)])
    def test_is_a_checkpoint_where_steps_since_an_older_snapshot_cannot_be_applied_again(
        self, tmp_path: Path, tokenizer: Any, build: Any, state: str, lost: int
    ) -> None:
        trainer = build(
            tmp_path,
            tokenizer,
            # The next snapshot after that of the beginning is never taken.
            callbacks=[SelfHealingCallback(HealingConfig(snapshot_interval=50)), WeightFault(a_few_nans, 22)],
            max_steps=26,
            gradient_accumulation_steps=1,
            save_strategy="steps",
            save_steps=10,
        )
        trainer.train()

        (back,), (outcome,) = rollbacks(tmp_path), journal(tmp_path, "outcome")
        assert (back["state"], outcome["steps_lost"], outcome["outcome"]) == (state, lost, "resolved")
        assert {int(each["step"]) for each in trainer.optimizer.state.values()} == {26 - lost}


class TestWithoutMemory:
    def test_a_run_goes_back_to_its_newest_trusted_checkpoint(
        self, tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("self_healing.rollback.ring.free_host_memory", lambda: 1000)
        trainer = sft_trainer(
            tmp_path,
            tokenizer,
            callbacks=[SelfHealingCallback(), WeightFault(a_few_nans, 33)],
            max_steps=40,
            gradient_accumulation_steps=1,
            save_strategy="steps",
            save_steps=10,
        )
        trainer.train()

        (back,) = rollbacks(tmp_path)
        assert (back["state"], back["to_step"]) == ("disk", 20), "the newest that healthy steps came after"
        assert "Snapshots are off" in caplog.text
        assert all(torch.isfinite(value).all() for value in weights(trainer).values())

    def test_and_without_checkpoints_corrupted_weights_end_the_run(self, tmp_path: Path, tokenizer: Any) -> None:
        config = HealingConfig(snapshots=False)
        trainer = sft_trainer(
            tmp_path, tokenizer, callbacks=[SelfHealingCallback(config), WeightFault(a_few_nans, 3)], max_steps=6
        )
        with pytest.raises(UnrecoverableTrainingError, match="no trusted state to go back to"):
            trainer.train()


class TestBadStart:
    def test_weights_that_are_not_finite_are_refused(self, tmp_path: Path, tokenizer: Any) -> None:
        model = tiny_model(tokenizer)
        with torch.no_grad():
            a_few_nans(model)
        trainer = sft_trainer(tmp_path, tokenizer, model=model, callbacks=[SelfHealingCallback()])
        with pytest.raises(UnrecoverableTrainingError, match=r"not finite \(model.layers.0.mlp.down_proj"):
            trainer.train()
        assert "training_step" not in vars(trainer)

    def test_a_resume_from_bad_state_is_refused_and_names_the_trusted_checkpoint(
        self, tmp_path: Path, tokenizer: Any
    ) -> None:
        arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], **arguments).train()
        bad = tmp_path / "checkpoint-4" / "model.safetensors"
        tensors = load_file(bad)
        next(iter(tensors.values())).view(-1)[0] = float("inf")
        save_file(tensors, bad, metadata={"format": "pt"})

        trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], **{**arguments, "max_steps": 6})
        with pytest.raises(UnrecoverableTrainingError, match="checkpoint-2"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    def test_a_checkpoint_that_only_looked_sound_is_not_advised_again(self, tmp_path: Path, tokenizer: Any) -> None:
        class Spoil(TrainerCallback):
            """As weights that are loaded from parts which nobody has searched."""

            def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                next(model.parameters()).data.fill_(float("nan"))

        arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        sft_trainer(tmp_path, tokenizer, **arguments).train()
        callbacks, arguments = [Spoil(), SelfHealingCallback()], arguments | {"max_steps": 6}
        trainer = sft_trainer(tmp_path, tokenizer, callbacks=callbacks, **arguments)
        with pytest.raises(UnrecoverableTrainingError, match="remove it, or name an older one") as caught:
            trainer.train(resume_from_checkpoint=True)
        assert str(caught.value).count("checkpoint-4") == 1


class MomentFaultAtTheEnd(TrainerCallback):
    """A number of the optimizer's state turns NaN with the last step, or right after its checkpoint was written."""

    def __init__(self, event: str = "on_step_end") -> None:
        setattr(self, event, self._strike)

    def _strike(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            moments = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]
            moments.view(-1)[0] = float("nan")


@pytest.mark.parametrize(
    ("wrapped", "event", "expected"),
    [(True, "on_step_end", "resolved"), pytest.param(False, "on_save", "reported", marks=pytest.mark.slow)],
)
def test_the_best_model_outlasts_an_optimizer_state_that_is_not_finite_at_the_end(
    tmp_path: Path, tokenizer: Any, wrapped: bool, event: str, expected: str
) -> None:
    def build(name: str, *callbacks: TrainerCallback) -> Any:
        return best_model_trainer(tmp_path / name, tokenizer, EvalLoss(rises=True), *callbacks)

    plain = build("plain")
    plain.train()
    trainer = build("run", *([] if wrapped else [SelfHealingCallback()]), MomentFaultAtTheEnd(event))
    (SelfHealingTrainer(trainer) if wrapped else trainer).train()

    assert_same_weights(weights(trainer), weights(plain))
    assert logged(trainer) == logged(plain)
    (outcome,) = journal(tmp_path / "run", "outcome")
    assert (outcome["failure"], outcome["outcome"]) == ("corrupted_state", expected)
    found = [each for each in vet_all(tmp_path / "run") if Path(each.path).parent.name == "run"]
    assert {each.step: each.usable for each in found} == {2: True, 4: True, 6: True}, "healed before it is saved"
