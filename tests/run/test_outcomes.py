"""What counts as healed: a failure that has come back at the same place until the run ended was healed no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TEXTS, grpo_trainer, journal, lost_connection, plain_trainer, sft_trainer
from constants import settings_among
from datasets import Dataset, IterableDataset
from made_up_run import MadeUpRun
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import TrainerCallback

from self_healing import Action, FailureType, HealingConfig, Incident, SelfHealingTrainer, UnrecoverableTrainingError


HELD_OUT = {"eval_dataset": Dataset.from_dict({"text": ["the model reads", "a row of text"] * 4})}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")


def service_down(*_: Any, **__: Any) -> Any:
    raise lost_connection()


def broken_off() -> Iterator[dict[str, str]]:
    yield from ({"text": text} for text in TEXTS[:20])
    service_down()


class DownAt(TrainerCallback):
    """Cannot reach its server in one event, from a step on."""

    def __init__(self, event: str, step: int, times: int = 1_000) -> None:
        failing = iter(range(times))

        def handler(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= step and next(failing, None) is not None:
                service_down()

        setattr(self, event, handler)


def one_row_does_not_fit(directory: Path, tokenizer: Any) -> Any:
    trainer = sft_trainer(directory, tokenizer)
    trainer.model.model.norm.register_forward_pre_hook(out_of_memory)
    return trainer


def rewards_are_down(directory: Path, tokenizer: Any) -> Any:
    return grpo_trainer(directory, tokenizer, reward_funcs=service_down)


def metrics_do_not_fit(directory: Path, tokenizer: Any) -> Any:
    return sft_trainer(
        directory, tokenizer, **EVALUATED, trainer_kwargs={**HELD_OUT, "compute_metrics": out_of_memory}
    )


def stream_breaks_off(directory: Path, tokenizer: Any) -> Any:
    return sft_trainer(directory, tokenizer, dataset=IterableDataset.from_generator(broken_off))


def down_in(event: str) -> Callable[[Path, Any], Any]:
    def build(directory: Path, tokenizer: Any) -> Any:
        return sft_trainer(directory, tokenizer, callbacks=[DownAt(event, 2)], **EVALUATED, trainer_kwargs=HELD_OUT)

    return build


def ended(trainer: Any, **settings: Any) -> list[Incident]:
    healer = SelfHealingTrainer(
        trainer, HealingConfig(max_recovery_attempts=3, api_retry_attempts=2, **settings), sleep=lambda seconds: None
    )
    with pytest.raises((UnrecoverableTrainingError, torch.OutOfMemoryError)):
        healer.train()
    assert healer._run is not None
    return healer._run.journal.incidents


@pytest.mark.parametrize(
    "build",
    [
        one_row_does_not_fit,
        rewards_are_down,
        metrics_do_not_fit,
        stream_breaks_off,
        down_in("on_step_end"),
        down_in("on_evaluate"),
    ],
)
def test_what_comes_back_after_each_re_entry_was_never_healed(build: Any, tmp_path: Path, tokenizer: Any) -> None:
    incidents = ended(build(tmp_path, tokenizer))
    assert len(incidents) >= 3
    assert [each.outcome for each in incidents] == ["unresolved"] * (len(incidents) - 1) + ["fatal"]
    # As the report reads it.
    written = {event["incident"]: event["outcome"] for event in journal(tmp_path, "outcome")}
    assert written == {each.id: each.outcome for each in incidents}


def test_a_step_that_is_judged_well_and_never_applied_heals_nothing(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_among({"OUTCOME_STEPS": 1}, monkeypatch.setattr)
    trainer = sft_trainer(tmp_path, tokenizer)
    handle = register_optimizer_step_pre_hook(lambda *_: service_down() if trainer.state.global_step == 2 else None)
    try:
        incidents = ended(trainer)
    finally:
        handle.remove()
    assert [each.outcome for each in incidents] == ["unresolved"] * 3 + ["fatal"]


def test_a_save_that_fails_at_each_step_to_the_end_is_not_healed(tmp_path: Path, tokenizer: Any) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    trainer = sft_trainer(tmp_path, tokenizer, save_strategy="steps", save_steps=1, max_steps=3)
    trainer._save_checkpoint = full
    healer = SelfHealingTrainer(trainer)
    healer.train()
    assert [event["outcome"] for event in journal(tmp_path, "outcome")] == ["unresolved"]


def test_what_passes_at_the_third_attempt_is_healed(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[DownAt("on_step_end", 2, times=2)], max_steps=9)
    SelfHealingTrainer(trainer, sleep=lambda seconds: None).train()
    assert [event["outcome"] for event in journal(tmp_path, "outcome")] == ["resolved"] * 2


def failed(run: MadeUpRun, step: int = 3) -> Incident:
    with run.incident(step, "ConnectionError", {}) as opened:
        opened.diagnosed(FailureType.NETWORK, "network")
        opened.acted(Action.WAIT_AND_RESUME)
    return opened.incident


def test_what_was_healed_at_an_earlier_step_stays_healed_where_the_run_ends(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path)
    healed = failed(run, step=3)
    for step in (3, 4):
        run.outcomes.take_in(1.0, step)
    in_place = failed(run, step=4)
    last = run.journal.open(5, "ConnectionError", {})
    run.numerics.close_as_fatal(last)
    assert [each.outcome for each in (healed, in_place, last)] == ["resolved", "resolved", "fatal"]


def test_one_that_was_closed_as_healed_takes_the_end_of_the_same_failure(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path)
    earlier, other = failed(run), failed(run, step=2)
    for each in (earlier, other):
        run.dealing_with(each).close("resolved")
    last = failed(run)
    run.numerics.close_as_fatal(last)
    assert [each.outcome for each in (earlier, other, last)] == ["unresolved", "resolved", "fatal"]


def test_steps_done_again_on_the_way_back_to_a_failure_heal_nothing(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path)
    incident = failed(run, step=9)
    incident.steps_repeated = 8
    for step in range(1, 9):
        run.outcomes.take_in(1.0, step)
    run.numerics.close_as_fatal(failed(run, step=9))
    assert incident.outcome == "unresolved"


def test_what_had_come_back_when_the_run_was_interrupted_is_not_healed(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path)
    incidents = [failed(run) for _ in range(3)]
    run.numerics.close_outcomes()
    assert [each.outcome for each in incidents] == ["unresolved"] * 3


def test_a_checkpoint_that_was_gone_on_without_is_not_healed_by_the_steps_of_the_next_process(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path)
    incident = run.journal.open(3, "OSError", {})
    run.journal.diagnosed(incident, FailureType.DISK, "a checkpoint could not be written", {})
    run.journal.acted(incident, Action.GO_ON_WITHOUT)
    run.outcomes.wait_for(incident)
    for step in range(4, 12):
        run.outcomes.take_in(1.0, step)
    assert incident.outcome == "unresolved"
