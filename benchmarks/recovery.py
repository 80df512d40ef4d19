"""
What one fault takes until the step that it struck is in the weights: seconds, steps' worth of time, steps done again.

```bash
python benchmarks/recovery.py            # five minutes on two idle cores
python benchmarks/recovery.py --only oom # jobs whose name has it
```

SFT with steps of a quarter of a second. Faults strike several times in a job, with steps between them that nothing
strikes. Lost is the time from the end of the step before the strike to the first end of the step after the one that it
struck, less twice the median of the steps before: they are seconds apart, and what else the machine does falls on all
of them. Of all strikes the median counts. The plain trainer is started again from its last checkpoint, as torchrun
would.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import jobs
import memory
import transformers
from jobs import Job
from survival import setting


RESULT = Path(__file__).parent / "results" / "recovery.json"
ROWS = 96
# A checkpoint is so many steps old on average, where a death strikes.
SAVED_EVERY = 10
# Steps before a strike whose median is what the struck one would have taken.
USUAL = 4


def often(faults: Iterable[str], times: int, first: int, apart: int) -> list[tuple[str, int]]:
    """Each of the faults so often, one after the other."""
    return [(fault, first + apart * number) for number, fault in enumerate([*faults] * times)]


# By name: the tool, what strikes it and when, and after how many steps it saves (0: at the end).
DEATHS = ("sigkill", "sigterm")
JOBS: dict[str, tuple[str, list[tuple[str, int]], int]] = {
    # An epoch has 16 batches, some of longer rows than others: 7 apart, each fault strikes eight of them.
    "nan": ("wrapper", often(["nan_loss", "nan_gradient"], 8, 12, 7), 0),
    "poison": ("wrapper", often(["poison_samples", "oom"], 8, 12, 7), 0),
    # Far enough apart for a snapshot that is trusted to lie between.
    "state": ("wrapper", often(["corrupted_weights"], 5, 20, 20), 0),
    "deaths": (
        "wrapper",
        [*often(DEATHS, 4, 15, 10), ("hang", 95), ("network_error", 105), ("hang", 115)],
        SAVED_EVERY,
    ),
    "plain deaths": ("plain", [*often(["oom", *DEATHS, "network_error"], 3, 15, 10), ("hang", 135)], SAVED_EVERY),
    "options oom": ("options", [("oom", 15)], SAVED_EVERY),
}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def strike(steps: list[dict[str, Any]], at: int) -> dict[str, float]:
    """What a fault took that struck after so many steps: seconds, in steps' time, and steps trained again."""
    struck = next(number for number, step in enumerate(steps) if step["step"] == at and not step["begins"])
    # Who gets SIGTERM ends the step first.
    there = next(n for n, step in enumerate(steps[struck:], struck) if step["step"] == at + 2 and not step["begins"])
    before = itertools.pairwise(steps[struck - USUAL : struck + 1])
    usual = statistics.median(after["time"] - earlier["time"] for earlier, after in before)
    seconds = steps[there]["time"] - steps[struck]["time"] - 2 * usual
    again = sum(not step["begins"] for step in steps[struck + 1 : there]) - 1
    return {"seconds": seconds, "steps": seconds / usual, "again": again, "step_seconds": usual}


def restores(directory: Path) -> list[dict[str, float]]:
    """From the journal of a healed run: seconds that putting a state back took, and the steps replayed after it."""
    found, began = list[dict[str, float]](), 0.0
    for line in lines_of(directory / "run" / "healing_events.jsonl"):
        if line["kind"] == "diagnosed":
            began = line["time"]
        elif line.get("action") == "roll_back":
            found.append({"seconds": line["time"] - began, "replayed": 0})
        elif line.get("action") == "replay_steps" and line["happened"]:
            found[-1]["replayed"] = line["replayed"]
    return found


def measure(only: str) -> dict[str, Any]:
    jobs.warm_up()
    strikes: dict[str, list[dict[str, float]]] = {}
    restored = list[dict[str, float]]()
    for name, (tool, faults, saved_every) in JOBS.items():
        if only not in name:
            continue
        last = faults[-1][1] + 4
        with tempfile.TemporaryDirectory() as temporary:
            asked = ",".join(f"{fault}@{at}" for fault, at in faults)
            job = Job("sft", tool, Path(temporary) / "job", asked, 0, last, saved_every or last, ROWS)
            outcome = jobs.run(job, starts=len(faults) + 1)
            if not outcome.finished:
                raise RuntimeError(f"{name}: {outcome.why}")
            steps = lines_of(job.directory / "steps.jsonl")
            for fault, at in faults:
                strikes.setdefault(f"{tool}/{fault}", []).append(strike(steps, at))
            if name == "state":
                restored = restores(job.directory)
        print(f"{name:24} {outcome.starts} starts, {outcome.seconds:.1f} s", flush=True)
    for each, restore in zip(strikes.get("wrapper/corrupted_weights", []), restored, strict=True):
        each |= {"again": restore["replayed"], "restore_steps": restore["seconds"] / each["step_seconds"]}
    return {"setting": setting(), "rows": ROWS, "saved_every": SAVED_EVERY, "strikes": strikes}


def medians(strikes: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in strikes) for name in strikes[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="jobs whose name has it; printed, and not written")
    only = parser.parse_args().only
    result = measure(only)
    for key, strikes in result["strikes"].items():
        told = ", ".join(f"{name} {value:.3f}" for name, value in medians(strikes).items())
        print(f"{key:28} {told}; {len(strikes)} strikes")
    if only:
        return
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    # A limit that stays: beside the largest batch that fits, set by hand.
    limited = {"rows": ROWS, "fit": ROWS // 2, "tokens": 64, "width": 64, "layers": 2, "laps": 2, "turns": 20}
    result["limited"] = memory.throughput(argparse.Namespace(**limited, tasks=["sft"]), print)
    RESULT.write_text(json.dumps(memory.rounded(result), indent=1) + "\n")


if __name__ == "__main__":
    main()
