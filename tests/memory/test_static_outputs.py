"""A model that writes its outputs into the same memory each time, as a replay of a CUDA graph does (simulated)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OutputFault, assert_same_weights, journal, logged, losses, plain_trainer, weights

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.healers.numerics.detectors.panel import DetectorPanel


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


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The losses that the detectors see."""
    seen: list[float] = []
    observe = DetectorPanel.observe

    def note(self: Any, signals: Any) -> Any:
        seen.append(signals.loss)
        return observe(self, signals)

    monkeypatch.setattr(DetectorPanel, "observe", note)
    return seen


def test_each_step_is_judged_by_the_losses_of_its_own_calls(
    tmp_path: Path, tokenizer: Any, judged: list[float]
) -> None:
    plain = trainer_of(tmp_path / "plain", tokenizer)
    plain.train()
    healed = trainer_of(tmp_path / "healed", tokenizer, HealingConfig())
    static = StaticLoss(healed.model)
    healed.train()

    assert static.calls == 12
    assert judged == pytest.approx(losses(plain), abs=1e-4)
    assert_same_weights(weights(healed), weights(plain))


@pytest.mark.parametrize("first", [3, 4], ids=["first of its step", "second of its step"])
def test_a_step_that_is_computed_again_is_logged_with_its_own_losses(
    tmp_path: Path, tokenizer: Any, judged: list[float], first: int
) -> None:
    plain = trainer_of(tmp_path / "plain", tokenizer)
    plain.train()
    healed = trainer_of(tmp_path / "healed", tokenizer, HealingConfig())
    OutputFault(healed.model, lambda n: n == first)
    StaticLoss(healed.model)
    healed.train()

    assert [each["failure"] for each in journal(tmp_path / "healed", "outcome")] == ["nonfinite_transient"]
    assert logged(healed) == logged(plain)
    assert judged == pytest.approx(losses(plain), abs=1e-4)
    assert_same_weights(weights(healed), weights(plain))


def test_steps_that_are_applied_again_are_the_ones_they_were(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"max_steps": 22}
    plain = trainer_of(tmp_path / "plain", tokenizer, **arguments)
    plain.train()
    healed = trainer_of(tmp_path / "healed", tokenizer, HealingConfig(snapshot_interval=5), **arguments)
    StaticLoss(healed.model)
    spoiled: list[int] = []

    def spoil(module: Any, inputs: Any) -> None:
        if healed.state.global_step == 18 and not spoiled:
            spoiled.append(18)
            healed.model.model.layers[0].mlp.down_proj.weight.data.view(-1)[:3] = float("nan")

    healed.model.register_forward_pre_hook(spoil)
    healed.train()

    (outcome,) = journal(tmp_path / "healed", "outcome")
    assert (outcome["failure"], outcome["steps_lost"]) == ("corrupted_state", 0)
    assert logged(healed) == logged(plain)
    assert_same_weights(weights(healed), weights(plain))
