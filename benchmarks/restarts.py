"""
How long a process that is started again takes to get its state back: from shared memory, and from disk.

```bash
python benchmarks/restarts.py                 # a model of 20 million parameters, with AdamW
python benchmarks/restarts.py --hidden 1024   # a larger one
```

A job is killed after a step of which both are there, and each is put into a new trainer by turns. From disk, as
`train()` does it: the checkpoint is read through (checksums, NaN), then loaded. "cold" reads it from the device, as a
machine does whose memory was needed for other things, or a network file system; "warm" has it in the page cache. The
shortest of all repeats counts. Building the trainer and reading the data are the same for both, and left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.checkpoints.vetting import vet
from self_healing.instrument.live_state import live_state_of
from self_healing.restarts.memory_start import open_in_memory, steps_in_memory
from self_healing.shared_memory import remove_states


STEPS = 6
CPU = torch.device("cpu")


class Killed(TrainerCallback):
    """Kills the process in the step after those."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS:
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(directory: Path, hidden: int) -> Trainer:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    rows = [{"input_ids": [row % 400] * 16, "labels": [row % 400] * 16} for row in range(32)]
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=STEPS + 2,
        per_device_train_batch_size=1,
        save_strategy="steps",
        save_steps=STEPS,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)  # type: ignore[arg-type]


def leave_both(directory: Path, hidden: int) -> None:
    """In a process of its own: trains, and is killed."""
    launcher = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}
    child = os.fork()
    if child == 0:
        os.environ.update(launcher)
        trainer = make_trainer(directory, hidden)
        trainer.add_callback(Killed())
        SelfHealingTrainer(trainer, HealingConfig(snapshot_interval=2, snapshot_verify_steps=2)).train()
        os._exit(0)
    os.waitpid(child, 0)


def drop_from_page_cache(checkpoint: Path) -> None:
    for file in checkpoint.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def shortest(ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], repeats: int) -> dict[str, float]:
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, (prepare, way) in ways.items():
            prepare()
            began = time.perf_counter()
            way()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk that is to be measured", default=None)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.directory))
    directory = root / "run"
    try:
        leave_both(directory, options.hidden)
        trainer = make_trainer(directory, options.hidden)
        trainer.create_optimizer_and_scheduler(STEPS + 2)
        checkpoint = directory / f"checkpoint-{STEPS}"
        newest = steps_in_memory(str(directory), 0, CPU)[0]

        def from_memory() -> None:
            opened = open_in_memory(str(directory), newest, 0, CPU)
            assert opened is not None
            live = live_state_of(trainer)
            opened.state.check(live)
            opened.state.put(live)

        def from_disk() -> None:
            assert vet(checkpoint).usable
            trainer._load_from_checkpoint(str(checkpoint))
            trainer._load_optimizer_and_scheduler(str(checkpoint))

        seconds = shortest(
            {
                "shared memory": (bool, from_memory),
                "disk, warm": (bool, from_disk),
                "disk, cold": (lambda: drop_from_page_cache(checkpoint), from_disk),
            },
            options.repeats,
        )
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        parameters = sum(each.numel() for each in trainer.model.parameters())
        print(f"{parameters / 1e6:.1f} million parameters, {size / 1e6:.0f} MB")
        for name, took in seconds.items():
            print(f"{name:15} {took:6.3f} s   {took / seconds['shared memory']:5.1f} times")
    finally:
        remove_states(directory)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
