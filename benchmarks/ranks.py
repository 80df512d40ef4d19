"""
What healing costs on two ranks of a run in which nothing goes wrong.

As `overhead.py`, on two processes that train together: both hold a plain trainer and one with a
`SelfHealingCallback`, which take turns of some steps, and then change their parts. Both ranks have come before a turn
begins. A turn holds all that a step brings now and then: snapshots, the comparison of weights. So of a duet the ratio
of all its steps counts.

```bash
python benchmarks/ranks.py
python benchmarks/ranks.py --strategy fsdp2
python benchmarks/ranks.py --strategy zero2      # where DeepSpeed is installed: `make test-deepspeed`
```

What threads of the package do beside training falls on both trainers alike, and stands beside the ratio, as share of
one core. A run of its own counts the votes of ranks, and the time from a rank's ballot to the result: that of the
reduction, and of waiting for the other rank. What no healing before the update can be cheaper than is measured in the
same way: a plain reduction of one ballot in each step, by a callback that does nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers.training_args
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from overhead import RESULTS, Bench, Profile, Turn, keep_freed_memory, median_and_interval, processor
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTTrainer

import self_healing
from self_healing import SelfHealingCallback
from self_healing.hf.deepspeed import engine_of
from self_healing.ranks import votes as consensus


RANKS = 2
# Seconds per step of a turn of the plain trainer, and of the healed one.
Pair = tuple[float, float]


# What a step with healing may take, of one without.
BOUND = 1.015
# Turns at the start of a duet that are not counted: a turn is noted from the end of the one before.
WARM_UP_TURNS = 1
# The stage of ZeRO, and whether in bf16.
ZERO = {"zero1": (1, False), "zero2": (2, True), "zero3": (3, True)}
# The job is ended after so many seconds, whatever became of it, and a collective after so many.
LIMIT, COLLECTIVE = 1800, 90


@dataclass(frozen=True, slots=True)
class Timed:
    """
    A duet: seconds per step of each pair of turns.

    Args:
        clock (`list[Pair]`), cpu (`list[Pair]`):
            On the clock, and of the training thread's CPU time.
        share (`dict[str, float]`):
            What each thread of the package takes of a core.
    """

    clock: list[Pair]
    cpu: list[Pair]
    share: dict[str, float]


class BothRanks:
    """Waits for the other rank at the end of a turn."""

    @staticmethod
    def synchronize() -> None:
        dist.barrier()


class RankTurn(Turn):
    """
    A turn on several ranks: only the trainer whose turn it is may be in a collective, also at the end of its run. So
    the one that has had its last turn waits until the other has ended.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps and self.other is not None and self.other.ended:
            self._note()
            return
        if state.global_step == state.max_steps:
            self.ended = True
        super().on_step_end(args, state, control, **kwargs)
        if self.ended:
            self.wait()

    ended = False
    other: RankTurn | None = None

    def _note(self) -> None:
        self._synchronize()
        self.seconds.append((self._clock() - (self._began or 0.0)) / self._steps)
        self.cpu_seconds.append((time.thread_time() - self._cpu_began) / self._steps)


class OneReduction(TrainerCallback):
    """Has the ranks reduce a ballot before each update, and does nothing with it."""

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        ballot = torch.zeros(consensus.BALLOT)
        dist.all_reduce(ballot)
        ballot.tolist()


class OwnThreads(TrainerCallback):
    """Adds up the CPU time of the threads of the package, at the end of the last step."""

    def __init__(self) -> None:
        self.share: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._since = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self._began, self._since = _seconds_of_threads(), time.perf_counter()
        elif state.global_step == state.max_steps:
            passed = time.perf_counter() - self._since
            self.share = {
                name: (seconds - self._began.get(name, 0.0)) / passed
                for name, seconds in _seconds_of_threads().items()
            }


def _seconds_of_threads() -> dict[str, float]:
    threads = [each for each in threading.enumerate() if each.name.startswith("self_healing") and each.ident]
    return {each.name: time.clock_gettime(time.pthread_getcpuclockid(each.ident or 0)) for each in threads}


class Votes:
    """Times the votes of this process while it is entered."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._cast = consensus._cast

    def _timed(self, question: str, *ballot: Any) -> list[float]:
        began = time.perf_counter()
        try:
            return self._cast(question, *ballot)
        finally:
            self.seconds.setdefault(question, []).append(time.perf_counter() - began)

    def __enter__(self) -> Votes:
        consensus._cast = self._timed
        return self

    def __exit__(self, *exception: object) -> None:
        consensus._cast = self._cast

    def table(self, steps: int) -> list[dict[str, Any]]:
        """By question, those that take most time first."""
        found = sorted(self.seconds.items(), key=lambda each: -sum(each[1]))
        return [
            {
                "question": question,
                "votes": len(seconds),
                "per_step": round(len(seconds) / steps, 3),
                "us_each": round(1e6 * statistics.median(seconds), 1),
                "us_per_step": round(1e6 * sum(seconds) / steps, 1),
            }
            for question, seconds in found
        ]


class RanksBench(Bench):
    """Builds the same trainer again and again on each rank, and times its steps."""

    warm_up = WARM_UP_TURNS

    def arguments(self, directory: str) -> dict[str, Any]:
        common = {**super().arguments(directory), "ddp_backend": "gloo", "ddp_find_unused_parameters": False}
        return common | (zero_arguments(self.options.strategy) if self.options.strategy in ZERO else {})

    def rank_duets(self, healing: type[TrainerCallback]) -> Iterator[Timed]:
        """
        Times two trainers that take turns, one plain and one with a callback of a class, and again with these parts
        changed: where the memory of a trainer lies makes its steps up to 5 % slower or faster, and is in the mean of
        both no more. Under DeepSpeed a trainer can train only once.
        """
        threads = [ThreadPoolExecutor(1) for _ in range(2)]
        with tempfile.TemporaryDirectory() as directory:
            trainers: list[SFTTrainer] = []
            for healed in range(2):
                if not trainers or self.options.strategy in ZERO:
                    trainers = [self.trainer(False, TrainerCallback(), f"{directory}/{number}") for number in range(2)]
                gc.collect()
                yield self._duet(trainers, threads, healed, healing())
            for trainer in trainers:
                sharded = [isinstance(each, DTensor) for each in trainer.model.parameters()]
                assert all(sharded) == any(sharded) == (self.options.strategy == "fsdp2")
                assert (engine_of(trainer) is not None) == (self.options.strategy in ZERO)
        for thread in threads:
            thread.shutdown()

    def _duet(
        self,
        trainers: Sequence[SFTTrainer],
        threads: Sequence[ThreadPoolExecutor],
        healed: int,
        healing: TrainerCallback,
    ) -> Timed:
        turns = [RankTurn(self.options.turn, BothRanks) for _ in trainers]
        for turn, other in zip(turns, reversed(turns), strict=True):
            turn.other, turn.theirs = other, other.mine
        own = OwnThreads()
        callbacks: list[list[TrainerCallback]] = [[turn] for turn in turns]
        callbacks[healed] = [healing, turns[healed], own]

        def train(number: int) -> None:
            torch.set_num_threads(self.options.threads)
            for callback in callbacks[number]:
                trainers[number].add_callback(callback)
            turns[number].wait()
            trainers[number].train()
            for callback in callbacks[number]:
                trainers[number].remove_callback(callback)
            turns[number].theirs.release()

        dist.barrier()
        running = [thread.submit(train, number) for number, thread in enumerate(threads)]
        turns[0].mine.release()
        for run in running:
            run.result()
        plain, with_healing = turns[1 - healed], turns[healed]
        return Timed(
            list(zip(plain.seconds, with_healing.seconds, strict=True)),
            list(zip(plain.cpu_seconds, with_healing.cpu_seconds, strict=True)),
            own.share,
        )

    def votes(self) -> list[dict[str, Any]]:
        """Counts and times the votes, in a run of its own."""
        torch.set_num_threads(self.options.threads)
        with tempfile.TemporaryDirectory() as directory, Votes() as votes:
            trainer = self.trainer(True, TrainerCallback(), directory)
            dist.barrier()
            trainer.train()
        return votes.table(self.steps)


def sharded_on_the_cpu() -> None:
    """Has accelerate take the CPU for a device that FSDP2 can shard over; otherwise it trains under DDP, silently."""
    os.environ.update(
        ACCELERATE_TORCH_DEVICE="cpu",
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer",
    )
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def zero_arguments(strategy: str) -> dict[str, Any]:
    """Of `SFTConfig`, and forgets the plugin of the trainer before."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    stage, bf16 = ZERO[strategy]
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    return {"use_cpu": False, "bf16": bf16, "deepspeed": config}


def zero_on_the_cpu() -> None:
    """Has accelerate, transformers and DeepSpeed take the CPU for a device that they train on like any other."""
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", DS_ACCELERATOR="cpu")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    import deepspeed

    # Or a collective of its own for the CPU is compiled first, for minutes; those of gloo will do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def ratio_of(duet: list[Pair]) -> float:
    """Of all its steps: what comes only now and then is in some turns, and in the median of none."""
    return sum(healed for _, healed in duet) / sum(plain for plain, _ in duet)


def typical_ratio_of(duet: list[Pair]) -> float:
    """Of a step in which nothing comes that comes only now and then."""
    return statistics.median(healed / plain for plain, healed in duet)


def of_both_parts(values: list[float]) -> list[float]:
    """The mean of two duets, in which each trainer has been the plain one and the healed one."""
    return [statistics.mean(values[first : first + 2]) for first in range(0, len(values), 2)]


@dataclass(slots=True)
class Duets:
    """What was timed, seconds per step of all duets: mean of both ranks on the clock, and CPU time of this one."""

    clock: list[list[Pair]]
    cpu: list[list[Pair]]
    shares: list[dict[str, float]]


def time_duets(bench: RanksBench, healing: type[TrainerCallback], count: int) -> Duets:
    timed, began = Duets([], [], []), time.monotonic()
    for number in range(count // 2):
        for duet in bench.rank_duets(healing):
            # Both ranks wait for each other in each step: what one takes longer is in the time of the other as well.
            of_ranks: list[Any] = [None] * RANKS
            dist.all_gather_object(of_ranks, duet.clock)
            timed.clock.append(
                [tuple(map(statistics.mean, zip(*pairs, strict=True))) for pairs in zip(*of_ranks, strict=True)]
            )
            timed.cpu.append(duet.cpu)
            timed.shares.append(duet.share)
        if dist.get_rank() == 0:
            plain = 1e3 * statistics.median(plain for plain, _ in timed.clock[-1])
            ratios = " and ".join(f"{ratio_of(duet):.4f}" for duet in timed.clock[-2:])
            told = f"ratios {ratios}, {plain:.0f} ms per plain step ({time.monotonic() - began:.0f} s)"
            print(f"{healing.__name__}, pair {number + 1} of {count // 2}: {told}", flush=True)
    return timed


def measure(options: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()
    bench = RanksBench(options)
    timed = time_duets(bench, SelfHealingCallback, options.duets)
    reduced = of_both_parts(list(map(ratio_of, time_duets(bench, OneReduction, options.reductions).clock)))
    duets, shares = timed.clock, timed.shares
    pairs = [pair for duet in duets for pair in duet]
    ratios, typical = of_both_parts(list(map(ratio_of, duets))), of_both_parts(list(map(typical_ratio_of, duets)))
    ratio, interval = median_and_interval(ratios)
    typical_ratio, typical_interval = median_and_interval(typical)
    cpu_ratio, cpu_interval = median_and_interval(of_both_parts(list(map(ratio_of, timed.cpu))))
    reduction_ratio, reduction_interval = median_and_interval(reduced)
    bench.steps = options.profiled
    votes = bench.votes()
    bench.steps = options.profiled
    profile = Profile()
    with tempfile.TemporaryDirectory() as directory:
        torch.set_num_threads(options.threads)
        bench.trainer(True, profile, directory).train()
    return {
        "what": f"time of an optimizer step with SelfHealingCallback over that of the plain trainer, {RANKS} ranks, "
        f"{options.strategy}, healthy SFT run",
        "bound": BOUND,
        "ratio": ratio,
        "ratio_ci95": interval,
        "typical_ratio": typical_ratio,
        "typical_ratio_ci95": typical_interval,
        # Of the training thread of the first rank: other work on the machine disturbs it less.
        "cpu_ratio": cpu_ratio,
        "cpu_ratio_ci95": cpu_interval,
        # With one reduction of a ballot in each step, and nothing else.
        "reduction_ratio": reduction_ratio,
        "reduction_ratio_ci95": reduction_interval,
        "plain_ms_per_step": 1e3 * statistics.mean(plain for plain, _ in pairs),
        "healed_ms_per_step": 1e3 * statistics.mean(healed for _, healed in pairs),
        "threads_share_of_a_core": {
            name: round(statistics.mean(each.get(name, 0.0) for each in shares), 5) for name in shares[0]
        },
        "duets": options.duets,
        "duets_of_reductions": options.reductions,
        "pairs_of_turns_per_duet": options.turns,
        "steps_per_turn": options.turn,
        "setting": {
            "ranks": RANKS,
            "strategy": options.strategy,
            "backend": "gloo",
            "cpu": processor(),
            "threads": options.threads,
            "cores": os.cpu_count(),
            "parameters": bench.parameters,
            "rows": options.rows,
            "tokens": options.tokens,
        },
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "self_healing": self_healing.__version__,
        },
        "votes": votes,
        "profile": profile.own_time(),
        "ratio_of_two_duets": [round(value, 5) for value in ratios],
        "typical_ratio_of_two_duets": [round(value, 5) for value in typical],
        "reduction_ratio_of_two_duets": [round(value, 5) for value in reduced],
    }


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"Cost on {RANKS} ranks, {result['setting']['strategy']}", header_style="bold")
    for column in ("", "value", "95 % interval"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("plain trainer, ms per step", f"{result['plain_ms_per_step']:.2f}", "")
    table.add_row("with the callback, ms per step", f"{result['healed_ms_per_step']:.2f}", "")
    for name, key in (
        ("ratio", "ratio"),
        ("ratio of a step with nothing special", "typical_ratio"),
        ("ratio of CPU time", "cpu_ratio"),
        ("ratio of one reduction alone", "reduction_ratio"),
    ):
        low, high = result[f"{key}_ci95"]
        table.add_row(name, f"{result[key]:.4f}", f"{low:.4f} to {high:.4f}")
    for name, share in result["threads_share_of_a_core"].items():
        table.add_row(f"thread '{name}', of a core", f"{100 * share:.2f} %", "")
    console.print(table)
    votes = Table(title="Votes of the ranks", header_style="bold")
    for column in ("question", "per step", "us each", "us per step"):
        votes.add_column(column, justify="left" if column == "question" else "right")
    for entry in result["votes"]:
        votes.add_row(entry["question"], *(str(entry[key]) for key in ("per_step", "us_each", "us_per_step")))
    console.print(votes)
    functions = Table(title="Own time of the package, under the profiler", header_style="bold")
    for column in ("function", "us per step", "calls per step"):
        functions.add_column(column, justify="left" if column == "function" else "right")
    for entry in result["profile"]:
        functions.add_row(entry["function"], f"{entry['us_per_step']:.1f}", f"{entry['calls_per_step']:.2f}")
    console.print(functions)
    told = "within" if result["ratio"] <= BOUND else "above"
    console.print(f"The ratio is {told} the bound of {BOUND}.")


def on_each_rank(options: argparse.Namespace) -> None:
    if options.strategy == "fsdp2":
        sharded_on_the_cpu()
    elif options.strategy in ZERO:
        zero_on_the_cpu()
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE))
    result = measure(options)
    if dist.get_rank() == 0:
        output = options.output or RESULTS / f"ranks_{options.strategy}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        console = Console(highlight=False)
        show(console, result)
        console.print(f"Written to {output}", soft_wrap=True)
    dist.barrier()
    dist.destroy_process_group()


def launch() -> int:
    """Starts this script on each rank; returns the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run([*command, *sys.argv], env=environment, timeout=LIMIT, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp2", *ZERO])
    parser.add_argument("--duets", type=int, default=10, help="duets of a plain and a healed run; an even number")
    parser.add_argument("--reductions", type=int, default=6, help="duets of one reduction alone; an even number")
    parser.add_argument("--turns", type=int, default=8, help="turns of each run in a duet that count")
    parser.add_argument("--turn", type=int, default=10, help="steps of a turn")
    parser.add_argument("--profiled", type=int, default=40, help="steps of the runs whose votes and calls are counted")
    parser.add_argument("--rows", type=int, default=6, help="rows of a step on each rank")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a row")
    parser.add_argument("--width", type=int, default=160, help="size of the hidden states")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks")
    parser.add_argument("--output", type=Path, help="JSON file; by default results/ranks_STRATEGY.json")
    options = parser.parse_args()
    for name in ("duets", "reductions"):
        if getattr(options, name) < 2 or getattr(options, name) % 2:
            parser.error(f"--{name} is {getattr(options, name)}, but must be an even number: they come in pairs")
    if "RANK" not in os.environ:
        raise SystemExit(launch())
    # Two ranks, and two cores are all that most machines have for certain.
    options.device, options.threads = "cpu", 1
    on_each_rank(options)


if __name__ == "__main__":
    main()
