"""
What the callback costs on a run in which nothing goes wrong.

Two runs go on at once, in two processes that take turns: the plain trainer does a step, the one with a
`SelfHealingCallback` does a step, and so on. Whatever else the machine is doing falls on both alike, and neither is in
the way of the other in one heap, which costs either up to 15 %. Each such duet gives the median over its pairs of
steps. Two duets, one in which either begins, count as one value, their mean; reported are the median over these and
its bootstrap confidence interval.

```bash
python benchmarks/overhead.py
python benchmarks/overhead.py --device cuda --turn 10 --width 1024 --layers 16
```

A step lasts from the end of the step before to its own end: logging, fetching, forward and backward, clipping, update.
On a GPU the host runs ahead of the device, so there a turn should be several steps: the device is synchronised when
the turn passes, and left alone within it.

Beside the time on the clock stands the CPU time of the training thread, which other work on the machine disturbs less,
and a profile: which functions of the package take how long per step by themselves, with what they call of Python and
torch.
"""

import argparse
import cProfile
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import pstats
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import datasets
import torch
import transformers
import trl
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

import self_healing
from self_healing import SelfHealingCallback
from self_healing.tools.demo.model import DemoSize, small_llama, stdlib_docstrings, train_tokenizer


RESULTS = Path(__file__).parent / "results"
# Turns at the start that are not counted: allocators and caches fill, the callback copies all buffers once.
WARM_UP = 5
# What a function of the package calls in these is the step of the plain trainer.
NOT_OURS = ("/transformers/", "/trl/", "/accelerate/", "/datasets/", "/torch/optim/", "/torch/nn/")
# Functions that the profile shows.
PROFILED = 20
# No turn takes as long; a thread that waits longer waits for one that has died.
PATIENCE = 600.0


class Turn(TrainerCallback):
    """Passes the turn to the other run after every few steps, and notes how long its own turns took."""

    def __init__(self, steps: int, on_device: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        # Of a thread or a process: acquired before a turn of this run, and released for one of the next run.
        self.mine: Any = threading.Semaphore(0)
        self.theirs: Any = None
        self._steps = steps
        self._on_device = on_device
        self._clock = clock
        self._began: float | None = None
        self._cpu_began = 0.0

    def _synchronize(self) -> None:
        if self._on_device is not None:
            self._on_device.synchronize()

    def wait(self) -> None:
        if not self.mine.acquire(timeout=PATIENCE):
            raise RuntimeError("the other run of the duet has ended")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._steps:
            return
        self._synchronize()
        if self._began is not None:
            self.seconds.append((self._clock() - self._began) / self._steps)
            self.cpu_seconds.append((time.thread_time() - self._cpu_began) / self._steps)
        self.theirs.release()
        if state.global_step < state.max_steps:
            self.wait()
        self._began, self._cpu_began = self._clock(), time.thread_time()


class Profile(TrainerCallback):
    """Profiles the steps after the warm-up, in CPU time of the training thread."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile(time.thread_time)
        self._steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP:
            self._profile.enable()
        elif state.global_step == state.max_steps:
            self._profile.disable()
            self._steps = state.max_steps - WARM_UP

    def own_time(self) -> list[dict[str, Any]]:
        """Functions of the package by what they take per step themselves, those they call outside of it included."""
        stats: dict[Any, Any] = pstats.Stats(self._profile).stats  # type: ignore[attr-defined]
        root = str(Path(self_healing.__file__).parent)
        seconds = {function: entry[2] for function, entry in stats.items() if function[0].startswith(root)}
        for function, (_, _, _, _, callers) in stats.items():
            if function in seconds or any(part in function[0] for part in NOT_OURS):
                continue
            for caller in callers.keys() & seconds.keys():
                seconds[caller] += callers[caller][3]
        largest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:PROFILED]
        return [
            {
                "function": f"{Path(file).relative_to(root)}:{name}",
                "us_per_step": round(1e6 * seconds[file, line, name] / self._steps, 1),
                "calls_per_step": round(stats[file, line, name][1] / self._steps, 2),
            }
            for file, line, name in largest
        ]


class Bench:
    """Builds the same trainer again and again and times its steps."""

    warm_up = WARM_UP

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.size = DemoSize(tokens=options.tokens, vocabulary=2048, width=options.width, layers=options.layers)
        self.on_device = None if options.device == "cpu" else torch.get_device_module(options.device)
        texts = [text for text in stdlib_docstrings() if len(text) > 4 * options.tokens]
        self.tokenizer = train_tokenizer(texts, self.size.vocabulary)
        # Tokenized once, and every row full: all steps do the same work.
        rows = [self.tokenizer(text)["input_ids"][: options.tokens] for text in texts]
        rows = [row for row in rows if len(row) == options.tokens]
        self.steps = (options.turns + self.warm_up) * options.turn
        needed = self.steps * options.rows * options.accumulation
        self.dataset = Dataset.from_dict({"input_ids": [rows[index % len(rows)] for index in range(needed)]})
        model = small_llama(self.tokenizer, self.size, seed=0)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

    def arguments(self, directory: str) -> dict[str, Any]:
        """Of `SFTConfig`."""
        options = self.options
        return {
            "output_dir": directory,
            "max_steps": self.steps,
            "max_length": options.tokens,
            "per_device_train_batch_size": options.rows,
            "gradient_accumulation_steps": options.accumulation,
            "logging_steps": 10,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": options.device == "cpu",
            "bf16": options.device != "cpu",
            "gradient_checkpointing": False,
            "dataloader_pin_memory": options.device != "cpu",
        }

    def trainer(self, healed: bool, turn: TrainerCallback, directory: str) -> SFTTrainer:
        trainer = SFTTrainer(
            model=small_llama(self.tokenizer, self.size, seed=0),
            args=SFTConfig(**self.arguments(directory)),
            train_dataset=self.dataset,
            processing_class=self.tokenizer,
            callbacks=[SelfHealingCallback()] if healed else None,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(turn)
        return trainer

    def profile(self) -> list[dict[str, Any]]:
        """Where the time of the callback goes, in a run of its own."""
        profile = Profile()
        torch.set_num_threads(self.options.threads)
        with tempfile.TemporaryDirectory() as directory:
            self.trainer(True, profile, directory).train()
        return profile.own_time()

    def duet(self, healed_first: bool) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Seconds per step, plain and healed, of each pair of turns: on the clock, and of the thread's CPU time."""
        plain, healed = in_turns([partial(self.timed, healed) for healed in (False, True)], int(healed_first))
        clock, cpu = (list(zip(*each, strict=True)) for each in zip(plain, healed, strict=True))
        return clock[WARM_UP - 1 :], cpu[WARM_UP - 1 :]

    def timed(self, healed: bool, mine: Any, theirs: Any) -> tuple[list[float], list[float]]:
        """One of the two runs."""
        torch.set_num_threads(self.options.threads)
        turn = Turn(self.options.turn, self.on_device)
        turn.mine, turn.theirs = mine, theirs
        with tempfile.TemporaryDirectory() as directory:
            trainer = self.trainer(healed, turn, directory)
            gc.collect()
            turn.wait()
            trainer.train()
        return turn.seconds, turn.cpu_seconds


def in_turns(runs: Sequence[Callable[[Any, Any], Any]], first: int = 0) -> list[Any]:
    """
    Two runs at once, each in a process of its own, begun alike by a fork; or two halves of runs.

    Each is called with the semaphore that it acquires before its turns, and the one that it releases after them. The
    `first` half begins.
    """
    context = multiprocessing.get_context("fork")
    half = len(runs) // 2
    with context.Manager() as shared, context.Pool(len(runs)) as processes:
        turns = [shared.Semaphore(0) for _ in runs]
        for turn in turns[first * half :][:half]:
            turn.release()
        calls = [(number, run, turns[number], turns[(number + half) % len(runs)]) for number, run in enumerate(runs)]
        # As they end: where one has failed, the other waits for its turn for ever, and is ended with the pool.
        found = dict(processes.imap_unordered(_numbered, calls))
    return [found[number] for number in range(len(runs))]


def _numbered(call: tuple[int, Callable[[Any, Any], Any], Any, Any]) -> tuple[int, Any]:
    number, run, mine, theirs = call
    return number, run(mine, theirs)


def keep_freed_memory() -> None:
    """
    Has glibc keep freed memory instead of giving it back to the system.

    Otherwise it gives back and takes again a part of the activations in every step, and MKL's workspace of 64 MB once
    or twice: how often is a matter of luck that holds for a whole run, and costs either run up to 5 % of a step.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # from malloc.h
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(top_pad, 64 * 2**20)
    libc.mallopt(mmap_max, 0)
    # Only the main arena has pieces as large as that.
    libc.mallopt(arena_max, 1)


def median_and_interval(values: list[float], resamples: int = 10_000) -> tuple[float, list[float]]:
    """Median with its 95 % percentile bootstrap interval."""
    sample = torch.tensor(values, dtype=torch.float64)
    draws = torch.randint(len(values), (resamples, len(values)), generator=torch.Generator().manual_seed(0))
    medians = sample[draws].quantile(0.5, dim=1)
    return statistics.median(values), medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


def over_both_orders(duets: list[list[tuple[float, float]]], of_pair: Callable[[float, float], float]) -> list[float]:
    """The median over the pairs of steps of each duet; the mean of two, as the order alternates."""
    medians = [statistics.median(of_pair(plain, healed) for plain, healed in duet) for duet in duets]
    return [statistics.mean(medians[first : first + 2]) for first in range(0, len(medians), 2)]


def fastest_tenth(pairs: list[tuple[float, float]], which: int) -> float:
    """The first decile of the plain (0) or the healed (1) steps."""
    return statistics.quantiles([pair[which] for pair in pairs], n=10)[0]


def processor() -> str:
    """The CPU's name as its maker writes it, where the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()
    # A process that has worked with several threads cannot be forked.
    torch.set_num_threads(1)
    bench = Bench(options)
    measured = [bench.duet(healed_first=number % 2 == 1) for number in range(options.duets)]
    duets, cpu_duets = [clock for clock, _ in measured], [cpu for _, cpu in measured]
    ratios = over_both_orders(duets, lambda plain, healed: healed / plain)
    extras = over_both_orders(duets, lambda plain, healed: 1e3 * (healed - plain))
    ratio, ratio_interval = median_and_interval(ratios)
    extra, extra_interval = median_and_interval(extras)
    cpu_ratio, cpu_interval = median_and_interval(over_both_orders(cpu_duets, lambda plain, healed: healed / plain))
    cpu_extra, _ = median_and_interval(over_both_orders(cpu_duets, lambda plain, healed: 1e3 * (healed - plain)))
    pairs = [pair for duet in duets for pair in duet]
    cpu_pairs = [pair for duet in cpu_duets for pair in duet]
    return {
        "what": "time of an optimizer step with SelfHealingCallback over that of the plain trainer, healthy SFT run",
        "ratio": ratio,
        "ratio_ci95": ratio_interval,
        "extra_ms_per_step": extra,
        "extra_ms_per_step_ci95": extra_interval,
        "plain_ms_per_step": 1e3 * statistics.median(plain for plain, _ in pairs),
        "healed_ms_per_step": 1e3 * statistics.median(healed for _, healed in pairs),
        "cpu_time": {
            "ratio": cpu_ratio,
            "ratio_ci95": cpu_interval,
            "extra_ms_per_step": cpu_extra,
            "plain_ms_per_step": 1e3 * statistics.median(plain for plain, _ in cpu_pairs),
            # What nothing else on the machine has slowed down.
            "fastest_plain_ms": 1e3 * min(plain for plain, _ in cpu_pairs),
            "fastest_healed_ms": 1e3 * min(healed for _, healed in cpu_pairs),
            "ratio_of_fastest_tenth": fastest_tenth(cpu_pairs, 1) / fastest_tenth(cpu_pairs, 0),
        },
        "duets": options.duets,
        "pairs_of_turns_per_duet": options.turns,
        "steps_per_turn": options.turn,
        "setting": {
            "device": "cpu" if bench.on_device is None else bench.on_device.get_device_name(),
            "cpu": processor(),
            "threads": options.threads,
            "cores": os.cpu_count(),
            "parameters": bench.parameters,
            "rows": options.rows,
            "accumulation": options.accumulation,
            "tokens": options.tokens,
            "precision": "float32" if bench.on_device is None else "bfloat16 autocast",
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
            "accelerate": accelerate.__version__,
            "self_healing": self_healing.__version__,
        },
        "profile": bench.profile(),
        "ratio_of_two_duets": [round(value, 5) for value in ratios],
        "extra_ms_per_step_of_two_duets": [round(value, 4) for value in extras],
    }


def show(result: dict[str, Any]) -> Table:
    table = Table(title="Cost of the callback on a healthy run", header_style="bold")
    for column in ("", "median", "95 % interval"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("plain trainer, ms per step", f"{result['plain_ms_per_step']:.2f}", "")
    table.add_row("with the callback, ms per step", f"{result['healed_ms_per_step']:.2f}", "")
    low, high = result["extra_ms_per_step_ci95"]
    table.add_row("difference, ms per step", f"{result['extra_ms_per_step']:+.2f}", f"{low:+.2f} to {high:+.2f}")
    low, high = result["ratio_ci95"]
    table.add_row("ratio", f"{result['ratio']:.4f}", f"{low:.4f} to {high:.4f}")
    cpu = result["cpu_time"]
    low, high = cpu["ratio_ci95"]
    table.add_row("ratio of CPU time", f"{cpu['ratio']:.4f}", f"{low:.4f} to {high:.4f}")
    table.add_row("ratio of CPU time, fastest tenth", f"{cpu['ratio_of_fastest_tenth']:.4f}", "")
    return table


def show_profile(result: dict[str, Any]) -> Table:
    table = Table(title="Own time of the callback, under the profiler", header_style="bold")
    table.add_column("function")
    table.add_column("us per step", justify="right")
    table.add_column("calls per step", justify="right")
    for entry in result["profile"]:
        table.add_row(entry["function"], f"{entry['us_per_step']:.1f}", f"{entry['calls_per_step']:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--duets", type=int, default=32, help="duets of a plain and a healed run; an even number")
    parser.add_argument("--turns", type=int, default=40, help="turns of each run in a duet that count")
    parser.add_argument("--turn", type=int, default=1, help="steps of a turn")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a row")
    parser.add_argument("--width", type=int, default=160, help="size of the hidden states")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--output", type=Path, help="JSON file; by default results/overhead_DEVICE.json")
    options = parser.parse_args()
    if options.duets < 2 or options.duets % 2:
        parser.error(f"--duets is {options.duets}, but must be an even number: either run begins in half of them")

    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    result = measure(options)
    output = options.output or RESULTS / f"overhead_{options.device}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console = Console(highlight=False)
    console.print(show(result))
    console.print(show_profile(result))
    console.print(f"Written to {output}", soft_wrap=True)


if __name__ == "__main__":
    main()
