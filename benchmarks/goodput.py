"""
Goodput: the share of a run's time that went into steps which are in its weights, while faults strike at random.

```bash
python benchmarks/goodput.py         # one seed, one fault in 50 steps
python benchmarks/goodput.py --all   # one in 25, 50 and 100, three seeds each; goes on where it was
```

Faults inside steps (NaN in a forward or a gradient, a poison row, out of memory) and deaths of the process (SIGKILL,
SIGTERM) are drawn apart, one for each so many steps, each at a random step of its share of the run. Ours is beside the
plain trainer started again from its last checkpoint, two runs at a time, on a core each.

Runs with faults inside steps are 800 steps long, because two things happen once in a run and not once for each fault:
the first step takes twice the time, in the plain trainer too, and after the first fault a healthy step is computed
twice, to see whether it repeats. Inside steps the plain trainer has one seed: its weights are NaN, whatever the seed.

Goodput = updates in the weights x clean step / time from the first start to the end of training; a run with NaN in its
weights has none. The clean step is the mean of the run's own steps that nothing struck, so that a machine that is
slower for a while is slower in both; what healing costs such a step is measured by itself (`overhead.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jobs
from jobs import Job
from survival import setting


RESULT = Path(__file__).parent / "results" / "goodput.json"
KINDS = {
    "inside steps": ("nan_loss", "nan_gradient", "poison_samples", "oom"),
    "deaths": ("sigkill", "sigterm"),
}
RATES, SEEDS = (25, 50, 100), 3
STEPS = {"inside steps": 800, "deaths": 200}
SAVED_EVERY, ROWS = 50, 192
TOOLS = ("plain", "wrapper")


def schedule(kind: str, rate: int, seed: int) -> str:
    """Draws what strikes, one in each `rate` steps, as `self-healing chaos` takes it."""
    drawn = random.Random(f"{kind} {rate} {seed}")
    faults = KINDS[kind]
    return ",".join(
        f"{faults[(seed + number) % len(faults)]}@{begin + drawn.randrange(2, rate - 2)}"
        for number, begin in enumerate(range(0, STEPS[kind], rate))
    )


def measure(rates: list[int], seeds: int, cells: dict[str, Any], anew: bool) -> None:
    """Runs what is not there yet, or all of it, and writes the file after each job."""
    jobs.warm_up()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(2) as pool:
        started = {}
        for seed, kind, rate, tool in itertools.product(range(seeds), KINDS, rates, TOOLS):
            key = f"{tool}/{seed}/{kind}/{rate}"
            if (anew or key not in cells) and (tool == "wrapper" or kind == "deaths" or seed == 0):
                faults = schedule(kind, rate, seed)
                started[key] = Job("sft", tool, Path(directory) / key, faults, seed, STEPS[kind], SAVED_EVERY, ROWS)
        outcomes = pool.map(partial(jobs.run, starts=12), started.values())
        for (key, job), outcome in zip(started.items(), outcomes, strict=True):
            found = asdict(outcome)
            usual = [each for step, each in found.pop("step_seconds").items() if step not in struck_in(job.faults)]
            cells[key] = found | {"faults": job.faults, "clean_step": statistics.mean(usual)}
            told = f"finished={outcome.finished} {outcome.why}"
            print(f"{key:28} {told}, {outcome.starts} starts, {outcome.seconds:.1f} s", flush=True)
            RESULT.write_text(json.dumps({"setting": setting(), "cells": cells}, indent=1) + "\n")


def struck_in(faults: str) -> set[int]:
    """Gives the steps that a schedule strikes, each with the two in which the last of it is dealt with."""
    struck = [int(fault.rpartition("@")[2]) for fault in faults.split(",")]
    return {step + further for step in struck for further in (1, 2, 3)}


def shares(cells: dict[str, Any], tool: str, kind: str, rate: int) -> list[float]:
    """The share of its time that each run, by its seed, spent on what is in its weights."""
    found = []
    for seed in range(SEEDS):
        run = cells.get(f"{tool}/{seed}/{kind}/{rate}")
        if run is not None:
            useful = run["updates"] * run["clean_step"] if run["finished"] else 0.0
            found.append(useful / run["training_seconds"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all rates, three seeds")
    parser.add_argument("--anew", action="store_true", help="also what is there")
    arguments = parser.parse_args()
    cells = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else {}
    measure(list(RATES) if arguments.all else [50], SEEDS if arguments.all else 1, cells, arguments.anew)
    for kind in KINDS:
        for rate in RATES:
            for tool in TOOLS:
                if found := shares(cells, tool, kind, rate):
                    print(f"{kind}, one in {rate}, {tool}: {statistics.mean(found):.3f}")


if __name__ == "__main__":
    main()
