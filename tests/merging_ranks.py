"""Run by test_merging.py under torchrun: what one of two ranks learns, and what the other one does with it."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from conftest import POISON_WORD, TEXTS, PoisonToken, build_tokenizer, leave_together, plain_trainer, sft_trainer
from constants import settings_among
from transformers import TrainerCallback, set_seed
from two_sharded_processes import sharded_on_the_cpu

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.report.reading import read_run


# Samples that are bad, by index: enough for some of them to change the rank in the next epoch.
BAD = (3, 9, 14, 21)


class Epochs(TrainerCallback):
    """Notes how often something has happened by the beginning of each epoch, and the incidents it is told of."""

    def __init__(self) -> None:
        self.count = lambda: 0
        self.at_beginnings: list[int] = []
        self.told: list[list[Any]] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at_beginnings.append(self.count())

    def on_instability(self, args: Any, state: Any, control: Any, incident: Any = None, **kwargs: Any) -> None:
        self.told.append([incident.id.rpartition("-")[2], incident.symptom, incident.step])


class Rows(torch.utils.data.Dataset):
    """Rows of which some cannot be loaded; each attempt is counted."""

    def __init__(self, rows: Any) -> None:
        self.rows = list(rows)
        self.tried = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index in BAD:
            self.tried += 1
            raise ValueError(f"cannot decode {index}")
        return dict(self.rows[index])


def main(directory: Path, strategy: str) -> None:
    rank = int(os.environ["RANK"])
    results: dict[str, Any] = {}
    if strategy != "ddp":
        sharded_on_the_cpu(strategy)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    tokenizer = build_tokenizer()
    common = {"ddp_backend": "gloo", "num_train_epochs": 3, "max_steps": -1, "gradient_accumulation_steps": 1}

    def train(name: str, trainer: Any, epochs: Epochs) -> None:
        SelfHealingTrainer(
            trainer, HealingConfig(**settings_among({"PROBE_STEPS": 1000, "max_bad_fraction": 0.5}))
        ).train()
        torch.distributed.barrier()
        results[name] = {
            "at_beginnings": [*epochs.at_beginnings, epochs.count()],
            "told": epochs.told,
            "reported": [
                [each.id.rpartition("-")[2], each.symptom, each.step] for each in read_run(directory / name).incidents
            ],
            "metrics": {
                key: value for each in trainer.state.log_history for key, value in each.items() if "healing/" in key
            },
        }

    def rows(name: str) -> None:
        """Rows that are not finite."""
        set_seed(1234)
        epochs = Epochs()
        texts = [f"{text} {POISON_WORD}" if index in BAD else text for index, text in enumerate(TEXTS[:32])]
        trainer = sft_trainer(directory / name, tokenizer, texts=texts, callbacks=[epochs], **common)
        poison = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
        epochs.count = lambda: poison.fired
        train(name, trainer, epochs)

    def samples(name: str) -> None:
        """Samples that cannot be loaded."""
        set_seed(1234)
        epochs = Epochs()
        data = Rows(list(plain_trainer(directory / name, tokenizer, max_steps=1).train_dataset)[:32])
        trainer = plain_trainer(
            directory / name, tokenizer, callbacks=[epochs], trainer_kwargs={"train_dataset": data}, **common
        )
        epochs.count = lambda: data.tried
        train(name, trainer, epochs)

    rows("rows")
    samples("samples")
    (directory / f"results.{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    leave_together()
