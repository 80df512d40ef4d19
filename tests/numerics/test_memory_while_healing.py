"""Memory runs out in what is done beside training: the run is healed all the same, or ends with a postmortem."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    OutputFault,
    PoisonToken,
    WeightFault,
    a_few_nans,
    assert_same_weights,
    journal,
    sft_trainer,
    weights,
)
from safetensors.torch import load_file
from transformers import TrainerCallback

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    UnrecoverableTrainingError,
)
from self_healing.healers.numerics.judge import StepJudge
from self_healing.healers.numerics.nonfinite import NonfiniteHealer
from self_healing.hf import view
from self_healing.hf.step import Window
from self_healing.rollback.ring import StepReplayer


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


class States(TrainerCallback):
    """The weights that training was in, step by step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append({name: value.detach().clone() for name, value in model.state_dict().items()})

    on_step_end = on_step_begin

    def include(self, found: dict[str, torch.Tensor]) -> bool:
        return any(all(torch.equal(value, state[name]) for name, value in found.items()) for state in self.seen)


# ---- what is wrong with the run ----

STORY = [*TEXTS[:9], f"{TEXTS[9]} {POISON_WORD}", *TEXTS[10:]]


@dataclass(frozen=True, slots=True)
class Case:
    """A run in which something is wrong, and since when."""

    trainer: Any
    struck: Callable[[], bool]


def transient(directory: Path, tokenizer: Any, **config: Any) -> Case:
    trainer = sft_trainer(directory, tokenizer, callbacks=[SelfHealingCallback(HealingConfig(**config))], max_steps=8)
    fault = OutputFault(trainer.model, lambda n: n == 9)
    return Case(trainer, lambda: bool(fault.fired))


def poisoned(directory: Path, tokenizer: Any, **config: Any) -> Case:
    config = {"on_spike": "warn", "on_divergence": "warn", **config}
    trainer = sft_trainer(
        directory, tokenizer, texts=STORY, callbacks=[SelfHealingCallback(HealingConfig(**config))], max_steps=8
    )
    fault = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    return Case(trainer, lambda: bool(fault.fired))


def nan_weights(directory: Path, tokenizer: Any, **config: Any) -> Case:
    fault = WeightFault(a_few_nans, 18)
    config = {"snapshot_interval": 5, **config}
    callbacks = [SelfHealingCallback(HealingConfig(**config)), fault]
    trainer = sft_trainer(directory, tokenizer, callbacks=callbacks, max_steps=22)
    return Case(trainer, lambda: bool(fault.fired))


def healthy(directory: Path, tokenizer: Any, **config: Any) -> Case:
    callbacks = [SelfHealingCallback(HealingConfig(snapshot_interval=5, **config))]
    trainer = sft_trainer(directory, tokenizer, callbacks=callbacks, max_steps=16)
    return Case(trainer, lambda: trainer.state.global_step >= 4)


# ---- where memory runs out ----


@dataclass(frozen=True, slots=True)
class Place:
    """A function of ours, and what becomes of a run in which it runs out of memory each time."""

    case: Callable[..., Case]
    holder: Any
    name: str
    without: Literal["ended", "stopped"]


PLACES = {
    "computing again: the numbers that judge it": Place(transient, Window, "loss_and_norm", "stopped"),
    "poison rows: the search for NaN": Place(poisoned, view, "nonfinite_tensors", "stopped"),
    "NaN weights: applying steps again": Place(nan_weights, StepReplayer, "_loss", "ended"),
}


def train(case: Case) -> dict[str, Any] | None:
    """The postmortem of a run that was stopped; `None` of one that came to its end."""
    try:
        case.trainer.train()
    except UnrecoverableTrainingError as error:
        return dict(json.loads(Path(error.postmortem or "").read_text()))
    assert case.trainer.state.global_step == case.trainer.state.max_steps
    return None


def run_out(
    place: Place, times: int, directory: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[NoRoom, States, dict[str, torch.Tensor], dict[str, Any] | None]:
    case, memory, states = place.case(directory, tokenizer), NoRoom(times), States()
    case.trainer.add_callback(states)
    memory.strike(monkeypatch, place.holder, place.name, case.struck)
    postmortem = train(case)
    return memory, states, weights(case.trainer), postmortem


@pytest.mark.parametrize("name", PLACES)
def test_that_runs_out_each_time_leaves_sound_weights(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, name: str
) -> None:
    place = PLACES[name]
    memory, states, found, postmortem = run_out(place, ALWAYS, tmp_path, tokenizer, monkeypatch)

    assert memory.fired >= 2
    assert "has switched itself off" not in caplog.text
    assert ("ended" if postmortem is None else "stopped") == place.without
    checkpoint = None if postmortem is None else postmortem["emergency_checkpoint"]
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
    assert "memory ran out, twice, while self_healing diagnosed" in postmortem["verdict"]
    assert "Tried to allocate 2.50 GiB" in postmortem["error"]["message"]
    (detected,) = [each for each in journal(tmp_path, "detected") if each["symptom"] == "out_of_memory"]
    assert detected["evidence"]["place"] == "healing"
    assert postmortem["emergency_checkpoint"], "the step before is whole"


def test_without_memory_beside_a_step_that_is_sound_training_goes_on(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    place = Place(healthy, StepJudge, "_judge_finite", "ended")
    memory, _, found, postmortem = run_out(place, 3, tmp_path / "run", tokenizer, monkeypatch)

    assert memory.fired == 3
    assert postmortem is None
    assert "checking resumes with the next one" in caplog.text
    assert "has switched itself off" not in caplog.text
    undisturbed = healthy(tmp_path / "undisturbed", tokenizer)
    train(undisturbed)
    assert_same_weights(found, weights(undisturbed.trainer))


@pytest.mark.parametrize("on_nonfinite", ["heal", "watch"])
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
    assert finite == (on_nonfinite != "watch")
