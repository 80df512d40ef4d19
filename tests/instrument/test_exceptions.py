"""Exceptions that leave `train()`: it is entered again as if it had never been left, or ends with a postmortem."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    TEXTS,
    TRAINERS,
    PanicException,
    RaisingAt,
    RaisingForward,
    Unspeakable,
    assert_same_weights,
    grpo_trainer,
    journal,
    logged,
    lost_connection,
    sft_trainer,
    slowly,
    weights,
)
from datasets import Dataset
from transformers import TrainerCallback

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
)


# 40 rows, 4 a micro-batch, 2 micro-batches a step: 5 steps an epoch.
TWO_EPOCHS = {"texts": TEXTS[:40], "max_steps": -1, "num_train_epochs": 2, "logging_steps": 3}


def heal(trainer: Any, config: HealingConfig | None = None) -> Any:
    waits: list[float] = []
    output = SelfHealingTrainer(trainer, config, sleep=waits.append).train()
    assert waits, "nothing was waited for: no fault was healed"
    return output


def assert_same_run(trainer: Any, output: Any, clean: Any, expected: Any) -> None:
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    assert output.global_step == expected.global_step
    assert output.training_loss == expected.training_loss
    assert output.metrics["train_loss"] == expected.metrics["train_loss"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Any, Any]:
    """Two epochs in which nothing goes wrong, and what `train()` returned."""
    trainer = sft_trainer(tmp_path_factory.mktemp("undisturbed"), tokenizer, **TWO_EPOCHS)
    return trainer, trainer.train()


@pytest.mark.parametrize("forwards", [(17, 18, 19), *slowly((1,), (13,))], ids=str)
def test_a_lost_connection_in_the_model_costs_no_step(
    tmp_path: Path, tokenizer: Any, undisturbed: tuple[Any, Any], forwards: tuple[int, ...]
) -> None:
    trainer = sft_trainer(tmp_path / "healed", tokenizer, **TWO_EPOCHS)
    fault = RaisingForward(trainer.model, lambda forward: forward in forwards, lost_connection)
    output = heal(trainer)
    assert fault.fired == len(forwards)
    assert_same_run(trainer, output, *undisturbed)
    assert all(event["steps_lost"] == 0 for event in journal(tmp_path / "healed", "outcome"))
    assert not list((tmp_path / "healed").glob("checkpoint-*")), "emergency checkpoints that served are removed"


WITH_WORKERS = {**TWO_EPOCHS, "dataloader_num_workers": 2}


@pytest.fixture(scope="module")
def undisturbed_with_workers(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Any, Any]:
    trainer = sft_trainer(tmp_path_factory.mktemp("undisturbed"), tokenizer, **WITH_WORKERS)
    return trainer, trainer.train()


@pytest.mark.heals("connection", "wrapper")
@pytest.mark.parametrize("again", ["in the worker", "by the wrapper"])
def test_a_lost_connection_in_a_data_worker_costs_no_step(
    tmp_path: Path, tokenizer: Any, undisturbed_with_workers: tuple[Any, Any], again: str
) -> None:
    trainer = sft_trainer(tmp_path / "healed", tokenizer, **WITH_WORKERS)
    collate, raised = trainer.data_collator, tmp_path / "raised"
    row = trainer.train_dataset[30]["input_ids"]

    def collate_or_raise(examples: list[dict[str, Any]]) -> Any:
        if not raised.exists() and any(example["input_ids"] == row for example in examples):
            raised.touch()
            raise lost_connection()
        return collate(examples)

    trainer.data_collator = collate_or_raise
    if again == "in the worker":
        output = SelfHealingTrainer(trainer, HealingConfig(api_retry_base_delay=0)).train()
    else:
        output = heal(trainer, HealingConfig(api_retry_attempts=1))
    assert raised.exists()
    assert_same_run(trainer, output, *undisturbed_with_workers)


@pytest.mark.heals("connection", "wrapper")
@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_is_entered_again_without_losing_a_step(tmp_path: Path, tokenizer: Any, name: str) -> None:
    clean = TRAINERS[name](tmp_path / "clean", tokenizer, max_steps=3)
    expected = clean.train()
    trainer = TRAINERS[name](tmp_path / "healed", tokenizer, max_steps=3)
    fault = RaisingForward(trainer.model, lambda forward: forward == 6, lost_connection)
    output = heal(trainer)
    assert fault.fired == 1
    assert_same_run(trainer, output, clean, expected)


def test_a_generation_cycle_longer_than_a_step_is_taken_up_in_the_middle(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"max_steps": 6, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    clean = grpo_trainer(tmp_path / "clean", tokenizer, **arguments)
    expected = clean.train()
    trainer = grpo_trainer(tmp_path / "healed", tokenizer, **arguments)
    fault = RaisingForward(
        trainer.model, lambda forward: trainer.state.global_step == 3 and not raised, lost_connection
    )
    raised: list[bool] = []
    fault._error = lambda: raised.append(True) or lost_connection()
    output = heal(trainer)
    assert fault.fired == 1
    assert_same_run(trainer, output, clean, expected)


# 4 steps an epoch.
EVALUATED_AND_SAVED = {
    **TWO_EPOCHS,
    "texts": TEXTS[:32],
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "trainer_kwargs": {"eval_dataset": Dataset.from_dict({"text": ["the model reads", "a row of text"] * 4})},
}


@pytest.fixture(scope="module")
def undisturbed_with_all_events(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Any, Any]:
    trainer = sft_trainer(tmp_path_factory.mktemp("undisturbed"), tokenizer, **EVALUATED_AND_SAVED)
    return trainer, trainer.train()


@pytest.mark.parametrize(
    ("event", "step"),
    [
        ("on_train_begin", 0),
        ("on_pre_optimizer_step", 2),
        ("on_evaluate", 4),
        ("on_save", 3),
        ("on_train_end", 8),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("on_step_begin", 2), ("on_epoch_begin", 4), ("on_log", 3), ("on_epoch_end", 8))
        ),
    ],
)
def test_a_callback_that_raises_anywhere_costs_no_step(
    tmp_path: Path, tokenizer: Any, undisturbed_with_all_events: tuple[Any, Any], event: str, step: int
) -> None:
    clean, expected = undisturbed_with_all_events
    raising = RaisingAt(event, step)
    trainer = sft_trainer(tmp_path / "healed", tokenizer, **EVALUATED_AND_SAVED)
    wrapper = SelfHealingTrainer(trainer, sleep=lambda _: None)
    trainer.add_callback(raising)
    output = wrapper.train()
    assert raising.fired == 1
    assert_same_run(trainer, output, clean, expected)


def test_after_the_last_step_in_mid_epoch_no_step_more_is_trained(tmp_path: Path, tokenizer: Any) -> None:
    raising = RaisingAt("on_save", 5)
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[raising], max_steps=5, save_strategy="steps", save_steps=5)
    output = heal(trainer)
    assert (raising.fired, output.global_step, trainer.state.global_step) == (1, 5, 5)


# ---- what cannot be healed ----


@pytest.mark.heals(
    "exception", "wrapper", partly="raised unchanged, with a checkpoint of the last step and the line that resumes"
)
@pytest.mark.parametrize("forward", [1, 6, 17])
def test_a_users_exception_surfaces_unchanged_with_an_exact_checkpoint(
    tmp_path: Path, tokenizer: Any, undisturbed: tuple[Any, Any], forward: int
) -> None:
    raised: list[Exception] = []

    def bug() -> Exception:
        raised.append(ValueError("a bug in the user's code"))
        return raised[0]

    broken = sft_trainer(tmp_path / "broken", tokenizer, **TWO_EPOCHS)
    fault = RaisingForward(broken.model, lambda count: count == forward, bug)
    with pytest.raises(ValueError, match="a bug in the user's code") as caught:
        SelfHealingTrainer(broken).train()
    assert fault.fired == 1
    assert caught.value is raised[0]
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert traceback.extract_tb(caught.tb)[-1].name == "_hook"

    postmortem = json.loads((tmp_path / "broken" / "postmortem.json").read_text())
    assert postmortem["failure"] == "user_code"
    assert "a bug in the user's code" in postmortem["error"]["traceback"][-1]
    checkpoint = postmortem["emergency_checkpoint"]
    resumed = sft_trainer(tmp_path / "broken", tokenizer, **TWO_EPOCHS)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same_weights(weights(resumed), weights(undisturbed[0]))


@pytest.mark.parametrize("kind", [PanicException, *slowly(Unspeakable)])
def test_an_exception_of_an_odd_kind_surfaces_unchanged_with_a_checkpoint(
    tmp_path: Path, tokenizer: Any, kind: type[BaseException]
) -> None:
    error = kind()

    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2:
                raise error

    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[Failing()], max_steps=4)
    with pytest.raises(kind) as caught:
        SelfHealingTrainer(trainer).train()
    assert caught.value is error
    assert caught.value.__context__ is None
    postmortem = json.loads((tmp_path / "postmortem.json").read_text())
    assert kind.__name__ in postmortem["verdict"]
    assert (Path(postmortem["emergency_checkpoint"]) / "trainer_state.json").is_file()


def test_an_exception_raised_twice_while_the_step_is_reexecuted_is_the_users_own(
    tmp_path: Path, tokenizer: Any
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    state = {"forwards": 0}
    cause = KeyError("inner")

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        state["forwards"] += 1
        if state["forwards"] == 5:
            return output * float("nan")
        if state["forwards"] in (7, 8):
            # Again when that is tried once more.
            raise ValueError("while computing again") from cause
        return None

    trainer.model.model.norm.register_forward_hook(hook)
    with pytest.raises(ValueError, match="while computing again") as caught:
        trainer.train()
    assert state["forwards"] == 8
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, *slowly(SystemExit)])
def test_an_interruption_passes_through_after_a_postmortem(
    tmp_path: Path, tokenizer: Any, interruption: type[BaseException]
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer)
    fault = RaisingForward(trainer.model, lambda forward: forward == 5, interruption)
    with pytest.raises(interruption):
        SelfHealingTrainer(trainer).train()
    assert fault.fired == 1
    assert json.loads((tmp_path / "postmortem.json").read_text())["failure"] == "interrupted"
    assert "training_step" not in vars(trainer)


@pytest.mark.parametrize(
    "error", [pytest.param(lost_connection, id="budget spent"), *slowly(KeyError, KeyboardInterrupt)]
)
def test_what_leaves_the_wrapper_says_how_to_go_on(tmp_path: Path, tokenizer: Any, error: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, save_strategy="steps", save_steps=2)
    RaisingForward(trainer.model, lambda forward: forward >= 7, error)
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        SelfHealingTrainer(trainer, HealingConfig(max_recovery_attempts=1), sleep=lambda _: None).train()
    (note,) = caught.value.__notes__
    postmortem = json.loads((tmp_path / "postmortem.json").read_text())
    assert str(tmp_path / "postmortem.json") in note
    assert postmortem["resume_with"] in note
    resumed = sft_trainer(tmp_path, tokenizer)
    eval(postmortem["resume_with"], {"trainer": resumed})
    assert resumed.state.global_step == 6


class KeyErrorIn(TrainerCallback):
    """Raises a `KeyError` in one event, once the run was interrupted."""

    def __init__(self, event: str, interrupted: Callable[[], bool]) -> None:
        def handler(*_: Any, **__: Any) -> None:
            if interrupted():
                raise KeyError("text")

        setattr(self, event, handler)


@pytest.mark.parametrize("event", ["on_epoch_begin", *slowly("on_step_begin")])
def test_where_training_cannot_be_entered_again_the_checkpoint_of_the_first_exception_is_left(
    tmp_path: Path, tokenizer: Any, event: str
) -> None:
    errors: list[Exception] = []

    def lost() -> Exception:
        errors.append(lost_connection())
        return errors[0]

    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[KeyErrorIn(event, lambda: bool(errors))])
    RaisingForward(trainer.model, lambda forward: forward == 6, lost)
    with pytest.raises(KeyError):
        SelfHealingTrainer(trainer, sleep=lambda _: None).train()
    postmortem = json.loads((tmp_path / "postmortem.json").read_text())
    assert postmortem["error"]["type"].endswith("KeyError")
    assert postmortem["emergency_checkpoint"] is not None


def test_an_exception_out_of_the_optimizer_falls_back_on_the_newest_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3}
    clean = sft_trainer(tmp_path / "clean", tokenizer, **arguments)
    expected = clean.train()
    trainer = sft_trainer(tmp_path / "healed", tokenizer, **arguments)
    fired: list[int] = []

    class Half(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs["optimizer"].optimizer
            step = type(optimizer).step

            def half_a_step(*inner: Any, **more: Any) -> Any:
                if trainer.state.global_step == 5 and not fired:
                    fired.append(5)
                    trainer.model.model.embed_tokens.weight.data.mul_(1.5)
                    raise ConnectionError("a sharded optimizer lost its peer")
                return step(optimizer)

            optimizer.register_step_pre_hook(lambda *_: None)
            optimizer.step = torch.optim.Optimizer.profile_hook_step(half_a_step).__get__(optimizer)

    trainer.add_callback(Half())
    output = heal(trainer)
    assert fired
    assert_same_weights(weights(trainer), weights(clean))
    assert output.training_loss == expected.training_loss
    (event,) = [event for event in journal(tmp_path / "healed", "outcome") if event["failure"] == "network"]
    assert (event["steps_lost"], event["steps_repeated"]) == (0, 2)


def test_auto_find_batch_size_is_switched_off_with_a_notice(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=1, auto_find_batch_size=True)
    SelfHealingTrainer(trainer).train()
    assert trainer.args.auto_find_batch_size is False
    assert "auto_find_batch_size=True is switched off" in caplog.text


def test_a_wrapper_around_a_wrapper_is_refused_with_the_way_out(tmp_path: Path, tokenizer: Any) -> None:
    healer = SelfHealingTrainer(sft_trainer(tmp_path, tokenizer))
    with pytest.raises(TypeError, match=r"already wrapped.*SelfHealingTrainer\(healer\.trainer, config\)"):
        SelfHealingTrainer(healer)  # type: ignore[arg-type]


def test_what_is_not_a_trainer_is_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match="Please build it first"):
        SelfHealingTrainer("model")  # type: ignore[arg-type]
