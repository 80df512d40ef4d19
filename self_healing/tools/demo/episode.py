"""
One run of the demo, and the job of its rehearsal.

Imports are absolute, because torchrun runs this file as a script: [`train_under_chaos`].
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.markup import escape
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer

from self_healing.config.healing_config import HealingConfig
from self_healing.journal.incident import Incident, headline
from self_healing.report.healing_report import HealingReport
from self_healing.tools.chaos.callback import Chaos
from self_healing.tools.chaos.faults import Fault
from self_healing.tools.demo.model import (
    BROKEN_CHARACTER,
    TINY,
    TINY_LEARNING_RATE,
    DemoSize,
    small_llama,
    stdlib_docstrings,
    train_tokenizer,
)
from self_healing.trainer import SelfHealingTrainer


# What strikes, a quarter of the run apart, in words.
FAULTS = {
    "nan_loss": "one forward answers NaN",
    "poison_samples": "one row gives NaN, always",
    "network_error": "a connection drops",
}
_MICRO_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Task:
    """What all runs of a demo have in common: rows in the order they are trained on, and what strikes."""

    size: DemoSize
    seed: int
    tokenizer: Any
    training: list[str]
    held_out: list[str]
    faults: tuple[Fault, ...]
    poison_row: int


def make_task(size: DemoSize, seed: int) -> Task:
    """Draws the rows, breaks one of them, and trains the tokenizer."""
    texts = stdlib_docstrings()
    chosen = random.Random(seed).sample(texts, size.steps * size.rows * _MICRO_BATCHES + size.held_out)
    held_out, training = chosen[: size.held_out], chosen[size.held_out :]
    steps = [size.steps * quarter // 4 for quarter in (1, 2, 3)]
    # In the second row of the first micro-batch of its step, or somewhat further on.
    poison_row = steps[1] * size.rows * _MICRO_BATCHES + size.rows // 2
    training[poison_row] = f"{BROKEN_CHARACTER} {training[poison_row]}"
    tokenizer = train_tokenizer(texts, size.vocabulary)
    # Only the row that holds this token is poison.
    tokens = (None, tokenizer.vocab[BROKEN_CHARACTER], None)
    faults = tuple(Fault(kind, at=step, token=token) for kind, step, token in zip(FAULTS, steps, tokens, strict=True))
    return Task(size, seed, tokenizer, training, held_out, faults, poison_row)


def sft_trainer(task: Task, **settings: Any) -> SFTTrainer:
    """The trainer of demo and rehearsal."""
    size = task.size
    args = SFTConfig(
        seed=task.seed,
        max_steps=size.steps,
        max_length=size.tokens,
        per_device_train_batch_size=size.rows,
        learning_rate=TINY_LEARNING_RATE,
        adam_beta2=0.95,
        warmup_steps=size.steps // 10,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        # So small a model is not faster on a GPU, and the CPU computes each step bitwise alike.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **settings,
    )
    trainer = SFTTrainer(
        model=small_llama(task.tokenizer, size, task.seed),
        args=args,
        train_dataset=Dataset.from_dict({"text": task.training}),
        eval_dataset=Dataset.from_dict({"text": task.held_out}),
        processing_class=task.tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Progress(TrainerCallback):
    """Prints some losses of a run."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs and state.global_step % max(args.max_steps // 8, 1) == 0:
            norm = float(logs.get("grad_norm", 0.0))
            told = f"loss {float(logs['loss']):.4f}" + ("" if math.isfinite(norm) else f", gradient norm {norm}")
            self.say("dim", f"step {state.global_step}: {told}")

    def say(self, style: str, text: str) -> None:
        # In a file, a line that is searched for is in one piece.
        self._console.print(f"  [{style}]{escape(text)}[/]", soft_wrap=not self._console.is_terminal)


class Episode(Progress):
    """One run of the demo: it trains, and says what happens and what becomes of it."""

    def __init__(self, task: Task, console: Console) -> None:
        super().__init__(console)
        self.task = task
        self.ruined = False

    def run(self, output_dir: str, config: HealingConfig | None = None) -> HealingReport:
        """Trains to the end, or to the exception that ends the run; healed where there are settings for it."""
        task = self.task
        # Matrices this small are not faster on several cores, and on one they are rounded alike everywhere.
        torch.set_num_threads(1)
        with _quiet(), tempfile.TemporaryDirectory() as scratch:
            trainer = sft_trainer(
                task,
                # The plain run writes nothing; TRL wants a directory all the same.
                output_dir=scratch if config is None else output_dir,
                gradient_accumulation_steps=_MICRO_BATCHES,
                # Rows come in the order they were shuffled into, so that the poison sample comes half way.
                train_sampling_strategy="sequential",
                save_strategy="no",
            )
            trainer.add_callback(self)
            Chaos(task.faults, ledger=Path(scratch) / "chaos.jsonl").attach(trainer)
            healer = SelfHealingTrainer(trainer, config) if config is not None else None
            try:
                (healer or trainer).train()
            except Exception as error:
                self.say("bold red", f"dead at step {trainer.state.global_step}: {type(error).__name__}: {error}")
            came_to = f"came to step {trainer.state.global_step} of {task.size.steps}"
            self.say("bold", f"{came_to}, held-out loss {trainer.evaluate()['eval_loss']:.4f}")
            return HealingReport() if healer is None else healer.get_report()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_log(args, state, control, **kwargs)
        tensors = list(kwargs["model"].parameters())
        bad = sum(not bool(torch.isfinite(tensor).all()) for tensor in tensors)
        if bad and not self.ruined:
            self.ruined = True
            self.say("bold red", f"step {state.global_step}: NaN in {bad} of {len(tensors)} weight tensors")

    def on_instability(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, incident: Incident, **kwargs: Any
    ) -> None:
        self.say("bold green", headline(incident, 98))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mutes what the libraries would say in between; errors have to be seen."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def train_under_chaos(output_dir: str, seed: int) -> None:
    """The job of the rehearsal: started again, it goes on from its newest checkpoint."""
    torch.set_num_threads(1)
    # What is said of faults and healing belongs to the show; what torchrun says goes to the log.
    sys.stderr = sys.stdout
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    task = make_task(TINY, seed)
    trainer = sft_trainer(task, output_dir=output_dir, save_steps=TINY.steps // 8, save_total_limit=2)
    trainer.add_callback(Progress(Console(highlight=False, width=200)))
    # A step takes milliseconds here: one that takes seconds hangs, where a minute would be the default.
    SelfHealingTrainer(trainer, HealingConfig(hang_floor_seconds=4.0)).train()
    print(f"Held-out loss: {trainer.evaluate()['eval_loss']:.3f}.")
    if torch.distributed.is_initialized():
        # Gloo's threads abort a process now and then that ends before them.
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train_under_chaos(sys.argv[1], int(sys.argv[2]))
