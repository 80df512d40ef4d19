"""Ranks that have a part of each checkpoint to write need an output_dir that can be written, and no others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import build_tokenizer, sft_trainer
from forked_pairs import run_pair
from transformers import set_seed

from self_healing import HealingConfig, SelfHealingTrainer


def _train(directory: Path, rank: int) -> dict[str, Any]:
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
        try:
            SelfHealingTrainer(trainer, config).train()
        except Exception as error:
            found[f"refused {only_model}"] = f"{type(error).__name__}: {error}"
        found[f"steps {only_model}"] = trainer.state.global_step
    return found | {"checkpoints": sorted(each.name for each in own.glob("checkpoint-*"))}


def test_a_rank_that_cannot_write_is_named_before_the_first_step_if_it_has_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second = run_pair(tmp_path, _train)["ranks"]
    for rank in (first, second):
        assert rank["refused False"].startswith("ConfigurationError")
        assert "by rank 1 (FileExistsError" in rank["refused False"]
        assert (rank["steps False"], rank["steps True"]) == (0, 2)
        assert "refused True" not in rank
    assert first["checkpoints"] == ["checkpoint-1", "checkpoint-2"]
