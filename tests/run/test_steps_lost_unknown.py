"""Where nobody has checked what a failure has cost, no incident says that it has cost no step."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    TEXTS,
    RaisingForward,
    grpo_trainer,
    journal,
    lost_connection,
    plain_trainer,
    sft_trainer,
    slowly,
)
from datasets import IterableDataset as HuggingFaceStream
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from self_healing import HealingConfig, Incident, SelfHealingCallback, SelfHealingTrainer
from self_healing.journal.incident import describe, headline
from self_healing.report.reading import read_run


UNKNOWN = "steps_lost_unknown"


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")


def healed(trainer: Any, config: Any = None) -> Incident:
    healer = SelfHealingTrainer(trainer, HealingConfig(**(config or {})), sleep=lambda seconds: None)
    healer.train()
    assert healer._run is not None
    [incident] = healer._run.journal.incidents
    assert incident.steps_lost == 0
    return incident


def assert_unknown(incident: Incident, directory: Path, why: str) -> None:
    assert why in incident.evidence[UNKNOWN]
    assert f"steps lost not known ({incident.evidence[UNKNOWN]})" in describe(incident)
    assert "no step lost" not in describe(incident)
    assert "steps lost not known" in headline(incident, 200)
    assert Incident.from_dict(incident.to_dict()).evidence[UNKNOWN] == incident.evidence[UNKNOWN]
    # As the report reads it from disk.
    written = [event["evidence"].get(UNKNOWN) for event in journal(directory, "diagnosed")]
    assert incident.evidence[UNKNOWN] in written
    [read] = read_run(directory).incidents
    assert read.evidence[UNKNOWN] == incident.evidence[UNKNOWN]


def assert_known(incident: Incident) -> None:
    assert UNKNOWN not in incident.evidence
    assert "no step lost" in describe(incident)
    assert "0 steps lost" in headline(incident, 200)


# ---- an exception inside a training_step of the user's own ----


def moving(step: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Adversarial training: weights are moved, and put back once the gradient is known."""
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.add_(0.01)
    loss = step(*args, **kwargs)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.sub_(0.01)
    return loss


class Adversarial(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return moving(super().training_step, self, *args, **kwargs)


def subclassed(directory: Path, tokenizer: Any) -> Any:
    return plain_trainer(directory, tokenizer, trainer_class=Adversarial)


def replaced_on_the_instance(directory: Path, tokenizer: Any) -> Any:
    trainer = plain_trainer(directory, tokenizer)
    trainer.training_step = functools.wraps(trainer.training_step)(
        functools.partial(moving, trainer.training_step, trainer)
    )
    return trainer


def bound_to_the_instance(directory: Path, tokenizer: Any) -> Any:
    trainer = plain_trainer(directory, tokenizer)
    own = trainer.training_step

    @functools.wraps(own)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return moving(own, self, *args, **kwargs)

    trainer.training_step = types.MethodType(step, trainer)
    return trainer


@pytest.mark.parametrize("error", [lost_connection, out_of_memory])
@pytest.mark.parametrize("build", [subclassed, *slowly(replaced_on_the_instance, bound_to_the_instance)])
def test_not_after_an_exception_in_a_training_step_of_the_user_s_own(
    build: Any, error: Any, tmp_path: Path, tokenizer: Any
) -> None:
    trainer = build(tmp_path, tokenizer)
    RaisingForward(trainer.model, lambda forward: forward == 6, error)
    assert_unknown(healed(trainer), tmp_path, "was left half-way, and may have moved weights")


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def own_loss(directory: Path, tokenizer: Any) -> Any:
    return plain_trainer(directory, tokenizer, trainer_class=OwnLoss)


@pytest.mark.parametrize("build", [plain_trainer, sft_trainer, *slowly(own_loss, grpo_trainer)])
def test_known_after_one_in_that_of_the_trainer(build: Any, tmp_path: Path, tokenizer: Any) -> None:
    trainer = build(tmp_path, tokenizer)
    RaisingForward(trainer.model, lambda forward: forward == 4, lost_connection)
    assert_known(healed(trainer))


def test_known_after_one_outside_of_a_training_step_of_the_user_s_own(tmp_path: Path, tokenizer: Any) -> None:
    class Down(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3 and not raised:
                raised.append(1)
                raise lost_connection()

    raised = list[int]()
    trainer = subclassed(tmp_path, tokenizer)
    trainer.add_callback(Down())
    assert_known(healed(trainer))


# ---- a stream that does not begin again ----


def numbered(tokenizer: Any) -> Iterator[dict[str, Any]]:
    for number in range(400):
        ids = (tokenizer(f"{number} {TEXTS[number % 64]}")["input_ids"] + [tokenizer.pad_token_id] * 24)[:24]
        yield {"input_ids": ids, "labels": ids}


class Standing(IterableDataset[Any]):
    """Has one iterator over its rows, which is never made again."""

    def __init__(self, tokenizer: Any) -> None:
        self.rows = iter(list(numbered(tokenizer)))


class Itself(Standing):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.rows)


class Kept(Standing):
    def __iter__(self) -> Any:
        return self.rows


class KeptGenerator(Kept):
    def __init__(self, tokenizer: Any) -> None:
        self.rows = numbered(tokenizer)


class PassedOn(Standing):
    def __iter__(self) -> Any:
        yield from self.rows


class Again(IterableDataset[Any]):
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __iter__(self) -> Any:
        return numbered(self.tokenizer)


def of_hugging_face(tokenizer: Any) -> Any:
    return HuggingFaceStream.from_generator(numbered, gen_kwargs={"tokenizer": tokenizer})


def interrupted(stream: Any, directory: Path, tokenizer: Any, **config: Any) -> Incident:
    trainer = plain_trainer(directory, tokenizer, trainer_kwargs={"train_dataset": stream})
    RaisingForward(trainer.model, lambda forward: forward == 8, lost_connection)
    return healed(trainer, config)


@pytest.mark.parametrize("on_bad_sample", ["quarantine", *slowly("raise")])
@pytest.mark.parametrize("stream", [Itself, Kept, KeptGenerator, PassedOn])
def test_not_after_a_re_entry_over_a_stream_that_goes_on_where_it_stands(
    stream: Any, on_bad_sample: str, tmp_path: Path, tokenizer: Any
) -> None:
    incident = interrupted(stream(tokenizer), tmp_path, tokenizer, on_bad_sample=on_bad_sample)
    assert_unknown(incident, tmp_path, "rows may have been skipped twice")


@pytest.mark.parametrize("on_bad_sample", ["quarantine", *slowly("raise")])
@pytest.mark.parametrize("stream", [Again, of_hugging_face])
def test_known_after_one_over_a_stream_that_begins_again(
    stream: Any, on_bad_sample: str, tmp_path: Path, tokenizer: Any
) -> None:
    assert_known(interrupted(stream(tokenizer), tmp_path, tokenizer, on_bad_sample=on_bad_sample))


# ---- steps that are applied again ----


class Hit(TrainerCallback):
    """NaN weights at the end of one step; and before it something small, which no replay repeats."""

    def __init__(self, at: int, small: Callable[[Any], None], small_at: int = 8) -> None:
        self.at, self.small, self.small_at = at, small, small_at

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            if state.global_step == self.small_at:
                self.small(model)
            if state.global_step == self.at:
                model.model.layers[0].mlp.down_proj.weight.view(-1)[:3] = float("nan")


def a_little_noise(model: Any) -> None:
    model.lm_head.weight.mul_(1 + 1e-5)


def one_weight(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.view(-1)[0].add_(1e-2)


def replayed(tmp_path: Path, tokenizer: Any, small: Callable[[Any], None], max_steps: int = 16) -> Incident:
    callback = SelfHealingCallback({"snapshot_interval": 5, "snapshot_verify_steps": 5})
    trainer = sft_trainer(
        tmp_path, tokenizer, callbacks=[callback, Hit(12, small)], max_steps=max_steps, gradient_accumulation_steps=1
    )
    trainer.train()
    assert callback.run is not None
    [incident] = callback.run.journal.incidents
    assert (incident.steps_lost, "replay_steps" in incident.actions) == (0, True)
    return incident


@pytest.mark.parametrize("small", [a_little_noise, one_weight])
def test_not_where_steps_come_out_otherwise_on_a_machine_that_repeats(
    small: Any, tmp_path: Path, tokenizer: Any
) -> None:
    incident = replayed(tmp_path, tokenizer, small)
    assert_unknown(incident, tmp_path, "a step computed twice: bitwise")


def test_not_where_no_step_follows_to_measure_whether_they_repeat(tmp_path: Path, tokenizer: Any) -> None:
    assert_unknown(replayed(tmp_path, tokenizer, one_weight, max_steps=12), tmp_path, "computed twice: not measured")


def test_known_where_they_come_out_as_they_were(tmp_path: Path, tokenizer: Any) -> None:
    assert_known(replayed(tmp_path, tokenizer, lambda model: None))
