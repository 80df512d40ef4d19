"""
What becomes of a run that a fault strikes: with the plain trainer, with transformers' own options, with ours.

```bash
python benchmarks/survival.py                       # SFT, plain and the wrapper: three minutes on two cores
python benchmarks/survival.py --all                 # SFT, DPO and GRPO, all tools that are installed; goes on
python benchmarks/survival.py --callback sdcguard=sdcguard.hf:SDCGuardCallback    # in an environment that has it
```

Each cell is a job of 80 steps that saves every 20, started again up to three times, as a launcher would. All tools get
the same faults (`self-healing chaos`), the same starts and the same patience: a process that makes no step for 20 s is
killed. Of each is told whether it came to the end with finite weights, how far its held-out loss is from that of the
run without faults, how many updates its weights lack, how many steps were done again, and what it took.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jobs
from jobs import TRAINERS, Job


RESULT = Path(__file__).parent / "results" / "survival.json"
# What strikes, and in words.
FAULTS = {
    "nan_loss@30": "NaN in one forward",
    "nan_gradient@30": "NaN in one gradient",
    "poison_samples@30": "a row that gives NaN, always",
    "corrupted_weights@35": "NaN in a weight",
    "scrambled_layer@55": "a layer replaced by noise",
    "oom@30": "out of memory, once",
    "network_error*2@30": "two calls that lose their connection",
    "bad_sample@30": "a sample that cannot be loaded",
    "hang@30": "a hang",
    "sigterm@35": "SIGTERM",
    "sigkill@35": "SIGKILL",
    "disk_full@35": "a full disk while a checkpoint is written",
    "torn_checkpoint@55:then=sigkill": "a torn checkpoint, then SIGKILL",
}
HEALTHY = ""


def versions(*names: str) -> dict[str, str]:
    """The versions of what is installed of these."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def setting() -> dict[str, Any]:
    """What a figure depends on, beside the code: machine, versions and day."""
    return {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "day": datetime.now(UTC).date().isoformat(),
        "versions": versions(
            "torch", "transformers", "trl", "accelerate", "self-healing-trl", "arc-training", "sdcguard"
        ),
    }


def measure(trainers: list[str], tools: dict[str, str], cells: dict[str, Any], anew: bool) -> None:
    """Runs what is not there yet, or all of it, and writes the file after each job."""
    jobs.warm_up()
    for trainer in trainers:
        for tool, callback in {"plain": "", **tools}.items():
            for fault in [HEALTHY, *FAULTS]:
                key = f"{trainer}/{tool}/{fault}"
                if (key in cells and not anew) or (tool not in tools and fault != HEALTHY):
                    continue
                with tempfile.TemporaryDirectory() as directory:
                    outcome = asdict(jobs.run(Job(trainer, tool, Path(directory) / "job", fault, callback=callback)))
                seconds = outcome.pop("step_seconds")
                outcome["step_seconds"] = statistics.median(seconds.values()) if seconds else None
                cells[key] = outcome
                told = "finished" if outcome["finished"] else outcome["why"]
                print(f"{key:50} {told}, {outcome['starts']} starts, {outcome['seconds']:.1f} s", flush=True)
                write(cells)


def write(cells: dict[str, Any]) -> None:
    RESULT.write_text(json.dumps({"setting": setting(), "steps": jobs.STEPS, "cells": cells}, indent=1) + "\n")


def row(cells: dict[str, Any], trainer: str, tool: str, fault: str) -> dict[str, Any] | None:
    """Compares a run with those without faults: that of the plain trainer, and in time that of its own tool."""
    found, own = cells.get(f"{trainer}/{tool}/{fault}"), cells.get(f"{trainer}/{tool}/{HEALTHY}")
    clean = cells.get(f"{trainer}/plain/{HEALTHY}")
    if found is None or own is None or clean is None:
        return None
    if not found["finished"]:
        return {"finished": False, "why": found["why"]}
    further = (found["held_out_loss"] or 0.0) - (clean["held_out_loss"] or 0.0)
    return {
        "finished": True,
        "bitwise": found["digest"] == clean["digest"],
        "loss": None if found["held_out_loss"] is None or math.isnan(further) else further,
        "missing": jobs.STEPS - found["updates"],
        "again": found["steps_done"] - jobs.STEPS,
        "seconds": found["seconds"] - own["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--all", action="store_true", help="all trainers, and all tools that need no other environment"
    )
    parser.add_argument("--callback", metavar="NAME=MODULE:CLASS", help="another tool, and only that")
    parser.add_argument("--anew", action="store_true", help="also what is there")
    arguments = parser.parse_args()
    tools = dict.fromkeys(["plain", "options", "callback", "wrapper"] if arguments.all else ["plain", "wrapper"], "")
    if arguments.callback:
        tools = dict([arguments.callback.split("=", 1)])
    cells = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else {}
    measure(list(TRAINERS) if arguments.all else ["sft"], tools, cells, arguments.anew)


if __name__ == "__main__":
    main()
