"""
How cost grows: with the length of a run, the size of its model, the number of its ranks.

```bash
python benchmarks/growth.py --all           # everything, and benchmarks/results/growth.json: about five minutes
python benchmarks/growth.py length ranks    # some of it; in the file the other parts stay as they were
```

The objects are the library's own, what they are given is made up; only `training` trains, a model of a few weights. A
series is one cost at growing sizes: of a step, an incident, a log, a tensor, a byte, a file or a rank. It holds if no
size costs more than `factor` times what a smaller one does; why that much is beside it. Times are those of the
processor in the thread that trains, which other work disturbs little; the sizes take turns, and of each the least
counts. What is reckoned by arithmetic says so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import logging
import os
import platform
import random
import shutil
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainerState, TrainingArguments


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from made_up_run import MadeUpRun, MadeUpWindow  # noqa: E402

from self_healing import Action, HealingConfig, SelfHealingTrainer, __version__  # noqa: E402
from self_healing.checkpoints.marker import write_marker  # noqa: E402
from self_healing.checkpoints.vetting import vet  # noqa: E402
from self_healing.failures.recipes import Cause, FailureType  # noqa: E402
from self_healing.healers.numerics.loss import AppliedSteps  # noqa: E402
from self_healing.healers.restarts.attempts import Attempts  # noqa: E402
from self_healing.hf.objective import StepSignals  # noqa: E402
from self_healing.hf.state import LiveState, WeightSearch, live_state_of, nonfinite_tensors  # noqa: E402
from self_healing.journal.journal import Journal  # noqa: E402
from self_healing.journal.step_log import ROWS, StepLog, StepRow, step_log_of  # noqa: E402
from self_healing.ranks import votes  # noqa: E402
from self_healing.ranks.messages import Position  # noqa: E402
from self_healing.report.page.rendering import page_of  # noqa: E402
from self_healing.report.reading import read_run  # noqa: E402
from self_healing.rollback import host_memory  # noqa: E402
from self_healing.rollback.ring import SnapshotRing  # noqa: E402
from self_healing.rollback.snapshots import Snapshot  # noqa: E402
from self_healing.run.record import RunRecord  # noqa: E402
from self_healing.system.processes import Process  # noqa: E402
from self_healing.tools.judge import judge_log  # noqa: E402


RESULTS = ROOT / "benchmarks" / "results" / "growth.json"
LENGTHS, INCIDENTS, RANKS = (1_000, 10_000, 100_000, 1_000_000), (10, 100, 1_000), (1, 8, 64, 256, 1_024)
TRAINED = (1_000, 3_000, 10_000)
MEGABYTES, FILES = (64, 256, 1_024), (1, 10, 30, 100, 300)
# Width, layers, inner width, heads, heads of keys, vocabulary, tied: of GPT-2's size, Llama 3.2 1B, Llama 3 8B, 70B.
MODELS = {
    "0.1 B": (768, 12, 2_048, 12, 12, 32_000, False),
    "1 B": (2_048, 16, 8_192, 32, 8, 128_256, True),
    "8 B": (4_096, 32, 14_336, 32, 8, 128_256, False),
    "70 B": (8_192, 80, 28_672, 64, 8, 128_256, False),
}
NOISE = 1.5, "clock and caches, on a machine with other work"
FULL = ROWS / 1_000, "the step log is full at 8,192 rows"
NAMED = (
    3.0,
    "not flat: healing_run.json, which holds all incidents for the next process, is written anew at each change",
)
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
Found = dict[str, Any]


def series(
    of: str,
    per: str,
    unit: str,
    sizes: Iterable[Any],
    cost: Callable[[Any], float],
    allowed: tuple[float, str] = NOISE,
) -> Found:
    """One cost at growing sizes; `allowed` is the factor on what a smaller one costs, and why."""
    costs = {size: cost(size) for size in sizes}
    least = itertools.accumulate(costs.values(), min)
    grown = max(
        each / before if before else float(each > 0) for each, before in zip(costs.values(), least, strict=True)
    )
    values = {str(size): float(f"{each:.4g}") for size, each in costs.items()}
    told = {"grown": round(grown, 2), "factor": allowed[0], "within": grown <= allowed[0], "why": allowed[1]}
    return {"series": of, "per": per, "unit": unit, "values": values, "should_be_flat": True, **told}


def timed(
    of: str,
    per: str,
    unit: str,
    sizes: Sequence[Any],
    call: Callable[[Any], Any],
    share: Any,
    rounds: int = 5,
    **more: Any,
) -> Found:
    """The series of processor seconds, for each of so many units of work: a number, or one by size."""
    best = dict.fromkeys(sizes, float("inf"))
    gc.collect()
    for size in [*sizes] * rounds:
        began = time.thread_time()
        call(size)
        best[size] = min(best[size], time.thread_time() - began)
    shares = share if isinstance(share, Mapping) else dict.fromkeys(sizes, share)
    return series(of, per, unit, sizes, lambda size: best[size] / shares[size] / SECONDS[unit], **more)


def peak_of(call: Callable[[], Any]) -> float:
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return float(peak)


def held_by(*roots: Any) -> float:
    """Bytes of all objects that some hold, without classes, modules and functions."""
    seen, found = dict[int, Any](), list(roots)
    for each in found:
        if id(each) not in seen and not isinstance(each, (type, ModuleType, FunctionType)):
            seen[id(each)] = each
            found += gc.get_referents(each)
    return float(sum(map(sys.getsizeof, seen.values())))


# ---- length ----


def healthy(steps: int, first: int = 0) -> Iterable[StepSignals]:
    noise = random.Random(first)
    for step in range(first, first + steps):
        loss = (2 + 4 / (1 + step / 500)) * (1 + 0.02 * noise.gauss(0, 1))
        yield StepSignals(step, loss, noise.lognormvariate(0, 0.1))


class Judged:
    """A run whose steps are judged as `StepJudge` does it, and written to its step log, ten at a time."""

    def __init__(self, directory: Path) -> None:
        self.run = MadeUpRun(directory)
        self.applied = AppliedSteps(self.run)
        self.log = StepLog(step_log_of(directory, "made-up"), {"run": "made-up"})
        self.judged = self.written = 0

    def judge(self, steps: int) -> None:
        numerics = self.run.numerics
        for signals in healthy(steps, self.judged):
            if numerics.bounds is not None and numerics.bounds.admit(signals):
                numerics.waiting.append(signals)
                continue
            numerics.feed()
            numerics.detector.judge(signals)
            if numerics.panel.alarming(signals) is None:
                self.applied.take_in(MadeUpWindow(signals.step), signals)
        self.judged += steps

    def write(self, steps: int) -> None:
        for step, loss, norm in ((each.step, each.loss, each.grad_norm) for each in healthy(steps, self.written)):
            self.log.kept.append(StepRow(step, 1, 0, 1, float(step), 0.1, 0.1, loss, loss, norm or 0.0, norm or 0.0))
            if step % 10 == 9:
                self.log.write()
        self.written += steps


class Healed:
    """A run with a record, some of whose steps were NaN until they were computed again."""

    def __init__(self, directory: Path, incidents: int) -> None:
        self.run = MadeUpRun(directory)
        self.attempts, record = Attempts(self.run), RunRecord(directory, "made-up")
        record.begin_attempt(None, 0)
        self.heal(incidents)
        self.attempts.keep(record, taken_up=False)
        self.attempts.write()

    def heal(self, incidents: int) -> None:
        for number in range(incidents):
            with self.run.incident(number, "nonfinite_loss", {"loss": float("nan"), "grad_norm": 1.0}) as opened:
                again = {"again": {"loss": 2.5, "grad_norm": 1.0}, "reexecutions": 1}
                opened.diagnosed(FailureType.NONFINITE_TRANSIENT, Cause.TRANSIENT, again)
                opened.acted(Action.USE_REEXECUTED_STEP)
                opened.close("resolved")


def write_run(run: Judged, place: Path, steps: int, incidents: int) -> Path:
    """What a run has left that was written to its step log, and that logged every tenth step."""
    shutil.copytree(run.run.directory, place)
    journal = Healed(place, incidents).run.journal
    journal.event("run_started", 0, output_dir=str(place), max_steps=steps)
    told = [{"step": 10 * each.step, "loss": each.loss, "reward": each.loss} for each in healthy(steps // 10)]
    TrainerState(global_step=steps, log_history=told).save_to_json(str(place / "trainer_state.json"))
    return place


def length(root: Path) -> Iterable[Found]:
    runs = {steps: Judged(root / str(steps)) for steps in LENGTHS}
    for steps, run in runs.items():
        run.judge(steps)
        run.write(steps)
    kept = {count: {n: write_run(runs[n], root / f"{n} {count}", n, count) for n in LENGTHS} for count in (0, 1_000)}
    few = {count: write_run(runs[10_000], root / f"few {count}", 10_000, count) for count in INCIDENTS}
    held = {steps: held_by(vars(run.run.numerics.panel), run.run.numerics.limits) for steps, run in runs.items()}
    yield series("judging: memory", "run", "bytes", LENGTHS, held.get, (2.0, "windows are not full at 1,000 steps"))
    yield series("step log and journal", "run", "bytes", LENGTHS, lambda steps: disk_of(root / str(steps)), FULL)
    yield timed("judging", "step", "µs", LENGTHS, lambda steps: runs[steps].judge(5_000), 5_000)
    passes = 3.0, "a full log is merged in as many passes as its rows have bits of steps"
    yield timed(
        "step log", "step", "µs", LENGTHS, lambda steps: runs[steps].write(2 * ROWS), 2 * ROWS, 2, allowed=passes
    )
    for count, of in {0: "report, no incident", 1_000: "report, 1,000 incidents"}.items():
        yield from of_report(of, {steps: partial(read_run, place) for steps, place in kept[count].items()})
    yield timed("report", "incident", "µs", INCIDENTS, lambda count: read_run(few[count]), {n: n for n in INCIDENTS})
    healed = {count: Healed(root / f"{count} healed", count) for count in INCIDENTS}
    journal = {count: each.run.journal.path.stat().st_size for count, each in healed.items()}
    yield series("journal", "incident", "bytes", INCIDENTS, lambda count: journal[count] / count)
    record = {count: float((root / f"{count} healed/healing_run.json").stat().st_size) for count in INCIDENTS}
    yield series("record, at each change", "run", "bytes", INCIDENTS, record.get, NAMED)
    with mock.patch("os.fsync"):
        yield timed(
            "incident written", "incident", "ms", INCIDENTS, lambda n: healed[n].heal(10), 10, 3, allowed=NAMED
        )
    files = {steps: root / f"{steps}.csv" for steps in LENGTHS}
    for steps, file in files.items():
        rows = (f"{each.step},{each.loss},{each.grad_norm}" for each in healthy(steps))
        file.write_text("\n".join(["step,loss,grad_norm", *rows]))
    yield timed(
        "judge_log", "log", "µs", LENGTHS, lambda steps: judge_log(files[steps], "sft"), {n: n for n in LENGTHS}, 1
    )
    # Tracing is slow, and this is linear.
    peaks = {steps: partial(judge_log, files[steps], "sft") for steps in LENGTHS[:3]}
    yield series("judge_log: memory", "log", "bytes", peaks, lambda steps: peak_of(peaks[steps]) / steps)


def of_report(of: str, read: Mapping[int, Callable[[], Any]]) -> Iterable[Found]:
    logs = {steps: steps / 10 for steps in LENGTHS}
    yield timed(of, "log", "µs", LENGTHS, lambda steps: read[steps](), logs, 2)
    yield series(f"{of}: memory", "log", "bytes", LENGTHS, lambda steps: peak_of(read[steps]) / logs[steps])
    yield series(f"{of}: page", "run", "bytes", LENGTHS, lambda steps: float(len(page_of(read[steps]()))), FULL)


def disk_of(directory: Path) -> float:
    return float(sum(file.stat().st_size for file in directory.iterdir()))


# ---- model size ----


def model_of(name: str, real: bool) -> LlamaForCausalLM:
    """A model without memory; or as many tensors as it has, of a few elements."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    width, layers, *others, tied = MODELS[name]
    sizes = dict(zip(names, (width, *others) if real else (8, 8, 2, 2, 8), strict=True))
    with torch.device("meta" if real else "cpu"):
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, tie_word_embeddings=tied))


def trainer_of(model: LlamaForCausalLM) -> SimpleNamespace:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    apart = {"accelerator": SimpleNamespace(scaler=None), "args": SimpleNamespace(sync_ref_model=False)}
    return SimpleNamespace(model=model, optimizer=optimizer, **apart)


def take(live: LiveState) -> Snapshot:
    snapshot = Snapshot()
    snapshot.take(live)
    return snapshot


def trusted(ring: SnapshotRing, live: LiveState) -> None:
    """All of it, as it is between two steps and in the one that completes the test."""
    assert ring.fits(live)
    assert not ring.take(live, 0, {}).nonfinite()
    ring.promote()


def model_size(root: Path) -> Iterable[Found]:
    real = {name: [each.numel() for each in model_of(name, real=True).parameters()] for name in MODELS}
    tensors, billions = {each: len(real[each]) for each in real}, {each: sum(real[each]) / 1e9 for each in real}
    yield {"series": "models: tensors, billions", "values": {name: [tensors[name], billions[name]] for name in MODELS}}
    trainers = {name: trainer_of(model_of(name, real=False)) for name in MODELS}
    found = list[Found]()
    # Norms are copied together, as they are small. Matrices are not, however small these are.
    with mock.patch.object(host_memory, "_FEW", 8):
        live = {name: live_state_of(trainer) for name, trainer in trainers.items()}
        taken, rings = {name: take(each) for name, each in live.items()}, {name: SnapshotRing() for name in MODELS}
        search = {name: WeightSearch(trainer.model) for name, trainer in trainers.items()}
        calls: dict[str, Callable[[str], Any]] = {
            "tensors collected": lambda name: live_state_of(trainers[name]),
            "snapshot planned, and copied": lambda name: take(live[name]),
            "snapshot copied": lambda name: taken[name].take(live[name]),
            "snapshot searched for NaN": lambda name: taken[name]._look([], [], None),
            "snapshot taken, searched, trusted": lambda name: trusted(rings[name], live[name]),
            "snapshot put back": lambda name: taken[name].restore(live[name]),
            "weights searched": lambda name: search[name].finds_nothing(),
            "weights and moments searched": lambda each: nonfinite_tensors(
                trainers[each].model, trainers[each].optimizer
            ),
        }
        for what, call in calls.items():
            found.append(timed(what, "tensor", "µs", [*MODELS], call, tensors, 9))
            yield found[-1]
    for each in of_bytes(root):
        found.append(each)
        yield each
    last = {each["series"]: [*each["values"].values()][-1] for each in found}
    by = {"arithmetic": "tensors, and bytes of fp32 and AdamW on one rank"}
    for what in ("snapshot copied", "snapshot searched for NaN"):
        seconds = {
            each: last[what] * tensors[each] / 1e6 + 12 * billions[each] * last[f"{what}: bytes"] for each in MODELS
        }
        yield {"series": f"{what}, by arithmetic", "per": "snapshot", "unit": "s", "values": seconds, **by}
    seconds, by = (
        {each: 10 * billions[each] * last["checkpoint vetted: bytes"] for each in MODELS},
        {"arithmetic": "bytes of bf16, fp32 moments"},
    )
    yield {"series": "checkpoint vetted, by arithmetic", "per": "checkpoint", "unit": "s", "values": seconds, **by}


def of_bytes(root: Path) -> Iterable[Found]:
    weights = {size: {str(each): torch.randn(1 << 22) for each in range(size // 16)} for size in MEGABYTES}
    live = {size: LiveState(each, {}, None, {}) for size, each in weights.items()}
    taken = {size: take(each) for size, each in live.items()}
    places = {size: write_checkpoint(root / f"{size} MB", each, size // 64) for size, each in weights.items()}
    calls: dict[str, Callable[[int], Any]] = {
        "snapshot copied": lambda size: taken[size].take(live[size]),
        "snapshot searched for NaN": lambda size: taken[size]._look([], [], None),
        "snapshot put back": lambda size: taken[size].restore(live[size]),
        "checkpoint vetted": lambda size: vetted(places[size]),
    }
    for what, call in calls.items():
        yield timed(f"{what}: bytes", "GB", "s", MEGABYTES, call, {size: size * 2**20 / 1e9 for size in MEGABYTES}, 3)
    many = {files: {str(number): torch.ones(8) for number in range(files)} for files in FILES}
    shards = {files: write_checkpoint(root / f"{files} files", each, files) for files, each in many.items()}
    yield timed(
        "checkpoint vetted: files", "file", "ms", FILES, lambda files: vetted(shards[files]), {n: n for n in FILES}
    )


def vetted(place: Path) -> None:
    verdict = vet(place)
    assert verdict.usable, verdict.reason


def write_checkpoint(place: Path, weights: Mapping[str, torch.Tensor], files: int) -> Path:
    LlamaConfig().save_pretrained(str(place))
    shards = {f"model-{number:05}.safetensors": list(weights)[number::files] for number in range(files)}
    for file, names in shards.items():
        safetensors.torch.save_file({name: weights[name] for name in names}, place / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": {}, "param_groups": []}, place / name)
    TrainerState(global_step=1).save_to_json(str(place / "trainer_state.json"))
    write_marker(place, "made-up", 1, {}, emergency=False, finite=True)
    return place


# ---- training ----


class Line(nn.Module):
    """The smallest model: a step is little but what the Trainer and we do in it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.line(rows) - labels).square().mean()}


class Looks(TrainerCallback):
    """Looks at the process after so many steps: its memory, and all objects that the collector knows."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[float, float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in TRAINED:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.found[state.global_step] = pages * os.sysconf("SC_PAGE_SIZE") / 1e6, float(len(gc.get_objects()))


def training(root: Path) -> Iterable[Found]:
    """A healthy run with the wrapper, everything on, that logs and saves every 500 steps."""
    every = {"logging_steps": 500, "save_steps": 500, "save_total_limit": 2, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(str(root / "run"), max_steps=TRAINED[-1], use_cpu=True, **every)
    rows = [{"rows": torch.randn(4), "labels": torch.randn(1)} for _ in range(64)]
    looks = Looks()
    trainer = Trainer(Line(), arguments, train_dataset=rows, callbacks=[looks])  # type: ignore[arg-type]
    with contextlib.redirect_stdout(None):
        # Batches are kept for a replay until the next snapshot is trusted: at each look equally many.
        SelfHealingTrainer(trainer, HealingConfig(snapshot_interval=50)).train()
    kept = 1.05, "the Trainer keeps what it logs"
    for number, (what, unit) in enumerate({"memory of the process": "MB", "Python objects": ""}.items()):
        yield series(f"training: {what}", "run", unit, TRAINED, lambda steps, n=number: looks.found[steps][n], kept)


# ---- ranks ----


class Asked:
    """A store within one process that counts the requests, and the bytes that go to and fro."""

    def __init__(self) -> None:
        self.store, self.lock, self.requests, self.nbytes = torch.distributed.HashStore(), threading.Lock(), 0, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            answer = getattr(self.store, name)(*arguments)
            with self.lock:
                self.requests += 1
                self.nbytes += sum(len(each) for each in (*arguments, answer) if isinstance(each, str | bytes))
            return answer

        return ask


def meet(ranks: int) -> Asked:
    store, met, gate = Asked(), list[str](), threading.Barrier(ranks)

    def enter(rank: int) -> None:
        gate.wait()
        met.append(votes._meet(store, "place", HealingConfig().to_dict(), 600.0, rank, ranks))

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(met) == ranks
    assert len(set(met)) == 1
    return store


def vote(ranks: int, others: int = 0) -> list[float]:
    """A vote, some of whose ranks ask another question, as single precision sums it up one after the other."""

    def reduce(ballot: torch.Tensor) -> None:
        assert ballot.nbytes == 4 * votes.BALLOT
        other = votes._ballot("another", [1.0], ballot.device)
        asked = torch.cat([ballot.expand(ranks - others, -1), other.expand(others, -1)])
        ballot.copy_(asked.cumsum(0)[-1])

    with (
        mock.patch.object(votes, "world_size", return_value=ranks),
        mock.patch("torch.distributed.all_reduce", reduce),
    ):
        return votes.sum_over_ranks("the same", [1.0], torch.device("cpu"))


def exact_up_to() -> int:
    """The ranks, a power of two, up to which the sums of what names any question are exact."""
    named = torch.tensor(sorted({votes._named(str(each)) for each in range(60_000)}))
    ranks, total = 0, torch.zeros(named.shape)
    while torch.equal((total + named).long(), (ranks + 1) * named) and ranks < 1 << 14:
        total, ranks = total + named, ranks + 1
    return ranks


def ranks(root: Path) -> Iterable[Found]:
    # How often one asks again depends on how long it waits: here for threads that share two cores.
    with mock.patch.object(votes, "_ASK_FIRST", votes._ASK_LAST):
        stores = {count: meet(count) for count in RANKS}
    polls = 3.0, "who comes early asks again, every two seconds"
    yield series("meeting", "rank", "requests", RANKS, lambda count: stores[count].requests / count, polls)
    yield series("meeting", "rank", "bytes", RANKS, lambda count: stores[count].nbytes / count, polls)
    yield series("vote", "rank", "bytes", RANKS, lambda _: 4.0 * votes.BALLOT, (1.0, "one ballot, one reduction"))
    for others in (1, 511):
        with contextlib.suppress(votes.RanksDisagree):
            raise AssertionError(f"ranks that ask another question go unnoticed: {vote(1_024, others)}")
    exact = {str(count): vote(count)[0] == count for count in RANKS}
    yield {"series": "sums of a vote are exact", "values": exact | {"of any question, up to ranks": exact_up_to()}}
    sign = {
        "count": 1,
        "left": False,
        "process": asdict(Process.this_one()),
        "position": asdict(Position(1, "", 1, 1.0, 1.0)),
    }
    nbytes = {str(count): len(json.dumps(sign)) * (count - 1) for count in RANKS}
    by = {
        "should_be_flat": True,
        "within": False,
        "arithmetic": "not flat: bytes of a sign of life, times the other ranks",
    }
    yield {"series": "others found, once, beside training", "per": "rank", "unit": "bytes", "values": nbytes, **by}
    for each, rank in ((count, rank) for count in RANKS for rank in range(count)):
        journal = Journal(root / f"{each} ranks", HealingConfig(), "made-up", rank)
        journal.event("run_started", 0, output_dir=str(root), max_steps=100)
        for step in range(5):
            incident = journal.open(step, "gradient_spike", {"value": 9.0, "baseline": 1.0})
            journal.acted(incident, "skip_step")
            journal.closed(incident, "resolved")
    of_each = {count: count for count in RANKS}
    yield timed("report", "rank", "ms", RANKS, lambda count: read_run(root / f"{count} ranks"), of_each, 3)


PARTS: dict[str, Callable[[Path], Iterable[Found]]] = {
    "length": length,
    "training": training,
    "model_size": model_size,
    "ranks": ranks,
}


def told(each: Found) -> Found:
    """Prints a row of the table (Markdown), as it is measured."""
    shown = {size: value if isinstance(value, list) else f"{value:.4g}" for size, value in each["values"].items()}
    values = ", ".join(f"{size}: {value}" for size, value in shown.items())
    cells = [each["series"], each.get("per", ""), each.get("unit", ""), values]
    print(
        "|", " | ".join([*cells, *(str(each.get(key, "")) for key in ("grown", "factor", "within"))]), "|", flush=True
    )
    return each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--all", action="store_true", help="all parts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    # What is there by now is not looked at in each collection.
    gc.freeze()
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "system": platform.platform()}
    versions = {"self_healing": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    about = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), **versions, **machine}
    result: Found = {} if options.all else json.loads(RESULTS.read_text())
    result |= {"what": "costs at growing sizes; grown: how many times that of a smaller one", **about}
    print("| series | per | unit | values by size | grown | factor | within |\n|---|---|---|---|---|---|---|")
    for part in PARTS if options.all else options.parts:
        with tempfile.TemporaryDirectory() as root:
            result[part] = [told(each) for each in PARTS[part](Path(root))]
    if options.all or options.parts:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
