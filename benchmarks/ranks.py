"""
What healing costs on two ranks of a run in which nothing goes wrong.

As `overhead.py`, with two processes to each of the two runs: the two ranks of the plain trainer do some steps, those
of the one with a `SelfHealingCallback` do some, and so on. A turn ends when all ranks of the run have come to its end,
and holds all that a step brings now and then: snapshots, the comparison of weights. So of a duet the ratio of all its
steps counts; two duets, one in which either begins, are one value, their mean.

```bash
python benchmarks/ranks.py
python benchmarks/ranks.py --strategy fsdp2
python benchmarks/ranks.py --strategy zero2      # where DeepSpeed is installed: `make test-deepspeed`
```

What threads of the package do beside training stands beside the ratio, as share of one core: while a run waits for its
turn they fall on the other one. A run of its own counts the votes of ranks, and the time from a rank's ballot to the
result: that of the reduction, and of waiting for the other rank. What no healing before the update can be cheaper than
is measured in the same way: a plain reduction of one ballot in each step, by a callback that does nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers.training_args
from accelerate import PartialState
from accelerate.utils import DistributedType
from overhead import RESULTS, Bench, Profile, Turn, in_turns, keep_freed_memory, median_and_interval, processor
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

import self_healing
from self_healing import SelfHealingCallback
from self_healing.hf.deepspeed import engine_of
from self_healing.ranks import votes as consensus


RANKS = 2
# Seconds per step of a turn of the plain trainer, and of the healed one.
Pair = tuple[float, float]


# What a step with healing may take, of one without.
BOUND = 1.015
# Turns of a run that are not counted: the first, and the last, in which the other run may have come to its end.
UNCOUNTED = 2
# The stage of ZeRO, and whether in bf16.
ZERO = {"zero1": (1, False), "zero2": (2, True), "zero3": (3, True)}
# A run waits for its turn within a collective of its own; none takes so many seconds.
COLLECTIVE = 600


@dataclass(frozen=True, slots=True)
class OfRank:
    """What a rank of one run has timed: seconds per step of each turn, on the clock and of its training thread."""

    seconds: list[float]
    cpu_seconds: list[float]
    share: dict[str, float]


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


class AllRanks:
    """Waits for the other ranks of the run at the end of a turn."""

    @staticmethod
    def synchronize() -> None:
        dist.barrier()


def at_step_end(trainer: Trainer, *watching: TrainerCallback) -> None:
    """
    Tells them of each step after all callbacks: were they callbacks of the user's themselves, the ranks would ask each
    other after each step what they ask for.
    """
    told = trainer.callback_handler.on_step_end

    def on_step_end(args: Any, state: Any, control: Any) -> Any:
        control = told(args, state, control)
        for each in watching:
            each.on_step_end(args, state, control)
        return control

    trainer.callback_handler.on_step_end = on_step_end


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

    warm_up = UNCOUNTED

    def arguments(self, directory: str) -> dict[str, Any]:
        common = {**super().arguments(directory), "ddp_backend": "gloo", "ddp_find_unused_parameters": False}
        return common | (zero_arguments(self.options.strategy) if self.options.strategy in ZERO else {})

    def rank_duet(self, healing: type[TrainerCallback], healed_first: bool) -> Timed:
        """A plain trainer and one with a callback of a class take turns."""
        runs: list[Callable[..., Any]] = []
        for callback in (TrainerCallback, healing):
            runs += on_ranks(self.options.strategy, partial(self.timed_rank, callback))
        found = in_turns(runs, int(healed_first))
        plain, healed = found[:RANKS], found[RANKS:]
        # The ranks wait for each other in each step: what one takes longer is in the time of the others as well.
        clock = [
            [statistics.mean(turn) for turn in zip(*(each.seconds for each in of), strict=True)]
            for of in (plain, healed)
        ]
        cpu = [run[0].cpu_seconds for run in (plain, healed)]
        return Timed(*(list(zip(*both, strict=True))[:-1] for both in (clock, cpu)), healed[0].share)

    def timed_rank(self, callback: type[TrainerCallback], mine: Any, theirs: Any) -> OfRank:
        """One rank of one of the two runs."""
        turn, threads = Turn(self.options.turn, AllRanks), OwnThreads()
        turn.mine, turn.theirs = mine, theirs
        with tempfile.TemporaryDirectory() as directory:
            trainer = self.trainer(False, callback(), directory)
            at_step_end(trainer, threads, turn)
            gc.collect()
            dist.barrier()
            turn.wait()
            trainer.train()
        sharded = [isinstance(each, DTensor) for each in trainer.model.parameters()]
        assert all(sharded) == any(sharded) == (self.options.strategy == "fsdp2")
        assert (engine_of(trainer) is not None) == (self.options.strategy in ZERO)
        return OfRank(turn.seconds, turn.cpu_seconds, threads.share)

    def votes(self, *turns: Any) -> list[dict[str, Any]]:
        """Counts and times the votes, in a run of its own."""
        with tempfile.TemporaryDirectory() as directory, Votes() as votes:
            self.trainer(True, TrainerCallback(), directory).train()
        return votes.table(self.steps)

    def profiled(self, *turns: Any) -> list[dict[str, Any]]:
        """Where the time of the callback goes, in a run of its own."""
        profile = Profile()
        with tempfile.TemporaryDirectory() as directory:
            trainer = self.trainer(True, TrainerCallback(), directory)
            at_step_end(trainer, profile)
            trainer.train()
        return profile.own_time()


def on_ranks(strategy: str, run: Callable[[Any, Any], Any]) -> list[Callable[[Any, Any], Any]]:
    """The run, as each of its ranks is called with the semaphores of its turns."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [partial(_on_rank, strategy, rank, port, run) for rank in range(RANKS)]


def _on_rank(strategy: str, rank: int, port: int, run: Callable[[Any, Any], Any], mine: Any, theirs: Any) -> Any:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="localhost")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TOKENIZERS_PARALLELISM="false")
    torch.set_num_threads(1)
    if strategy == "fsdp2":
        sharded_on_the_cpu()
    elif strategy in ZERO:
        zero_on_the_cpu()
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE))
    try:
        return run(mine, theirs)
    finally:
        dist.destroy_process_group()


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
    """Of `SFTConfig`."""
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
    """The mean of two duets, in which either run has begun."""
    return [statistics.mean(values[first : first + 2]) for first in range(0, len(values), 2)]


def time_duets(bench: RanksBench, healing: type[TrainerCallback], count: int) -> list[Timed]:
    timed, began = [], time.monotonic()
    for number in range(count):
        timed.append(bench.rank_duet(healing, healed_first=number % 2 == 1))
        plain = 1e3 * statistics.median(plain for plain, _ in timed[-1].clock)
        told = (
            f"ratio {ratio_of(timed[-1].clock):.4f}, {plain:.0f} ms per plain step ({time.monotonic() - began:.0f} s)"
        )
        print(f"{healing.__name__}, duet {number + 1} of {count}: {told}", flush=True)
    return timed


def measure(options: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()
    # A process that has worked with several threads cannot be forked.
    torch.set_num_threads(1)
    bench = RanksBench(options)
    timed = time_duets(bench, SelfHealingCallback, options.duets)
    reduced = of_both_parts([ratio_of(duet.clock) for duet in time_duets(bench, OneReduction, options.reductions)])
    duets, shares = [duet.clock for duet in timed], [duet.share for duet in timed]
    pairs = [pair for duet in duets for pair in duet]
    ratios, typical = of_both_parts(list(map(ratio_of, duets))), of_both_parts(list(map(typical_ratio_of, duets)))
    ratio, interval = median_and_interval(ratios)
    typical_ratio, typical_interval = median_and_interval(typical)
    cpu_ratio, cpu_interval = median_and_interval(of_both_parts([ratio_of(duet.cpu) for duet in timed]))
    reduction_ratio, reduction_interval = median_and_interval(reduced)
    bench.steps = options.profiled
    votes, profile = (in_turns(on_ranks(options.strategy, run))[0] for run in (bench.votes, bench.profiled))
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
        "profile": profile,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp2", *ZERO])
    parser.add_argument("--duets", type=int, default=10, help="duets of a plain and a healed run; an even number")
    parser.add_argument("--reductions", type=int, default=4, help="duets of one reduction alone; an even number")
    parser.add_argument("--turns", type=int, default=40, help="turns of each run in a duet that count")
    parser.add_argument("--turn", type=int, default=2, help="steps of a turn")
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
    # Two ranks, and two cores are all that most machines have for certain.
    options.device, options.threads = "cpu", 1
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    result = measure(options)
    output = options.output or RESULTS / f"ranks_{options.strategy}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console = Console(highlight=False)
    show(console, result)
    console.print(f"Written to {output}", soft_wrap=True)


if __name__ == "__main__":
    main()
