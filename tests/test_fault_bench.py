"""The job that the benchmarks of faults strike: what the tables of docs/benchmarks.md are made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
_RUN = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from jobs import Job, run
if __name__ == "__main__":
    outcomes = {tool: asdict(run(Job("sft", tool, Path(sys.argv[1]) / tool, sys.argv[2], steps=16, saved_every=4)))
                for tool in ("plain", "wrapper")}
    print(json.dumps(outcomes))
"""


def outcomes(directory: Path, fault: str) -> dict[str, Any]:
    script = directory / "both.py"
    script.write_text(_RUN, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{BENCHMARKS}{os.pathsep}{BENCHMARKS.parent}"}
    done = subprocess.run(
        [sys.executable, script, directory, fault], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_nan_is_in_the_weights_of_the_plain_run_and_not_of_the_healed_one(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "nan_loss@6")
    assert (found["plain"]["finished"], found["plain"]["why"]) == (False, "weights are NaN")
    assert (found["wrapper"]["finished"], found["wrapper"]["updates"]) == (True, 16)


@pytest.mark.slow
def test_a_run_that_is_killed_is_started_again_and_ends_the_same_either_way(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "sigkill@6")
    assert {tool: (each["starts"], each["updates"]) for tool, each in found.items()} == {
        "plain": (2, 16),
        "wrapper": (2, 16),
    }
    assert found["plain"]["digest"] == found["wrapper"]["digest"]
    assert found["plain"]["steps_done"] == 18
