"""
The job of the benchmarks of faults: a small SFT, DPO or GRPO run on the CPU under one tool, started again if it dies.

Each start is a process, forked from one that has imported everything. What a job leaves in its directory is read
from there: a line for each optimizer step that was finished in any start (`steps.jsonl`), and, from the start that
came to the end, `end.json`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.tools.chaos.callback import Chaos
from self_healing.tools.demo.model import TINY, TINY_LEARNING_RATE, small_llama, stdlib_docstrings, train_tokenizer


STEPS, SAVED_EVERY, ROWS, STARTS = 80, 20, 8, 4
# Seconds without a finished step after which whoever watches a job kills it; and before its first one.
PATIENCE, START = 20.0, 60.0
TRAINERS = ("sft", "dpo", "grpo")
# Further steps begin another epoch: what a start takes to prepare its data is not what is measured.
MOST_TEXTS = 1500


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, under which tool, and what strikes it."""

    trainer: str
    tool: str
    directory: Path
    faults: str = ""
    seed: int = 0
    steps: int = STEPS
    saved_every: int = SAVED_EVERY
    rows: int = ROWS
    # Of another tool than those here: its callback, `MODULE:CLASS`, which the plain trainer gets.
    callback: str = ""
    # Where its first start is killed, as ckpt-chaos counts and says it; 0 only counts.
    kill: tuple[int, str] | None = None


@dataclass(slots=True)
class Outcome:
    """What became of a job."""

    finished: bool
    why: str
    starts: int
    seconds: float
    # Of the last start: the loss on held-out rows, updates that the weights have had, and their digest.
    held_out_loss: float | None = None
    updates: int | None = None
    digest: str | None = None
    # Optimizer steps that were finished in all starts together; seconds from before the first to after the last one,
    # without the trainer's first construction.
    steps_done: int = 0
    training_seconds: float = 0.0
    # By step, as it was computed last.
    step_seconds: dict[int, float] = field(default_factory=dict)


# ---- the tools: each trains to the end, or raises ----


def _newest(directory: str) -> str | None:
    return get_last_checkpoint(directory) if Path(directory).is_dir() else None


def _plain(trainer: Any) -> None:
    trainer.train(resume_from_checkpoint=_newest(trainer.args.output_dir))


def _with_callback(trainer: Any) -> None:
    trainer.add_callback(SelfHealingCallback(HealingConfig(healing_dir=trainer.args.output_dir)))
    _plain(trainer)


def _with_wrapper(trainer: Any) -> None:
    config = HealingConfig.aggressive(hang_floor_seconds=PATIENCE / 4)
    SelfHealingTrainer(trainer, config).train(resume_from_checkpoint="auto")


# The settings of `TrainingArguments` that a tool consists of, and how it trains.
TOOLS: dict[str, tuple[dict[str, Any], Callable[[Any], None]]] = {
    "plain": ({}, _plain),
    "options": ({"enable_jit_checkpoint": True, "auto_find_batch_size": True}, _plain),
    "callback": ({}, _with_callback),
    "wrapper": ({}, _with_wrapper),
}


# ---- one start ----


class _Told(TrainerCallback):
    """Writes down each step that is finished."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell(state.global_step, begins=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell(state.global_step, begins=False)

    def _tell(self, step: int, begins: bool) -> None:
        told = {"pid": os.getpid(), "step": step, "time": time.time(), "begins": begins}
        self._file.write(json.dumps(told) + "\n")


@functools.cache
def _texts(rows: int) -> tuple[list[str], list[str], Any]:
    texts = stdlib_docstrings(rows + TINY.held_out)
    held_out, training = texts[: TINY.held_out], texts[TINY.held_out :]
    return training, held_out, train_tokenizer(texts, TINY.vocabulary)


def trainer_of(job: Job) -> Any:
    """Builds the trainer of a job, as its user would."""
    settings, _ = TOOLS.get(job.tool, TOOLS["plain"])
    training, held_out, tokenizer = _texts(min(job.steps * job.rows, MOST_TEXTS))
    common = {
        "output_dir": str(job.directory / "run"),
        "seed": job.seed,
        "max_steps": job.steps,
        "save_steps": job.saved_every,
        "per_device_train_batch_size": job.rows,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        **settings,
    }
    if job.trainer == "grpo":
        # GRPO refuses it: a group has to be whole.
        common["auto_find_batch_size"] = False
    model = small_llama(tokenizer, TINY, job.seed)
    if job.trainer == "sft":
        return SFTTrainer(
            model,
            args=SFTConfig(max_length=TINY.tokens, learning_rate=TINY_LEARNING_RATE, warmup_steps=4, **common),
            train_dataset=Dataset.from_dict({"text": training}),
            eval_dataset=Dataset.from_dict({"text": held_out}),
            processing_class=tokenizer,
        )
    if job.trainer == "dpo":
        return DPOTrainer(
            model,
            ref_model=small_llama(tokenizer, TINY, job.seed),
            args=DPOConfig(max_length=TINY.tokens, learning_rate=5e-4, warmup_steps=4, **common),
            train_dataset=_pairs(training),
            eval_dataset=_pairs(held_out),
            processing_class=tokenizer,
        )
    return GRPOTrainer(
        model,
        reward_funcs=vowels,
        args=GRPOConfig(max_completion_length=12, num_generations=4, learning_rate=5e-4, warmup_steps=4, **common),
        train_dataset=Dataset.from_dict({"prompt": [text[:24] for text in training]}),
        processing_class=tokenizer,
    )


def _pairs(texts: list[str]) -> Dataset:
    rows = [(text[:24], text[24:72], text[24:72][::-1]) for text in texts]
    return Dataset.from_dict(
        dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*rows, strict=True)), strict=True))
    )


def vowels(completions: list[str], **kwargs: Any) -> list[float]:
    """The reward of the GRPO job."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def _train(job: Job, start: int) -> None:
    os.setsid()
    # What torchrun would say.
    os.environ |= {"TORCHELASTIC_RUN_ID": job.directory.name, "TORCHELASTIC_RESTART_COUNT": str(start)}
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "11"
    with (job.directory / "output.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    trainer = trainer_of(job)
    trainer.add_callback(_Told(job.directory / "steps.jsonl"))
    if job.kill is not None and start == 0:
        from ckpt_chaos import inject  # type: ignore[import-not-found]

        at, mode = job.kill
        log = str(job.directory / "events.log")
        inject.arm(trainer.args.output_dir, at or None, mode, log_path=log, lazy_native=True, torn_python=True)
    if job.faults:
        Chaos(job.faults, seed=job.seed, ledger=job.directory / "chaos.jsonl").attach(trainer)
    if job.callback:
        module, _, name = job.callback.partition(":")
        trainer.add_callback(getattr(importlib.import_module(module), name)())
    _, train = TOOLS.get(job.tool, TOOLS["plain"])
    train(trainer)
    if trainer.state.global_step < job.steps:
        # It was asked to end, and has saved: the next start goes on.
        os._exit(3)
    losses = {} if job.trainer == "grpo" else trainer.evaluate()
    weights = [weight.detach() for weight in trainer.model.parameters()]
    updates = {int(state["step"]) for state in trainer.optimizer.state.values() if "step" in state}
    told = {
        "held_out_loss": losses.get("eval_loss"),
        "updates": max(updates, default=0),
        "digest": hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()[:16],
        "finite": all(bool(torch.isfinite(weight).all()) for weight in weights),
    }
    (job.directory / "end.json").write_text(json.dumps(told))
    os._exit(0)


# ---- all starts of a job ----


def warm_up() -> None:
    """Starts what all jobs are forked from, so that no job pays for its imports."""
    process = _forks().Process(target=_texts, args=(MOST_TEXTS,))
    process.start()
    process.join()


@functools.cache
def _forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    context.set_forkserver_preload([Path(__file__).stem])
    return context


def run(job: Job, starts: int = STARTS) -> Outcome:
    """Runs a job to its end as a launcher would: what dies, or makes no step for long, is started again."""
    shutil.rmtree(job.directory, ignore_errors=True)
    job.directory.mkdir(parents=True)
    began, number, why = time.time(), 0, ""
    while number < starts:
        process = _forks().Process(target=_train, args=(job, number))
        number += 1
        process.start()
        why = _watch(process, job.directory)
        if why == "":
            break
    outcome = Outcome(why == "", why, number, time.time() - began)
    steps = [json.loads(line) for line in _lines(job.directory / "steps.jsonl")]
    if steps:
        outcome.training_seconds = steps[-1]["time"] - steps[0]["time"]
    outcome.steps_done = sum(not step["begins"] for step in steps)
    outcome.step_seconds = {
        after["step"]: after["time"] - before["time"]
        for before, after in itertools.pairwise(steps)
        if before["pid"] == after["pid"] and not before["begins"]
    }
    if outcome.finished:
        end = json.loads((job.directory / "end.json").read_text())
        outcome.held_out_loss, outcome.updates, outcome.digest = end["held_out_loss"], end["updates"], end["digest"]
        if not end["finite"]:
            outcome.finished, outcome.why = False, "weights are NaN"
    return outcome


def _lines(path: Path) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        yield from path.read_text().splitlines()


def _watch(process: Any, directory: Path) -> str:
    """Waits for a start to end; gives how it died, or nothing."""
    steps, began = directory / "steps.jsonl", time.time()
    while process.is_alive():
        process.join(0.1)
        newest = steps.stat().st_mtime if steps.exists() else 0.0
        silent = time.time() - max(newest, began)
        if silent > (PATIENCE if newest > began else START):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return "hung, and was killed"
    code = process.exitcode
    if code == 0:
        return ""
    if code == 3:
        return "ended early"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else _last_error(directory)


def _last_error(directory: Path) -> str:
    lines = [line for line in _lines(directory / "output.txt") if line[:1].isalpha() and "Error" in line.split(":")[0]]
    return lines[-1][:120] if lines else "raised"
