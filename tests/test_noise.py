"""Runs whose kernels do not repeat bitwise, simulated: what is healed by computing again is healed there, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TRAINERS, journal, sft_trainer, tiny_model
from noise import kernel_noise

from self_healing import SelfHealingCallback


# Of one element: what atomic sums in single precision do, and what one step of the last place of a bfloat16 does.
LEVELS = [
    pytest.param(False, 1e-6, id="fp32-1e-6"),
    pytest.param(False, 1e-4, id="fp32-1e-4"),
    pytest.param(True, 1e-3, id="bf16-1e-3"),
    pytest.param(True, 4e-3, id="bf16-4e-3"),
]


# ---- the simulation ----


def loss_and_gradient(model: Any, bf16: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of the same batch with the same random state, each time."""
    torch.manual_seed(0)
    model.zero_grad()
    rows = torch.arange(24).reshape(2, 12)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    return loss.detach(), [each.grad.clone() for each in model.parameters() if each.grad is not None]


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The norm of the difference, relative to the norm."""
    apart = torch.stack([(x - y).norm() for x, y in zip(a, b, strict=True)]).norm()
    return float(apart / torch.stack([x.norm() for x in a]).norm())


@pytest.mark.parametrize(("bf16", "eps"), LEVELS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_noise_keeps_a_pass_from_repeating(tokenizer: Any, bf16: bool, eps: float, checkpointing: bool) -> None:
    model = tiny_model(tokenizer).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with kernel_noise(model, eps) as noise:
        (loss, gradient), (again, gradient_again) = (loss_and_gradient(model, bf16) for _ in range(2))
    assert 0 < distance(gradient, gradient_again) < 10 * eps
    # A mean over many elements may round to the same.
    assert abs(loss - again) < 10 * eps
    # Two layers, twice; none of them is wanted again to recompute what the backward of the others needs.
    assert (noise.forwards, noise.backwards) == (4, 4)


def test_noise_ends_with_its_block(tokenizer: Any) -> None:
    model = tiny_model(tokenizer).train()
    expected, gradient = loss_and_gradient(model)
    with kernel_noise(model, 1e-2):
        loss_and_gradient(model)
    loss, again = loss_and_gradient(model)
    assert loss == expected
    assert distance(gradient, again) == 0


def test_noise_leaves_the_random_state_alone(tokenizer: Any) -> None:
    model = tiny_model(tokenizer).train()
    loss_and_gradient(model)
    expected = torch.get_rng_state()
    with kernel_noise(model, 1e-2):
        loss_and_gradient(model)
    assert torch.equal(torch.get_rng_state(), expected)


# ---- healthy runs ----


@pytest.mark.parametrize(("bf16", "eps"), LEVELS)
def test_a_healthy_noisy_run_is_left_alone(tmp_path: Path, tokenizer: Any, bf16: bool, eps: float) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, bf16=bf16, max_steps=20, callbacks=[SelfHealingCallback()])
    with kernel_noise(trainer.model, eps) as noise:
        trainer.train()
    assert noise.backwards > 0
    assert not journal(tmp_path, "detected")
    assert not journal(tmp_path, "action")


@pytest.mark.slow
@pytest.mark.parametrize(("bf16", "eps"), LEVELS)
@pytest.mark.parametrize("name", [name for name in TRAINERS if name != "SFTTrainer"])
def test_a_healthy_noisy_run_of_any_trainer_is_left_alone(
    tmp_path: Path, tokenizer: Any, name: str, bf16: bool, eps: float
) -> None:
    callback = SelfHealingCallback()
    trainer = TRAINERS[name](tmp_path / "run", tokenizer, bf16=bf16, max_steps=12, callbacks=[callback])
    with kernel_noise(trainer.model, eps):
        trainer.train()
    assert not journal(tmp_path / "run", "detected")
    assert not journal(tmp_path / "run", "action")
