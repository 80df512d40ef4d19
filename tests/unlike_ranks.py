"""Run by health/test_rank_health.py, once for each rank: one of them does not answer for a while, or is slower."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from conftest import build_tokenizer, leave_together, sft_trainer
from transformers import set_seed

from self_healing import HealingConfig, SelfHealingTrainer, processes
from self_healing.health import healer
from self_healing.health.stragglers import StragglerWatch


def hold_the_gil(seconds: int) -> None:
    """No thread of this process runs meanwhile."""
    ctypes.PyDLL(None).sleep(seconds)


def main(directory: Path, options: dict[str, Any]) -> None:
    rank, on = int(os.environ["RANK"]), options.get("rank", 1)
    set_seed(1234)
    trainer = sft_trainer(
        directory,
        build_tokenizer(),
        ddp_backend="gloo",
        ddp_timeout=90,
        max_steps=options.get("steps", 6),
        gradient_accumulation_steps=1,
    )

    def strike(module: Any, args: Any, kwargs: Any) -> None:
        step = trainer.state.global_step
        if rank != on or not module.training:
            return
        if "slow_from" in options and step >= options["slow_from"]:
            time.sleep(options["seconds"])
        if step == 3 and options.get("fault") is not None and not (directory / "struck").exists():
            # By then the ranks know of each other.
            time.sleep(4.0)
            (directory / "struck").write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
            if options["fault"] == "gil":
                hold_the_gil(14)
            else:
                os.kill(os.getpid(), signal.SIGSTOP)

    # Within the model: around it, DDP may wait for the other ranks.
    trainer.model.model.layers[0].register_forward_pre_hook(strike, with_kwargs=True)
    if "slow_from" in options:
        # As noticed after minutes of longer steps.
        soon = functools.partial(StragglerWatch, times=4, seconds=1.0, steps=2)
        vars(healer).update(StragglerWatch=soon, _COMPARE=0.2)
    if options.get("elsewhere"):
        vars(processes)["machine"] = lambda: f"node-{rank} boot"
    SelfHealingTrainer(trainer, HealingConfig(**options.get("config", {}))).train()
    (directory / f"results.{rank}.json").write_text(json.dumps({"steps": trainer.state.global_step}))
    leave_together()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
