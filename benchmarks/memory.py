"""
What healing out-of-memory errors costs, and what it gives.

```bash
python benchmarks/memory.py cost
python benchmarks/memory.py throughput
python benchmarks/memory.py cuda
```

`cost`: several SFT runs go on at once, in threads that take turns step by step (see `overhead.py`), so that whatever
else the machine is doing falls on all of them alike. One lap has the healthy run with `on_oom="raise"` (twice, which
tells how much is chance), with `on_oom="heal"`, and with `on_oom="backup"`. The other has steps of the same
rows: whole, split, and made of smaller batches by hand.

`throughput`: SFT, DPO and GRPO after healing, beside the same steps with the largest batch that fits and more
accumulation, which somebody would have set by hand: again in turns, and in calls of the model, which are no matter of
chance. Calls with more rows than fit fail.

`cuda`: a Llama on a device whose memory is limited to less than its batch needs, trained with SFT, DPO and GRPO by
`SelfHealingTrainer`, with a smaller batch found by hand, and with `auto_find_batch_size=True`, each in a process of
its own, beside the run with all of the memory. Rows are all of one length (`every`: no batch fits), or a few are twice
as long as the others (`some`: only their batches do not fit). Without a device everything but the figures of its
memory can be gone through with `--device cpu --simulate-rows N`: calls of the model fail above N rows of full length.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


# Set before anything reads it: models, data and tokenizers are made here, and nothing is asked of the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import accelerate
import datasets
import torch
import transformers
import trl
from datasets import Dataset
from overhead import WARM_UP, Turn, in_turns, keep_freed_memory, median_and_interval, processor
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import self_healing
from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.healers.oom import calls
from self_healing.tools.demo.model import DemoSize, small_llama, stdlib_docstrings, train_tokenizer


RESULTS = Path(__file__).parent / "results"
NEVER = 10**9


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "accelerate": accelerate.__version__,
        "self_healing": self_healing.__version__,
    }


def rounded(value: Any, digits: int = 6) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner, digits) for inner in value]
    return value


class SmallDevice:
    """The memory of a device that holds so many tokens and no more: calls of the model with more of them fail."""

    def __init__(self, trainer: Any, tokens: int) -> None:
        self.tokens = tokens
        # The steps at which it struck.
        self.fired: list[int] = []
        self._trainer = trainer
        trainer.model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if ids.numel() > self.tokens:
            self.fired.append(self._trainer.state.global_step)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 1.00 GiB. (simulated: {ids.shape})")


# ---- cost ----


class OwnLoss(SFTTrainer):
    """With a loss that is nobody's: what is split is computed again in the backward pass, not in passes."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@dataclass(frozen=True)
class Run:
    """
    One of the runs that take turns.

    Args:
        config ([`HealingConfig`]):
            Of its callback.
        rows (`int`), accumulation (`int`):
            Of its optimizer steps.
        at_a_time (`int`, *optional*):
            Rows that fit; known from an earlier start, so every call is split from the first step.
    """

    config: HealingConfig
    rows: int
    accumulation: int = 1
    at_a_time: int | None = None


class Cost:
    """Builds trainers for the same optimizer steps and times them against each other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.on_device = None if options.device == "cpu" else torch.get_device_module(options.device)
        self.size = DemoSize(tokens=options.tokens, vocabulary=2048, width=options.width, layers=options.layers)
        texts = [text for text in stdlib_docstrings() if len(text) > 4 * options.tokens]
        self.tokenizer = train_tokenizer(texts, self.size.vocabulary)
        # Every row full: all steps do the same work.
        rows = [self.tokenizer(text)["input_ids"][: options.tokens] for text in texts]
        rows = [row for row in rows if len(row) == options.tokens]
        self.steps = (options.turns + WARM_UP) * options.turn
        needed = self.steps * options.rows
        self.dataset = Dataset.from_dict({"input_ids": [rows[index % len(rows)] for index in range(needed)]})
        model = small_llama(self.tokenizer, self.size, seed=0)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.known_sizes: dict[int, str] = {}
        self.lessons: dict[int, dict[str, Any]] = {}
        self.bytes_of_state = 0

    def trainer(self, run: Run, directory: Path, steps: int) -> tuple[SFTTrainer, SmallDevice | None]:
        on_cpu = self.on_device is None
        trainer = (SFTTrainer if run.at_a_time is None else OwnLoss)(
            model=small_llama(self.tokenizer, self.size, seed=0),
            args=SFTConfig(
                output_dir=str(directory),
                max_steps=steps,
                max_length=self.options.tokens,
                per_device_train_batch_size=run.rows,
                gradient_accumulation_steps=run.accumulation,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=on_cpu,
                bf16=not on_cpu,
                gradient_checkpointing=False,
                dataloader_pin_memory=not on_cpu,
            ),
            train_dataset=self.dataset,
            processing_class=self.tokenizer,
            callbacks=[SelfHealingCallback(run.config)],
        )
        trainer.remove_callback(PrinterCallback)
        small = None
        if run.at_a_time is not None:
            small = SmallDevice(trainer, run.at_a_time * self.options.tokens)
        return trainer, small

    def learn(self, at_a_time: int) -> None:
        """A short run on such a device: what it writes down about sizes, and what finding that out has cost."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            calls.PROBE_STEPS = 1
            run = Run(HealingConfig(), self.options.rows, at_a_time=at_a_time)
            trainer, small = self.trainer(run, directory, steps=12)
            trainer.train()
            self.known_sizes[at_a_time] = (directory / "healing_sizes.json").read_text()
            events = [json.loads(line) for line in (directory / "healing_events.jsonl").read_text().splitlines()]
        first = next(event for event in events if event["kind"] == "outcome")
        self.lessons[at_a_time] = {
            "failures": len(small.fired),
            "first_incident_seconds": first["seconds_lost"],
            "steps_lost": first["steps_lost"],
        }

    def lap(self, runs: dict[str, Run], first: int) -> dict[str, list[float]]:
        """Seconds per step in each turn of each run; they take turns in this order, beginning with the `first`."""
        order = [*runs][first % len(runs) :] + [*runs][: first % len(runs)]
        turns = {name: Turn(self.options.turn, self.on_device) for name in order}
        for name, following in zip(order, order[1:] + order[:1], strict=True):
            turns[name].theirs = turns[following].mine

        def train(name: str) -> None:
            # OpenMP keeps the number of threads for each calling thread.
            torch.set_num_threads(self.options.threads)
            turns[name].wait()
            trainers[name].train()

        with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(len(runs)) as threads:
            trainers, devices = {}, {}
            for number, name in enumerate(order):
                directory = Path(root) / str(number)
                directory.mkdir()
                run = runs[name]
                if run.at_a_time is not None:
                    (directory / "healing_sizes.json").write_text(self.known_sizes[run.at_a_time])
                trainers[name], devices[name] = self.trainer(run, directory, self.steps)
                trainers[name].add_callback(turns[name])
            gc.collect()
            running = [threads.submit(train, name) for name in order]
            turns[order[0]].mine.release()
            for each in running:
                each.result()
        for name, run in runs.items():
            self._check(name, run, trainers[name], devices[name])
        return {name: turn.seconds[WARM_UP - 1 :] for name, turn in turns.items()}

    def _check(self, name: str, run: Run, trainer: SFTTrainer, device: SmallDevice | None) -> None:
        pieces = [entry["healing/split_into"] for entry in trainer.state.log_history if "healing/split_into" in entry]
        expected = 1 if run.at_a_time is None else self.options.rows // run.at_a_time
        found = pieces[-1] if pieces else 1
        failed = [] if device is None else device.fired
        if found != expected or max(failed, default=0) >= WARM_UP * self.options.turn:
            raise RuntimeError(f"{name}: {found} pieces instead of {expected}, failures at steps {failed}")
        self.bytes_of_state = bytes_of_state(trainer)


def bytes_of_state(trainer: Any) -> int:
    """Weights and optimizer state."""
    held = [*trainer.model.parameters(), *trainer.model.buffers()]
    for state in trainer.optimizer.state.values():
        held += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def against(laps: list[dict[str, list[float]]], run: str, base: str) -> dict[str, Any]:
    """The ratio of two runs: the median of each lap's pairs, and over all laps with its bootstrap interval."""
    pairs = [list(zip(lap[run], lap[base], strict=True)) for lap in laps]
    ratios = [statistics.median(mine / theirs for mine, theirs in lap) for lap in pairs]
    ratio, interval = median_and_interval(ratios)
    extra, extra_interval = median_and_interval(
        [statistics.median(1e3 * (mine - theirs) for mine, theirs in lap) for lap in pairs]
    )
    return {
        "ratio": ratio,
        "ratio_ci95": interval,
        "extra_ms_per_step": extra,
        "extra_ms_per_step_ci95": extra_interval,
        "ratio_of_each_lap": ratios,
    }


def milliseconds(laps: list[dict[str, list[float]]]) -> dict[str, float]:
    return {name: 1e3 * statistics.median(value for lap in laps for value in lap[name]) for name in laps[0]}


def cost(options: argparse.Namespace) -> dict[str, Any]:
    if options.device == "cpu":
        keep_freed_memory()
        torch.set_num_threads(options.threads)
    bench, rows = Cost(options), options.rows
    healthy = {
        "raise": Run(HealingConfig(on_oom="raise"), rows),
        "raise again": Run(HealingConfig(on_oom="raise"), rows),
        "heal": Run(HealingConfig(), rows),
        "backup": Run(HealingConfig(on_oom="backup"), rows),
    }
    divided = {"whole": Run(HealingConfig(), rows)}
    for pieces in (2, 4):
        at_a_time = rows // pieces
        bench.learn(at_a_time)
        # Known from the start, and never tried larger: all steps that are timed are split alike.
        divided[f"split in {pieces}"] = Run(HealingConfig(), rows, at_a_time=at_a_time)
        divided[f"by hand in {pieces}"] = Run(HealingConfig(), at_a_time, pieces)
    calls.PROBE_STEPS = NEVER
    first, second = [], []
    # Both rounds over the whole time: what the machine does changes by the minute.
    for number in range(max(options.laps, options.split_laps)):
        if number < options.laps:
            first.append(bench.lap(healthy, number))
        if number < options.split_laps:
            second.append(bench.lap(divided, number))
    split = {}
    for pieces in (2, 4):
        split[str(pieces)] = {
            "over_whole": against(second, f"split in {pieces}", "whole"),
            "over_by_hand": against(second, f"split in {pieces}", f"by hand in {pieces}"),
            "by_hand_over_whole": against(second, f"by hand in {pieces}", "whole"),
            "finding_it_out": bench.lessons[rows // pieces],
        }
    return {
        "what": "time of an optimizer step: medians over laps of the median over pairs of turns, SFT",
        "healthy_run": {
            "heal_over_raise": against(first, "heal", "raise"),
            "raise_over_raise": against(first, "raise again", "raise"),
            "backup_over_heal": against(first, "backup", "heal"),
            "backup_bytes_per_step": bench.bytes_of_state,
            "ms_per_step": milliseconds(first),
            "laps": options.laps,
        },
        "split": {**split, "ms_per_step": milliseconds(second), "laps": options.split_laps},
        "turns_per_lap": options.turns,
        "steps_per_turn": options.turn,
        "setting": {
            "device": "cpu" if bench.on_device is None else bench.on_device.get_device_name(),
            "cpu": processor(),
            "threads": options.threads,
            "cores": os.cpu_count(),
            "parameters": bench.parameters,
            "rows": rows,
            "tokens": options.tokens,
            "precision": "float32" if bench.on_device is None else "bfloat16 autocast",
        },
        "versions": versions(),
    }


def show_cost(result: dict[str, Any]) -> Table:
    table = Table(title="Time of an optimizer step", header_style="bold")
    for column in ("", "ratio", "95 % interval", "ms more"):
        table.add_column(column, justify="left" if not column else "right")

    def row(title: str, figures: dict[str, Any]) -> None:
        low, high = figures["ratio_ci95"]
        more = figures["extra_ms_per_step"]
        table.add_row(title, f"{figures['ratio']:.4f}", f"{low:.4f} to {high:.4f}", f"{more:+.2f}")

    healthy = result["healthy_run"]
    row('on_oom="raise", against itself', healthy["raise_over_raise"])
    row('on_oom="heal" over "raise"', healthy["heal_over_raise"])
    copied = healthy["backup_bytes_per_step"] / 1e6
    row(f"with on_oom=backup ({copied:.1f} MB a step)", healthy["backup_over_heal"])
    for pieces in ("2", "4"):
        each = result["split"][pieces]
        row(f"split in {pieces}, over the whole batch", each["over_whole"])
        row(f"split in {pieces}, over a smaller batch by hand", each["over_by_hand"])
    return table


# ---- with limited memory ----

TASKS = ("sft", "dpo", "grpo")
VARIANTS = {
    "full": "all of the memory",
    "ours": "SelfHealingTrainer",
    "by_hand": "a smaller batch with more accumulation, found by trying",
    "auto_find": "auto_find_batch_size=True",
}


@dataclass(frozen=True)
class Job:
    """
    One training run in a process of its own.

    Args:
        task (`str`), variant (`str`), lengths (`"every"` or `"some"`):
            What is trained and how; whether all rows are long, or some.
        directory (`str`):
            Where it writes, and finds the tokenizer.
        rows (`int`), accumulation (`int`), steps (`int`), tokens (`int`):
            Of the run; with DPO rows are pairs.
        width (`int`), layers (`int`):
            Of the model.
        limit (`int`, *optional*):
            Bytes of device memory it may take.
        simulate_rows (`int`, *optional*):
            Rows of full length above which calls fail, in place of a limit.
        probe_steps (`int`):
            Steps after which a size that did not fit is tried again.
        generations (`int`):
            `num_generations` of GRPO.
    """

    task: str
    variant: str
    lengths: str
    device: str
    directory: str
    rows: int
    accumulation: int
    steps: int
    tokens: int
    width: int
    layers: int
    probe_steps: int
    generations: int
    limit: int | None = None
    simulate_rows: int | None = None

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return max(self.tokens // 8, 1)

    @property
    def length(self) -> int:
        """Tokens of the longest rows that are trained on."""
        return self.prompt + self.tokens // 2 if self.task == "grpo" else self.tokens


class Gauge(TrainerCallback):
    """Time and memory of the steps, from outside of whatever runs them."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.seconds: list[float] = []
        # Optimizer steps that were made, also those whose result was thrown away.
        self.updates = 0
        self.peaks = {"allocated": 0, "reserved": 0, "allocated_in_update": 0}
        self.at_rest = 0
        # Of the last call in each step that was trained on.
        self.rows_at_a_time: list[int] = []
        self._rows = 0
        self._began: float | None = None
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._rows = (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).size(0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._began is None:
            self._synchronize()
            self._began = time.perf_counter()
        if self.on_cuda and state.global_step > 0:
            self.at_rest = max(self.at_rest, torch.cuda.memory_allocated())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_peaks()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.updates += 1
        self._note_peaks(of_update=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._synchronize()
        now = time.perf_counter()
        if self._began is not None:
            self.seconds.append(now - self._began)
            self.rows_at_a_time.append(self._rows)
        self._began = now

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_peaks()

    def _note_peaks(self, of_update: bool = False) -> None:
        if not self.on_cuda:
            return
        allocated = torch.cuda.max_memory_allocated()
        self.peaks["allocated"] = max(self.peaks["allocated"], allocated)
        self.peaks["reserved"] = max(self.peaks["reserved"], torch.cuda.max_memory_reserved())
        if of_update:
            self.peaks["allocated_in_update"] = max(self.peaks["allocated_in_update"], allocated)
        torch.cuda.reset_peak_memory_stats()

    def _synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()


def data_for(job: Job, tokenizer: Any, texts: list[str]) -> Dataset:
    """
    Rows of `tokens` tokens; with `some`, of half as many but for one in every fourth optimizer step, from a third of
    the run on (where the trainer takes them in their order).
    """
    pools = [ids for ids in (tokenizer(text)["input_ids"] for text in texts) if len(ids) >= job.tokens]
    per_step, first = job.rows * job.accumulation, job.steps // 3
    lengths = []
    for index in range(job.steps * per_step):
        step, row = divmod(index, per_step)
        long = row == 0 and step >= first and (step - first) % 4 == 0
        lengths.append(job.tokens if long or job.lengths == "every" else job.tokens // 2)
    rows = [pools[index % len(pools)][:length] for index, length in enumerate(lengths)]
    if job.task == "sft":
        return Dataset.from_dict({"input_ids": rows})
    if job.task == "grpo":
        # The prompts; how long a row gets is up to the model, which has not learned to stop.
        return Dataset.from_dict({"prompt": [tokenizer.decode(row[: job.prompt]) for row in rows]})
    others = [pools[(index + 1) % len(pools)][job.prompt : length] for index, length in enumerate(lengths)]
    return Dataset.from_dict(
        {
            "prompt": [tokenizer.decode(row[: job.prompt]) for row in rows],
            "chosen": [tokenizer.decode(row[job.prompt :]) for row in rows],
            "rejected": [tokenizer.decode(row) for row in others],
        }
    )


def variety(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between completions."""
    return [float(len(set(text))) + 0.01 * len(text) for text in completions]


def llama(job: Job, tokenizer: Any) -> LlamaForCausalLM:
    transformers.set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=job.width,
            intermediate_size=4 * job.width,
            num_hidden_layers=job.layers,
            num_attention_heads=max(job.width // 64, 2),
            num_key_value_heads=max(job.width // 64, 2),
            max_position_embeddings=4 * job.tokens,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def trainer_for(job: Job) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job.directory)
    texts = json.loads((Path(job.directory) / "texts.json").read_text())
    on_cpu = job.device == "cpu"
    common = {
        "output_dir": str(Path(job.directory) / f"{job.task}-{job.lengths}-{job.variant}-{job.rows}"),
        "per_device_train_batch_size": job.rows,
        "gradient_accumulation_steps": job.accumulation,
        "max_steps": job.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "seed": 0,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": not on_cpu,
        "auto_find_batch_size": job.variant == "auto_find",
    }
    if any(each.name == "train_sampling_strategy" for each in dataclasses.fields(SFTConfig)):
        common["train_sampling_strategy"] = "sequential"
    shared = {
        "model": llama(job, tokenizer),
        "train_dataset": data_for(job, tokenizer, texts),
        "processing_class": tokenizer,
    }
    if job.task == "sft":
        return SFTTrainer(args=SFTConfig(learning_rate=2e-4, max_length=job.tokens, **common), **shared)
    if job.task == "dpo":
        return DPOTrainer(
            args=DPOConfig(learning_rate=5e-6, max_length=job.tokens, **common),
            ref_model=llama(job, tokenizer),
            **shared,
        )
    return GRPOTrainer(
        args=GRPOConfig(
            learning_rate=1e-6,
            max_completion_length=job.tokens // 2,
            num_generations=job.generations,
            **common,
        ),
        reward_funcs=variety,
        **shared,
    )


def run(job: Job) -> dict[str, Any]:
    """Trains, in this process."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    on_cuda = job.device == "cuda"
    if not on_cuda:
        torch.set_num_threads(1)
    if on_cuda and job.limit is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(job.limit / total, 1.0))
    result: dict[str, Any] = {"variant": job.variant, "rows": job.rows, "accumulation": job.accumulation}
    try:
        trainer = trainer_for(job)
    except ValueError as error:
        # GRPO does not take auto_find_batch_size.
        return {**result, "failed": f"{type(error).__name__}: {str(error)[:300]}", "not_supported": True}
    trainer.remove_callback(PrinterCallback)
    small = None
    if job.simulate_rows is not None and job.variant != "full":
        small = SmallDevice(trainer, job.simulate_rows * job.length)
    gauge = Gauge(trainer.model, trainer.accelerator.device)
    runner = trainer
    if job.variant == "ours":
        calls.PROBE_STEPS = job.probe_steps
        runner = SelfHealingTrainer(trainer, HealingConfig())
    trainer.add_callback(gauge)
    began = time.perf_counter()
    try:
        runner.train()
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        result["out_of_memory"] = isinstance(error, torch.OutOfMemoryError)
    seconds = time.perf_counter() - began
    return {**result, **figures_of(trainer, gauge, seconds, small)}


def figures_of(trainer: Any, gauge: Gauge, seconds: float, small: SmallDevice | None) -> dict[str, Any]:
    state, args = trainer.state, trainer.args
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    rewards = [entry["reward"] for entry in state.log_history if "reward" in entry]
    # The last half: sizes have been found by then, what is reserved has been taken.
    settled = gauge.seconds[len(gauge.seconds) // 2 :]
    ooms = len(small.fired) if small is not None else 0
    if gauge.on_cuda:
        ooms = torch.cuda.memory_stats().get("num_ooms", 0)
    return {
        "optimizer_steps": state.global_step,
        "steps_lost": gauge.updates - state.global_step,
        "failed_attempts": ooms,
        "effective_batch": trainer._train_batch_size * args.gradient_accumulation_steps,
        "peak": gauge.peaks if gauge.on_cuda else None,
        "at_rest": gauge.at_rest if gauge.on_cuda else None,
        "seconds": seconds,
        "steps_per_second": 1 / statistics.median(settled) if settled else None,
        "steps_per_second_overall": state.global_step / seconds,
        "final_loss": losses[-1] if losses else None,
        "final_reward": rewards[-1] if rewards else None,
        "losses": losses,
        "rows_at_a_time": gauge.rows_at_a_time,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
    }


def in_a_process(job: Job) -> dict[str, Any]:
    """The same in a process of its own: its allocator is fresh, and its limit its own."""
    output = Path(job.directory) / "result.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "job", json.dumps(dataclasses.asdict(job)), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not output.exists():
        tail = done.stderr.strip().splitlines()[-8:]
        return {"variant": job.variant, "failed": f"exit status {done.returncode}: " + " | ".join(tail)}
    return json.loads(output.read_text())


def limit_for(full: dict[str, Any], share: float) -> int:
    """
    Between what a step needs anyway and what it needs with all rows at once: at rest, and so much of the rest. Updates
    have to fit: they do not get smaller with the batch.
    """
    peak, at_rest = full["peak"]["allocated"], full["at_rest"]
    limit = max(at_rest + share * (peak - at_rest), 1.15 * full["peak"]["allocated_in_update"])
    if limit > 0.9 * peak:
        raise SystemExit(
            f"The update alone needs {full['peak']['allocated_in_update'] / 1e9:.2f} GB, the whole step "
            f"{peak / 1e9:.2f} GB: please raise --rows, so that a limit can lie between the two."
        )
    return int(limit)


def by_hand(job: Job, log: Callable[[str], None]) -> dict[str, Any]:
    """Half the rows, and again, until a run comes through: what somebody does who looks at the error."""
    tries, result = 0, {"variant": job.variant, "failed": "no smaller batch"}
    while job.rows % 2 == 0:
        job = dataclasses.replace(job, rows=job.rows // 2, accumulation=job.accumulation * 2)
        result = in_a_process(job)
        if "failed" not in result:
            break
        log(f"  by hand: {job.rows} rows do not fit")
        tries += 1
    return {**result, "failed_runs_before": tries}


def limited(options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    tasks = []
    with tempfile.TemporaryDirectory() as directory:
        texts = [text for text in stdlib_docstrings() if len(text) > 4 * options.tokens]
        train_tokenizer(texts, options.vocabulary).save_pretrained(directory)
        (Path(directory) / "texts.json").write_text(json.dumps(texts[:2000]))
        for task in options.tasks:
            for lengths in ("every",) if task == "grpo" else options.lengths:
                job = Job(
                    task=task,
                    variant="full",
                    lengths=lengths,
                    device=options.device,
                    directory=directory,
                    # A pair is two rows.
                    rows=options.rows // 2 if task == "dpo" else options.rows,
                    accumulation=options.accumulation,
                    steps=options.grpo_steps if task == "grpo" else options.steps,
                    tokens=options.tokens,
                    width=options.width,
                    layers=options.layers,
                    probe_steps=options.probe_steps,
                    generations=options.generations,
                    simulate_rows=options.simulate_rows,
                )
                tasks.append(one_setting(job, options, log))
                write({"settings": tasks}, options.output)
                # Checkpoints and journals of the runs.
                for path in Path(directory).glob(f"{task}-{lengths}-*"):
                    shutil.rmtree(path, ignore_errors=True)
    on_cuda = options.device == "cuda"
    return {
        "what": "training runs whose batch does not fit: by SelfHealingTrainer, with a batch found by hand, with "
        "auto_find_batch_size, and with all of the memory",
        "variants": VARIANTS,
        "settings": tasks,
        "setting": {
            "device": torch.cuda.get_device_name() if on_cuda else "cpu, simulated",
            "total_memory": torch.cuda.get_device_properties(0).total_memory if on_cuda else None,
            "simulate_rows": options.simulate_rows,
            "share": options.share,
            "tokens": options.tokens,
            "width": options.width,
            "layers": options.layers,
            "probe_steps": options.probe_steps,
            "precision": "bfloat16 autocast" if on_cuda else "float32",
        },
        "versions": versions(),
    }


def one_setting(job: Job, options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    log(f"{job.task}, {job.lengths} row long: with all of the memory")
    full = in_a_process(job)
    if "failed" in full:
        raise SystemExit(f"{job.task} does not run even with all of the memory: {full['failed']}")
    # Batches of short rows have to fit where only some are long.
    share = options.share if job.lengths == "every" else max(options.share, 0.75)
    limit = limit_for(full, share) if job.device == "cuda" else None
    runs = [full]
    for variant in ("ours", "by_hand", "auto_find"):
        log(f"{job.task}, {job.lengths} row long: {VARIANTS[variant]}")
        this = dataclasses.replace(job, variant=variant, limit=limit)
        runs.append(by_hand(this, log) if variant == "by_hand" else in_a_process(this))
    for each in runs[1:]:
        pairs = list(zip(each.get("losses", []), full["losses"], strict=False))
        each["largest_difference_of_a_loss"] = max((abs(mine - theirs) for mine, theirs in pairs), default=None)
    return {
        "task": job.task,
        "rows_long": job.lengths,
        "rows": job.rows,
        "accumulation": job.accumulation,
        "steps": job.steps,
        "limit_bytes": limit,
        "share_of_what_all_rows_at_once_need": None if limit is None else limit / full["peak"]["allocated"],
        "runs": runs,
    }


def show_limited(result: dict[str, Any]) -> Table:
    table = Table(title="Batches that do not fit", header_style="bold")
    for column in ("task", "long", ""):
        table.add_column(column, no_wrap=True)
    for column in ("steps", "lost", "failed", "batch", "peak GB", "steps/s", "overall", "loss", "off by"):
        table.add_column(column, justify="right", no_wrap=True)

    def text(value: Any, form: str) -> str:
        return "–" if value is None else format(value, form)

    for setting in result["settings"]:
        for each in setting["runs"]:
            names = (setting["task"], setting["rows_long"], each["variant"])
            if "failed" in each and "losses" not in each:
                table.add_row(*names, *["–"] * 9)
                continue
            failed = each["failed_attempts"] + each.get("failed_runs_before", 0)
            peak = None if each["peak"] is None else each["peak"]["reserved"] / 1e9
            table.add_row(
                *names,
                ("failed at " if "failed" in each else "") + str(each["optimizer_steps"]),
                str(each["steps_lost"]),
                str(failed),
                str(each["effective_batch"]),
                text(peak, ".2f"),
                text(each["steps_per_second"], ".2f"),
                text(each["steps_per_second_overall"], ".2f"),
                text(each["final_loss"], ".4f"),
                text(each.get("largest_difference_of_a_loss"), ".1e"),
            )
    return table


# ---- throughput after healing ----


class Calls(TrainerCallback):
    """Calls of a trainer's models in each optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self.of_steps: list[int] = []
        self._now = 0
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                model.register_forward_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        self._now += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.of_steps.append(self._now)
        self._now = 0


@dataclass
class Side:
    """What became of one of the two runs of a duet: the seconds of its steps, calls of the model, failed attempts."""

    seconds: list[float]
    calls: list[int]
    failures: int


def side_of(job: Job, mine: Any, theirs: Any) -> Side:
    """One of them."""
    # Of the processor: what else the machine does falls on neither.
    turn = Turn(1, None, time.thread_time)
    turn.mine, turn.theirs = mine, theirs
    trainer = trainer_for(job)
    trainer.remove_callback(PrinterCallback)
    small, calls = SmallDevice(trainer, job.simulate_rows * job.length), Calls(trainer)
    if job.variant == "ours":
        trainer.add_callback(SelfHealingCallback())
    trainer.add_callback(calls)
    trainer.add_callback(turn)
    turn.wait()
    trainer.train()
    return Side(turn.seconds[WARM_UP - 1 :], calls.of_steps[WARM_UP:], len(small.fired))


def duet(job: Job, by_hand_first: bool) -> dict[str, Side]:
    """The healed run and the one with a batch set by hand, which take turns step by step."""
    pieces = job.rows // (job.simulate_rows // (2 if job.task == "dpo" else 1))
    by_hand = {"variant": "by_hand", "rows": job.rows // pieces, "accumulation": job.accumulation * pieces}
    jobs = (job, dataclasses.replace(job, **by_hand))
    sides = dict(
        zip(("ours", "by_hand"), in_turns([partial(side_of, each) for each in jobs], by_hand_first), strict=True)
    )
    if sides["by_hand"].failures or not sides["ours"].failures:
        raise RuntimeError(f"{job.task}: {job.simulate_rows} rows are no limit to the one and a limit to the other")
    return sides


def throughput(options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    keep_freed_memory()
    torch.set_num_threads(1)
    size, tasks = SIZES["cpu"], {}
    with tempfile.TemporaryDirectory() as directory:
        texts = [text for text in stdlib_docstrings() if len(text) > 4 * options.tokens]
        train_tokenizer(texts, size["vocabulary"]).save_pretrained(directory)
        (Path(directory) / "texts.json").write_text(json.dumps(texts[:2000]))
        for task in options.tasks:
            log(task)
            laps: list[dict[str, list[float]]] = []
            calls: dict[str, list[int]] = {"ours": [], "by_hand": []}
            failures: list[int] = []
            for lap in range(options.laps):
                job = Job(
                    task=task,
                    variant="ours",
                    lengths="every",
                    device="cpu",
                    directory=directory,
                    rows=options.rows // 2 if task == "dpo" else options.rows,
                    accumulation=1,
                    steps=options.turns + WARM_UP,
                    tokens=options.tokens,
                    width=options.width,
                    layers=options.layers,
                    probe_steps=50,
                    generations=4,
                    simulate_rows=options.fit,
                )
                sides = duet(job, by_hand_first=lap % 2 == 1)
                laps.append({name: each.seconds for name, each in sides.items()})
                for name, each in sides.items():
                    calls[name] += each.calls
                failures.append(sides["ours"].failures)
                for path in Path(directory).glob(f"{task}-*"):
                    shutil.rmtree(path, ignore_errors=True)
            tasks[task] = {
                "in_processor_time": {
                    name: value for name, value in against(laps, "by_hand", "ours").items() if name.startswith("ratio")
                },
                "in_calls": sum(calls["by_hand"]) / sum(calls["ours"]),
                "calls_per_step": {name: statistics.mean(each) for name, each in calls.items()},
                "failed_attempts": failures,
                "ms_per_step": milliseconds(laps),
            }
    return {
        "what": "optimizer steps per second after healing, over those with the largest batch that fits, set by hand",
        "tasks": tasks,
        "laps": options.laps,
        "turns_per_lap": options.turns,
        "setting": {
            "device": "cpu, simulated",
            "cpu": processor(),
            "rows": options.rows,
            "rows_that_fit": options.fit,
            "tokens": options.tokens,
            "width": options.width,
            "layers": options.layers,
        },
        "versions": versions(),
    }


def show_throughput(result: dict[str, Any]) -> Table:
    setting = result["setting"]
    title = f"Throughput after healing, {setting['rows_that_fit']} of {setting['rows']} rows fit, over a batch by hand"
    table = Table(title=title, header_style="bold")
    for column in ("", "in processor time", "95 % interval", "in calls", "failed attempts"):
        table.add_column(column, justify="left" if not column else "right")
    for task, each in result["tasks"].items():
        low, high = each["in_processor_time"]["ratio_ci95"]
        ratio = each["in_processor_time"]["ratio"]
        failed = ", ".join(map(str, each["failed_attempts"]))
        table.add_row(task, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", f"{each['in_calls']:.3f}", failed)
    return table


# ---- the command line ----


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    commands = top.add_subparsers(dest="command", required=True)

    costs = commands.add_parser("cost", help="what the machinery, the backup and a split step cost")
    costs.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    costs.add_argument("--laps", type=int, default=10, help="laps of the healthy runs")
    costs.add_argument("--split-laps", type=int, default=6, help="laps of the runs that are split")
    costs.add_argument("--turns", type=int, default=25, help="turns of each run in a lap that count")
    costs.add_argument("--turn", type=int, default=1, help="steps of a turn; on a GPU better 10")
    costs.add_argument("--rows", type=int, default=8, help="rows of a step")
    costs.add_argument("--tokens", type=int, default=64, help="tokens of a row")
    costs.add_argument("--width", type=int, default=160, help="size of the hidden states")
    costs.add_argument("--layers", type=int, default=2, help="transformer blocks")
    costs.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    costs.add_argument("--output", type=Path, help="JSON file; by default results/memory_cost_DEVICE.json")

    after = commands.add_parser("throughput", help="steps after healing beside those with a batch set by hand")
    after.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    after.add_argument("--laps", type=int, default=6, help="laps of each task")
    after.add_argument("--turns", type=int, default=25, help="turns of each run in a lap that count")
    after.add_argument("--rows", type=int, default=8, help="rows of a step (DPO: half as many pairs)")
    after.add_argument("--fit", type=int, default=4, help="rows of full length that fit")
    after.add_argument("--tokens", type=int, default=64, help="tokens of a row")
    after.add_argument("--width", type=int, default=160, help="size of the hidden states")
    after.add_argument("--layers", type=int, default=2, help="transformer blocks")
    after.add_argument("--output", type=Path, help="JSON file; by default results/memory_throughput_cpu.json")

    cuda = commands.add_parser("cuda", help="real runs on a device with too little memory")
    cuda.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    cuda.add_argument("--simulate-rows", type=int, help="on the CPU: rows of full length above which calls fail")
    cuda.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    cuda.add_argument("--lengths", nargs="+", default=["every", "some"], choices=["every", "some"])
    cuda.add_argument("--share", type=float, default=0.5, help="part of what the batch needs that there is")
    cuda.add_argument("--rows", type=int, help="rows of a batch (DPO: half as many pairs)")
    cuda.add_argument("--accumulation", type=int, default=2)
    cuda.add_argument("--steps", type=int, help="optimizer steps of SFT and DPO")
    cuda.add_argument("--grpo-steps", type=int, help="optimizer steps of GRPO")
    cuda.add_argument("--tokens", type=int, help="tokens of a row")
    cuda.add_argument("--width", type=int, help="size of the hidden states")
    cuda.add_argument("--layers", type=int, help="transformer blocks")
    cuda.add_argument("--vocabulary", type=int, help="tokens of the tokenizer")
    cuda.add_argument("--generations", type=int, default=4, help="num_generations of GRPO")
    cuda.add_argument(
        "--probe-steps",
        type=int,
        default=10,
        help="until a size that failed is tried again",
    )
    cuda.add_argument("--output", type=Path, help="JSON file; by default results/memory_cuda.json")

    job = commands.add_parser("job", help="one run of `cuda`, in a process of its own")
    job.add_argument("job")
    job.add_argument("output", type=Path)
    return top


# 280M parameters on a GPU; something to try the script with on a CPU.
SIZES = {
    "cuda": {
        "rows": 32,
        "steps": 60,
        "grpo_steps": 16,
        "tokens": 512,
        "width": 1024,
        "layers": 16,
        "vocabulary": 8192,
    },
    "cpu": {"rows": 8, "steps": 16, "grpo_steps": 6, "tokens": 32, "width": 64, "layers": 2, "vocabulary": 1024},
}


def complete(options: argparse.Namespace) -> None:
    """Sizes that were not given; whether there is a device to run on."""
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "There is no CUDA device here, and this benchmark is about its memory. "
            "`--device cpu --simulate-rows 5` goes through all of it with a simulated limit."
        )
    if options.device == "cpu" and options.simulate_rows is None:
        sys.exit("On a CPU there is no limit of memory to run into: please give --simulate-rows.")
    for name, size in SIZES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, size)


def write(result: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(rounded(result), indent=2) + "\n", encoding="utf-8")


def main() -> None:
    options = parser().parse_args()
    console = Console(highlight=False, width=120)
    if options.command == "job":
        write(run(Job(**json.loads(options.job))), options.output)
        return
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    if options.command == "cost":
        result = cost(options)
        table, name = show_cost(result), f"memory_cost_{options.device}.json"
    elif options.command == "throughput":
        result = throughput(options, console.print)
        table, name = show_throughput(result), "memory_throughput_cpu.json"
    else:
        complete(options)
        name = "memory_cuda.json" if options.device == "cuda" else "memory_simulated.json"
        options.output = options.output or RESULTS / name
        result = limited(options, console.print)
        table = show_limited(result)
    output = options.output or RESULTS / name
    write(result, output)
    console.print(table)
    console.print(f"Written to {output}", soft_wrap=True)


if __name__ == "__main__":
    main()
