"""Two ranks on machines with disks of their own begin at a checkpoint that both can read, or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tokenizer, sft_trainer
from forked_pairs import run_pair
from transformers import TrainerCallback, set_seed

from self_healing import SelfHealingTrainer


def _train(steps: int, resume: Any = None) -> dict[str, Any]:
    set_seed(1234)
    trainer = sft_trainer(
        # The same path on another disk.
        Path("run"),
        build_tokenizer(),
        ddp_backend="gloo",
        max_steps=steps,
        save_strategy="steps",
        save_steps=2,
        save_on_each_node=True,
    )
    began = []
    trainer.add_callback(_Beginning(began))
    try:
        SelfHealingTrainer(trainer).train(resume_from_checkpoint=resume)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "began": began}
    return {"began": began, "weights": sum(float(each.double().sum()) for each in trainer.model.parameters())}


class _Beginning(TrainerCallback):
    def __init__(self, began: list[int]) -> None:
        self._began = began

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began.append(int(state.global_step))


def _on_own_disks(directory: Path, rank: int) -> dict[str, Any]:
    node = directory / f"node{rank}"
    node.mkdir()
    os.chdir(node)
    # The first of the ranks of its machine.
    os.environ["LOCAL_RANK"] = "0"
    _train(4)
    # Of what the second machine has, whatever transformers has written there.
    if rank == 1:
        for weights in Path("run").rglob("model.safetensors"):
            weights.unlink()
    found = {"none": _train(6, "auto"), "path": _train(6, "run/checkpoint-4")}
    torch.distributed.barrier()
    if rank == 1:
        shutil.copy(directory / "node0" / "run" / "checkpoint-2" / "model.safetensors", Path("run", "checkpoint-2"))
    torch.distributed.barrier()
    return found | {"older": _train(6, "auto")}


def test_ranks_on_own_disks_begin_at_what_all_of_them_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second = run_pair(tmp_path, _on_own_disks)["ranks"]
    for rank in (first, second):
        for case in ("none", "path"):
            # Told before anything is loaded.
            assert rank[case]["began"] == []
            assert rank[case]["error"].startswith("CheckpointError")
            assert "rank 1 cannot read it (no weights" in rank[case]["error"]
        assert "no checkpoint in run that all ranks can read" in rank["none"]["error"]
        assert rank["older"]["began"] == [2]
    assert first["older"]["weights"] == second["older"]["weights"]
    # What lies on the other machine is not missing.
    assert "rng_state_1.pth is missing" not in (tmp_path / "log.0.txt").read_text()
