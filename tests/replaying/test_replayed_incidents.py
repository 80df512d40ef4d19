"""The step of a saved incident, computed again: which module and row, or that it does not come back."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
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
    plain_trainer,
    sft_trainer,
    tiny_model,
    weights,
)
from torch import nn
from typer.testing import CliRunner, Result

import self_healing
from self_healing import (
    FailureType,
    HealingConfig,
    Incident,
    ReplayError,
    SelfHealingCallback,
    UnrecoverableTrainingError,
)
from self_healing.checkpoints.marker import write_marker
from self_healing.healers.numerics import healer
from self_healing.healers.numerics.healer import KEPT_BATCHES, KEPT_OF_TRANSIENT, save_offending_batch
from self_healing.hf.engine import Origin, watching_gradients
from self_healing.system.random_state import RandomState
from self_healing.tools.cli import app
from self_healing.tools.replay import choose_weights, find_incident, kept_incidents, load_kept
from self_healing.tools.replay_model import WeightsChoice, build_model


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
        return next(each.id for each in kept_incidents(self.directory) if each.entry["cause"] == cause)


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
    assert found.exact
    assert found.look.rows_in_step == 8
    assert found.look.poison == len(found.look.rows) == 1
    row = found.look.rows[0]
    assert row.source["dataset_index"] in POISONED
    assert row.origin is not None
    assert row.origin.names == ("model.layers.0.self_attn.v_proj",)
    assert row.origin.details["inputs_finite"]


def test_a_transient_fault_does_not_come_back_and_the_loss_is_that_of_the_healed_step(finished: FinishedRun) -> None:
    found = self_healing.replay(finished.directory, finished.incident("transient"))
    assert not found.came_back
    assert found.step == finished.transient_step
    # Dropout included: the same weights, rows and random numbers.
    assert found.look.loss == finished.losses[finished.transient_step]
    assert "did not come back" in str(found)


def test_nothing_is_changed_in_the_run_directory_and_random_numbers_go_on_as_before(finished: FinishedRun) -> None:
    def files() -> dict[str, bytes]:
        every = sorted(path for path in finished.directory.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in every}

    before, state = files(), torch.get_rng_state()
    self_healing.replay(finished.directory)
    assert files() == before
    assert torch.equal(torch.get_rng_state(), state)


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
    assert [row.source["dataset_index"] for row in found.look.rows] == [5]
    origin = found.look.rows[0].origin
    assert origin is not None
    assert origin.place == "gradient"
    assert origin.details["backward_module"] == "model.norm"


@pytest.mark.parametrize("on_nonfinite", ["skip", "warn"])
def test_a_step_that_was_not_looked_into_can_be_looked_into_later(
    tmp_path: Path, tokenizer: Any, on_nonfinite: str
) -> None:
    texts = [f"{text} {POISON_WORD}" if index == 40 else text for index, text in enumerate(TEXTS)]
    trainer = sft_trainer(
        tmp_path,
        tokenizer,
        texts=texts,
        model=overflowing_model(tokenizer),
        max_steps=2,
        callbacks=[SelfHealingCallback(HealingConfig(on_nonfinite=on_nonfinite))],
    )
    trainer.train()
    found = self_healing.replay(tmp_path, 0)
    assert [row.source["dataset_index"] for row in found.look.rows] == [40]


def test_a_run_that_ended_at_its_first_step_can_be_replayed(tmp_path: Path, tokenizer: Any) -> None:
    model = overflowing_model(tokenizer)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
    trainer = sft_trainer(tmp_path, tokenizer, model=model, callbacks=[SelfHealingCallback()])
    with pytest.raises(UnrecoverableTrainingError):
        trainer.train()
    found = self_healing.replay(tmp_path)
    assert found.look.poison == found.look.rows_in_step == 8
    assert found.look.origin is not None
    assert found.look.origin.names == ("model.layers.0.self_attn.v_proj",)


def test_mixed_precision_is_that_of_the_run(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, bf16=True, max_steps=2, callbacks=[SelfHealingCallback()])
    fault = OutputFault(trainer.model, lambda _: trainer.state.global_step == 1 and fault.fired == 0)
    trainer.train()
    found = self_healing.replay(tmp_path)
    assert "with bf16" in found.computed
    assert found.look.loss == losses(trainer)[1]


def test_where_no_module_makes_it_what_contains_it_is_named(tmp_path: Path, tokenizer: Any) -> None:
    origin = Origin("module", ("layers.0.attn.o_proj",), {"module_class": "Linear", "inputs_finite": False})
    assert "what reaches it is not finite either, and was computed in layers.0.attn itself" in str(origin)


# ---- the command ----


def test_the_command_says_what_came_of_it_by_text_and_exit_code(finished: FinishedRun) -> None:
    poison = run("replay", str(finished.directory), finished.incident("poison rows"))
    assert poison.exit_code == 1, poison.output
    assert "It comes back: 1 of 8 rows" in poison.stdout
    assert "model.layers.0.self_attn.v_proj (Linear" in poison.stdout
    transient = run("replay", str(finished.directory), str(finished.transient_step))
    assert transient.exit_code == 0, transient.output
    assert "did not come back" in transient.stdout


def test_the_command_prints_json(finished: FinishedRun) -> None:
    result = run("replay", str(finished.directory), finished.incident("poison rows"), "--json")
    told = json.loads(result.stdout)
    assert told["came_back"]
    assert told["rows"][0]["origin"]["first_nonfinite_names"] == ["model.layers.0.self_attn.v_proj"]
    assert told["loss"] == "nan"


def test_the_command_lists_the_incidents_with_a_batch(finished: FinishedRun) -> None:
    result = run("replay", str(finished.directory), "--list")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [str(each) for each in kept_incidents(finished.directory)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "There is no directory nowhere"),
        (["{run}", "99"], "Those with a batch:"),
        (["{run}", "--checkpoint", "nowhere"], "--checkpoint nowhere: its weights cannot be loaded"),
        (["{run}", "--model", "nowhere:build"], "--model nowhere:build: the module cannot be imported"),
        (["{run}", "--model", "json:dumps_"], "there is no function dumps_ in json"),
        (["{run}", "--model", "os:getcwd"], "it returned str, and not a torch.nn.Module"),
    ],
)
def test_what_cannot_be_replayed_is_a_clear_error(finished: FinishedRun, arguments: list[str], told: str) -> None:
    result = run("replay", *(each.format(run=finished.directory) for each in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert told in result.stderr
    assert "Traceback" not in result.stderr


# ---- which incident ----


def keep(directory: Path, name: str, step: int) -> None:
    (directory / "incidents").mkdir(exist_ok=True)
    torch.save({"step": step, "micro_batches": {}}, directory / "incidents" / f"{name}.pt")


def test_an_incident_is_found_by_id_and_by_step_and_an_ambiguous_step_is_refused(tmp_path: Path) -> None:
    for name, step in (("a-001", 3), ("a-002", 7), ("a-003", 7)):
        keep(tmp_path, name, step)
    assert find_incident(tmp_path, "a-002").id == "a-002"
    assert find_incident(tmp_path, 3).id == "a-001"
    with pytest.raises(ReplayError, match=r"2 incidents are of step 7.*\n  a-002 .*\n  a-003 "):
        find_incident(tmp_path, "7")


def test_a_batch_of_an_earlier_version_is_named_as_such(tmp_path: Path) -> None:
    keep(tmp_path, "a-001", 3)
    with pytest.raises(ReplayError, match="kept by an earlier version"):
        self_healing.replay(tmp_path)


def test_a_batch_that_was_torn_is_a_clear_error(tmp_path: Path) -> None:
    keep(tmp_path, "a-001", 3)
    file = tmp_path / "incidents" / "a-001.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ReplayError, match=r"a-001.pt cannot be read; is it complete\? \(\w+\)$"):
        find_incident(tmp_path)


def test_a_model_of_the_script_names_both_ways_to_replay_it() -> None:
    blueprint = {"model": {"class": ["__main__", "Model"], "config": {}}}
    with pytest.raises(ReplayError, match=r"--model MODULE:FUNCTION[\s\S]*trainer of your script"):
        build_model(blueprint, WeightsChoice("none", False, None, {}), None, all_weights=True)


def test_a_run_without_a_batch_says_why(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="There is no incident in"):
        find_incident(tmp_path)


def test_an_incident_is_found_from_either_directory_of_its_run(tmp_path: Path, tokenizer: Any) -> None:
    config = HealingConfig(healing_dir=str(tmp_path / "healing"))
    trainer = plain_trainer(tmp_path / "run", tokenizer, max_steps=2, callbacks=[SelfHealingCallback(config)])
    fault = OutputFault(trainer.model, lambda _: fault.fired == 0)
    trainer.train()
    found = kept_incidents(tmp_path / "run")
    assert len(found) == 1
    assert found == kept_incidents(tmp_path / "healing")


def test_a_spike_comes_back_as_a_spike(finished: FinishedRun, tmp_path: Path) -> None:
    shutil.copytree(finished.directory, tmp_path / "run")
    name = finished.incident("transient")
    norm = self_healing.replay(finished.directory, name).look.grad_norm
    assert norm is not None
    for then, back in ((norm, True), (10 * norm, False)):
        line = {"run": "a", "step": 3, "kind": "diagnosed", "incident": name, "cause": "the same again"}
        with (tmp_path / "run" / "healing_events.jsonl").open("a") as journal:
            journal.write(json.dumps(line | {"evidence": {"again": {"loss": 1.0, "grad_norm": then}}}) + "\n")
        found = self_healing.replay(tmp_path / "run", name)
        assert found.came_back is back
        assert f"its gradient norm was {then:.6g}" in found.verdict


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
    assert not found.exact
    assert found.weights == f"those of step 2, 1 step before the incident, from {directory / 'checkpoint-2'}"
    assert not found.came_back
    assert "was not computed exactly as before" in found.verdict


def test_a_checkpoint_that_is_not_finite_is_passed_by(finished: FinishedRun, tmp_path: Path, tokenizer: Any) -> None:
    directory, name = without_weights(finished, tmp_path / "run", "transient")
    for step in (1, 2):
        folder, model = directory / f"checkpoint-{step}", overflowing_model(tokenizer)
        if step == 2:
            with torch.no_grad():
                model.lm_head.weight[0, 0] = float("nan")
        model.save_pretrained(folder)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    chosen = choose_weights(find_incident(directory, name), {}, [directory], None)
    assert chosen.checkpoint == str(directory / "checkpoint-1")


def test_a_checkpoint_of_a_later_run_into_the_directory_is_passed_by(
    finished: FinishedRun, tmp_path: Path, tokenizer: Any
) -> None:
    directory, name = without_weights(finished, tmp_path / "run", "transient")
    incident = find_incident(directory, name)
    for step, of in ((1, name.rpartition("-")[0]), (2, "another")):
        folder = directory / f"checkpoint-{step}"
        tiny_model(tokenizer).save_pretrained(folder)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        write_marker(folder, of, step, {}, emergency=False)
    kept = load_kept(incident)
    assert choose_weights(incident, kept, [directory], None).checkpoint == str(directory / "checkpoint-1")
    # Had it been there when the incident happened, the run would have gone on from it.
    later = choose_weights(incident, kept | {"time": time.time()}, [directory], None)
    assert later.checkpoint == str(directory / "checkpoint-2")


def test_with_neither_weights_nor_model_the_error_says_what_to_name(finished: FinishedRun, tmp_path: Path) -> None:
    directory, name = without_weights(finished, tmp_path / "run", "transient")
    with pytest.raises(ReplayError, match="--checkpoint PATH, or --model PATH"):
        self_healing.replay(directory, name)


def test_a_model_can_be_built_by_a_function(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_model.py").write_text(
        "from conftest import build_tokenizer, tiny_model\n\ndef build():\n    return tiny_model(build_tokenizer())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = self_healing.replay(finished.directory, finished.incident("poison rows"), model="my_own_model:build")
    # The weights of the step are put over those of the function.
    assert found.came_back
    assert found.exact


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
    assert found.exact
    assert found.look.loss == finished.losses[finished.transient_step]
    assert trainer.args is arguments
    assert trainer.get_train_dataloader == loader
    after = weights(trainer)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_each_rank_keeps_its_own_batch_of_an_incident_and_both_are_found(tmp_path: Path) -> None:
    class Window:
        engine: Any = None

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def export(self) -> dict[str, Any]:
            return {"step": 7, "micro_batches": {0: torch.tensor([self.rank])}}

    for rank, cause in enumerate(("poison_rows", "transient")):
        name = "a-001" if rank == 0 else "a-001.rank1"
        incident = Incident(name, 7 + rank, "nonfinite_loss", failure=FailureType.NONFINITE_POISON_ROWS, cause=cause)
        line = {
            "time": 1.0,
            "run": "a",
            "rank": rank,
            "step": 7 + rank,
            "kind": "detected",
            "symptom": "nonfinite_loss",
        }
        journal = tmp_path / ("healing_events.jsonl" if rank == 0 else "healing_events.rank1.jsonl")
        journal.write_text(json.dumps({**line, "incident": name, "cause": cause}) + "\n")
        window: Any = Window(rank)
        window.engine = SimpleNamespace(trainer=None)
        save_offending_batch(window, tmp_path, incident)
    for name, rank, step in (("a-001", 0, 7), ("a-001.rank1", 1, 8)):
        found = find_incident(tmp_path, name)
        assert (found.step, torch.load(found.path)["micro_batches"][0].item()) == (step, rank)
    assert [path.name for path in tmp_path.glob("incidents/*.tmp")] == []


def test_a_batch_that_only_another_rank_has_kept_is_found_by_the_incident(tmp_path: Path) -> None:
    keep(tmp_path, "a-001.rank1", 3)
    assert find_incident(tmp_path, "a-001").id == "a-001.rank1"
    keep(tmp_path, "a-001.rank2", 3)
    with pytest.raises(ReplayError, match=r"2 incidents are of a-001\."):
        find_incident(tmp_path, "a-001")


def test_the_batches_of_one_rank_take_no_room_from_another(tmp_path: Path) -> None:
    class Window:
        engine = SimpleNamespace(trainer=None)

        def export(self) -> dict[str, Any]:
            return {"step": 1, "micro_batches": {}}

    for number in range(KEPT_BATCHES):
        keep(tmp_path, f"a-{number:03d}.rank1", 1)
    window: Any = Window()
    second, other = (
        Incident(f"a-900.rank{rank}", 1, "nonfinite_loss", failure=FailureType.NONFINITE_POISON_ROWS)
        for rank in (1, 12)
    )
    assert save_offending_batch(window, tmp_path, second) is None
    assert save_offending_batch(window, tmp_path, other) is not None


# ---- what is kept ----


def test_a_fault_that_passed_leaves_room_for_those_that_did_not(tmp_path: Path) -> None:
    class Window:
        exported = 0

        def export(self) -> dict[str, Any]:
            self.exported += 1
            return {}

    window: Any = Window()
    passed = Incident("a-100", 1, "nonfinite_loss", failure=FailureType.NONFINITE_TRANSIENT)
    stayed = Incident("a-101", 1, "nonfinite_loss", failure=FailureType.NONFINITE_POISON_ROWS)
    for number in range(KEPT_OF_TRANSIENT):
        keep(tmp_path, f"a-{number:03d}", 1)
    save_offending_batch(window, tmp_path, passed)
    assert window.exported == 0
    save_offending_batch(window, tmp_path, stayed)
    assert window.exported == 1
    for number in range(KEPT_OF_TRANSIENT, KEPT_BATCHES):
        keep(tmp_path, f"a-{number:03d}", 1)
    save_offending_batch(window, tmp_path, stayed)
    assert window.exported == 1


def test_random_states_come_back_from_plain_values(tmp_path: Path) -> None:
    import random

    import numpy as np

    np.random.standard_normal()
    state = RandomState.capture()
    torch.save(state.to_plain(), tmp_path / "state.pt")
    drawn = random.random(), np.random.standard_normal(), torch.rand(1)
    RandomState.from_plain(torch.load(tmp_path / "state.pt", weights_only=True)).restore()
    assert (random.random(), np.random.standard_normal(), torch.rand(1)) == drawn


# ---- gradients ----


class Root(nn.Module):
    """Its derivative at 0 is infinite."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.sqrt()


def test_the_module_in_whose_backward_a_gradient_begins_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Root(), nn.Linear(3, 1))
    with watching_gradients({"": model}) as seen:
        model(torch.zeros(2, 3)).sum().backward()
    assert [origin.details["backward_module"] for origin in seen] == ["1"]
    assert "it begins in the backward of 1" in str(seen[0])


def test_a_gradient_that_reaches_the_modules_as_such_is_told_so() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with watching_gradients({"": model}) as seen:
        outputs = model(torch.ones(2, 3))
        (outputs - outputs.detach()).sqrt().sum().backward()
    assert [origin.details["backward_place"] for origin in seen] == ["between the loss and the output of"]
    assert "it begins between the loss and the output of 1" in str(seen[0])


# ---- every objective ----


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINERS, "adapter"])
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
    assert (found.look.loss, found.look.grad_norm) == (logged[1]["loss"], logged[1]["grad_norm"])


@pytest.mark.slow
@pytest.mark.parametrize(("at_most", "told"), [(0, "checkpoint-2"), (4096, "kept with the incident")])
def test_an_adapter_is_kept_without_its_base_or_comes_from_a_checkpoint(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, at_most: int, told: str
) -> None:
    monkeypatch.setattr(healer, "KEPT_WEIGHTS", at_most)
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    trainer = adapter_trainer(
        tmp_path / "run",
        tokenizer,
        callbacks=[SelfHealingCallback(HealingConfig())],
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
    )
    base = trainer.model.get_base_model()
    base.config._name_or_path = str(tmp_path / "model")
    fault = OutputFault(base, lambda _: trainer.state.global_step == 2 and fault.fired == 0)
    trainer.train()
    found = self_healing.replay(tmp_path / "run")
    assert found.exact
    assert told in found.weights
    assert found.look.loss == losses(trainer)[2]
