"""
What a GPU has to show, in parts of less than nine minutes each; all of it can be gone through on a CPU, tiny.

```bash
python benchmarks/gpu.py needs                          # what is missing on this machine, and how to get it
python benchmarks/gpu.py run                            # all parts that have no result yet, the most telling first
python benchmarks/gpu.py run --in-all 9                 # where commands are cut off after ten minutes
python benchmarks/gpu.py run memory replay --again
python benchmarks/gpu.py run --device cpu --tiny --results /tmp/rehearsal
```

Each part runs in a process of its own, which is ended when its time is up, and writes `gpu_PART.json` whenever one of
its cases is done: what was cut off is gone on with by the same command, and a case that ended its process twice is not
begun again. Each case says what it has to show, and whether it did. Nothing waits for input.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


RESULTS = Path(__file__).parent / "results"
# In the order of what they tell; the names of `gpu_parts.PARTS`, which cannot be imported where something is missing.
PARTS = (
    "veto",
    "repeats",
    "memory",
    "vocabulary",
    "side_stream",
    "replay",
    "lost_device",
    "precision",
    "optimizers",
    "compile",
    "syncs",
    "overhead",
    "overhead_grpo",
    "first_steps",
    "snapshots",
    "distributed",
    "limits_sft",
    "limits_dpo",
    "limits_grpo",
)
# What is imported, by the name it is installed under; without those of the second group their cases are left out.
NEEDED = {name: name for name in ("torch", "transformers", "accelerate", "tenacity", "typer", "rich", "psutil")}
WANTED = {
    name: name for name in ("trl", "datasets", "peft", "xxhash", "dill", "multiprocess", "pytest", "bitsandbytes")
}
MINUTES = 8.5


def missing(wanted: dict[str, str]) -> list[str]:
    return [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]


def tell_needs() -> int:
    """Prints what is missing and the one command that gets it; the exit code says whether anything can run."""
    needed, wanted = missing(NEEDED), missing(WANTED)
    print("needed and missing:", ", ".join(needed) or "nothing")
    print("of use and missing (their cases are left out):", ", ".join(wanted) or "nothing")
    if needed or wanted:
        names = " ".join([*needed, *wanted])
        print("to get it, here:            python3 -m pip install -c constraints.txt", names)
        print("or where there is a network: make gpu-wheels    (into .whl; bring the folder), and here:")
        print(
            "    python3 -m pip install --no-index --no-deps --upgrade --target /tmp/site .whl/*.whl"
            " && export PYTHONPATH=/tmp/site:$PWD"
        )
    return 1 if needed else 0


# What a machine with torch, accelerate, peft, typer, rich, psutil and pytest still lacks.
CARRIED = ("transformers", "trl", "datasets", "xxhash", "dill", "multiprocess", "tenacity")
PLATFORMS = tuple(f"manylinux{each}_x86_64" for each in ("_2_28", "_2_27", "_2_17", "2014", "1"))


def gather_wheels(folder: Path) -> int:
    """Downloads them as they are pinned, for another machine."""
    pins = (Path(__file__).parents[1] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [pin for pin in pins if pin.partition("==")[0].lower() in CARRIED]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    command += ["--implementation", "cp", *(f"--platform={each}" for each in PLATFORMS), "-d", str(folder), *wanted]
    return subprocess.run(command).returncode


def state_of(results: Path, part: str) -> dict[str, Any]:
    file = results / f"gpu_{part}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def run(options: argparse.Namespace) -> int:
    """Every part that is asked for and not complete; 0 where each case has shown what it had to."""
    options.results.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.in_all
    for part in options.parts or PARTS:
        left = min(60 * options.minutes, ends - time.monotonic())
        if left <= 0:
            print(f"{part}: left to the next call, {options.in_all:g} minutes are over", flush=True)
            continue
        found = state_of(options.results, part)
        if found.get("complete") and not options.again:
            print(f"{part}: has a result already", flush=True)
            continue
        if options.again:
            (options.results / f"gpu_{part}.json").unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("gpu_parts.py")), part, str(options.results.resolve())]
        command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
        began = time.monotonic()
        print(f"{part}: {until(left, command)}, {time.monotonic() - began:.0f} s", flush=True)
    return summary(options)


def until(seconds: float, command: list[str]) -> str:
    """How a process ended; one that takes longer is ended with all that it has started, which hold the device."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return f"exit code {process.wait(timeout=seconds)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "cut off; the same command goes on with it"


def summary(options: argparse.Namespace) -> int:
    failed = 0
    for part in options.parts or PARTS:
        cases = state_of(options.results, part).get("cases", {})
        for name, case in cases.items() or [("", {"shown": None, "error": "no result"})]:
            told = case.get("error") or case.get("skipped") or ""
            verdict = {True: "shown", False: "NOT SHOWN"}.get(case.get("shown"), "left out")
            failed += case.get("shown") is False or "error" in case
            print(f"{part:12} {name:28} {verdict:10} {told}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("needs", help="what is missing on this machine")
    commands.add_parser("wheels", help="gather what such a machine lacks into .whl, where there is a network")
    running = commands.add_parser("run", help="run parts")
    running.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which; all by default")
    running.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    running.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on a CPU")
    running.add_argument("--again", action="store_true", help="also those that have a result")
    running.add_argument("--minutes", type=float, default=MINUTES, help="after which a part is cut off")
    running.add_argument("--in-all", type=float, default=600.0, help="minutes after which the rest is left for later")
    running.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    options = parser.parse_args()
    if options.command == "wheels":
        return gather_wheels(Path(".whl"))
    return tell_needs() if options.command == "needs" else run(options)


if __name__ == "__main__":
    sys.exit(main())
