"""The learning rate is really changed, whatever the schedule, and the logs say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TEXTS, RaisingForward, assert_same_weights, lost_connection, sft_trainer, slowly, weights
from datasets import Dataset
from transformers import TrainerCallback

from self_healing import (
    Action,
    HealingConfig,
    HealingContext,
    SelfHealingCallback,
    SelfHealingTrainer,
    Target,
)


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
CONFIG = HealingConfig(lr_ramp_steps=4, snapshot_interval=5)


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
    reduce = Reduce(*steps)
    reduce.callback = SelfHealingCallback(CONFIG)
    overrides: dict[str, Any] = {"max_steps": 40, "gradient_accumulation_steps": 1, "learning_rate": 1e-3, **arguments}
    if schedule == "reduce_lr_on_plateau":
        # No evaluation is ever so much better, so the rate falls at each.
        impatient = {"patience": 0, "threshold": 0.9}
        overrides |= {"eval_strategy": "steps", "eval_steps": 10, "lr_scheduler_kwargs": impatient}
    trainer = sft_trainer(
        directory,
        tokenizer,
        callbacks=[reduce.callback, reduce],
        lr_scheduler_type="constant" if schedule == "from_current" else schedule,
        trainer_kwargs={"eval_dataset": Dataset.from_dict({"text": TEXTS[:8]})},
        **overrides,
    )
    named = list(trainer.model.named_parameters())
    groups = [
        {"params": [p for name, p in named if "mlp" in name], "lr": 1e-3},
        {"params": [p for name, p in named if "mlp" not in name], "lr": 2e-3},
    ]
    trainer.optimizer = probe = Probe(groups)
    if schedule == "from_current":
        trainer.lr_scheduler = FromCurrent(trainer.optimizer)
    return trainer, probe


# Held for a tenth of the run, lr_ramp_steps=4, after a cut to a half in step 20.
SCALES = [1.0] * 20 + [0.5] * 4 + [0.625, 0.75, 0.875] + [1.0] * 13
SAVING = {"save_strategy": "steps", "save_steps": 22}


@pytest.fixture(scope="module", params=["linear", *slowly("reduce_lr_on_plateau", "from_current")])
def schedule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reduced(schedule: str, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Any, Probe]:
    """A run whose rate is reduced in its 20th step, and that is saved in the 22nd; nobody changes it afterwards."""
    trainer, probe = probed(tmp_path_factory.mktemp("reduced"), tokenizer, schedule, 20, **SAVING)
    trainer.train()
    return trainer, probe


def test_the_optimizer_steps_with_the_scaled_rate_and_the_logs_say_so(
    tmp_path: Path, tokenizer: Any, schedule: str, reduced: tuple[Any, Probe]
) -> None:
    plain, plain_probe = probed(tmp_path, tokenizer, schedule)
    plain.train()
    trainer, probe = reduced
    assert len(probe.rates) == len(SCALES)
    for scale, rates, expected in zip(SCALES, probe.rates, plain_probe.rates, strict=True):
        assert rates == pytest.approx([scale * rate for rate in expected], rel=1e-9)
    logs = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert logs == pytest.approx([rates[0] for rates in probe.rates], rel=1e-9)


def test_it_is_kept_across_checkpoint_and_resume(
    tmp_path: Path, tokenizer: Any, schedule: str, reduced: tuple[Any, Probe]
) -> None:
    again, probe = probed(tmp_path, tokenizer, schedule, **SAVING)
    again.train(resume_from_checkpoint=str(Path(reduced[0].args.output_dir) / "checkpoint-22"))

    assert probe.rates == [pytest.approx(rates, rel=1e-9) for rates in reduced[1].rates[22:]]
    assert_same_weights(weights(again), weights(reduced[0]))


def test_it_is_kept_across_a_reentry(
    tmp_path: Path, tokenizer: Any, schedule: str, reduced: tuple[Any, Probe]
) -> None:
    trainer, probe = probed(tmp_path, tokenizer, schedule, 20)
    fault = RaisingForward(trainer.model, lambda forward: forward == 23, lost_connection)
    SelfHealingTrainer(trainer, CONFIG, sleep=lambda _: None).train()

    assert fault.fired == 1
    assert probe.rates == [pytest.approx(rates, rel=1e-9) for rates in reduced[1].rates]
    assert_same_weights(weights(trainer), weights(reduced[0]))
