"""A device that is lost in the middle of a run, simulated: from then on every tensor operation raises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import OutputFault, RaisingForward, assert_same_weights, journal, sft_trainer, weights
from lost_device import LoseDevice, LostDevice
from transformers import Trainer

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.checkpoints.choice import find_trusted_checkpoint


MICRO_BATCHES = 2


@pytest.fixture
def device() -> Iterator[LostDevice]:
    device = LostDevice()
    yield device
    device.replace()


def build(directory: Path, tokenizer: Any, *callbacks: Any) -> Trainer:
    return sft_trainer(
        directory, tokenizer, callbacks=list(callbacks), save_strategy="steps", save_steps=2, max_steps=8
    )


def train(trainer: Trainer, wrapped: bool, **arguments: Any) -> None:
    (SelfHealingTrainer(trainer) if wrapped else trainer).train(**arguments)


def ends_with(trainer: Trainer, wrapped: bool, device: LostDevice) -> BaseException:
    """Trains until the device is lost, and gives what `train()` raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        train(trainer, wrapped)
    device.replace()
    return caught.value


def postmortem(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "postmortem.json").read_text())


# Before a forward, in the trainer's own loop between two calls, while it logs.
@pytest.mark.parametrize(
    ("event", "step", "wrapped"),
    [
        ("on_step_begin", 5, True),
        ("on_optimizer_step", 5, False),
        pytest.param("on_log", 4, True, marks=pytest.mark.slow),
    ],
)
def test_it_is_written_down_and_the_exception_goes_on_as_it_came(
    tmp_path: Path, tokenizer: Any, device: LostDevice, event: str, step: int, wrapped: bool
) -> None:
    callback = SelfHealingCallback()
    trainer = build(tmp_path, tokenizer, callback, LoseDevice(device, event, step))
    error = ends_with(trainer, wrapped, device)
    assert error is device.first
    # Nothing was computed, copied, saved or freed after it.
    assert len(device.tried) == 1
    assert callback.run is not None
    assert callback.run.rollback.states.generations()
    assert not (tmp_path / "emergency").exists()
    assert postmortem(tmp_path)["failure"] == "device"
    (incident,) = postmortem(tmp_path)["chain"]
    assert (incident["failure"], incident["actions"], incident["outcome"]) == ("device", ["stop"], "fatal")
    assert "training_step" not in vars(trainer)


@pytest.mark.slow
def test_the_next_process_goes_on_bitwise_from_the_newest_checkpoint(
    tmp_path: Path, tokenizer: Any, device: LostDevice
) -> None:
    undisturbed = build(tmp_path / "undisturbed", tokenizer)
    undisturbed.train()
    ends_with(build(tmp_path, tokenizer, SelfHealingCallback(), LoseDevice(device, "on_substep_end", 5)), True, device)
    newest = str(tmp_path / "checkpoint-4")
    assert postmortem(tmp_path)["resume_with"] == f"trainer.train(resume_from_checkpoint={newest!r})"
    assert find_trusted_checkpoint(str(tmp_path)) == newest
    again = build(tmp_path, tokenizer, SelfHealingCallback())
    train(again, True, resume_from_checkpoint=True)
    assert_same_weights(weights(again), weights(undisturbed))


def test_an_assertion_on_the_device_names_the_samples_of_its_step(tmp_path: Path, tokenizer: Any) -> None:
    trainer = build(tmp_path, tokenizer, SelfHealingCallback())
    lost = RuntimeError("CUDA error: device-side assert triggered")
    RaisingForward(trainer.model, lambda forward: forward == 2 * MICRO_BATCHES + 1, lambda: lost)
    with pytest.raises(RuntimeError, match="device-side assert"):
        trainer.train()
    drawn = [index for batch in [*trainer.get_train_dataloader().batch_sampler][4:6] for index in batch]
    assert f"({', '.join(map(str, sorted(drawn)))})" in postmortem(tmp_path)["verdict"]


def computed_again(model: Any, device: LostDevice) -> None:
    """A NaN that passes, and the device is lost when the step is computed again."""
    first, again = 5 * MICRO_BATCHES + 1, 6 * MICRO_BATCHES + 1
    OutputFault(model, lambda forward: forward == first)
    lose_in_forward(model, device, again)


def lose_in_forward(model: Any, device: LostDevice, nth: int) -> None:
    def hook(module: Any, inputs: Any) -> None:
        hook.forwards += 1
        if hook.forwards == nth:
            device.lose()

    hook.forwards = 0
    model.model.embed_tokens.register_forward_pre_hook(hook)


def test_an_experiment_that_it_ends_is_no_finding(tmp_path: Path, tokenizer: Any, device: LostDevice) -> None:
    trainer = build(tmp_path, tokenizer, SelfHealingCallback(HealingConfig(snapshot_interval=2)))
    computed_again(trainer.model, device)
    error = ends_with(trainer, True, device)
    assert error is device.first
    assert len(device.tried) == 1
    assert postmortem(tmp_path)["failure"] == "device"
    assert [event["failure"] for event in journal(tmp_path, "diagnosed")][-1] == "device"
    assert "switched itself off" not in (tmp_path / "healing_events.jsonl").read_text()


def test_an_exception_that_does_not_say_so_ends_in_the_same_postmortem(
    tmp_path: Path, tokenizer: Any, device: LostDevice
) -> None:
    trainer = build(tmp_path, tokenizer)

    def fail(module: Any, inputs: Any) -> None:
        if trainer.state.global_step == 5:
            device.lose()
            raise ValueError("what a library makes of it")

    trainer.model.model.norm.register_forward_pre_hook(fail)
    error = ends_with(trainer, True, device)
    # Saving the state was tried, and showed what it is.
    assert isinstance(error, ValueError)
    assert postmortem(tmp_path)["failure"] == "device"
    assert "what a library makes of it" in postmortem(tmp_path)["verdict"]
    assert find_trusted_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")
