"""Ranks that have a part of each checkpoint to write need an output_dir that can be written, and no others do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import build_tokenizer, sft_trainer
from forked_pairs import run_pair
from transformers import set_seed

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.checkpoints.choice import writes_checkpoints
from self_healing.hf.saving import SavingTogether


@pytest.mark.parametrize(
    ("only_model", "first", "deepspeed", "writes"),
    [
        (False, False, None, True),
        (True, False, None, False),
        (True, True, None, True),
        # It may have shards of weights to write.
        (True, False, "a plugin", True),
    ],
)
def test_a_rank_makes_the_directory_of_a_checkpoint_where_it_has_something_to_write(
    tmp_path: Path, only_model: bool, first: bool, deepspeed: Any, writes: bool
) -> None:
    args: Any = SimpleNamespace(save_only_model=only_model, should_save=first, deepspeed_plugin=deepspeed)
    state = SimpleNamespace(fsdp_plugin=None)
    together = SavingTogether(SimpleNamespace(args=args, accelerator=SimpleNamespace(state=state)))
    together._make_directories(tmp_path / "run" / "checkpoint-3")
    assert writes_checkpoints(args) is writes
    assert (tmp_path / "run" / "checkpoint-3").is_dir() is writes


def _train(directory: Path, rank: int, wrapped: bool) -> dict[str, Any]:
    """The second rank finds a file in the place of its output_dir, so that not even root can write there."""
    own = directory / f"run{rank}"
    if rank == 1:
        own.touch()
    config = HealingConfig(healing_dir=str(directory / f"healing{rank}"))
    found: dict[str, Any] = {}
    for only_model in (False, True):
        set_seed(1234)
        trainer = sft_trainer(
            own,
            build_tokenizer(),
            ddp_backend="gloo",
            max_steps=2,
            save_strategy="steps",
            save_steps=1,
            save_only_model=only_model,
        )
        if not wrapped:
            trainer.add_callback(SelfHealingCallback(config))
        try:
            (SelfHealingTrainer(trainer, config) if wrapped else trainer).train()
        except Exception as error:
            found[f"refused {only_model}"] = f"{type(error).__name__}: {error}"
        found[f"steps {only_model}"] = trainer.state.global_step
    return found | {"checkpoints": sorted(each.name for each in own.glob("checkpoint-*"))}


@pytest.mark.parametrize("wrapped", [False, True], ids=["callback", "wrapper"])
def test_a_rank_that_cannot_write_is_named_before_the_first_step_if_it_has_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second = run_pair(tmp_path, partial(_train, wrapped=wrapped))["ranks"]
    for rank in (first, second):
        assert rank["refused False"].startswith("ConfigurationError")
        assert "by rank 1 (FileExistsError" in rank["refused False"]
        assert (rank["steps False"], rank["steps True"]) == (0, 2)
        assert "refused True" not in rank
    assert first["checkpoints"] == ["checkpoint-1", "checkpoint-2"]
