"""Run by test_chaos_on_ranks.py, once for each rank and start: a job under faults."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from conftest import build_tokenizer, leave_together, sft_trainer
from constants import settings_among
from two_sharded_processes import sharded_on_the_cpu, whole

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.tools.chaos.callback import Chaos


CONFIG = {
    "api_retry_base_delay": 0.01,
    "api_retry_max_delay": 0.05,
    # No step of this model takes as long, however busy the machine is.
    "hang_floor_seconds": 12.0,
    "GRACE_SECONDS": 2.0,
    "REFUND_STEPS": 5,
    "snapshot_interval": 5,
}


def train(directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainer = sft_trainer(
        directory / "run",
        build_tokenizer(),
        max_steps=options["steps"],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        seed=options["seed"],
        ddp_backend="gloo",
        save_strategy="steps",
        save_steps=5,
        save_total_limit=3,
        **options["arguments"],
    )
    Chaos(options["faults"], seed=options["seed"], ledger=directory / "chaos.jsonl").attach(trainer)
    SelfHealingTrainer(trainer, HealingConfig.aggressive(**settings_among(CONFIG))).train()
    content = hashlib.sha256()
    finite = True
    for value in trainer.model.state_dict().values():
        value = whole(value)
        finite = finite and bool(torch.isfinite(value).all())
        content.update(value.numpy().tobytes())
    return {
        "weights": content.hexdigest(),
        "finite": finite,
        "steps": trainer.state.global_step,
        "sharded": all(hasattr(each, "placements") for each in trainer.model.parameters()),
    }


def main(directory: Path, options: dict[str, Any]) -> None:
    if options["arguments"]:
        sharded_on_the_cpu("fsdp2")
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    result = train(directory, options)
    (directory / f"results.{os.environ['RANK']}.json").write_text(json.dumps(result))
    leave_together()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
