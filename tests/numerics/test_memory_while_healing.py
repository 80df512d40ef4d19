"""Memory runs out in what is done beside training: the run is healed all the same, or ends with a postmortem."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    OutputFault,
    PoisonToken,
    assert_same_weights,
    journal,
    plain_trainer,
    sft_trainer,
    tiny_model,
    weights,
)
from safetensors.torch import load_file
from test_memory import HalfWay, TooManyRows
from test_resume_trial import damage_weights
from transformers import TrainerCallback

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
)
from self_healing.healers.numerics.judge import StepJudge
from self_healing.healers.numerics.nonfinite import NonfiniteHealer
from self_healing.healers.oom.microbatches import Microbatches
from self_healing.hf import experiments, trainer_state, view
from self_healing.hf import step as fewer_rows
from self_healing.hf import step as step_record
from self_healing.hf.experiments import EarlierSteps, StepExperiments
from self_healing.hf.step import Window
from self_healing.hf.training_step import AccelerateEngine
from self_healing.rollback import ring
from self_healing.rollback.ring import SnapshotRing
from self_healing.rollback.snapshots import Snapshot


ALWAYS = 10**6


class NoRoom:
    """Calls of one function run out of memory from when something is wrong, so many times."""

    def __init__(self, times: int) -> None:
        self.times, self.fired = times, 0

    def strike(self, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, armed: Callable[[], bool]) -> None:
        original = getattr(holder, name)

        def run_out(*args: Any, **kwargs: Any) -> Any:
            if armed() and self.fired < self.times:
                self.fired += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
            return original(*args, **kwargs)

        monkeypatch.setattr(holder, name, run_out)


class ChangedWeights(TrainerCallback):
    """Spoils weights in place once a step is finished."""

    def __init__(self, change: Callable[[Any], None], step: int) -> None:
        self.change, self.step, self.fired = change, step, 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step and not self.fired:
            self.fired = 1
            with torch.no_grad():
                self.change(model)


class States(TrainerCallback):
    """The weights that training was in, step by step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append({name: value.detach().clone() for name, value in model.state_dict().items()})

    on_step_end = on_step_begin

    def include(self, found: dict[str, torch.Tensor]) -> bool:
        return any(all(torch.equal(value, state[name]) for name, value in found.items()) for state in self.seen)


def a_few_nans(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.view(-1)[:3] = float("nan")


def scrambled(model: Any) -> None:
    weight = model.lm_head.weight
    weight.mul_(50).add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))


# ---- what is wrong with the run ----

STORY = [*TEXTS[:9], f"{TEXTS[9]} {POISON_WORD}", *TEXTS[10:]]


@dataclass(frozen=True, slots=True)
class Case:
    """A run in which something is wrong, and since when."""

    trainer: Any
    struck: Callable[[], bool]
    resume_from: str | None = None


def transient(directory: Path, tokenizer: Any, **config: Any) -> Case:
    trainer = sft_trainer(directory, tokenizer, callbacks=[SelfHealingCallback(HealingConfig(**config))], max_steps=8)
    fault = OutputFault(trainer.model, lambda n: n == 9)
    return Case(trainer, lambda: fault.fired > 0)


def poisoned(directory: Path, tokenizer: Any, **config: Any) -> Case:
    config = {"on_spike": "warn", "on_divergence": "warn", **config}
    trainer = sft_trainer(
        directory, tokenizer, texts=STORY, callbacks=[SelfHealingCallback(HealingConfig(**config))], max_steps=8
    )
    fault = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    return Case(trainer, lambda: fault.fired > 0)


def nan_weights(directory: Path, tokenizer: Any, **config: Any) -> Case:
    fault = ChangedWeights(a_few_nans, 18)
    config = {"snapshot_interval": 5, **config}
    callbacks = [SelfHealingCallback(HealingConfig(**config)), fault]
    trainer = sft_trainer(directory, tokenizer, callbacks=callbacks, max_steps=22)
    return Case(trainer, lambda: fault.fired > 0)


def nan_before_a_save(directory: Path, tokenizer: Any, **config: Any) -> Case:
    fault = ChangedWeights(a_few_nans, 18)
    callbacks = [fault, SelfHealingCallback(HealingConfig(snapshot_interval=5, **config))]
    trainer = sft_trainer(
        directory, tokenizer, callbacks=callbacks, max_steps=22, save_strategy="steps", save_steps=18
    )
    return Case(trainer, lambda: fault.fired > 0)


def nan_at_the_end(directory: Path, tokenizer: Any, **config: Any) -> Case:
    fault = ChangedWeights(a_few_nans, 20)
    callbacks = [fault, SelfHealingCallback(HealingConfig(snapshot_interval=5, **config))]
    trainer = sft_trainer(directory, tokenizer, callbacks=callbacks, max_steps=20)
    return Case(trainer, lambda: fault.fired > 0)


def scrambled_layer(directory: Path, tokenizer: Any, **config: Any) -> Case:
    fault = ChangedWeights(scrambled, 60)
    callbacks = [SelfHealingCallback(HealingConfig(snapshot_interval=10, **config)), fault]
    trainer = plain_trainer(
        directory, tokenizer, callbacks=callbacks, max_steps=75, learning_rate=1e-2, lr_scheduler_type="constant"
    )
    return Case(trainer, lambda: fault.fired > 0)


def too_high_a_rate(directory: Path, tokenizer: Any, **config: Any) -> Case:
    trainer = plain_trainer(
        directory,
        tokenizer,
        callbacks=[SelfHealingCallback(HealingConfig(**config))],
        max_steps=40,
        learning_rate=3.0,
        lr_scheduler_type="constant",
    )
    return Case(trainer, lambda: True)


def wrong_from_the_start(directory: Path, tokenizer: Any, **config: Any) -> Case:
    trainer = sft_trainer(directory, tokenizer, callbacks=[SelfHealingCallback(HealingConfig(**config))], max_steps=4)
    fault = OutputFault(trainer.model, lambda _: True)
    return Case(trainer, lambda: fault.fired > 0)


def resumed_from_damage(directory: Path, tokenizer: Any, **config: Any) -> Case:
    steps = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4}
    SelfHealingTrainer(sft_trainer(directory, tokenizer, **steps)).train()
    damaged = directory / "checkpoint-8"
    damage_weights(damaged)
    (directory / "healing_events.jsonl").unlink()
    callbacks = [SelfHealingCallback(HealingConfig(**config))]
    trainer = sft_trainer(directory, tokenizer, callbacks=callbacks, **steps)
    return Case(trainer, lambda: bool(journal(directory, "detected")), str(damaged))


def harder_data(directory: Path, tokenizer: Any, **config: Any) -> Case:
    model, easy = tiny_model(tokenizer), [TEXTS[0]] * 8
    sft_trainer(directory / "warm", tokenizer, model=model, texts=easy, max_steps=60, learning_rate=1e-2).train()
    trainer = sft_trainer(
        directory,
        tokenizer,
        model=model,
        texts=easy * 6 + [" ".join(reversed(text.split())) for text in TEXTS] * 4,
        max_steps=25,
        learning_rate=1e-5,
        train_sampling_strategy="sequential",
        callbacks=[SelfHealingCallback(HealingConfig(on_spike="warn", **config))],
    )
    return Case(trainer, lambda: True)


def half_updated(directory: Path, tokenizer: Any, **config: Any) -> Case:
    trainer = sft_trainer(directory, tokenizer, callbacks=[SelfHealingCallback(HealingConfig(**config))], max_steps=14)
    trainer.optimizer = HalfWay(trainer.model.parameters(), lr=1e-3, fails_at=10)
    return Case(trainer, lambda: trainer.optimizer.optimizer.times == 0)


def too_large(directory: Path, tokenizer: Any, **config: Any) -> Case:
    """What is called is no model of which it is known how its loss adds up."""
    trainer = plain_trainer(
        directory, tokenizer, dropout=0.0, callbacks=[SelfHealingCallback(HealingConfig(**config))]
    )
    trainer.model.register_forward_hook(lambda *_: None)
    memory = TooManyRows(trainer.model, 2)
    return Case(trainer, lambda: memory.fired > 0)


def healthy(directory: Path, tokenizer: Any, **config: Any) -> Case:
    callbacks = [SelfHealingCallback(HealingConfig(snapshot_interval=5, **config))]
    trainer = sft_trainer(directory, tokenizer, callbacks=callbacks, max_steps=16)
    return Case(trainer, lambda: trainer.state.global_step >= 4)


# ---- where memory runs out ----


@dataclass(frozen=True, slots=True)
class Place:
    """
    A function of ours, and what becomes of a run in which it runs out of memory each time.

    `repairs`: whether it is by this that weights are put back, so that without it they cannot be.
    """

    case: Callable[..., Case]
    holder: Any
    name: str
    without: Literal["ended", "stopped"]
    repairs: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


PLACES = {
    "computing again: the state it begins from": Place(transient, Window, "rewind", "stopped"),
    "computing again: forward and backward": Place(transient, Window, "compute", "stopped"),
    "computing again: the same, not healed in training": Place(
        transient, Window, "compute", "stopped", settings={"on_oom": "raise"}
    ),
    "computing again: the numbers that judge it": Place(transient, step_record, "as_tensor", "stopped"),
    "computing again: whether that repeats": Place(transient, StepExperiments, "_compute_once_more", "stopped"),
    "poison rows: the search for NaN": Place(poisoned, view, "nonfinite_tensors", "stopped"),
    "poison rows: picking some": Place(poisoned, experiments, "select_rows", "ended"),
    "poison rows: a probe": Place(poisoned, StepExperiments, "_probe_once", "ended"),
    "poison rows: what is left": Place(poisoned, fewer_rows, "_count_items", "stopped"),
    "NaN weights: the search for NaN": Place(nan_weights, view, "nonfinite_tensors", "stopped"),
    "NaN weights: putting a state back": Place(nan_weights, SnapshotRing, "restore", "stopped", repairs=True),
    "NaN weights: applying steps again": Place(nan_weights, EarlierSteps, "_loss", "ended"),
    "NaN weights: the update of such a step": Place(nan_weights, AccelerateEngine, "_clip", "ended"),
    "NaN weights: the buffers they leave": Place(
        nan_weights, trainer_state.Bookkeeper, "with_buffers_of_now", "ended"
    ),
    "before a save: the search for NaN": Place(nan_before_a_save, view, "nonfinite_tensors", "stopped"),
    "before a save: putting a state back": Place(nan_before_a_save, SnapshotRing, "restore", "stopped", repairs=True),
    "before a save: applying steps again": Place(nan_before_a_save, EarlierSteps, "_loss", "ended"),
    "at the end: the search for NaN": Place(nan_at_the_end, view, "nonfinite_tensors", "stopped"),
    "at the end: putting a state back": Place(nan_at_the_end, SnapshotRing, "restore", "stopped", repairs=True),
    "at the end: applying steps again": Place(nan_at_the_end, EarlierSteps, "_loss", "ended"),
    "trusted weights: setting the state aside": Place(scrambled_layer, SnapshotRing, "take", "ended"),
    "trusted weights: putting them in place": Place(scrambled_layer, SnapshotRing, "restore", "stopped"),
    "trusted weights: the batch with them": Place(scrambled_layer, Window, "compute", "stopped"),
    "learning rates: a step with one": Place(too_high_a_rate, EarlierSteps, "_loss", "ended"),
    "learning rates: its update": Place(too_high_a_rate, AccelerateEngine, "_clip", "stopped"),
    "learning rates: the state they begin from": Place(too_high_a_rate, SnapshotRing, "restore", "stopped"),
    "older checkpoints: loading one": Place(resumed_from_damage, ring, "reload_checkpoint", "stopped"),
    "older checkpoints: setting the state aside": Place(resumed_from_damage, SnapshotRing, "take", "stopped"),
    "older checkpoints: the batch with one": Place(resumed_from_damage, Window, "begin_from_here", "stopped"),
    "harder data: the control batch": Place(harder_data, EarlierSteps, "_loss", "ended"),
    "half an update: putting a state back": Place(half_updated, SnapshotRing, "restore", "stopped", repairs=True),
    "half an update: applying steps again": Place(half_updated, EarlierSteps, "_loss", "ended"),
    "half an update: the copy before it": Place(
        half_updated, SnapshotRing, "restore", "stopped", True, {"optimizer_step_backup": True, "snapshots": False}
    ),
    "splitting: what a step begins from": Place(too_large, Window, "compute_again_so_far", "stopped"),
    "splitting: finding out what rows count for": Place(too_large, Microbatches, "_computed", "stopped"),
    "where it begins": Place(wrong_from_the_start, StepExperiments, "_origin_in", "stopped"),
    "a snapshot: taking it": Place(healthy, SnapshotRing, "take", "ended"),
    "a snapshot: searching it": Place(healthy, Snapshot, "nonfinite", "ended"),
}


def train(case: Case) -> dict[str, Any] | None:
    """The postmortem of a run that was stopped; `None` of one that came to its end."""
    try:
        case.trainer.train(resume_from_checkpoint=case.resume_from)
    except UnrecoverableTrainingError as error:
        return dict(json.loads(Path(error.postmortem or "").read_text()))
    assert case.trainer.state.global_step == case.trainer.state.max_steps
    return None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[..., dict[str, torch.Tensor]]:
    """The weights at the end of a case in which memory never runs out."""
    known: dict[Any, dict[str, torch.Tensor]] = {}

    def weights_of(build: Callable[..., Case]) -> dict[str, torch.Tensor]:
        if build not in known:
            case = build(tmp_path_factory.mktemp("undisturbed"), tokenizer)
            train(case)
            known[build] = weights(case.trainer)
        return known[build]

    return weights_of


QUICK = {
    "computing again: the same, not healed in training",
    "poison rows: the search for NaN",
    "NaN weights: applying steps again",
    "at the end: the search for NaN",
}
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLACES]


def run_out(
    place: Place, times: int, directory: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[NoRoom, States, dict[str, torch.Tensor], dict[str, Any] | None]:
    case, memory, states = place.case(directory, tokenizer, **place.settings), NoRoom(times), States()
    case.trainer.add_callback(states)
    memory.strike(monkeypatch, place.holder, place.name, case.struck)
    postmortem = train(case)
    return memory, states, weights(case.trainer), postmortem


@pytest.mark.parametrize("name", EACH)
def test_that_runs_out_once_leaves_no_trace(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, undisturbed: Any, caplog: Any, name: str
) -> None:
    place = PLACES[name]
    expected = undisturbed(place.case)
    memory, _, found, _ = run_out(place, 1, tmp_path, tokenizer, monkeypatch)

    assert memory.fired == 1
    assert "has switched itself off" not in caplog.text
    assert_same_weights(found, expected)


@pytest.mark.parametrize("name", EACH)
def test_that_runs_out_each_time_leaves_sound_weights(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, name: str
) -> None:
    place = PLACES[name]
    memory, states, found, postmortem = run_out(place, ALWAYS, tmp_path, tokenizer, monkeypatch)

    assert memory.fired >= 2
    assert "has switched itself off" not in caplog.text
    assert ("ended" if postmortem is None else "stopped") == place.without
    checkpoint = None if postmortem is None else postmortem["emergency_checkpoint"]
    if place.repairs:
        # There is nothing to put in their place, and nothing of them is offered to be resumed from.
        assert checkpoint is None
        return
    assert all(torch.isfinite(value).all() for value in found.values())
    assert states.include(found), "weights of the run, not of an experiment"
    if checkpoint is not None:
        saved = load_file(Path(checkpoint) / "model.safetensors")
        assert all(torch.equal(value, found[key]) for key, value in saved.items())


def test_a_postmortem_says_what_could_not_be_done(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PLACES["computing again: the numbers that judge it"]
    *_, postmortem = run_out(place, ALWAYS, tmp_path, tokenizer, monkeypatch)

    assert postmortem is not None
    assert postmortem["failure"] == "out_of_memory"
    assert "memory ran out, twice, while self_healing looked into" in postmortem["verdict"]
    assert "Tried to allocate 2.50 GiB" in postmortem["error"]["message"]
    (detected,) = [each for each in journal(tmp_path, "detected") if each["symptom"] == "out_of_memory"]
    assert detected["evidence"]["place"] == "healing"
    assert postmortem["emergency_checkpoint"], "the step before is whole"


def test_without_memory_beside_a_step_that_is_sound_training_goes_on(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, undisturbed: Any, caplog: Any
) -> None:
    place = Place(healthy, StepJudge, "_judge_finite", "ended")
    memory, _, found, postmortem = run_out(place, 3, tmp_path, tokenizer, monkeypatch)

    assert memory.fired == 3
    assert postmortem is None
    assert "the next one is watched again" in caplog.text
    assert "has switched itself off" not in caplog.text
    assert_same_weights(found, undisturbed(healthy))


@pytest.mark.parametrize("on_nonfinite", ["heal", "skip", "warn"])
def test_a_failure_of_ours_lets_no_step_through_that_would_be_left_out(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, on_nonfinite: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("a mistake of ours")

    case = transient(tmp_path, tokenizer, on_nonfinite=on_nonfinite)
    monkeypatch.setattr(NonfiniteHealer, "heal", fail)
    train(case)

    assert "has switched itself off" in caplog.text
    finite = all(torch.isfinite(value).all() for value in weights(case.trainer).values())
    assert finite == (on_nonfinite != "warn")


def test_a_run_in_which_nothing_is_healed_is_not_stopped_for_memory(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    numbers = PLACES["computing again: the numbers that judge it"]
    place = Place(numbers.case, numbers.holder, numbers.name, "ended", settings={"on_nonfinite": "warn"})
    memory, _, _, postmortem = run_out(place, 4, tmp_path, tokenizer, monkeypatch)

    assert memory.fired == 4
    assert postmortem is None
    assert "has switched itself off" not in caplog.text


def test_the_state_a_step_begins_from_is_copied_at_the_second_attempt(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, undisturbed: Any, caplog: Any
) -> None:
    place = Place(healthy, trainer_state, "_clone", "ended")
    memory, _, found, _ = run_out(place, 1, tmp_path, tokenizer, monkeypatch)

    assert memory.fired == 1
    assert "has switched itself off" not in caplog.text
    assert_same_weights(found, undisturbed(healthy))
