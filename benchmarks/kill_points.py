"""
A run that is killed at every file event of its saves, and started again: the events of PyPI's ckpt-chaos.

```bash
python benchmarks/kill_points.py            # every eighth event
python benchmarks/kill_points.py --all      # all of them, of the plain trainer and ours; goes on where it was
```

A run of 12 steps that saves every 4 is killed before each event in its directory (a file is opened, renamed, removed),
and where a file is written also with half of it there. Survived is: started again once, it came to its end with bit
for bit the weights of the run that was not killed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jobs
from jobs import Job, Outcome
from survival import setting


RESULT = Path(__file__).parent / "results" / "kill_points.json"
STEPS, SAVED_EVERY, TOOLS = 12, 4, ("plain", "wrapper")


def run(tool: str, kill: tuple[int, str]) -> tuple[Outcome, list[list[str]]]:
    """Trains, killed there; gives what became of it, and the events of the first start."""
    with tempfile.TemporaryDirectory() as directory:
        job = Job("sft", tool, Path(directory) / "job", steps=STEPS, saved_every=SAVED_EVERY, kill=kill)
        outcome = jobs.run(job, starts=2)
        events = (job.directory / "events.log").read_text().splitlines()
    return outcome, [event.split("\t") for event in events]


def measure(share: int, tools: dict[str, Any], anew: bool) -> None:
    """Runs what is not there yet, or all of it, and writes the file after each job."""
    jobs.warm_up()
    for tool in TOOLS:
        if tool not in tools or anew:
            outcome, events = run(tool, (0, "before"))
            points = [(int(number), mode) for number, *_, cut in events for mode in ("before", "torn")[: 1 + int(cut)]]
            tools[tool] = {"digest": outcome.digest, "points": points, "killed": {}}
        found = tools[tool]
        for number, mode in found["points"][::share]:
            if f"{number} {mode}" in found["killed"]:
                continue
            outcome, events = run(tool, (number, mode))
            why = outcome.why.partition(":")[0]
            became = why if not outcome.finished else "same" if outcome.digest == found["digest"] else "other"
            found["killed"][f"{number} {mode}"] = {
                "became": became,
                "event": events[-1][1:3],
                "again": outcome.steps_done,
            }
            print(f"{tool}, {number} {mode} {events[-1][1:3]}: {became}", flush=True)
            RESULT.write_text(json.dumps({"setting": setting(), "tools": tools}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every event")
    parser.add_argument("--anew", action="store_true", help="also what is there")
    arguments = parser.parse_args()
    tools = json.loads(RESULT.read_text())["tools"] if RESULT.exists() else {}
    measure(1 if arguments.all else 8, tools, arguments.anew)
    for tool, found in tools.items():
        print(tool, Counter(point["became"] for point in found["killed"].values()))


if __name__ == "__main__":
    main()
