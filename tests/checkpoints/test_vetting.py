"""What is wrong with a checkpoint is seen in its files, and said; what is not wrong is not made up."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import sft_trainer
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from self_healing import SelfHealingCallback
from self_healing.checkpoints.choice import (
    find_trusted_checkpoint,
    resolve_checkpoint,
    vet_all,
)
from self_healing.checkpoints.marker import set_standing, write_marker
from self_healing.checkpoints.vetting import Verdict, vet
from self_healing.tools.cli import app


SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """The same run with this library and without it; nobody writes to them."""
    directory = tmp_path_factory.mktemp("runs")
    sft_trainer(directory / "marked", tokenizer, callbacks=[SelfHealingCallback()], **SAVING).train()
    as_just_written(directory / "marked")
    sft_trainer(directory / "plain", tokenizer, **SAVING).train()
    return directory


def as_just_written(run: Path) -> Path:
    """A run as if nothing were known about its checkpoints yet, and none had been kept."""
    shutil.rmtree(run / "last-known-good", ignore_errors=True)
    for checkpoint in run.glob("checkpoint-*"):
        set_standing(checkpoint, "unverified")
    return run


@pytest.fixture
def marked(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "marked", tmp_path / "marked"))


@pytest.fixture
def plain(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "plain", tmp_path / "plain"))


# ---- ways to damage a checkpoint ----


def truncated(name: str, keep: float = 0.6) -> Damage:
    def damage(checkpoint: Path) -> None:
        file = checkpoint / name
        with file.open("r+b") as stream:
            stream.truncate(int(file.stat().st_size * keep))

    return damage


def removed(name: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).unlink()


def written(name: str, content: str | bytes) -> Damage:
    raw = content.encode() if isinstance(content, str) else content
    return lambda checkpoint: (checkpoint / name).write_bytes(raw) and None


def weight(value: float, index: int = 7) -> Damage:
    """One number of one weight, in a file of the same size."""

    def damage(checkpoint: Path) -> None:
        tensors = load_file(checkpoint / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[index] = value
        save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})

    return damage


def moment(value: float) -> Damage:
    def damage(checkpoint: Path) -> None:
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        state["state"][3]["exp_avg"].view(-1)[0] = value
        torch.save(state, checkpoint / "optimizer.pt")

    return damage


def emptied(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def a_file_instead(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.write_text("not a checkpoint")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty directory": (emptied, "is empty"),
    "a file": (a_file_instead, "is not a directory"),
    "killed while saving": (written("checkpoint-is-incomplete.txt", "…"), "checkpoint-is-incomplete.txt is there"),
    "no state": (removed("trainer_state.json"), "trainer_state.json is missing"),
    "half-written state": (truncated("trainer_state.json"), "trainer_state.json cannot be read"),
    "state of another step": (
        written("trainer_state.json", '{"global_step": 3}'),
        "trainer_state.json is of step 3, not of 4",
    ),
    "no weights": (removed("model.safetensors"), "no weights"),
    "truncated weights": (truncated("model.safetensors"), "model.safetensors is truncated"),
    "no optimizer state": (removed("optimizer.pt"), "optimizer.pt is missing"),
    "no schedule": (removed("scheduler.pt"), "scheduler.pt is missing"),
    "truncated optimizer state": (truncated("optimizer.pt"), "optimizer.pt cannot be read"),
    "NaN weight": (weight(float("nan")), "model.layers.1.mlp.up_proj.weight in model.safetensors holds NaN or Inf"),
    "NaN moment": (moment(float("nan")), "state.3.exp_avg in optimizer.pt holds NaN or Inf"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(plain: Path, damage: str) -> None:
    inflict, reason = DAMAGES[damage]
    inflict(plain / "checkpoint-4")
    passed_over: list[Verdict] = []
    assert find_trusted_checkpoint(plain, passed_over) == str(plain / "checkpoint-2")
    (verdict,) = passed_over
    assert (verdict.path, verdict.usable) == (str(plain / "checkpoint-4"), False)
    assert verdict.reason.startswith(reason)


# ---- damage that leaves a file whole and finite ----


def flipped_bit(name: str, position: int, bit: int = 0) -> Damage:
    def damage(checkpoint: Path) -> None:
        raw = bytearray((checkpoint / name).read_bytes())
        raw[position] ^= 1 << bit
        (checkpoint / name).write_bytes(raw)

    return damage


def test_no_flipped_bit_is_resumed_from_in_silence(marked: Path) -> None:
    checkpoint, draw = marked / "checkpoint-4", random.Random(0)
    for file in sorted(file for file in checkpoint.rglob("*") if file.is_file() and file.name != "healing.json"):
        whole = file.read_bytes()
        for _ in range(3):
            position, bit = draw.randrange(len(whole)), draw.randrange(8)
            flipped_bit(file.name, position, bit)(checkpoint)
            verdict = vet(checkpoint)
            assert not verdict.usable or verdict.doubts, f"{file.name}: bit {bit} of byte {position}"
            file.write_bytes(whole)
    assert vet(checkpoint).reason == "complete"


# ---- what is fine ----


def test_a_checkpoint_of_the_plain_trainer_is_judged_by_its_content(plain: Path) -> None:
    assert vet_all(plain) == [
        Verdict(str(plain / f"checkpoint-{step}"), step, True, "complete", "unmarked") for step in (4, 2)
    ]


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 99}'])
def test_a_marker_that_cannot_be_read_is_as_good_as_none(marked: Path, content: str) -> None:
    (marked / "checkpoint-4" / "healing.json").write_text(content)
    verdict = vet(marked / "checkpoint-4")
    assert (verdict.usable, verdict.standing) == (True, "unmarked")
    assert verdict.doubts == ("its marker healing.json cannot be read, so it is judged without it",)


def test_lora(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {**SAVING, "trainer_kwargs": {"peft_config": LoraConfig(target_modules=["q_proj"], r=4)}}
    sft_trainer(tmp_path, tokenizer, **arguments).train()
    assert not (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    assert vet(tmp_path / "checkpoint-4").usable
    adapter = tmp_path / "checkpoint-4" / "adapter_model.safetensors"
    tensors = load_file(adapter)
    name, value = next((name, value) for name, value in tensors.items() if "lora_A" in name)
    value.view(-1)[0] = float("nan")
    save_file(tensors, adapter)
    assert vet(tmp_path / "checkpoint-4").reason == f"{name} in adapter_model.safetensors holds NaN or Inf"


def sharded(trainer_dir: Path, tokenizer: Any) -> Path:
    """A checkpoint of the plain trainer whose weights are in several files."""
    trainer = sft_trainer(trainer_dir, tokenizer, **SAVING)
    save = trainer.model.save_pretrained
    trainer.model.save_pretrained = lambda *args, **kwargs: save(*args, **kwargs, max_shard_size="30KB")
    trainer.train()
    return trainer_dir / "checkpoint-4"


def test_every_shard_has_to_be_there_whole_and_finite(tmp_path: Path, tokenizer: Any) -> None:
    checkpoint = sharded(tmp_path, tokenizer)
    assert (checkpoint / "model.safetensors.index.json").exists()
    assert vet(checkpoint).usable
    last = sorted(checkpoint.glob("model-*.safetensors"))[-1]
    tensors = load_file(last)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, last, metadata={"format": "pt"})
    assert vet(checkpoint).reason == f"{name} in {last.name} holds NaN or Inf"
    truncated(last.name)(checkpoint)
    assert vet(checkpoint).reason.startswith(f"{last.name} is truncated")
    last.unlink()
    assert vet(checkpoint).reason == f"{last.name} is missing (model.safetensors.index.json names it)"
    (checkpoint / "model.safetensors.index.json").write_text("{")
    assert vet(checkpoint).reason.startswith("model.safetensors.index.json cannot be read")


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8],
    ids=str,
)
def test_any_type_of_weights(plain: Path, dtype: torch.dtype) -> None:
    file = plain / "checkpoint-4" / "model.safetensors"
    values = torch.tensor([0.0, 1.0, 0.5]).to(dtype)
    save_file({"value": values, "empty": values[:0].clone(), "scalar": values[1].clone()}, file)
    assert vet(plain / "checkpoint-4").usable
    if dtype.is_floating_point or dtype.is_complex:
        save_file({"value": torch.tensor([1.0, float("nan")]).to(dtype)}, file)
        assert vet(plain / "checkpoint-4").reason == "value in model.safetensors holds NaN or Inf"


def test_a_causal_mask_kept_as_a_buffer_is_no_damage(plain: Path) -> None:
    mask = torch.full((8, 8), float("-inf")).triu(1)
    save_file({"mask": mask}, plain / "checkpoint-4" / "model.safetensors")
    assert vet(plain / "checkpoint-4").usable


def test_a_setting_of_the_optimizer_may_be_infinite(plain: Path) -> None:
    file = plain / "checkpoint-4" / "optimizer.pt"
    state = torch.load(file, weights_only=True)
    state["param_groups"][0]["growth_rate"] = float("inf")
    torch.save(state, file)
    assert vet(plain / "checkpoint-4").usable
    state["param_groups"][0]["lr"] = float("nan")
    torch.save(state, file)
    assert vet(plain / "checkpoint-4").reason == "param_groups.0.lr in optimizer.pt holds NaN or Inf"


def test_code_in_a_checkpoint_is_not_run(plain: Path, tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    file = plain / "checkpoint-4" / "optimizer.pt"
    torch.save({"state": Malicious()}, file)
    vet(plain / "checkpoint-4")
    file.write_bytes(pickle.dumps(Malicious()))
    vet(plain / "checkpoint-4")
    assert not (tmp_path / "executed").exists()


DAMAGED_RANDOM_STATES: dict[str, Damage] = {
    "empty": truncated("rng_state.pth", 0),
    "garbage": written("rng_state.pth", "garbage"),
}


@pytest.mark.parametrize("damage", DAMAGED_RANDOM_STATES)
def test_random_states_that_cannot_be_loaded_are_taken_for_missing(marked: Path, damage: str) -> None:
    run = marked
    DAMAGED_RANDOM_STATES[damage](run / "checkpoint-4")
    chosen = resolve_checkpoint(True, run, [])
    assert chosen is not None
    assert chosen.path == str(run / "checkpoint-4")
    assert chosen.doubts[0].startswith("rng_state.pth ")
    assert "is taken for missing: the resume is not bitwise" in chosen.doubts[0]


# ---- sharded engines ----


@pytest.mark.parametrize(
    ("file", "folder"), [("model.safetensors", "pytorch_model_fsdp_0"), ("optimizer.pt", "optimizer_0")]
)
def test_shards_that_not_all_ranks_have_written_are_refused(plain: Path, file: str, folder: str) -> None:
    """As FSDP2 saves with SHARDED_STATE_DICT: weights and optimizer state in directories of their own."""
    checkpoint = plain / "checkpoint-4"
    (checkpoint / file).unlink()
    (checkpoint / folder).mkdir()
    (checkpoint / folder / "__0_0.distcp").touch()
    assert vet(checkpoint).reason.startswith(f"{folder}/.metadata is missing")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_are_compared_with_the_marker_alone(plain: Path) -> None:
    checkpoint = plain / "checkpoint-4"
    (checkpoint / "model.safetensors").unlink()
    dcp.save({"weight": torch.ones(100)}, checkpoint_id=checkpoint / "pytorch_model_fsdp_0")
    told = "complete; its sharded parts were not read through"
    assert (vet(checkpoint).usable, vet(checkpoint).reason) == (True, told)
    write_marker(checkpoint, "run", 4, {}, emergency=False)
    assert told not in vet(checkpoint).reason
    truncated("pytorch_model_fsdp_0/__0_0.distcp")(checkpoint)
    assert "__0_0.distcp is truncated: " in vet(checkpoint).reason


def by_ranks(checkpoint: Path, *ranks: int) -> Path:
    """As if several processes had written it, and these had come to the end."""
    state = torch.load(checkpoint / "rng_state.pth", weights_only=False)
    (checkpoint / "rng_state.pth").unlink()
    for rank in ranks:
        torch.save(state, checkpoint / f"rng_state_{rank}.pth")
    return checkpoint


@pytest.mark.parametrize(("ranks", "missing"), [((0,), "rng_state_1.pth"), ((1,), "rng_state_0.pth")])
def test_an_older_checkpoint_is_preferred_to_one_without_the_part_of_a_rank(
    plain: Path, ranks: tuple[int, ...], missing: str
) -> None:
    by_ranks(plain / "checkpoint-4", *ranks)
    by_ranks(plain / "checkpoint-2", 0, 1)
    passed_over: list[Verdict] = []
    assert find_trusted_checkpoint(plain, passed_over) == str(plain / "checkpoint-2")
    assert [verdict.reason for verdict in passed_over] == [
        f"{missing} is missing: not every process had written its part, and draws other random numbers"
    ]


# ---- the marker ----


def test_a_suspect_checkpoint_names_its_incident(marked: Path) -> None:
    set_standing(marked / "checkpoint-4", "suspect", "run-007")
    verdict = vet(marked / "checkpoint-4")
    assert (verdict.usable, verdict.standing) == (False, "suspect")
    assert verdict.reason == "written in a stretch that was rolled back or went bad (incident run-007)"


# ---- self-healing check ----


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "200"})


def test_check_shows_every_checkpoint_and_which_one_is_taken(marked: Path) -> None:
    set_standing(marked / "checkpoint-2", "verified")
    weight(float("nan"))(marked / "checkpoint-4")
    result = check(str(marked))
    assert result.exit_code == 0
    four, two = (line for line in result.stdout.splitlines() if line.startswith("checkpoint-"))
    assert four.split()[:3] == ["checkpoint-4", "4", "no"]
    assert "unverified" in four
    assert "model.layers.1.mlp.up_proj.weight in model.safetensors holds NaN or Inf" in four
    assert "can be resumed from" in two
    assert "verified" in two
    assert f"resume_from_checkpoint=True takes {marked / 'checkpoint-2'} (step 2)." in result.stdout


def test_check_lists_a_checkpoint_that_is_kept_as_well_once_unless_one_of_the_two_is_damaged(marked: Path) -> None:
    shutil.copytree(marked / "checkpoint-2", marked / "last-known-good" / "checkpoint-2")
    shutil.copytree(marked / "checkpoint-4", marked / "last-known-good" / "checkpoint-4")
    removed("optimizer.pt")(marked / "checkpoint-4")
    names = [line.split()[0] for line in check(str(marked)).stdout.splitlines() if "checkpoint-" in line.split()[0]]
    assert names == ["checkpoint-4", "last-known-good/checkpoint-4", "checkpoint-2"]


def test_check_fails_if_none_can_be_resumed_from(marked: Path) -> None:
    for step in (2, 4):
        removed("optimizer.pt")(marked / f"checkpoint-{step}")
    result = check(str(marked))
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "None can be resumed from." in result.stdout


def test_check_gives_the_same_as_json(marked: Path) -> None:
    removed("optimizer.pt")(marked / "checkpoint-4")
    result = check(str(marked), "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["resume_from"]) == (0, str(marked / "checkpoint-2"))
    assert [(each["step"], each["usable"]) for each in found["checkpoints"]] == [(4, False), (2, True)]
    assert "optimizer.pt" in found["checkpoints"][0]["reason"]


def test_check_as_json_fails_if_none_can_be_resumed_from(tmp_path: Path) -> None:
    result = check(str(tmp_path), "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"resume_from": None, "checkpoints": []})
