"""Batches that are kept, to compute earlier steps again, make room where memory runs out."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RaisingForward, assert_same_weights, sft_trainer, weights
from transformers import TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback


# Quick to take snapshots, which keep a batch as well.
QUICK = HealingConfig(snapshot_interval=1, snapshot_verify_steps=2)
ARGUMENTS: dict[str, Any] = {"max_steps": 12, "gradient_accumulation_steps": 1}


def out_of_host_memory() -> Exception:
    return RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory")


class Batches:
    """Which of the batches that a model was given are still there."""

    def __init__(self, model: Any) -> None:
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.alive_in_forward: list[int] = []
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        batch = kwargs["input_ids"]
        if not any(seen() is batch for seen in self.seen):
            self.seen.append(weakref.ref(batch))
        self.alive_in_forward.append(self.alive)

    @property
    def alive(self) -> int:
        return sum(seen() is not None for seen in self.seen)


class Noting(TrainerCallback):
    """How many batches are there before each update, and after something that is done then, once."""

    def __init__(self, batches: Batches, at: int = -1, do: Callable[[], Any] = lambda: None) -> None:
        self.batches, self.at, self.do = batches, at, do
        self.alive: list[int] = []
        self.found: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            self.found = self.do()
        self.alive.append(self.batches.alive)


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
def test_where_the_host_has_no_memory_they_are_given_up(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="self_healing")
    healing = SelfHealingCallback(QUICK)
    trainer = sft_trainer(tmp_path / "healed", tokenizer, callbacks=[healing], **ARGUMENTS)
    batches = Batches(trainer.model)
    noting = Noting(batches)
    trainer.add_callback(noting)
    fault = RaisingForward(trainer.model, lambda forward: forward == 9, out_of_host_memory)
    trainer.train()

    assert fault.fired == 1
    assert noting.alive[7] > 5, "steps since the newest trusted state, and the first ones"
    assert batches.alive_in_forward[8:10] == [noting.alive[7] + 1, 1], "the one that is computed"
    assert noting.alive[11] > 1, "later ones are kept again"
    assert "were given up" in caplog.text
    plain = sft_trainer(tmp_path / "plain", tokenizer, **ARGUMENTS)
    plain.train()
    assert_same_weights(weights(trainer), weights(plain))
