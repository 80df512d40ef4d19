"""A job as a user would start it, run by the tests in processes of its own and struck there."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    PoisonToken,
    RaisingForward,
    build_tokenizer,
    grpo_trainer,
    lost_connection,
    sft_trainer,
    tiny_model,
    without_times,
)
from constants import only_on_disk, settings_among
from datasets import Dataset
from lost_device import LostDevice
from transformers import TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.tools.chaos.callback import Chaos
from self_healing.tools.demo.model import stdlib_docstrings, train_tokenizer


def digest(model: Any) -> str:
    content = hashlib.sha256()
    for value in model.state_dict().values():
        content.update(value.numpy().tobytes())
    return content.hexdigest()


def minutes_in_native_code() -> None:
    """No signal interrupts it, and no handler of Python's can run."""
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 500_000_000)


class Once:
    """Something that happens once, or so many times, however often the job is started."""

    def __init__(self, file: Path, times: int = 1) -> None:
        self.file, self.times = file, times

    def __call__(self) -> bool:
        count = len(self.file.read_text()) if self.file.exists() else 0
        if count >= self.times:
            return False
        with self.file.open("a") as file:
            file.write("x")
            file.flush()
            os.fsync(file.fileno())
        return True


class Strike(TrainerCallback):
    """Does something to the job in the middle of a step."""

    def __init__(self, fault: str, step: int, once: Once) -> None:
        self.fault, self.step, self.once = fault, step, once

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step or not self.once():
            return
        if self.fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault in ("sigterm", "sigusr1"):
            os.kill(os.getpid(), getattr(signal, self.fault.upper()))
        elif self.fault == "slow_sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        elif self.fault == "deaf_sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
            minutes_in_native_code()
        elif self.fault == "native_hang":
            minutes_in_native_code()
        elif self.fault == "device":
            LostDevice().lose()


def kill_while_saving(trainer: Any, step: int, once: Once) -> None:
    """The process dies when half of a checkpoint is written."""
    original = trainer._save_optimizer_and_scheduler

    def save(output_dir: str) -> None:
        if trainer.state.global_step == step and once():
            Path(output_dir, "optimizer.pt").write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        original(output_dir)

    trainer._save_optimizer_and_scheduler = save


def hang_in_optimizer(trainer: Any, step: int, once: Once) -> None:
    def hang(*_: Any) -> None:
        if trainer.state.global_step == step and once():
            time.sleep(1000)

    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(hang)


class WeightFault:
    """Writes NaN into a weight in one of the training forwards."""

    def __init__(self, model: Any, strike: Callable[[int], bool]) -> None:
        self.fired = self.forwards = 0
        self._model, self._strike = model, strike
        model.model.embed_tokens.register_forward_pre_hook(self._look)

    def _look(self, module: Any, inputs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        self.forwards += 1
        if self._strike(self.forwards):
            self.fired += 1
            self._model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan


# What is wrong with the run, and so which remedy is at work: each takes the model, and whether it strikes now.
FAULTS: dict[str, Callable[[Any, Callable[[int], bool]], Any]] = {
    "corrupted weights": WeightFault,
    "lost connection": lambda model, strike: RaisingForward(model, strike, lost_connection),
}


class KillAfter:
    """
    Kills the process at the nth moment of a kind after a fault has struck: a forward of the model, or a change of a
    file below the output directory.
    """

    CHANGES = frozenset(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate"))

    def __init__(self, trainer: Any, fault: Any, moment: str, nth: int, once: Once) -> None:
        self.seen = 0
        self._fault, self._nth, self._once = fault, nth, once
        self._directory = os.path.abspath(trainer.args.output_dir)
        if moment == "forward":
            trainer.model.model.norm.register_forward_hook(self._count)
        else:
            sys.addaudithook(self._look)

    def _look(self, event: str, details: tuple[Any, ...]) -> None:
        changes = event in self.CHANGES or (event == "open" and self._writes(details[1], details[2]))
        if changes and str(details[0]).startswith(self._directory + os.sep):
            self._count()

    def _writes(self, mode: Any, flags: int) -> bool:
        return bool(flags & (os.O_WRONLY | os.O_RDWR))

    def _count(self, *_: Any) -> None:
        if not self._fault.fired:
            return
        self.seen += 1
        if self.seen == self._nth and self._once():
            os.kill(os.getpid(), signal.SIGKILL)


class BadSample(torch.utils.data.Dataset):
    """A dataset one of whose samples cannot be loaded; each attempt is noted in a file."""

    def __init__(self, dataset: Any, bad: int, note: Path) -> None:
        self.dataset, self.bad, self.note = dataset, bad, note

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            with self.note.open("a") as file:
                file.write("x")
            raise ValueError(f"sample {index} is broken")
        return self.dataset[index]


def strike_a_remedy(trainer: Any, output_dir: Path, options: dict[str, Any], poison: Any) -> None:
    """A fault of the run, once however often it is started, and a kill while that is being healed."""
    first = options.get("first")
    if first is None and poison is None:
        return
    strikes = Once(output_dir.parent / f"{output_dir.name}.first")
    at = options.get("at", 11)
    fault = poison or FAULTS[first](trainer.model, lambda forward: forward == at and strikes())
    moment, nth = options.get("kill", ("forward", 0))
    KillAfter(trainer, fault, moment, nth, Once(output_dir.parent / f"{output_dir.name}.killed"))


def main(output_dir: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    once = Once(output_dir.parent / f"{output_dir.name}.{options.get('struck', 'struck')}", options.get("times", 1))
    arguments = {
        "max_steps": 12,
        "save_strategy": "steps",
        "save_steps": 4,
        "dataloader_num_workers": 0,
        **options.get("arguments", {}),
    }
    make = {"sft": sft_trainer, "grpo": grpo_trainer}[options.get("trainer", "sft")]
    if options.get("warm_up"):
        SelfHealingTrainer(make(output_dir, build_tokenizer(), max_steps=2, save_strategy="no")).train()
    poisoned = options.get("poison")
    if poisoned is not None:
        arguments["texts"] = [f"{text} {POISON_WORD}" if row == poisoned else text for row, text in enumerate(TEXTS)]
    trainer = make(output_dir, build_tokenizer(), **arguments)
    poison = None
    if poisoned is not None:
        poison = PoisonToken(trainer.model, trainer.processing_class.convert_tokens_to_ids(POISON_WORD))
    if options.get("buffer_after_restart") and once.file.exists():
        # In no checkpoint, and nothing that a resume would miss.
        trainer.model.register_buffer("added", torch.zeros(1), persistent=False)
    strike_a_remedy(trainer, output_dir, options, poison)
    fault = options.get("fault")
    if fault == "sigkill_while_saving":
        kill_while_saving(trainer, options["step"], once)
    elif fault == "hang_in_optimizer":
        hang_in_optimizer(trainer, options["step"], once)
    elif fault:
        trainer.add_callback(Strike(fault, options["step"], once))
    if "bad_sample" in options:
        note = output_dir.parent / f"{output_dir.name}.loaded"
        trainer.train_dataset = BadSample(trainer.train_dataset, options["bad_sample"], note)
    if options.get("callback_alone"):
        trainer.add_callback(SelfHealingCallback(HealingConfig(**settings_among(options.get("config", {})))))
        trainer.train()
        return
    # What is asked here is mostly what becomes of checkpoints on disk.
    if not options.get("in_memory"):
        only_on_disk()
    settings = {"api_retry_base_delay": 0.0, **options.get("config", {})}
    healer = SelfHealingTrainer(trainer, HealingConfig(**settings_among(settings)))
    healer.train(resume_from_checkpoint=options.get("resume"))
    result = {
        "weights": digest(trainer.model),
        "steps": trainer.state.global_step,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "history": without_times(trainer.state.log_history),
        "incidents": healer.get_report().incidents,
    }
    (output_dir.parent / f"{output_dir.name}.json").write_text(json.dumps(result))


def long_run(output_dir: Path, options: dict[str, Any]) -> None:
    """A small model on a real text, with every fault there is; its loss on a text that it has not seen."""
    torch.set_num_threads(1)
    texts = stdlib_docstrings()
    tokenizer = train_tokenizer(texts, 512)
    held_out = len(texts) // 10
    seed = options["seed"]
    trainer = sft_trainer(
        output_dir,
        tokenizer,
        texts=texts[held_out:],
        model=tiny_model(tokenizer, seed=seed),
        trainer_kwargs={"eval_dataset": Dataset.from_dict({"text": texts[:held_out]})},
        max_steps=options["steps"],
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        seed=seed,
        save_strategy="steps",
        save_steps=10,
        save_total_limit=3,
    )
    if options.get("faults"):
        # Outside of the run directory, as its ledger of what it did has to be.
        ledger = output_dir.parent / f"{output_dir.name}.chaos.jsonl"
        trainer.add_callback(Chaos(options["faults"], seed=seed, ledger=ledger))
    healer = SelfHealingTrainer(trainer, HealingConfig.aggressive(**settings_among(options.get("config", {}))))
    healer.train()
    result = {
        "steps": trainer.state.global_step,
        "held_out": trainer.evaluate()["eval_loss"],
        "incidents": healer.get_report().incidents,
    }
    (output_dir.parent / f"{output_dir.name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    output_dir, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    (long_run if options.pop("long", False) else main)(output_dir, options)
