"""A model that writes its outputs into the same memory each time, as a replay of a CUDA graph does (simulated)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from conftest import OutputFault, assert_same_weights, journal, logged, plain_trainer, weights

from self_healing import HealingConfig, SelfHealingCallback


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return memory.copy_(loss).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class StaticLoss:
    """The loss of a model lies in the same place after each call; those of the calls before are written over."""

    def __init__(self, model: Any) -> None:
        self.calls, self._memory = 0, torch.zeros(())
        model.register_forward_hook(self._replay)

    def _replay(self, module: Any, inputs: Any, output: Any) -> Any:
        self.calls += 1
        # `apply` is not typed in torch.
        output["loss"] = _Replayed.apply(output["loss"], self._memory)  # type: ignore[no-untyped-call]
        return output


def trainer_of(directory: Path, tokenizer: Any, config: HealingConfig | None = None, **arguments: Any) -> Any:
    callbacks = [] if config is None else [SelfHealingCallback(config)]
    return plain_trainer(
        directory, tokenizer, callbacks=callbacks, **{"gradient_accumulation_steps": 2, "max_steps": 6, **arguments}
    )


def test_a_step_that_is_computed_again_is_logged_with_its_own_losses(tmp_path: Path, tokenizer: Any) -> None:
    plain = trainer_of(tmp_path / "plain", tokenizer)
    plain.train()
    healed = trainer_of(tmp_path / "healed", tokenizer, HealingConfig())
    OutputFault(healed.model, lambda n: n == 4)
    StaticLoss(healed.model)
    healed.train()

    assert [each["failure"] for each in journal(tmp_path / "healed", "outcome")] == ["nonfinite_transient"]
    assert logged(healed) == logged(plain)
    assert_same_weights(weights(healed), weights(plain))
