"""Splitting on kernels that do not repeat bitwise: noise is no reason to refuse it, and what was one still is."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import dpo_trainer, grpo_trainer, journal, kto_trainer, reward_trainer, sft_trainer
from noise import kernel_noise
from peft import LoraConfig
from test_faults_while_splitting import OwnLoss
from test_memory import TooManyRows
from test_splitting import Scorer, batch_of, only, split

from self_healing import HealingConfig, SelfHealingCallback, UnrecoverableTrainingError


BUILDERS: dict[str, Callable[..., Any]] = {
    "SFT": sft_trainer,
    "DPO": dpo_trainer,
    "KTO": kto_trainer,
    "Reward": reward_trainer,
    "GRPO": grpo_trainer,
}
# Whether they compute in bfloat16, and their noise.
KERNELS = {
    "fp32 1e-6": (False, 1e-6),
    "fp32 1e-4": (False, 1e-4),
    "bf16 1e-3": (True, 1e-3),
    "bf16 4e-3": (True, 4e-3),
}
# Of every trainer and of all kernels something in every run of the tests; the others are slow.
QUICK = {
    ("SFT", "bf16 4e-3"),
    ("DPO", "bf16 4e-3"),
    ("KTO", "fp32 1e-4"),
    ("Reward", "bf16 1e-3"),
    ("GRPO", "bf16 1e-3"),
}


def room_for_one_row(trainer: Any) -> TooManyRows:
    # Generation is left whole: split, it draws other tokens.
    return TooManyRows(trainer.model, 1, unless=lambda: not torch.is_grad_enabled())


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(name, kernels, marks=() if (name, kernels) in QUICK else pytest.mark.slow)
        for name in BUILDERS
        for kernels in KERNELS
    ],
)
def test_memory_for_one_row_is_enough(name: str, kernels: str, tmp_path: Path, tokenizer: Any) -> None:
    bf16, eps = KERNELS[kernels]
    trainer = BUILDERS[name](tmp_path, tokenizer, callbacks=[SelfHealingCallback()], bf16=bf16, max_steps=4)
    memory = room_for_one_row(trainer)
    with kernel_noise(trainer.model, eps):
        trainer.train()
    assert memory.fired
    assert trainer.state.global_step == 4
    # One incident: nothing that was split is refused in between.
    (outcome,) = journal(tmp_path, "outcome")
    assert (outcome["outcome"], outcome["steps_lost"]) == ("resolved", 0)


@pytest.mark.parametrize("name", ["Reward", pytest.param("DPO", marks=pytest.mark.slow)])
def test_other_kernels_for_passes_without_gradients_are_no_noise(name: str, tmp_path: Path, tokenizer: Any) -> None:
    trainer = BUILDERS[name](tmp_path, tokenizer, callbacks=[SelfHealingCallback()], bf16=True, max_steps=4)
    room_for_one_row(trainer)

    def rounded(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        # At other places: every second element to the next number.
        every_second = torch.arange(output.shape[-1]) % 2
        return None if torch.is_grad_enabled() else output * (1 + 2**-7 * every_second).to(output.dtype)

    for layer in trainer.model.model.layers:
        layer.mlp.register_forward_hook(rounded)
    trainer.train()
    (outcome,) = journal(tmp_path, "outcome")
    assert (outcome["outcome"], outcome["steps_lost"]) == ("resolved", 0)


# ---- what is refused under noise as well ----


def mode(model: Any) -> None:
    model.train(not model.training)


def dropout(model: Any) -> None:
    """Switches it where no module has a mode of its own for it."""
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1 - module.attention_dropout


def switching_for_the_backward_pass(trainer: Any, switch: Callable[[Any], None]) -> None:
    backward = trainer.accelerator.backward

    def switched(*args: Any, **kwargs: Any) -> None:
        switch(trainer.model)
        try:
            backward(*args, **kwargs)
        finally:
            switch(trainer.model)

    trainer.accelerator.backward = switched


@pytest.mark.parametrize(
    ("name", "kernels", "switch"),
    [
        ("KTO", "bf16 4e-3", mode),
        pytest.param("Reward", "bf16 4e-3", dropout),
        *(
            pytest.param(name, kernels, switch, marks=pytest.mark.slow)
            for name in ("DPO", "KTO", "Reward")
            for kernels in ("fp32 1e-4", "bf16 1e-3", "bf16 4e-3")
            for switch in (mode, dropout)
            if (name, kernels, switch) not in {("KTO", "bf16 4e-3", mode), ("Reward", "bf16 4e-3", dropout)}
        ),
    ],
)
def test_another_mode_in_the_backward_pass_is_refused(
    name: str, kernels: str, switch: Callable[[Any], None], tmp_path: Path, tokenizer: Any
) -> None:
    bf16, eps = KERNELS[kernels]
    config = HealingConfig(oom_activation_checkpointing=False)
    trainer = BUILDERS[name](tmp_path, tokenizer, callbacks=[SelfHealingCallback(config)], bf16=bf16)
    room_for_one_row(trainer)
    switching_for_the_backward_pass(trainer, switch)
    with kernel_noise(trainer.model, eps), pytest.raises(UnrecoverableTrainingError, match="another adapter or mode"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_another_adapter_in_the_backward_pass_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    adapter = LoraConfig(target_modules=["q_proj"], r=2)
    config = HealingConfig(oom_activation_checkpointing=False)
    trainer = sft_trainer(
        tmp_path,
        tokenizer,
        dropout=0.0,
        bf16=True,
        callbacks=[SelfHealingCallback(config)],
        trainer_class=OwnLoss,
        trainer_kwargs={"peft_config": adapter},
    )
    trainer.model.add_adapter("other", adapter)
    room_for_one_row(trainer)
    names = itertools.cycle(["other", "default"])
    switching_for_the_backward_pass(trainer, lambda model: model.set_adapter(next(names)))
    with kernel_noise(trainer.model, 4e-3), pytest.raises(UnrecoverableTrainingError, match="another adapter or mode"):
        trainer.train()
    assert trainer.state.global_step == 0


class Perceptron(torch.nn.Module):
    """A model of nobody's library, in which something comes of all rows together."""

    def __init__(self, together: torch.nn.Module) -> None:
        super().__init__()
        self.mlp, self.together = torch.nn.Linear(8, 8), together

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.together(self.mlp(inputs))
        return found


class Centred(torch.nn.Module):
    """Takes the mean over the batch away."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs - inputs.mean(0)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize(
    ("together", "reason"),
    [(torch.nn.BatchNorm1d(8), "batch normalisation"), (Centred(), "depend on each other")],
    ids=["batch norm", "coupled rows"],
)
def test_rows_that_depend_on_each_other_are_refused(together: Any, reason: str, dtype: Any, eps: float) -> None:
    model = Perceptron(together).to(dtype)
    with split(model, only(2)) as calls, kernel_noise(model, eps):
        model(torch.randn(6, 8, dtype=dtype))
    assert reason in calls.refused


@pytest.mark.parametrize("eps", [1e-6, 1e-4])
@pytest.mark.parametrize("reduction", ["sum", "rows", "tokens"])
def test_how_the_loss_of_an_unknown_model_adds_up_is_found_out(reduction: str, eps: float, tokenizer: Any) -> None:
    batch = batch_of(tokenizer)
    batch.pop("attention_mask")
    model = Scorer(reduction)
    whole = float(model(**batch)["loss"])
    model.embedding = torch.nn.Sequential(OrderedDict(mlp=model.embedding))  # type: ignore[assignment]
    with split(model, only(2)) as calls, kernel_noise(model, eps):
        parts = float(model(**batch)["loss"])
    assert calls.refused == ""
    assert calls.pieces == 3
    assert parts == pytest.approx(whole, rel=10 * eps)
