"""Copies of the state that are under way when it is overwritten: completed as late as a stream may."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WeightFault, a_few_nans, assert_same_weights, journal, sft_trainer, weights
from test_memory import HalfWay
from transformers import TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.rollback.host_memory import TRANSFERS
from self_healing.rollback.snapshots import Snapshot
from self_healing.rollback.trusted import TrustedStates


class LateTransfer:
    """Copies what is there when somebody waits for it, or has the device wait."""

    newest: LateTransfer | None = None

    def __init__(self, device: torch.device, work: Callable[[], None]) -> None:
        LateTransfer.newest = self
        self._work: Callable[[], None] | None = work
        self._done = threading.Event()

    def wait(self) -> None:
        assert self._done.wait(60)

    def join(self) -> None:
        if self._work is not None:
            self._work()
        self._work = None
        self._done.set()

    def held_up(self) -> float:
        return 0.0


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSFERS, "cpu", LateTransfer)


# ---- in a run ----


def test_snapshots_taken_while_training_hold_what_was_there(late: None, tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"max_steps": 18, "gradient_accumulation_steps": 1}
    plain = sft_trainer(tmp_path / "plain", tokenizer, **arguments)
    plain.train()
    healing = SelfHealingCallback(HealingConfig(snapshot_interval=1, snapshot_verify_steps=2))
    healed = sft_trainer(tmp_path / "healed", tokenizer, callbacks=[healing, WeightFault(a_few_nans, 15)], **arguments)
    healed.train()

    (back,) = [event for event in journal(tmp_path / "healed", "action") if event["action"] == "roll_back"]
    assert (back["state"], back["to_step"]) == ("newest", 13)
    assert_same_weights(weights(healed), weights(plain))


def test_an_update_that_failed_half_way_is_undone(late: None, tmp_path: Path, tokenizer: Any) -> None:
    def trained(directory: str, times: int) -> dict[str, torch.Tensor]:
        healing = SelfHealingCallback(HealingConfig(on_oom="backup", snapshot_interval=1))
        trainer = sft_trainer(tmp_path / directory, tokenizer, callbacks=[healing], max_steps=7)
        trainer.optimizer = HalfWay(trainer.model.parameters(), lr=1e-3, fails_at=4, times=times)
        trainer.train()
        return weights(trainer)

    healed = trained("healed", times=1)
    assert journal(tmp_path / "healed", "outcome")[0]["steps_lost"] == 0
    assert_same_weights(healed, trained("plain", times=0))


def test_an_update_does_not_wait_until_its_copy_is_searched(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    updated, look, searches = threading.Event(), Snapshot._look, queue.SimpleQueue[bool]()

    def after_the_update(self: Snapshot, *of_it: Any) -> list[str]:
        searches.put(updated.wait(60))
        return look(self, *of_it)

    class Updated(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            updated.set()

    monkeypatch.setattr(Snapshot, "_look", after_the_update)
    healing = SelfHealingCallback(HealingConfig(on_oom="backup", snapshots=False))
    sft_trainer(tmp_path, tokenizer, callbacks=[healing, Updated()], max_steps=1).train()
    assert searches.get(timeout=60)
    assert searches.empty()


def clamp(weight: torch.Tensor) -> None:
    weight.clamp_(-0.03, 0.03)


def clamp_without_a_trace(weight: torch.Tensor) -> None:
    weight.data.clamp_(-0.03, 0.03)


def quantise(weight: torch.Tensor) -> torch.Tensor:
    kept = weight.clone()
    weight.data.sign_()
    return kept


@pytest.mark.parametrize("write", [clamp, clamp_without_a_trace, quantise])
def test_where_a_forward_writes_to_weights_a_torn_copy_is_refused_and_training_waits_for_the_next(
    late: None,
    tmp_path: Path,
    tokenizer: Any,
    write: Callable[[torch.Tensor], torch.Tensor | None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, tried = list[Any](), list[int]()
    take = TrustedStates.take_snapshot
    monkeypatch.setattr(TrustedStates, "take_snapshot", lambda self, step: (tried.append(step), take(self, step)))

    @torch.no_grad()
    def before(module: torch.nn.Module, *_: Any) -> None:
        kept.append(write(module.weight))
        if LateTransfer.newest is not None:
            # The copy comes by the weight in the middle of the forward.
            LateTransfer.newest.join()

    @torch.no_grad()
    def after(module: torch.nn.Module, *_: Any) -> None:
        if (values := kept.pop()) is not None:
            module.weight.data.copy_(values)

    config = {"snapshot_interval": 4, "snapshot_verify_steps": 2}
    callbacks = [SelfHealingCallback(config), WeightFault(a_few_nans, 12)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=callbacks, max_steps=14, gradient_accumulation_steps=1)
    trainer.model.model.embed_tokens.register_forward_pre_hook(before)
    trainer.model.model.embed_tokens.register_forward_hook(after)
    trainer.train()
    (refused,) = journal(tmp_path, "snapshot_refused")
    assert refused["tensors"] == ["written to while they were copied"]
    (back,) = [event for event in journal(tmp_path, "action") if event["action"] == "roll_back"]
    # Another is taken in the next step, and nothing is said of the weights.
    assert tried == [4, 6, 10]
    assert (back["state"], back["to_step"]) == ("newest", 10)
    assert "is not finite" not in caplog.text
