"""
The job of the rehearsal: a training script as a user has it, which knows nothing of the faults.

Started again, it goes on from its newest checkpoint: [`SelfHealingTrainer`] sees to that under a launcher.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.demo.tiny import TINY, TINY_LEARNING_RATE, tiny


class Progress(TrainerCallback):
    """Writes a line of JSON for each step, which the terminal shows."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            tell(step=state.global_step, loss=float(logs["loss"]))


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(output_dir: str, steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    tell(pid=os.getpid())
    material = tiny(seed)
    args = SFTConfig(
        output_dir=output_dir,
        seed=seed,
        max_steps=steps,
        max_length=TINY.tokens,
        per_device_train_batch_size=TINY.rows,
        learning_rate=TINY_LEARNING_RATE,
        adam_beta2=0.95,
        warmup_steps=steps // 10,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=max(steps // 8, 1),
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model=material.model,
        args=args,
        train_dataset=Dataset.from_dict({"text": material.training}),
        eval_dataset=Dataset.from_dict({"text": material.held_out}),
        processing_class=material.tokenizer,
        callbacks=[Progress()],
    )
    # A step takes milliseconds here: one that takes seconds hangs, where a minute would be the default.
    # What is left in memory when it is killed depends on how busy the machine is.
    SelfHealingTrainer(trainer, HealingConfig(hang_floor_seconds=4.0, resume_from_memory=False)).train()
    tell(held_out_loss=float(trainer.evaluate()["eval_loss"]), unigram_loss=material.unigram_loss)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
