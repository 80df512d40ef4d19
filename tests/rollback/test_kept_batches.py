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
from conftest import RaisingForward, assert_same_weights, journal, sft_trainer, weights
from transformers import BatchEncoding, TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.hf import step
from self_healing.hf.step import Control, on_host
from self_healing.rollback.ring import KeptBatches


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


@pytest.mark.usefixtures("no_garbage_collector")
def test_where_the_device_has_no_memory_all_of_them_leave_it(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    healing = SelfHealingCallback(QUICK)
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[healing], **ARGUMENTS | {"max_steps": 18})
    batches = Batches(trainer.model)
    # The CPU is the device here, and the host is another one.
    monkeypatch.setattr(step, "HOST", torch.device("meta"))
    # Beyond the first steps, which are kept longer: of those before the newest snapshot only an older one keeps some.
    noting = Noting(batches, 14, lambda: healing.run.rollback.in_place.free_batches(of_host=False))
    trainer.add_callback(noting)
    trainer.train()

    assert noting.alive[13] > 10
    assert noting.found > 0
    assert noting.alive[14:] == [1] * 4, "the one that is computed; later ones leave the device at once"
    assert not journal(tmp_path, "detected")


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": torch.ones(2, 3), "rows": [torch.ones(4), "text", None]},
        BatchEncoding({"input_ids": torch.ones(2, 3), "nested": (torch.ones(1), {"deep": torch.ones(2)})}),
        [torch.ones(2), 3],
    ],
    ids=["dictionary", "encoding", "list"],
)
def test_one_that_has_left_the_device_is_nested_as_it_was(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def outline(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape)
        if isinstance(value, (dict, BatchEncoding)):
            return type(value), {key: outline(inner) for key, inner in value.items()}
        return (type(value), [outline(each) for each in value]) if isinstance(value, (list, tuple)) else value

    calls = [(None, inputs, (), {})]
    control = Control(calls, loss=1.0, nbytes=0)
    assert control.leave_device() == 0
    monkeypatch.setattr(step, "HOST", torch.device("meta"))
    assert control.leave_device() > 0
    assert outline(control.calls[0][1]) == outline(inputs)
    assert calls[0][1] is inputs, "those of the step itself stay"
    assert control.leave_device() == 0
    assert on_host("text") == "text"


def test_steps_of_the_beginning_are_kept_without_a_gap() -> None:
    # Several ranks try learning rates on those they have in common: the first of each.
    batches = KeptBatches()
    kept = [Control([], 1.0, 0) for _ in range(3)]
    for control in (*kept[:2], None, kept[2]):
        batches.keep_first(control)
    assert batches.first_steps == kept[:2]
