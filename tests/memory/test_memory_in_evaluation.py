"""Memory that an evaluation lacks outside of the model is the evaluation's: no training batch gets smaller for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same_weights, encoded_rows, journal, plain_trainer, weights
from transformers import TrainerCallback, trainer_pt_utils

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer, UnrecoverableTrainingError


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79 GiB.")


def count(prediction: Any) -> dict[str, float]:
    return {"rows": float(len(prediction.predictions)), "sum": float(prediction.predictions.sum())}


def evaluating(directory: Path, tokenizer: Any, metrics: Callable[[Any], Any] = count, **arguments: Any) -> Any:
    """Evaluates 16 rows after the second of four steps, and at the end."""
    more = arguments.pop("trainer_kwargs", {})
    rows = {"compute_metrics": metrics, "eval_dataset": encoded_rows(tokenizer).select(range(16))}
    schedule = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "per_device_eval_batch_size": 4}
    return plain_trainer(directory, tokenizer, **schedule, **arguments, trainer_kwargs={**rows, **more})


def results(trainer: Any) -> list[tuple[float, float, float]]:
    logs = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return [(entry["eval_loss"], entry["eval_rows"], entry["eval_sum"]) for entry in logs]


def actions(directory: Path) -> list[str]:
    return [event["action"] for event in journal(directory, "action")]


@pytest.fixture
def room_for_8_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of predictions on a device."""
    join = trainer_pt_utils.nested_concat

    def joined(kept: Any, new: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kept, torch.Tensor) and kept.dim() == 3 and len(kept) + len(new) > 8:
            out_of_memory()
        return join(kept, new, *args, **kwargs)

    monkeypatch.setattr(trainer_pt_utils, "nested_concat", joined)


def test_predictions_that_pile_up_are_moved_to_the_host(
    tmp_path: Path, tokenizer: Any, request: pytest.FixtureRequest
) -> None:
    plain = evaluating(tmp_path / "plain", tokenizer)
    plain.train()
    request.getfixturevalue("room_for_8_rows")
    trainer = evaluating(tmp_path / "healed", tokenizer)
    SelfHealingTrainer(trainer).train()
    assert results(trainer) == results(plain)
    assert_same_weights(weights(trainer), weights(plain))
    assert trainer.args.per_device_train_batch_size == plain.args.per_device_train_batch_size
    assert actions(tmp_path / "healed") == ["emergency_checkpoint", "move_predictions_to_host"]
    # First with memory freed alone.
    outcomes = [(outcome["outcome"], outcome["steps_lost"]) for outcome in journal(tmp_path / "healed", "outcome")]
    assert outcomes == [("resolved", 0)] * 2


def test_an_evaluation_that_fits_once_memory_is_freed_stays_as_it_is(tmp_path: Path, tokenizer: Any) -> None:
    times: list[int] = []

    def metrics(prediction: Any) -> dict[str, float]:
        times.append(1)
        return out_of_memory() if len(times) == 1 else count(prediction)

    trainer = evaluating(tmp_path, tokenizer, metrics=metrics)
    SelfHealingTrainer(trainer).train()
    assert len(results(trainer)) == 2
    assert trainer.args.eval_accumulation_steps is None
    assert [outcome["outcome"] for outcome in journal(tmp_path, "outcome")] == ["resolved"]


def test_a_model_that_has_no_memory_left_beside_predictions_is_called_again_without_them(
    tmp_path: Path, tokenizer: Any
) -> None:
    trainer = evaluating(tmp_path, tokenizer)
    computed: list[int] = []

    def look(*_: Any) -> None:
        if not trainer.model.training:
            computed.append(1)
            if len(computed) > 2 and trainer.args.eval_accumulation_steps is None:
                out_of_memory()

    trainer.model.register_forward_pre_hook(look)
    SelfHealingTrainer(trainer).train()
    assert len(results(trainer)) == 2
    assert "move_predictions_to_host" in actions(tmp_path)


class GreedyOnEvaluate(TrainerCallback):
    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        out_of_memory()


NEVER_FITS: dict[str, dict[str, Any]] = {
    "compute_metrics": {"metrics": out_of_memory},
    "preprocess_logits_for_metrics": {"trainer_kwargs": {"preprocess_logits_for_metrics": out_of_memory}},
    "on_evaluate": {"callbacks": [GreedyOnEvaluate()]},
}


def assert_advice_is_about_the_evaluation(directory: Path) -> None:
    postmortem = json.loads((directory / "postmortem.json").read_text(encoding="utf-8"))
    assert postmortem["what_to_do"].startswith("Only the evaluation did not fit")
    assert "8-bit" not in postmortem["what_to_do"]
    assert postmortem["known_error"] is None


@pytest.mark.parametrize("place", NEVER_FITS)
def test_what_never_fits_stops_with_advice_about_the_evaluation(place: str, tmp_path: Path, tokenizer: Any) -> None:
    trainer = evaluating(tmp_path, tokenizer, **NEVER_FITS[place])
    with pytest.raises(torch.OutOfMemoryError):
        SelfHealingTrainer(trainer).train()
    assert "reduce_batch_size" not in actions(tmp_path)
    assert actions(tmp_path)[-1] == "stop"
    assert_advice_is_about_the_evaluation(tmp_path)


def test_with_the_callback_alone_the_traceback_has_the_advice(tmp_path: Path, tokenizer: Any) -> None:
    trainer = evaluating(tmp_path, tokenizer, metrics=out_of_memory, callbacks=[SelfHealingCallback()])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    (note,) = caught.value.__notes__
    assert note.startswith("self_healing: stopped at step 2 of 4. Only the evaluation did not fit.")


def test_that_is_not_to_be_healed_gets_the_same_advice(tmp_path: Path, tokenizer: Any) -> None:
    trainer = evaluating(tmp_path, tokenizer, metrics=out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        SelfHealingTrainer(trainer, HealingConfig(on_oom="raise")).train()
    assert "move_predictions_to_host" not in actions(tmp_path)
    assert_advice_is_about_the_evaluation(tmp_path)


def test_a_model_that_never_fits_in_an_evaluation_gets_no_advice_about_training(
    tmp_path: Path, tokenizer: Any
) -> None:
    trainer = evaluating(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    trainer.model.register_forward_pre_hook(lambda *_: None if trainer.model.training else out_of_memory())
    with pytest.raises(UnrecoverableTrainingError):
        trainer.train()
    assert_advice_is_about_the_evaluation(tmp_path)
