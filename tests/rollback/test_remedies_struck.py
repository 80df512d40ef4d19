"""A second fault that strikes while a remedy is at work: the remedy is repeated once before it is given up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    GradientFault,
    OutputFault,
    PoisonToken,
    RaisingForward,
    assert_same_weights,
    journal,
    logged,
    quarantined,
    sft_trainer,
    weights,
)
from transformers import TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.rollback.ring import SnapshotRing


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


# ---- computing the step again ----


@pytest.mark.parametrize("second", FAULTS)
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


# ---- looking for the row ----


@pytest.mark.parametrize("second", FAULTS)
def test_looking_for_the_row_outlasts_a_second_fault(
    tmp_path: Path, tokenizer: Any, undisturbed: Any, second: str
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=12, callbacks=[SelfHealingCallback()])
    # The first lasts until the step has been computed again (two forwards); the next forward is of the bisection.
    first = OutputFault(trainer.model, strike=lambda forward: 8 <= forward <= 10)
    struck = FAULTS[second](trainer.model, lambda forward: forward == 11)
    trainer.train()
    assert (first.fired, struck.fired) == (3, 1)
    assert_no_trace(trainer, undisturbed, tmp_path)
    assert not (tmp_path / "quarantine.jsonl").exists()


@pytest.mark.parametrize(
    "forwards", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow), 9]
)
def test_a_fault_that_lasts_is_not_blamed_on_rows_or_numbers(
    tmp_path: Path, tokenizer: Any, undisturbed: Any, forwards: int
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=12, callbacks=[SelfHealingCallback()])
    fault = OutputFault(trainer.model, strike=lambda forward: 8 <= forward < 8 + forwards)
    trainer.train()
    assert fault.fired == forwards
    assert_no_trace(trainer, undisturbed, tmp_path)
    assert [event["failure"] for event in journal(tmp_path, "outcome")] == ["nonfinite_transient"]
    assert not (tmp_path / "quarantine.jsonl").exists()


# ---- leaving rows out ----


POISONED = [f"{POISON_WORD} {text}" if index == 5 else text for index, text in enumerate(TEXTS)]


def with_a_poison_row(output_dir: Path, tokenizer: Any, second: Callable[[int], bool]) -> tuple[Any, OutputFault]:
    """A trained run that has left a row out, and what struck meanwhile."""
    trainer = sft_trainer(output_dir, tokenizer, texts=POISONED, max_steps=8, callbacks=[SelfHealingCallback()])
    PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    struck = OutputFault(trainer.model, strike=second)
    trainer.train()
    return trainer, struck


class Forwards(TrainerCallback):
    """How many training forwards there were by the end of each step."""

    def __init__(self) -> None:
        self.by_step: dict[int, int] = {}
        self.fault: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.by_step[state.global_step] = self.fault.forwards


def forwards_of_the_incident(output_dir: Path, tokenizer: Any) -> tuple[Any, range]:
    """A run with the poison row alone, and the forwards that healing it took."""
    count = Forwards()
    trainer = sft_trainer(output_dir, tokenizer, texts=POISONED, max_steps=8, callbacks=[SelfHealingCallback(), count])
    PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    count.fault = OutputFault(trainer.model, strike=lambda _: False)
    trainer.train()
    (step,) = {event["step"] for event in journal(output_dir, "detected")}
    return trainer, range(count.by_step.get(step, 0) + 3, count.by_step[step + 1] + 1)


def test_leaving_a_row_out_outlasts_a_second_fault(tmp_path: Path, tokenizer: Any) -> None:
    alone, forwards = forwards_of_the_incident(tmp_path / "alone", tokenizer)
    trainer, struck = with_a_poison_row(tmp_path / "struck", tokenizer, lambda forward: forward == forwards[-1])
    assert struck.fired == 1
    assert_same_weights(weights(trainer), weights(alone))
    assert [event["steps_lost"] for event in journal(tmp_path / "struck", "outcome")] == [0]


@pytest.mark.slow
def test_wherever_a_second_fault_strikes_the_same_row_is_left_out(tmp_path: Path, tokenizer: Any) -> None:
    alone, forwards = forwards_of_the_incident(tmp_path / "alone", tokenizer)
    for at in forwards:
        directory = tmp_path / str(at)
        trainer, struck = with_a_poison_row(directory, tokenizer, lambda forward, at=at: forward == at)
        assert struck.fired == 1
        assert [row["dataset_index"] for row in quarantined(directory)] == [5], f"struck at forward {at}"
        assert_same_weights(weights(trainer), weights(alone))


# ---- a gradient that stands far out ----


def test_computing_a_spike_again_outlasts_a_second_fault(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"max_steps": 56, "gradient_accumulation_steps": 1, "learning_rate": 1e-4}
    clean = sft_trainer(tmp_path / "clean", tokenizer, **arguments)
    clean.train()
    trainer = sft_trainer(tmp_path / "struck", tokenizer, callbacks=[SelfHealingCallback()], **arguments)
    spike = GradientFault(trainer.model, strike=lambda backward: backward == 54, value=1e5)
    struck = OutputFault(trainer.model, strike=lambda forward: forward == 55)
    trainer.train()
    assert (spike.fired, struck.fired) == (1, 1)
    assert_no_trace(trainer, clean, tmp_path / "struck")


# ---- going back, and applying the steps since then again ----


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


@pytest.mark.parametrize("second", FAULTS)
@pytest.mark.parametrize(
    "later",
    [pytest.param(3, marks=pytest.mark.slow), 4, pytest.param(6, marks=pytest.mark.slow)],
    ids=["at the first step", "half-way", "further on"],
)
def test_steps_that_are_applied_again_outlast_a_second_fault(
    tmp_path: Path, tokenizer: Any, undisturbed: Any, second: str, later: int
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=12, callbacks=[SelfHealingCallback(QUICK)])
    corrupted = WeightFault(trainer.model, forward=19)
    # The step it strikes is computed twice (four forwards) before the run goes back.
    struck = FAULTS[second](trainer.model, lambda forward: forward == 19 + later)
    trainer.train()
    assert (corrupted.fired, struck.fired) == (1, 1)
    (event,) = [event for event in journal(tmp_path, "action") if event["action"] == "replay_steps"]
    assert event["replayed"] >= 1
    assert_no_trace(trainer, undisturbed, tmp_path)


@pytest.mark.parametrize("second", [RuntimeError("a copy failed"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_a_state_that_cannot_be_put_in_place_is_tried_again(
    tmp_path: Path, tokenizer: Any, undisturbed: Any, second: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=12, callbacks=[SelfHealingCallback(QUICK)])
    WeightFault(trainer.model, forward=19)
    failed: list[Any] = []
    original = SnapshotRing.restore

    def restore(ring: Any, snapshot: Any, live: Any) -> None:
        if not failed:
            failed.append(snapshot)
            raise second
        original(ring, snapshot, live)

    monkeypatch.setattr(SnapshotRing, "restore", restore)
    trainer.train()
    assert failed
    assert_no_trace(trainer, undisturbed, tmp_path)


def test_what_putting_a_state_in_place_held_is_gone_before_memory_is_given_back(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=12, callbacks=[SelfHealingCallback(QUICK)])
    WeightFault(trainer.model, forward=19)
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    original = SnapshotRing.restore

    def restore(ring: Any, snapshot: Any, live: Any) -> None:
        if not held:
            temporary = torch.ones(3)
            held.append(weakref.ref(temporary))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        original(ring, snapshot, live)

    def look(phase: str, info: dict[str, int]) -> None:
        if held and phase == "start" and info["generation"] == 2:
            alive.append(held[0]() is not None)

    monkeypatch.setattr(SnapshotRing, "restore", restore)
    gc.disable()
    gc.callbacks.append(look)
    try:
        trainer.train()
    finally:
        gc.callbacks.remove(look)
        gc.enable()
    assert alive[:1] == [False]


def test_a_state_that_can_never_be_put_in_place_gives_way_to_another(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=12, callbacks=[SelfHealingCallback(QUICK)])
    WeightFault(trainer.model, forward=19)
    failed: list[Any] = []
    original = SnapshotRing.restore

    def restore(ring: Any, snapshot: Any, live: Any) -> None:
        if not failed or snapshot is failed[0]:
            failed.append(snapshot)
            raise RuntimeError("its host memory is gone")
        original(ring, snapshot, live)

    monkeypatch.setattr(SnapshotRing, "restore", restore)
    trainer.train()
    assert len(failed) == 2
    assert trainer.state.global_step == 12
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())
