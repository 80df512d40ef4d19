"""An update that is launched before its numbers are known: on a GPU, and here as if the CPU were one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    GradientFault,
    OutputFault,
    PoisonToken,
    WeightFault,
    a_few_nans,
    assert_same_weights,
    grpo_trainer,
    journal,
    logged,
    sft_trainer,
    slowly,
    weights,
)
from transformers import TrainerCallback

from self_healing import HealingConfig, Incident, SelfHealingCallback
from self_healing.healers.numerics.state import NumericsState
from self_healing.hf import optimizer
from self_healing.hf.optimizer import Veto
from self_healing.hf.sections import Phase


# The first updates wait for baselines.
STEPS = 36
CONFIG = HealingConfig(snapshot_interval=4, snapshot_verify_steps=2)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each update that is launched before it is judged, whether it was applied."""
    found: list[bool] = []
    launch = Veto.launch

    def noted(self: Veto, window: Any, *args: Any) -> Any:
        result = launch(self, window, *args)
        found.append(window.applied)
        return result

    monkeypatch.setattr(Veto, "launch", noted)
    monkeypatch.setattr(optimizer, "VETO_ON", {"cpu", "cuda"})
    return found


def trained(directory: Path, tokenizer: Any, fault: Callable[[Any], Any] | None = None, **arguments: Any) -> Any:
    arguments = {"max_steps": STEPS, "gradient_accumulation_steps": 1, **arguments}
    trainer = sft_trainer(directory, tokenizer, **arguments)
    if fault is not None:
        fault(trainer)
    trainer.train()
    return trainer


@pytest.mark.parametrize("accumulation", [1, *slowly(3)])
def test_a_healthy_run_is_bitwise_the_plain_one(
    tmp_path: Path, tokenizer: Any, launched: list[bool], accumulation: int
) -> None:
    plain = trained(tmp_path / "plain", tokenizer, gradient_accumulation_steps=accumulation)
    healed = trained(
        tmp_path / "healed", tokenizer, gradient_accumulation_steps=accumulation, callbacks=[SelfHealingCallback()]
    )
    assert launched.count(True) > 5
    assert_same_weights(weights(healed), weights(plain))
    assert logged(healed) == logged(plain)


class PoisonedLate(TrainerCallback):
    """Rows that hold a certain token are NaN once updates are launched; those met before would be in quarantine."""

    def __init__(self, token: int) -> None:
        self.token = token

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 30:
            PoisonToken(model, self.token)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "transient": lambda trainer: OutputFault(trainer.model, strike=lambda forward: forward == 31),
    "gradient": lambda trainer: GradientFault(trainer.model, strike=lambda backward: backward == 31),
    "each time": lambda trainer: OutputFault(trainer.model, strike=lambda _: trainer.state.global_step == 30),
    "poison": lambda trainer: trainer.add_callback(PoisonedLate(trainer.train_dataset[5]["input_ids"][3])),
    "weights": lambda trainer: trainer.add_callback(WeightFault(a_few_nans, 30)),
    "spike": lambda trainer: GradientFault(trainer.model, strike=lambda backward: backward == 31, value=1e3),
}


@pytest.mark.parametrize("fault", ["transient", "weights", *slowly("gradient", "each time", "poison", "spike")])
def test_a_step_is_healed_as_where_it_is_judged_first(
    tmp_path: Path, tokenizer: Any, launched: list[bool], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    healed = trained(tmp_path / "launched", tokenizer, FAULTS[fault], callbacks=[SelfHealingCallback(CONFIG)])
    assert False in launched
    monkeypatch.setattr(optimizer, "VETO_ON", set())
    number = len(launched)
    first = trained(tmp_path / "judged", tokenizer, FAULTS[fault], callbacks=[SelfHealingCallback(CONFIG)])
    assert len(launched) == number
    assert_same_weights(weights(healed), weights(first))
    # By its text: NaN is not equal to itself.
    assert str(logged(healed)) == str(logged(first))
    told = [
        [
            (event["kind"], event.get("failure"), event.get("action"), event["step"])
            for event in journal(tmp_path / run)
        ]
        for run in ("launched", "judged")
    ]
    assert told[0] == told[1]


class LowersTheRate(TrainerCallback):
    """Lowers the learning rate once, when it is told of an incident."""

    def __init__(self, healing: SelfHealingCallback) -> None:
        self.healing, self.lowered_at = healing, list[int]()

    def on_instability(self, args: Any, state: Any, control: Any, incident: Incident, **kwargs: Any) -> None:
        if not self.lowered_at:
            self.lowered_at.append(state.global_step)
            view = self.healing.run.instrument.view
            before = view.learning_rate
            self.healing.run.part(NumericsState).learning_rate.reduce(state.global_step)
            self.factor = view.learning_rate / before


def test_a_rate_that_is_lowered_while_a_step_is_judged_is_in_force_for_it(
    tmp_path: Path, tokenizer: Any, launched: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    for first in (False, True):
        if first:
            monkeypatch.setattr(optimizer, "VETO_ON", set())
        healing = SelfHealingCallback(CONFIG)
        lowers = LowersTheRate(healing)
        ended.append(
            trained(
                tmp_path / str(first),
                tokenizer,
                lambda trainer: OutputFault(trainer.model, strike=lambda forward: forward == 32),
                callbacks=[healing, lowers],
                gradient_accumulation_steps=1,
            )
        )
        assert lowers.lowered_at == [31]
        # As it is told in the journal.
        assert lowers.factor == pytest.approx(CONFIG.lr_reduce_factor)
    assert False in launched
    assert_same_weights(weights(ended[0]), weights(ended[1]))
    assert logged(ended[0]) == logged(ended[1])


class InterruptedWait:
    """An event whose wait for an update that was left out is interrupted: by Ctrl-C, or because it takes too long."""

    def __init__(self, veto: Veto) -> None:
        self._veto = veto

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        if bool(self._veto._found):
            raise KeyboardInterrupt


def test_a_wait_that_is_interrupted_does_not_count_the_step_as_taken(
    tmp_path: Path, tokenizer: Any, launched: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Veto.launch

    def interrupted(self: Veto, *args: Any) -> Any:
        self._event = InterruptedWait(self)
        return launch(self, *args)

    monkeypatch.setattr(Veto, "launch", interrupted)
    healing = SelfHealingCallback(CONFIG)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, tokenizer, FAULTS["transient"], callbacks=[healing])
    assert launched
    assert all(launched)
    assert healing.run is not None
    reentry = healing.run.instrument.reentry
    assert reentry.phase is Phase.STEPPING
    assert reentry.rewind_to_last_step() is None


def test_grpo_is_bitwise_the_plain_one(tmp_path: Path, tokenizer: Any, launched: list[bool]) -> None:
    arguments = {"max_steps": STEPS, "gradient_accumulation_steps": 1, "max_completion_length": 3}
    plain = grpo_trainer(tmp_path / "plain", tokenizer, **arguments)
    plain.train()
    healed = grpo_trainer(tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback()], **arguments)
    healed.train()
    assert launched
    assert_same_weights(weights(healed), weights(plain))
    assert logged(healed) == logged(plain)


class Projected(torch.optim.AdamW):
    """Does more in a step than its update."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.9999)


class WatchesUpdates(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


OWN_STEP = {"trainer_kwargs": {"optimizer_cls_and_kwargs": (Projected, {"fused": True, "lr": 1e-3})}}


@pytest.mark.parametrize(
    ("arguments", "callbacks"),
    [
        (OWN_STEP, []),
        ({}, [WatchesUpdates()]),
        pytest.param({"optim": "adamw_torch"}, [], marks=pytest.mark.slow),
        pytest.param({"optim": "adafactor"}, [], marks=pytest.mark.slow),
    ],
    ids=["an optimizer that does more in a step", "a callback that watches updates", "foreach", "adafactor"],
)
def test_where_an_update_cannot_be_left_out_unseen_a_step_is_judged_first(
    tmp_path: Path, tokenizer: Any, launched: list[bool], arguments: dict[str, Any], callbacks: list[Any]
) -> None:
    trained(tmp_path, tokenizer, callbacks=[SelfHealingCallback(), *callbacks], max_steps=34, **arguments)
    assert launched == []


def test_hooks_that_are_put_on_the_optimizer_later_are_told_of_updates_alone(
    tmp_path: Path, tokenizer: Any, launched: list[bool]
) -> None:
    class Hooks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if state.global_step == 30:
                optimizer.optimizer.register_step_post_hook(lambda *_: None)
                launched.clear()

    trained(tmp_path, tokenizer, callbacks=[SelfHealingCallback(), Hooks()])
    assert launched == []


def test_the_trainers_own_filter_is_back_after_each_step_and_epoch(tmp_path: Path, tokenizer: Any) -> None:
    class Looks(TrainerCallback):
        def __init__(self) -> None:
            self.seen: set[bool] = set()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.add(args.logging_nan_inf_filter)

        on_epoch_end = on_step_end

    class StopsBetween(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step == 3

    looks = Looks()
    trainer = trained(
        tmp_path,
        tokenizer,
        callbacks=[SelfHealingCallback(), looks, StopsBetween()],
        max_steps=5,
        gradient_accumulation_steps=2,
    )
    assert looks.seen == {True}
    assert trainer.args.logging_nan_inf_filter
