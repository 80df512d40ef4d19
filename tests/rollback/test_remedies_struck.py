"""A second fault that strikes while a remedy is at work: the remedy is repeated once before it is given up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    OutputFault,
    RaisingForward,
    assert_same_weights,
    journal,
    logged,
    sft_trainer,
    slowly,
    weights,
)

from self_healing import HealingConfig, SelfHealingCallback


FAULTS: dict[str, Callable[[Any, Callable[[int], bool]], Any]] = {
    "nan": OutputFault,
    "oom": lambda model, strike: RaisingForward(model, strike, lambda: torch.OutOfMemoryError("CUDA out of memory.")),
    "exception": lambda model, strike: RaisingForward(model, strike, lambda: RuntimeError("a kernel failed")),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    trainer = sft_trainer(tmp_path_factory.mktemp("clean"), tokenizer, max_steps=12)
    trainer.train()
    return trainer


def assert_no_trace(trainer: Any, undisturbed: Any, output_dir: Path) -> None:
    assert_same_weights(weights(trainer), weights(undisturbed))
    assert logged(trainer) == logged(undisturbed)
    assert sum(event["steps_lost"] for event in journal(output_dir, "outcome")) == 0


@pytest.mark.parametrize("second", ["nan", *slowly("exception")])
def test_computing_the_step_again_outlasts_a_second_fault(
    tmp_path: Path, tokenizer: Any, undisturbed: Any, second: str
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=12, callbacks=[SelfHealingCallback()])
    # Two micro-batches a step: the second of the fourth step, and the first time it is computed again.
    first = OutputFault(trainer.model, strike=lambda forward: forward == 8)
    struck = FAULTS[second](trainer.model, lambda forward: forward == 10)
    trainer.train()
    assert (first.fired, struck.fired) == (1, 1)
    assert_no_trace(trainer, undisturbed, tmp_path)
    assert journal(tmp_path, "diagnosed")[-1]["failure"] in ("nonfinite_transient", "out_of_memory")


class WeightFault:
    """Writes NaN into a weight in a training forward, once."""

    def __init__(self, model: Any, forward: int) -> None:
        self.forwards = self.fired = 0
        self._forward, self._model = forward, model
        model.model.embed_tokens.register_forward_pre_hook(self._hook)

    def _hook(self, module: Any, inputs: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self.forwards += 1
            if self.forwards == self._forward:
                self.fired += 1
                self._model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan


# A trusted state at step 5, and steps to be applied again until step 9.
QUICK = HealingConfig(snapshot_interval=2, snapshot_verify_steps=2)


@pytest.mark.parametrize("second", ["oom", *slowly("nan")])
def test_steps_that_are_applied_again_outlast_a_second_fault(
    tmp_path: Path, tokenizer: Any, undisturbed: Any, second: str
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=12, callbacks=[SelfHealingCallback(QUICK)])
    corrupted = WeightFault(trainer.model, forward=19)
    # The step it strikes is computed twice (four forwards) before the run goes back.
    struck = FAULTS[second](trainer.model, lambda forward: forward == 23)
    trainer.train()
    assert (corrupted.fired, struck.fired) == (1, 1)
    (event,) = [event for event in journal(tmp_path, "action") if event["action"] == "replay_steps"]
    assert event["replayed"] >= 1
    assert_no_trace(trainer, undisturbed, tmp_path)
