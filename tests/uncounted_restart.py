"""
Run by test_uncounted_restart.py: two ranks that each have trouble of their own, one of which fails; and the same ranks
once more, as torchrun starts them where only the agent of the one that failed counts that.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from conftest import build_tokenizer, sft_trainer
from forked_pairs import run_pair
from transformers import TrainerCallback, set_seed

from self_healing import HealingConfig, SelfHealingTrainer


STEPS, FAILS_AT = 10, 5
# Each rank has an incident that is not that of the other one after these steps: before the restart, and after it.
TROUBLE_AT = (3, 8)


class Trouble(TrainerCallback):
    """Cannot reach a service for a moment, another one on each rank; and fails for good on the second rank."""

    def __init__(self, rank: int, fails: bool) -> None:
        self._rank, self._fails, self._had = rank, fails, set[int]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if step in TROUBLE_AT and step not in self._had:
            self._had.add(step)
            raise [ConnectionError("the storage went away"), TimeoutError("the tracker does not answer")][self._rank]
        if self._fails and self._rank == 1 and step == FAILS_AT:
            raise ValueError("only here")


def start(directory: Path, rank: int, again: bool) -> dict[str, Any]:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1" if again and rank == 1 else "0"
    set_seed(1234)
    trainer = sft_trainer(
        directory / "run",
        build_tokenizer(),
        callbacks=[Trouble(rank, fails=not again)],
        ddp_backend="gloo",
        max_steps=STEPS,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=2,
    )
    began: list[int] = []

    class Begins(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began.append(state.global_step)

    trainer.add_callback(Begins())
    SelfHealingTrainer(trainer, HealingConfig(api_retry_base_delay=0.01, snapshot_interval=3)).train()
    return {"steps": trainer.state.global_step, "began": began}


def main(directory: Path) -> None:
    launcher = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3"}
    outcomes = [
        run_pair(directory, lambda path, rank, again=again: start(path, rank, again), 150, launcher=launcher)
        for again in (False, True)
    ]
    (directory / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
