"""Copies of the state that are under way when it is overwritten: completed as late as a stream may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WeightFault, a_few_nans, assert_same_weights, journal, sft_trainer, weights
from test_memory import HalfWay
from transformers import TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback


class LateTransfer:
    """Copies what is there when somebody waits for it, or has the device wait."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    @property
    def complete(self) -> bool:
        return self._work is None

    def wait(self) -> float:
        if self._work is not None:
            self._work()
        self._work = None
        return 0.0

    def join(self) -> None:
        self.wait()


class LateCopies:
    """A device that does what it is given beside computing only when it is waited for."""

    def __init__(self) -> None:
        self.started: list[LateTransfer] = []

    def stream(self, device: torch.device) -> LateCopies:
        return self

    def start(self, work: Callable[[], None]) -> LateTransfer:
        self.started.append(LateTransfer(work))
        return self.started[-1]

    def pin(self, address: int, nbytes: int) -> bool:
        return False

    def unpin(self, address: int) -> None:
        raise AssertionError("nothing was pinned")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    late = LateCopies()
    monkeypatch.setattr("self_healing.rollback.snapshots.copies_of", {"cpu": late}.get)
    return late


# ---- in a run ----


def test_snapshots_taken_while_training_hold_what_was_there(late: LateCopies, tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"max_steps": 18, "gradient_accumulation_steps": 1}
    plain = sft_trainer(tmp_path / "plain", tokenizer, **arguments)
    plain.train()
    healing = SelfHealingCallback(HealingConfig(snapshot_interval=1, snapshot_verify_steps=2))
    healed = sft_trainer(tmp_path / "healed", tokenizer, callbacks=[healing, WeightFault(a_few_nans, 15)], **arguments)
    healed.train()

    (back,) = [event for event in journal(tmp_path / "healed", "action") if event["action"] == "roll_back"]
    assert (back["state"], back["to_step"]) == ("newest", 13)
    assert_same_weights(weights(healed), weights(plain))


def test_a_state_that_is_written_to_while_it_is_copied_is_not_trusted(
    late: LateCopies, tmp_path: Path, tokenizer: Any
) -> None:
    def trained(directory: str, *callbacks: TrainerCallback) -> Any:
        arguments = {"max_steps": 18, "gradient_accumulation_steps": 1, "learning_rate": 1e-2}
        trainer = sft_trainer(tmp_path / directory, tokenizer, callbacks=list(callbacks), **arguments)
        head = trainer.model.lm_head.weight

        def clamp(*_: Any) -> None:
            with torch.no_grad():
                head.clamp_(-0.02, 0.02)

        trainer.model.register_forward_pre_hook(clamp)
        trainer.train()
        return trainer

    plain = trained("plain")
    config = HealingConfig(snapshot_interval=1, snapshot_verify_steps=2)
    healed = trained("healed", SelfHealingCallback(config), WeightFault(a_few_nans, 15))

    (refused,) = journal(tmp_path / "healed", "snapshot_refused")
    assert refused["tensors"] == ["written to while they were copied"]
    (back,) = [event for event in journal(tmp_path / "healed", "action") if event["action"] == "roll_back"]
    assert (back["state"], back["to_step"]) == ("newest", 13)
    assert_same_weights(weights(healed), weights(plain))


def test_an_update_that_failed_half_way_is_undone(late: LateCopies, tmp_path: Path, tokenizer: Any) -> None:
    def trained(directory: str, times: int) -> dict[str, torch.Tensor]:
        healing = SelfHealingCallback(HealingConfig(optimizer_step_backup=True, snapshot_interval=1))
        trainer = sft_trainer(tmp_path / directory, tokenizer, callbacks=[healing], max_steps=7)
        trainer.optimizer = HalfWay(trainer.model.parameters(), lr=1e-3, fails_at=4, times=times)
        trainer.train()
        return weights(trainer)

    healed = trained("healed", times=1)
    assert journal(tmp_path / "healed", "outcome")[0]["steps_lost"] == 0
    assert_same_weights(healed, trained("plain", times=0))
