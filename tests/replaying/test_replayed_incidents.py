"""The step of a saved incident, computed again: which module and row, or that it does not come back."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    TRAINERS,
    OutputFault,
    PoisonToken,
    adapter_trainer,
    build_tokenizer,
    losses,
    sft_trainer,
    tiny_model,
    weights,
)
from typer.testing import CliRunner, Result

import self_healing
from self_healing import (
    HealingConfig,
    ReplayError,
    SelfHealingCallback,
)
from self_healing.journal.journal import Journal
from self_healing.tools.cli import app
from self_healing.tools.replay import find_incident, kept_incidents


POISONED = (5, 17, 40)


def overflowing_model(tokenizer: Any) -> Any:
    """
    A model that overflows on one word, by its weights alone: only that word has the direction of the embedding which
    the first layer's values multiply with a number near the end of float32.
    """
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.0
        model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(POISON_WORD), 0] = 1.0
        model.model.layers[0].self_attn.v_proj.weight[0, 0] = 3e38
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has had a transient fault in one step, and poison rows in others."""

    directory: Path
    transient_step: int
    losses: list[float]

    def incident(self, cause: str) -> str:
        return next(each.id for each in kept_incidents(self.directory) if each.incident.cause == cause)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    directory, tokenizer = tmp_path_factory.mktemp("finished"), build_tokenizer()
    texts = [f"{text} {POISON_WORD}" if index in POISONED else text for index, text in enumerate(TEXTS)]
    trainer = sft_trainer(
        directory,
        tokenizer,
        texts=texts,
        model=overflowing_model(tokenizer),
        max_steps=5,
        callbacks=[SelfHealingCallback()],
    )
    fault = OutputFault(trainer.model, lambda _: trainer.state.global_step == 3 and fault.fired == 0)
    trainer.train()
    assert fault.fired == 1
    return FinishedRun(directory, 3, losses(trainer))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})


# ---- what it finds ----


def test_module_and_row_of_a_poison_sample_are_named(finished: FinishedRun) -> None:
    found = self_healing.replay(finished.directory, finished.incident("poison rows"))
    assert found.came_back
    assert found.exact_weights
    assert found.rows_in_step == 8
    assert found.poison_rows == len(found.rows) == 1
    row = found.rows[0]
    assert row.source["dataset_index"] in POISONED
    assert row.origin is not None
    assert row.origin.names == ("model.layers.0.self_attn.v_proj",)
    assert row.origin.details["inputs_finite"]


def test_a_transient_fault_does_not_come_back_and_the_loss_is_that_of_the_healed_step(finished: FinishedRun) -> None:
    found = self_healing.replay(finished.directory, finished.incident("transient"))
    assert not found.came_back
    assert found.step == finished.transient_step
    # Dropout included: the same weights, rows and random numbers.
    assert found.loss == finished.losses[finished.transient_step]
    assert "did not come back" in str(found)


def test_a_gradient_that_alone_is_not_finite_is_followed_to_a_module(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    with torch.no_grad():
        # A norm makes a finite number of it, and no finite derivative; the last of them is the first in the backward.
        model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(POISON_WORD)] = 3e38
    texts = [f"{text} {POISON_WORD}" if index == 5 else text for index, text in enumerate(TEXTS)]
    trainer = sft_trainer(
        tmp_path, tokenizer, texts=texts, model=model, max_steps=4, callbacks=[SelfHealingCallback()]
    )
    trainer.train()
    found = self_healing.replay(tmp_path)
    assert found.came_back
    assert [row.source["dataset_index"] for row in found.rows] == [5]
    origin = found.rows[0].origin
    assert origin is not None
    assert origin.place == "gradient"
    assert origin.details["backward_module"] == "model.norm"


# ---- the command ----


def test_the_command_says_what_came_of_it_by_text_and_exit_code(finished: FinishedRun) -> None:
    poison = run("replay", str(finished.directory), finished.incident("poison rows"))
    assert poison.exit_code == 1, poison.output
    assert "It comes back: 1 of 8 rows" in poison.stdout
    assert "model.layers.0.self_attn.v_proj (Linear" in poison.stdout
    transient = run("replay", str(finished.directory), str(finished.transient_step))
    assert transient.exit_code == 0, transient.output
    assert "did not come back" in transient.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "There is no healing_events.jsonl in nowhere"),
        (["{run}", "99"], "Those with a batch:"),
        (["{run}", "--checkpoint", "nowhere"], "--checkpoint nowhere: its weights cannot be loaded"),
        (["{run}", "--model", "nowhere"], "The model could not be loaded from nowhere"),
    ],
)
def test_what_cannot_be_replayed_is_a_clear_error(finished: FinishedRun, arguments: list[str], told: str) -> None:
    result = run("replay", *(each.format(run=finished.directory) for each in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert told in result.stderr
    assert "Traceback" not in result.stderr


# ---- which incident ----


def keep(journal: Journal, step: int) -> Path:
    file = journal.directory / "incidents" / f"{journal.open(step, 'nonfinite_loss', {}).id}.pt"
    file.parent.mkdir(exist_ok=True)
    torch.save({"step": step, "micro_batches": {}}, file)
    return file


def test_an_incident_is_found_by_id_and_by_step_and_an_ambiguous_step_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, HealingConfig(), run_id="a")
    for step in (3, 7, 7):
        keep(journal, step)
    assert find_incident(tmp_path, "a-002").id == "a-002"
    assert find_incident(tmp_path, 3).id == "a-001"
    with pytest.raises(ReplayError, match=r"2 incidents are of step 7.*\n  a-002 .*\n  a-003 "):
        find_incident(tmp_path, "7")


# ---- which weights ----


def without_weights(finished: FinishedRun, directory: Path, cause: str) -> tuple[Path, str]:
    """A copy of the run whose incident has no weights kept with it."""
    shutil.copytree(finished.directory, directory)
    name = finished.incident(cause)
    file = directory / "incidents" / f"{name}.pt"
    kept = torch.load(file, weights_only=True)
    kept["weights"], kept["all_weights"] = {}, False
    # Where it looks for checkpoints beside the run directory.
    kept["blueprint"]["arguments"]["output_dir"] = str(directory)
    torch.save(kept, file)
    return directory, name


def test_without_weights_the_newest_checkpoint_before_is_used_and_named(
    finished: FinishedRun, tmp_path: Path, tokenizer: Any
) -> None:
    directory, name = without_weights(finished, tmp_path / "run", "transient")
    for step in (1, 2, 4):
        folder = directory / f"checkpoint-{step}"
        overflowing_model(tokenizer).save_pretrained(folder)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    found = self_healing.replay(directory, name)
    assert not found.exact_weights
    assert found.weights == f"those of step 2, 1 step before the incident, from {directory / 'checkpoint-2'}"
    assert not found.came_back
    assert "was not computed exactly as before" in found.verdict


def test_with_neither_weights_nor_model_the_error_says_what_to_name(finished: FinishedRun, tmp_path: Path) -> None:
    directory, name = without_weights(finished, tmp_path / "run", "transient")
    with pytest.raises(ReplayError, match="--checkpoint PATH, or --model PATH"):
        self_healing.replay(directory, name)


# ---- a trainer of one's own ----


def test_a_loss_of_ones_own_needs_the_trainer_of_the_script(finished: FinishedRun, tmp_path: Path) -> None:
    shutil.copytree(finished.directory, tmp_path / "run")
    name = finished.incident("poison rows")
    file = tmp_path / "run" / "incidents" / f"{name}.pt"
    kept = torch.load(file, weights_only=True)
    kept["blueprint"]["own_loss"] = True
    torch.save(kept, file)
    with pytest.raises(ReplayError, match=r"(?s)code of your own.*trainer = \.\.\..*self_healing\.replay\("):
        self_healing.replay(tmp_path / "run", name)


def test_a_trainer_that_is_given_is_used_and_put_back(finished: FinishedRun, tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path / "other", tokenizer, model=tiny_model(tokenizer, seed=3))
    fault = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    before, arguments, loader = weights(trainer), trainer.args, trainer.get_train_dataloader
    found = self_healing.replay(finished.directory, finished.incident("transient"), trainer=trainer)
    assert not fault.fired
    assert found.exact_weights
    assert found.loss == finished.losses[finished.transient_step]
    assert trainer.args is arguments
    assert trainer.get_train_dataloader == loader
    after = weights(trainer)
    assert all(torch.equal(after[name], value) for name, value in before.items())


# ---- every objective ----


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "adapter"])
def test_the_step_of_every_objective_is_computed_as_it_was(tmp_path: Path, tokenizer: Any, name: str) -> None:
    build = TRAINERS.get(name, adapter_trainer)
    trainer = build(tmp_path / "run", tokenizer, callbacks=[SelfHealingCallback()], max_steps=3)
    base = trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model
    # What a reference model, or the base of an adapter, is loaded from.
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for model in (base, getattr(trainer, "ref_model", None)):
        if model is not None:
            model.config._name_or_path = str(tmp_path / "model")
    fault = OutputFault(base, lambda _: trainer.state.global_step == 1 and fault.fired == 0)
    trainer.train()
    assert fault.fired == 1
    found = self_healing.replay(tmp_path / "run")
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert not found.came_back
    assert found.notes == []
    assert (found.loss, found.grad_norm) == (logged[1]["loss"], logged[1]["grad_norm"])
