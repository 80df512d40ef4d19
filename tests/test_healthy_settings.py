"""SFT, DPO, GRPO and the plain Trainer under the settings people use: nothing differs, and no file but ours is new."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    TEXTS,
    TRAINERS,
    EvalLoss,
    assert_same_weights,
    is_own,
    journal,
    logged,
    plain_trainer,
    preferences,
    prompts,
    tiny_model,
    weights,
    without_times,
)
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer


NAMES = ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "Trainer")
# They differ between any two runs: the path of the run is in them.
NOT_COMPARED = ("training_args.bin", "README.md")
# What the docs allow beyond the checkpoints of the plain trainer, and what else we write.
CHECKPOINTS_MORE, BYTES_MORE = HealingConfig().keep_verified_checkpoints + 1, 200_000


def rows_of(name: str, tokenizer: Any, tmp_path: Path) -> Dataset:
    """The data of each trainer, as it is given to its constructor."""
    return {
        "SFTTrainer": lambda: Dataset.from_dict({"text": TEXTS}),
        "DPOTrainer": preferences,
        "GRPOTrainer": prompts,
        "Trainer": lambda: plain_trainer(tmp_path / "rows", tokenizer).train_dataset,
    }[name]()


def with_adapter(name: str, tokenizer: Any, tmp_path: Path) -> dict[str, Any]:
    adapter = LoraConfig(target_modules=["q_proj"], r=2, lora_dropout=0.1)
    if name == "Trainer":
        return {"model": get_peft_model(tiny_model(tokenizer), adapter)}
    reference = {"ref_model": None} if name == "DPOTrainer" else {}
    return {"trainer_kwargs": {"peft_config": adapter, **reference}}


def evaluated(name: str, tokenizer: Any, tmp_path: Path) -> dict[str, Any]:
    """Evaluates, and stops early: the second evaluation is worse, and the best model is that of the first."""
    return {
        "trainer_kwargs": {"eval_dataset": rows_of(name, tokenizer, tmp_path).select(range(8))},
        "callbacks": [EvalLoss(rises=True), EarlyStoppingCallback(early_stopping_patience=1)],
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }


def streamed(name: str, tokenizer: Any, tmp_path: Path) -> dict[str, Any]:
    stream = rows_of(name, tokenizer, tmp_path).to_iterable_dataset()
    data = {"dataset": stream} if name == "SFTTrainer" else {"trainer_kwargs": {"train_dataset": stream}}
    # Into the second epoch.
    return {"max_steps": 10, **data}


SETTINGS: dict[str, Callable[[str, Any, Path], dict[str, Any]]] = {
    "bf16": lambda *_: {"bf16": True},
    "gradient checkpointing": lambda *_: {"gradient_checkpointing": True},
    "LoRA": with_adapter,
    "early stopping": evaluated,
    "one checkpoint": lambda *_: {"save_total_limit": 1, "max_steps": 60, "save_steps": 8},
    "streaming": streamed,
    "two workers": lambda *_: {"dataloader_num_workers": 2},
}
QUICK = {("SFTTrainer", "bf16"), ("DPOTrainer", "LoRA"), ("GRPOTrainer", "early stopping"), ("Trainer", "streaming")}


def files_in(output_dir: Path) -> dict[str, Any]:
    """The files that are not ours, with their content where it can be compared."""
    return {
        path.relative_to(output_dir).as_posix(): content_of(path, output_dir)
        for path in output_dir.rglob("*")
        if path.is_file() and not is_own(path.relative_to(output_dir))
    }


def content_of(path: Path, output_dir: Path) -> Any:
    if path.name in NOT_COMPARED:
        return None
    if path.name != "trainer_state.json":
        return path.read_bytes()
    state = json.loads(path.read_text().replace(str(output_dir), "output_dir"))
    return state | {"log_history": without_times(state["log_history"]), "stateful_callbacks": None}


def bytes_on_disk(directory: Path) -> int:
    """What a directory takes; a file with several names takes it once."""
    found = {path.stat().st_ino: path.stat().st_size for path in directory.rglob("*") if path.is_file()}
    return sum(found.values())


class Disk(TrainerCallback):
    """The most a run has on the disk at the beginning of a step."""

    def __init__(self, output_dir: Path) -> None:
        self.most = 0
        self._output_dir = output_dir

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.most = max(self.most, bytes_on_disk(self._output_dir))


def build(
    name: str, setting: str, tokenizer: Any, output_dir: Path, *callbacks: TrainerCallback
) -> tuple[Trainer, Disk]:
    arguments = SETTINGS[setting](name, tokenizer, output_dir.parent)
    disk = Disk(output_dir)
    every = [*callbacks, disk, *arguments.pop("callbacks", [])]
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2} | arguments
    return TRAINERS[name](output_dir, tokenizer, callbacks=every, **arguments), disk


def cases() -> list[Any]:
    every = [(name, setting, wrapped) for name in NAMES for setting in SETTINGS for wrapped in (False, True)]
    return [
        pytest.param(
            *case,
            marks=[] if case[:2] in QUICK and not case[2] else [pytest.mark.slow],
            id="-".join((*case[:2], "wrapper" if case[2] else "callback")),
        )
        for case in every
    ]


@pytest.mark.parametrize(("name", "setting", "wrapped"), cases())
def test_a_healthy_run_differs_in_nothing_but_our_files(
    name: str, setting: str, wrapped: bool, tmp_path: Path, tokenizer: Any
) -> None:
    plain, disk_of_plain = build(name, setting, tokenizer, tmp_path / "plain")
    plain.train()
    ours = [] if wrapped else [SelfHealingCallback()]
    healed, disk_of_healed = build(name, setting, tokenizer, tmp_path / "healed", *ours)
    (SelfHealingTrainer(healed) if wrapped else healed).train()

    steps = 4 if setting == "early stopping" else plain.args.max_steps
    assert healed.state.global_step == plain.state.global_step == steps
    assert healed.state.best_global_step == plain.state.best_global_step
    assert_same_weights(weights(healed), weights(plain))
    assert logged(healed) == logged(plain)
    assert not journal(tmp_path / "healed", "action")
    of_plain, of_healed = files_in(tmp_path / "plain"), files_in(tmp_path / "healed")
    assert of_healed.keys() == of_plain.keys()
    assert [path for path in of_plain if of_plain[path] != of_healed[path]] == []
    checkpoint = max(bytes_on_disk(path) for path in (tmp_path / "plain").glob("checkpoint-*"))
    assert disk_of_healed.most - disk_of_plain.most <= CHECKPOINTS_MORE * checkpoint + BYTES_MORE
