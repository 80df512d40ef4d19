"""Copies of the weights beside the model: what no rollback reaches is reported, once, and nothing else is."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TRAINERS, journal, sft_trainer, slowly, weights
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from transformers import TrainerCallback
from trl import BEMACallback, SFTTrainer

from self_healing import HealingConfig, HealingReport, SelfHealingCallback
from self_healing.healers.numerics import nonfinite


NAN, INF = float("nan"), float("inf")


class WeightFault(TrainerCallback):
    """Writes a value into the weights in place once a step is finished: the callbacks after it copy it."""

    def __init__(self, step: int, value: float = NAN) -> None:
        self.step, self.value = step, value

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight.view(-1)[:3] = self.value


class Keeper(TrainerCallback):
    """Keeps something, made anew of it and the model after each step."""

    def __init__(self, update: Callable[[Any, Any], Any], kept: Any = None) -> None:
        self.update, self.kept = update, kept

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            self.kept = self.update(self.kept, model)


class AveragedTrainer(SFTTrainer):
    """Has an average of its own."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.average = averaged(getattr(self, "average", None), self.model)
        return super().training_step(*args, **kwargs)


@dataclass(slots=True)
class Shelf:
    models: list[Any]


def averaged(kept: Any, model: Any) -> dict[str, torch.Tensor]:
    now = {name: each.detach() for name, each in model.named_parameters()}
    return {name: 0.9 * (kept or now)[name] + 0.1 * each for name, each in now.items()}


def swa(kept: Any, model: Any) -> AveragedModel:
    kept = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9)) if kept is None else kept
    kept.update_parameters(model)
    return kept


def shelved(kept: Any, model: Any) -> Shelf:
    return Shelf([*([] if kept is None else kept.models), copy.deepcopy(model)])


def flat(kept: Any, model: Any) -> torch.Tensor:
    now = parameters_to_vector(model.parameters())
    return now if kept is None else 0.9 * kept + 0.1 * now


def bound(kept: Any, model: Any) -> Any:
    """Only a method of what has the copy is kept."""
    average = swa(None if kept is None else kept.__self__, model)
    return average.update_parameters


def train(directory: Path, tokenizer: Any, *callbacks: Any, steps: int = 6, **options: Any) -> Any:
    healing = SelfHealingCallback(HealingConfig())
    options |= {"max_steps": steps, "gradient_accumulation_steps": 1}
    trainer = sft_trainer(directory, tokenizer, callbacks=[healing, *callbacks], **options)
    trainer.train()
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())
    return trainer


def reported(directory: Path) -> list[tuple[int, str, str]]:
    """Step, cause and last outcome of each incident about a copy."""
    outcome = {event["incident"]: event["outcome"] for event in journal(directory, "outcome")}
    found = [event for event in journal(directory, "diagnosed") if event["failure"] == "corrupted_copy"]
    return [(event["step"], event["cause"].removeprefix("NaN/Inf in "), outcome[event["incident"]]) for event in found]


# ---- what turned NaN with the weights, and is not rolled back with them ----


@pytest.mark.parametrize("update", [averaged, shelved, *slowly(swa, flat, bound)])
def test_a_copy_that_a_callback_keeps_is_reported_after_the_rollback(
    update: Any, tmp_path: Path, tokenizer: Any
) -> None:
    train(tmp_path, tokenizer, WeightFault(3), Keeper(update))
    assert reported(tmp_path) == [(4, "Keeper.kept", "reported")]


def test_the_one_of_trl_is_reported_with_what_is_saved_of_it(tmp_path: Path, tokenizer: Any) -> None:
    train(tmp_path, tokenizer, WeightFault(3), BEMACallback(update_freq=1))
    assert sorted(reported(tmp_path)) == [
        (4, "BEMACallback.ema_params", "reported"),
        (4, "BEMACallback.running_model", "reported"),
    ]


def test_one_that_the_trainer_keeps_is_reported(tmp_path: Path, tokenizer: Any) -> None:
    train(tmp_path, tokenizer, WeightFault(3), trainer_class=AveragedTrainer)
    assert reported(tmp_path) == [(4, "AveragedTrainer.average", "reported")]


def test_inf_is_reported_as_well(tmp_path: Path, tokenizer: Any) -> None:
    train(tmp_path, tokenizer, WeightFault(3, INF), Keeper(averaged))
    assert reported(tmp_path) == [(4, "Keeper.kept", "reported")]


def test_what_turned_nan_with_the_last_step_is_reported_at_the_end(tmp_path: Path, tokenizer: Any) -> None:
    train(tmp_path, tokenizer, WeightFault(6), Keeper(averaged))
    assert reported(tmp_path) == [(6, "Keeper.kept", "reported")]


def test_what_only_the_copy_has_is_reported_at_the_end(tmp_path: Path, tokenizer: Any) -> None:
    def divided_by_zero(kept: Any, model: Any) -> Any:
        return {name: each.detach() * 0 / 0 for name, each in model.named_parameters()}

    train(tmp_path, tokenizer, Keeper(divided_by_zero))
    assert reported(tmp_path) == [(6, "Keeper.kept", "reported")]


def test_a_person_reads_which_copy_it_is_and_not_to_use_it(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "self_healing"):
        train(tmp_path, tokenizer, WeightFault(3), Keeper(averaged))
    lines = [record.getMessage() for record in caplog.records]
    assert "step 4: NaN/Inf in Keeper.kept -> only reported; 0 steps lost" in lines
    (told,) = [line for line in lines if line.startswith("Step 4: nonfinite copy; cause: NaN/Inf in Keeper.kept.")]
    assert "What to do: Do not use this copy" in told
    (incident,) = [
        each for each in HealingReport.from_run_dir(tmp_path).incidents if each["symptom"] == "nonfinite_copy"
    ]
    assert (incident["outcome"], incident["evidence"]) == ("reported", {"copied": 21, "not_finite": 1})


# ---- what is no reason to report anything ----


def test_a_copy_made_anew_in_every_step_is_healed_with_the_model(tmp_path: Path, tokenizer: Any) -> None:
    train(tmp_path, tokenizer, WeightFault(3), Keeper(lambda kept, model: copy.deepcopy(model.state_dict())))
    assert reported(tmp_path) == []


def test_one_that_is_made_anew_later_has_recovered_by_the_end(tmp_path: Path, tokenizer: Any) -> None:
    class EveryThird(Keeper):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step % 3 == 0:
                super().on_step_end(args, state, control, model)

    train(tmp_path, tokenizer, WeightFault(3), EveryThird(lambda kept, model: copy.deepcopy(model)))
    assert reported(tmp_path) == [(4, "EveryThird.kept", "self_recovered")]


@pytest.mark.parametrize("step", [15, 20])
def test_a_reference_model_that_follows_is_rolled_back_and_not_reported(
    step: int, tmp_path: Path, tokenizer: Any
) -> None:
    callbacks = [SelfHealingCallback(HealingConfig(snapshot_interval=5, snapshot_verify_steps=2)), WeightFault(step)]
    following = {"sync_ref_model": True, "ref_model_sync_steps": 1, "gradient_accumulation_steps": 1}
    trainer = TRAINERS["DPOTrainer"](tmp_path, tokenizer, callbacks=callbacks, max_steps=20, **following)
    trainer.train()
    assert all(torch.isfinite(each).all() for each in trainer.ref_model.parameters())
    assert reported(tmp_path) == []


@pytest.mark.parametrize("fault", [(), (WeightFault(3),)], ids=["healthy", "rolled_back"])
def test_what_is_not_finite_on_purpose_is_not_reported(fault: Any, tmp_path: Path, tokenizer: Any) -> None:
    class WithMask(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 32)
            self.register_buffer("mask", torch.full((32, 32), -INF).triu(1), persistent=False)

    # Of the shapes that weights have.
    keepers = [
        Keeper(lambda kept, model: kept, kept)
        for kept in (
            torch.full((32, 32), -INF).triu(1),
            torch.full((32, 32), INF),
            torch.full((32,), NAN),
            {"losses": torch.full((48,), NAN), "loss": torch.tensor(NAN), "rows": [NAN, 1.0]},
            WithMask(),
            torch.full((5, 7), NAN),
            torch.zeros(32, 32, device="meta"),
            torch.zeros(32, 32, dtype=torch.int8),
            torch.sparse_coo_tensor(size=(32, 32)),
        )
    ]
    train(tmp_path, tokenizer, *fault, *keepers)
    assert reported(tmp_path) == []


# ---- looking ----


def test_what_refuses_to_be_looked_at_hides_nothing_else(tmp_path: Path, tokenizer: Any) -> None:
    class Refusing:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("not yours")

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("not yours")

    endless: list[Any] = [Refusing, print, torch, partial(print)]
    endless.append(endless)
    keep = partial(Keeper, lambda kept, model: kept)
    trainer = train(tmp_path, tokenizer, WeightFault(3), keep(Refusing()), keep(endless), Keeper(averaged))
    assert reported(tmp_path) == [(4, "Keeper.kept", "reported")]
    assert not any("switched itself off" in str(event) for event in journal(tmp_path))
    assert trainer.state.global_step == 6


def test_one_that_is_nested_in_too_much_costs_no_more_than_it_may(tmp_path: Path, tokenizer: Any) -> None:
    rows = [[float(number)] * 10 for number in range(200_000)]
    train(tmp_path, tokenizer, WeightFault(3), Keeper(lambda kept, model: kept, rows), Keeper(averaged))
    assert reported(tmp_path) == [(4, "Keeper.kept", "reported")]


@pytest.mark.parametrize(("fault", "looks"), [((), 1), ((WeightFault(3),), 2)], ids=["healthy", "rolled_back"])
def test_they_are_looked_at_after_a_rollback_and_at_the_end_alone(
    fault: Any, looks: int, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    look = nonfinite.nonfinite_copies
    monkeypatch.setattr(nonfinite, "nonfinite_copies", lambda trainer: looked.append(trainer) or look(trainer))
    train(tmp_path, tokenizer, *fault, Keeper(averaged))
    assert len(looked) == looks
