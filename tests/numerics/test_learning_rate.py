"""The learning rate is really changed, whatever the schedule, and the logs say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TEXTS, RaisingForward, assert_same_weights, journal, lost_connection, sft_trainer, weights
from datasets import Dataset
from transformers import TrainerCallback

from self_healing import (
    Action,
    HealingConfig,
    HealingContext,
    SelfHealingCallback,
    SelfHealingTrainer,
)
from self_healing.healers.numerics.learning_rate import LearningRateControl
from self_healing.rollback.rollback import Target


class Probe(torch.optim.AdamW):
    """Records the learning rates of all its groups in every step that has gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates: list[list[float]] = []

    def step(self, closure: Any = None) -> Any:
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self.rates.append([float(group["lr"]) for group in self.param_groups])
        return super().step(closure)


class FromCurrent(torch.optim.lr_scheduler.LRScheduler):
    """Computes each rate from the one in force, as chained schedulers do."""

    def get_lr(self) -> list[float]:
        return [group["lr"] * (1.0 if self.last_epoch == 0 else 0.97) for group in self.optimizer.param_groups]


# An interval that is measured would be another one in each run.
CONFIG = HealingConfig(lr_hold_steps=3, lr_ramp_steps=4, snapshot_interval=5)
SCHEDULES = ["linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup", "reduce_lr_on_plateau"]


class Reduce(TrainerCallback):
    """Goes back and reduces the rate once a step is finished, by hand."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step not in self.steps:
            return
        run = self.callback.run
        assert run is not None
        incident = run.journal.open(state.global_step, "by hand", {})
        context = HealingContext(incident, run.instrument, target=Target.NEWEST)
        self.callback.actions.apply((Action.ROLL_BACK, Action.REDUCE_LEARNING_RATE), context, args)
        run.journal.closed(incident, "reported")

    callback: SelfHealingCallback


def probed(directory: Path, tokenizer: Any, schedule: str, *steps: int, **arguments: Any) -> tuple[Any, Probe]:
    config = arguments.pop("config", CONFIG)
    reduce = Reduce(*steps)
    reduce.callback = SelfHealingCallback(config)
    overrides: dict[str, Any] = {"max_steps": 40, "learning_rate": 1e-3, **arguments}
    if schedule == "reduce_lr_on_plateau":
        # No evaluation is ever so much better, so the rate falls at each.
        impatient = {"patience": 0, "threshold": 0.9}
        overrides |= {"eval_strategy": "steps", "eval_steps": 10, "lr_scheduler_kwargs": impatient}
    if schedule == "cosine_with_restarts":
        overrides |= {"lr_scheduler_kwargs": {"num_cycles": 2}}
    if schedule == "constant_with_warmup":
        overrides |= {"warmup_steps": 8}
    trainer_kwargs = {"eval_dataset": Dataset.from_dict({"text": TEXTS[:8]})}
    trainer = sft_trainer(
        directory,
        tokenizer,
        callbacks=[reduce.callback, reduce],
        lr_scheduler_type="constant" if schedule == "from_current" else schedule,
        trainer_kwargs=trainer_kwargs,
        **overrides,
    )
    named = list(trainer.model.named_parameters())
    groups = [
        {"params": [p for name, p in named if "mlp" in name], "lr": 1e-3},
        {"params": [p for name, p in named if "mlp" not in name], "lr": 2e-3},
    ]
    trainer.optimizer = Probe(groups)
    probe = trainer.optimizer
    if schedule == "from_current":
        trainer.lr_scheduler = FromCurrent(trainer.optimizer)
    return trainer, probe


def logged_rates(trainer: Any) -> list[float]:
    return [
        entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry and "loss" in entry
    ]


# lr_hold_steps=3, lr_ramp_steps=4 after a cut to a half in step 20.
SCALES = [1.0] * 20 + [0.5] * 3 + [0.625, 0.75, 0.875] + [1.0] * 14


def slow_but_for(*quick: str) -> list[Any]:
    every = [*SCHEDULES, "from_current"]
    return [schedule if schedule in quick else pytest.param(schedule, marks=pytest.mark.slow) for schedule in every]


# Two or three runs for each schedule take their time. The quick ones are those that differ most in kind.
MOST = slow_but_for("linear", "cosine_with_restarts", "reduce_lr_on_plateau", "from_current")
SOME = slow_but_for("linear", "from_current")


class TestEverySchedule:
    @pytest.mark.parametrize("schedule", MOST)
    def test_the_optimizer_steps_with_the_scaled_rate(self, tmp_path: Path, tokenizer: Any, schedule: str) -> None:
        plain, plain_probe = probed(tmp_path / "plain", tokenizer, schedule)
        plain.train()
        healed, probe = probed(tmp_path / "healed", tokenizer, schedule, 20)
        healed.train()

        assert len(probe.rates) == 40
        for scale, rates, expected in zip(SCALES, probe.rates, plain_probe.rates, strict=True):
            assert rates == pytest.approx([scale * rate for rate in expected], rel=1e-9)

    @pytest.mark.parametrize("schedule", SOME)
    def test_the_logs_say_what_the_optimizer_used(self, tmp_path: Path, tokenizer: Any, schedule: str) -> None:
        trainer, probe = probed(tmp_path, tokenizer, schedule, 20)
        trainer.train()

        assert logged_rates(trainer) == pytest.approx([rates[0] for rates in probe.rates], rel=1e-9)

    @pytest.mark.parametrize("schedule", SOME)
    def test_it_is_kept_across_checkpoint_and_resume(self, tmp_path: Path, tokenizer: Any, schedule: str) -> None:
        whole, whole_probe = probed(tmp_path / "whole", tokenizer, schedule, 20)
        whole.train()
        saving = {"save_strategy": "steps", "save_steps": 22}
        first, _ = probed(tmp_path / "run", tokenizer, schedule, 20, **saving)
        first.train()
        again, probe = probed(tmp_path / "run", tokenizer, schedule, **saving)
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-22"))

        assert probe.rates == [pytest.approx(rates, rel=1e-9) for rates in whole_probe.rates[22:]]
        assert_same_weights(weights(again), weights(first))

    @pytest.mark.parametrize("schedule", SOME)
    def test_it_is_kept_across_a_reentry(self, tmp_path: Path, tokenizer: Any, schedule: str) -> None:
        plain, plain_probe = probed(tmp_path / "plain", tokenizer, schedule, 20)
        plain.train()
        trainer, probe = probed(tmp_path / "healed", tokenizer, schedule, 20)
        fault = RaisingForward(trainer.model, lambda forward: forward == 45, lost_connection)
        SelfHealingTrainer(trainer, CONFIG, sleep=lambda _: None).train()

        assert fault.fired == 1
        assert probe.rates == [pytest.approx(rates, rel=1e-9) for rates in plain_probe.rates]
        assert_same_weights(weights(trainer), weights(plain))


def test_an_exception_inside_the_step_leaves_the_rates_of_the_schedule(tmp_path: Path, tokenizer: Any) -> None:
    trainer, probe = probed(tmp_path, tokenizer, "constant", 2, max_steps=6)

    class Failing(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                probe.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("a bug in the optimizer")))

    trainer.add_callback(Failing())
    with pytest.raises(ValueError, match="a bug in the optimizer"):
        trainer.train()

    assert [group["lr"] for group in probe.param_groups] == [1e-3, 2e-3]


class TestControl:
    def control(self, **settings: Any) -> LearningRateControl:
        control = LearningRateControl(HealingConfig(**{"lr_hold_steps": 10, "lr_ramp_steps": 10, **settings}))
        control.begin(max_steps=1000, beta2=0.999)
        return control

    def test_untouched_it_is_one(self) -> None:
        control = self.control()
        assert not control.touched
        assert {control.scale(step) for step in range(1000)} == {1.0}

    def test_a_cut_is_held_and_ramped_back_in_a_straight_line(self) -> None:
        control = self.control()
        control.reduce(100)
        assert {control.scale(step) for step in range(100, 110)} == {0.5}
        assert [control.scale(step) for step in range(110, 121)] == pytest.approx(
            [0.55 + 0.05 * i for i in range(10)] + [1.0]
        )

    def test_a_relapse_in_the_hold_cuts_deeper_than_the_last_cut(self) -> None:
        control = self.control()
        cuts = []
        before = 1.0
        for step in (100, 105, 109, 112):
            after = control.reduce(step)
            cuts.append(after / before)
            before = after
        assert cuts == [0.5, 0.25, 0.0625, 0.5**8]
        assert control.reductions == 4

    def test_a_relapse_on_the_way_up_cancels_the_ramp(self) -> None:
        control = self.control()
        control.reduce(100)
        assert control.scale(115) > 0.5
        assert control.reduce(115) == 0.5
        assert {control.scale(step) for step in range(115, 1000)} == {0.5}

    def test_after_a_relapse_in_the_hold_the_rate_never_grows_back_to_what_failed(self) -> None:
        control = self.control()
        control.reduce(100)
        control.reduce(105)
        assert max(control.scale(step) for step in range(105, 1000)) < 0.5

    def test_back_at_the_schedules_rate_the_reductions_are_forgotten(self) -> None:
        control = self.control(max_lr_reductions=1)
        control.reduce(100)
        assert control.exhausted
        assert control.reduce(500) == 0.5
        assert control.reductions == 1

    @pytest.mark.parametrize(
        ("asked", "max_steps", "beta2", "hold"),
        [
            (0, 100_000, 0.999, 1000),
            (0, 100_000, 0.95, 100),
            (0, 500, 0.999, 50),
            (400, 1000, None, 100),
            (7, -1, None, 7),
        ],
    )
    def test_the_hold_is_as_long_as_moments_remember_and_a_tenth_of_the_run_at_most(
        self, asked: int, max_steps: int, beta2: float | None, hold: int
    ) -> None:
        control = LearningRateControl(HealingConfig(lr_hold_steps=asked))
        control.begin(max_steps, beta2)
        assert control.hold == hold

    def test_a_rate_that_was_found_counts_as_many_reductions_as_lead_there(self) -> None:
        control = self.control()
        assert control.reduce(100, to=0.01) == 0.01
        assert control.reductions == 3
        assert {control.scale(step) for step in range(100, 1000)} == {0.01}

    def test_a_rate_out_of_reach_is_not_gone_to(self) -> None:
        control = self.control(max_lr_reductions=2)
        assert control.lowest(100) == 0.125
        assert control.reduce(100, to=0.01) == 0.125
        assert control.exhausted

    def test_new_moments_are_warmed_up(self) -> None:
        control = self.control()
        steps = control.warm_up_again(50)
        assert [control.scale(50 + i) for i in range(steps)] == pytest.approx([(i + 1) / steps for i in range(steps)])
        assert control.scale(50 + steps) == 1.0

    def test_it_is_raised_only_if_asked_for(self) -> None:
        assert self.control().increase(100) == 1.0
        control = self.control(lr_increase_factor=1.5)
        assert control.increase(100) == 1.5
        assert control.increase(200) == 1.5
        control.reduce(300)
        assert control.scale(300) == 1.0

    def test_its_state_is_exact(self) -> None:
        control = self.control()
        control.reduce(100)
        control.reduce(105)
        other = self.control()
        other.load_state_dict(control.state_dict())
        assert [other.scale(step) for step in range(100, 200)] == [control.scale(step) for step in range(100, 200)]
        assert other.reduce(110) == control.reduce(110)


def test_the_rate_is_raised_at_a_plateau_if_asked_for(tmp_path: Path, tokenizer: Any) -> None:
    config = HealingConfig(lr_increase_factor=2.0, plateau_window=20)
    trainer = sft_trainer(
        tmp_path,
        tokenizer,
        callbacks=[SelfHealingCallback(config)],
        learning_rate=1e-7,
        lr_scheduler_type="constant",
        max_steps=60,
    )
    trainer.train()

    (raised,) = [event for event in journal(tmp_path, "action") if event["action"] == "increase_learning_rate"]
    assert raised["learning_rate"] == pytest.approx(2e-7)
    assert logged_rates(trainer)[-1] == pytest.approx(2e-7)
