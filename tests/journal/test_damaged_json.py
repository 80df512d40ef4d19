"""JSON that a resume reads, damaged or of another version: what can be read is used, and the rest is said."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import journal, sft_trainer
from transformers import PreTrainedConfig, TrainerState

from self_healing import HealingConfig, Incident, SelfHealingCallback, SelfHealingTrainer
from self_healing.checkpoints.vetting import vet
from self_healing.failures.recipes import FailureType, Given
from self_healing.healers.assembly import assemble, load_state, state_of
from self_healing.healers.numerics.state import NumericsState
from self_healing.healers.restarts.attempts import Attempts
from self_healing.healers.restarts.start import start_of
from self_healing.run.record import RECORD_FILE, ExitReason, RunRecord
from self_healing.run.run import Run
from self_healing.system.processes import launch_of


Path_ = tuple[str | int, ...]
Change = Callable[[Any, str | int], None]
KINDS: list[Any] = [None, True, -1, 2.5, "x", [], {}, [None], {"x": []}]


def paths(value: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Every key in nested JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*above, key)
        yield from paths(each, (*above, key))


def damaged(content: Any, path: Path_, change: Change) -> Any:
    content = copy.deepcopy(content)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return content


def deleted(holder: Any, key: str | int) -> None:
    del holder[key]


def renamed(holder: Any, key: str | int) -> None:
    if isinstance(holder, dict):
        holder[f"{key}~"] = holder.pop(key)


def of_another_kind(draw: random.Random) -> Change:
    def change(holder: Any, key: str | int) -> None:
        holder[key] = draw.choice([kind for kind in KINDS if type(kind) is not type(holder[key])])

    return change


def damages(content: Any, seed: int) -> Iterator[tuple[str, Any]]:
    """The content with each of its keys, one after the other, deleted, renamed, or of another kind."""
    draw = random.Random(seed)
    for path in paths(content):
        change = draw.choice([deleted, renamed, of_another_kind(draw), of_another_kind(draw)])
        yield f"{'.'.join(map(str, path))} {change.__name__}", damaged(content, path, change)


# ---- healing_run.json ----


@pytest.fixture
def record(tmp_path: Path) -> dict[str, Any]:
    """Of a run that failed in its second attempt, with everything in it that there can be."""
    run = assemble(HealingConfig(), tmp_path, run_id="20260101-000000-abcdef")
    written = RunRecord(tmp_path, run.run_id)
    run.part(Attempts).keep(written, taken_up=False)
    for _ in range(2):
        run.part(Attempts).begin(None, 4)
    run.journal.incidents.append(Incident("run-001", 6, "loss_spike", FailureType.DIVERGENCE, steps_lost=3))
    run.budget.used, run.budget.failed_at = 2, 6
    run.part(NumericsState).ladder.load_state_dict({"climbed": {"divergence": 2}})
    run.part(NumericsState).learning_rate.reduce(6)
    run.part(Attempts).end(ExitReason.FAILED, "RuntimeError")
    return dict(json.loads((tmp_path / RECORD_FILE).read_text()))


def taken_up(directory: Path, content: Any) -> Run:
    """A process that goes on with what the record says, as far as it does before the Trainer is asked."""
    (directory / RECORD_FILE).write_text(json.dumps(content))
    record = RunRecord.read(directory)
    assert record is not None
    start = start_of(None, 0, record, launch_of(), taken_up=False, requested="auto")
    assert start.record is record
    assert start.spends in (True, False)
    assert start.steps_to_repeat >= 0
    run = assemble(HealingConfig(), directory, run_id=record.run)
    run.part(Attempts).keep(record, taken_up=True)
    run.budget.spend(6)
    run.part(NumericsState).ladder.climb(FailureType.DIVERGENCE, 7, {Given.LATE, Given.RATE_LEFT})
    run.part(NumericsState).learning_rate.scale(9)
    run.part(NumericsState).learning_rate.reduce(9)
    run.part(NumericsState).missing.trained(9)
    run.part(Attempts).begin(None, 4)
    run.part(NumericsState).close_outcomes()
    run.part(Attempts).end(ExitReason.FINISHED)
    return run


def test_a_whole_record_is_used_without_a_word(
    tmp_path: Path, record: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run = taken_up(tmp_path, record)
    assert run.budget.failed_at >= 6
    assert caplog.text == ""


def test_what_memory_cannot_be_read_of_is_named(
    tmp_path: Path, record: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    record["memory"]["budget"] = {"used": "often"}
    run = taken_up(tmp_path, record)
    assert run.budget.failed_at >= 6
    assert "What the run record says of budget cannot be read" in caplog.text


# ---- what checkpoints hold ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A run with checkpoints at 2, 4 and 6, judged by their content alone."""
    run = tmp_path_factory.mktemp("finished") / "run"
    saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    sft_trainer(run, tokenizer, callbacks=[SelfHealingCallback()], **saving).train()
    for marker in run.glob("**/healing.json"):
        marker.unlink()
    return run


@pytest.mark.parametrize("name", ["trainer_state.json", "config.json"])
def test_what_the_trainer_cannot_read_is_refused(finished: Path, name: str) -> None:
    file = finished / "checkpoint-6" / name
    whole = file.read_text()
    content = json.loads(whole)
    content.pop("stateful_callbacks", None)
    content["log_history"] = content.get("log_history", [])[:1]
    refused = 0
    try:
        for what, each in damages(content, seed=0):
            file.write_text(json.dumps(each))
            verdict = vet(finished / "checkpoint-6")
            refused += not verdict.usable
            if verdict.usable:
                # As `Trainer.train` does.
                assert TrainerState.load_from_json(str(file.parent / "trainer_state.json")).global_step == 6, what
                PreTrainedConfig.from_json_file(file.parent / "config.json")
    finally:
        file.write_text(whole)
    assert refused > 0


def test_auto_finds_the_newest_that_can_be_read(finished: Path, tokenizer: Any) -> None:
    (finished / "checkpoint-6" / "config.json").write_text('{"model_type": ')
    state = finished / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text().replace('"best_metric"', '"best_netric"'))
    trainer = sft_trainer(finished, tokenizer, max_steps=8)
    SelfHealingTrainer(trainer).train(resume_from_checkpoint="auto")
    assert trainer.state.global_step == 8
    (chosen,) = journal(finished, "checkpoint_chosen")
    assert chosen["path"] == str(finished / "checkpoint-2")
    reasons = [event["reason"] for event in journal(finished, "checkpoint_passed_over")]
    assert reasons[0].startswith("config.json cannot be read (JSONDecodeError")
    assert reasons[1].startswith("trainer_state.json cannot be read (TypeError")


def test_no_damage_to_what_detectors_have_learned_stops_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = json.loads(json.dumps(state_of(assemble(HealingConfig(), tmp_path))))
    for name, content in damages(state, seed=0):
        try:
            load_state(assemble(HealingConfig(), tmp_path), content)
        except Exception as error:
            raise AssertionError(name) from error
    assert "What 'ladder' has learned cannot be taken from the checkpoint" in caplog.text
