"""An emergency checkpoint holds what its step still owed, and at no time is it gone or half written."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    RaisingAt,
    assert_same_weights,
    journal,
    logged,
    plain_trainer,
    sft_trainer,
    tiny_model,
    weights,
)
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl import SFTTrainer

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.checkpoints.marker import checkpoints_in, load_marker
from self_healing.checkpoints.vetting import vet
from self_healing.hf.trainer_state import Pending


STEPS = {"max_steps": 6, "logging_steps": 2}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    trainer = sft_trainer(tmp_path_factory.mktemp("clean"), tokenizer, **STEPS)
    trainer.train()
    return trainer


def killed_while_it_waits(directory: Path, tokenizer: Any, event: str, step: int, **arguments: Any) -> Path:
    """What a process leaves that is killed after its emergency checkpoint, while it waits for another attempt."""
    left = directory / "killed"

    def wait(_: float) -> None:
        shutil.copytree(directory / "run", left)

    trainer = sft_trainer(directory / "run", tokenizer, callbacks=[RaisingAt(event, step)], **{**STEPS, **arguments})
    SelfHealingTrainer(trainer, sleep=wait).train()
    return left


def taken_up(directory: Path, tokenizer: Any, **arguments: Any) -> Any:
    trainer = sft_trainer(directory, tokenizer, **{**STEPS, **arguments})
    SelfHealingTrainer(trainer).train(resume_from_checkpoint="auto")
    return trainer


@pytest.mark.parametrize(
    ("event", "step"),
    [
        ("on_step_end", 4),
        pytest.param("on_log", 4, marks=pytest.mark.slow),
        pytest.param("on_step_end", 6, marks=pytest.mark.slow),
        pytest.param("on_step_begin", 3, marks=pytest.mark.slow),
    ],
)
def test_the_next_process_logs_what_the_interrupted_step_still_owed(
    tmp_path: Path, tokenizer: Any, clean: Any, event: str, step: int
) -> None:
    resumed = taken_up(killed_while_it_waits(tmp_path, tokenizer, event, step), tokenizer)
    assert logged(resumed) == logged(clean)
    assert_same_weights(weights(resumed), weights(clean))


def test_the_next_process_stops_where_the_run_was_to_stop(tmp_path: Path, tokenizer: Any) -> None:
    class Enough(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 4

    def wait(_: float) -> None:
        shutil.copytree(tmp_path / "run", tmp_path / "killed")

    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[Enough(), RaisingAt("on_log", 4)], **STEPS)
    SelfHealingTrainer(trainer, sleep=wait).train()
    assert trainer.state.global_step == 4
    resumed = taken_up(tmp_path / "killed", tokenizer)
    assert resumed.state.global_step == 4
    assert logged(resumed) == logged(trainer)


def test_a_second_exception_in_one_step_does_not_cost_the_checkpoint_of_the_first(
    tmp_path: Path, tokenizer: Any
) -> None:
    class FullTheSecondTime(SFTTrainer):
        saves = 0

        def _save_rng_state(self, output_dir: str) -> None:
            self.saves += 1
            if self.saves == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            super()._save_rng_state(output_dir)

    faults = [RaisingAt("on_step_begin", 3), RaisingAt("on_step_begin", 3)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=faults, trainer_class=FullTheSecondTime, **STEPS)
    left: list[bool] = []

    def wait(_: float) -> None:
        left.append(vet(tmp_path / "emergency" / "checkpoint-3").usable)

    SelfHealingTrainer(trainer, HealingConfig(max_recovery_attempts=9), sleep=wait).train()
    assert left[0]
    assert [path for path in left if not path] == []


def test_kept_checkpoints_give_way_to_an_emergency_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    class FullOnce(SFTTrainer):
        def _save_rng_state(self, output_dir: str) -> None:
            # One of them shares all it holds with a regular one, and would free nothing.
            if "emergency" in output_dir and len(list(tmp_path.glob("last-known-good/checkpoint-*"))) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            super()._save_rng_state(output_dir)

    arguments = {"max_steps": 24, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    faults = [RaisingAt("on_step_begin", 22)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=faults, trainer_class=FullOnce, **arguments)
    healer = SelfHealingTrainer(trainer, sleep=lambda _: None)
    healer.train()
    assert healer.get_report().steps_lost == 0
    (saved,) = [event for event in journal(tmp_path, "action") if event["action"] == "emergency_checkpoint"]
    assert saved["happened"]


def test_the_marker_says_what_is_pending(tmp_path: Path, tokenizer: Any) -> None:
    left = killed_while_it_waits(tmp_path, tokenizer, "on_step_end", 4)
    (checkpoint,) = checkpoints_in(left)
    marker = load_marker(checkpoint)
    assert marker is not None
    pending = Pending.from_dict(marker["bookkeeping"]["pending"])
    assert (pending.events, pending.stop) == (True, False)
    assert pending.grad_norm > 0


# ---- what JSON or safetensors refuses ----


class Mute:
    """A value that has no text either."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __deepcopy__(self, _: Any) -> Mute:
        return self


ITSELF: list[Any] = [1]
ITSELF.append(ITSELF)
ODD: dict[str, tuple[Any, Any]] = {
    "itself": (ITSELF, [1, "<list within itself>"]),
    "no text": (Mute(), "<Mute>"),
    "array": (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    "number of numpy": (np.float32(0.5), 0.5),
    "tensor with a graph": (torch.ones(2, requires_grad=True) * 2, [2.0, 2.0]),
    "0-d tensor": (torch.tensor(3), 3),
    "set": ({"b", "a"}, ["a", "b"]),
    "path": (Path("/data/set"), "/data/set"),
    "date": (datetime.date(2024, 2, 1), "2024-02-01"),
    "half a number": (Fraction(1, 2), "1/2"),
    "keys of several kinds": ({1: "a", "b": np.int64(2)}, {"1": "a", "b": 2}),
    "tuple as a key": ({(1, 2): "a"}, {"(1, 2)": "a"}),
}
NAMED = {
    "keys of several kinds": "log_history.odd.b (int64)",
    "tuple as a key": "log_history.odd.(1, 2) (key)",
    "itself": "log_history.odd (list within itself)",
}


class Logging(TrainerCallback):
    """Puts a value into the log and into the state of a callback, as user code does."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.log_history.append({"odd": self.value, "step": state.global_step})


class Remembering(Logging, ExportableState):
    def state(self) -> dict[str, Any]:
        return {"args": {"value": self.value}, "attributes": {}}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("regular", [False, True], ids=["emergency", "regular"])
def test_a_checkpoint_has_as_numbers_or_text_what_json_cannot_hold(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, odd: str, regular: bool
) -> None:
    value, expected = ODD[odd]
    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2} if regular else {}
    ends = [] if regular else [MistakeAt(2)]
    trainer = plain_trainer(
        tmp_path, tokenizer, callbacks=[Remembering(value), *ends], **{"max_steps": 3, **arguments}
    )
    with contextlib.nullcontext() if regular else pytest.raises(KeyError, match="a mistake"):
        SelfHealingTrainer(trainer).train()
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert next(entry["odd"] for entry in saved["log_history"] if "odd" in entry) == expected
    assert saved["stateful_callbacks"]["Remembering"]["args"]["value"] == expected
    assert vet(tmp_path / "checkpoint-2").usable
    assert NAMED.get(odd, f"log_history.odd ({type(value).__name__})") in caplog.text
    assert "Traceback" not in caplog.text


class MistakeAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyError("a mistake")


def shared(model: Any) -> None:
    """A second name that no configuration declares as tied."""
    model.second = torch.nn.Linear(32, model.config.vocab_size, bias=False)
    model.second.weight = model.model.embed_tokens.weight


def overlapping(model: Any) -> None:
    """A buffer that is a part of a weight."""
    model.register_buffer("part", model.model.embed_tokens.weight.detach()[2:5])


def with_gaps(model: Any) -> None:
    """As `channels_last` leaves the weights of a convolution."""
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())


class Bare(torch.nn.Module):
    """A model that transformers does not know: its weights go to safetensors as they are."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize(
    ("change", "bare", "name"),
    [
        (shared, False, "second.weight"),
        (shared, True, "second.weight"),
        (overlapping, True, "inner.model.embed_tokens.weight"),
        (with_gaps, True, "turned"),
    ],
)
def test_weights_that_safetensors_refuses_are_written_and_resumed_from_bitwise(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, change: Any, bare: bool, name: str
) -> None:
    def trainer(directory: Path, *callbacks: TrainerCallback) -> Any:
        model = tiny_model(tokenizer)
        change(model)
        model = Bare(model) if bare else model
        return plain_trainer(directory, tokenizer, model=model, callbacks=list(callbacks), max_steps=4)

    clean = trainer(tmp_path / "clean")
    clean.train()
    with pytest.raises(KeyError, match="a mistake"):
        SelfHealingTrainer(trainer(tmp_path / "run", MistakeAt(2))).train()
    assert f" are written {'each by itself' if bare else 'once'}: " in caplog.text
    assert f"{name}." in caplog.text
    assert "Traceback" not in caplog.text
    resumed = trainer(tmp_path / "run")
    SelfHealingTrainer(resumed).train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert_same_weights(weights(resumed), weights(clean))


def test_a_stateful_callback_that_came_late_costs_no_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    class Bringing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.add_callback(Remembering(7))

    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[Bringing()], save_strategy="steps", save_steps=2)
    SelfHealingTrainer(trainer).train()
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["Remembering"]["args"]["value"] == 7


@pytest.mark.slow
def test_a_healthy_run_writes_the_bytes_of_the_plain_trainer(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    plain_trainer(tmp_path / "run", tokenizer, **arguments).train()
    shutil.move(tmp_path / "run", tmp_path / "plain")
    SelfHealingTrainer(plain_trainer(tmp_path / "run", tokenizer, **arguments)).train()
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json"):
        written = [(tmp_path / each / "checkpoint-2" / name).read_bytes() for each in ("plain", "run")]
        assert written[0] == written[1], name
