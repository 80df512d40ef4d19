"""Several ranks under faults at random times on random ranks, started again and again: they complete, all alike."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from conftest import every_fault
from started_ranks import StartedRanks

from self_healing.report.reading import read_run
from self_healing.tools.chaos.faults import KINDS, Ledger
from self_healing.tools.chaos.rehearsal import survived


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]

# A deadlock is a failure after this time; more than any launch needs.
MOST_STARTS, LAUNCH_SECONDS = 16, 240.0
# After the first rank that fails the others have as long to end by themselves, or after SIGTERM, before SIGKILL.
GRACE_SECONDS = 30.0
# From the first rank that fails to the end of the last one.
BOUND = 10.0


def sharded(state_dict: str) -> dict[str, Any]:
    wrapped = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    config = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, "state_dict_type": f"{state_dict}_STATE_DICT"}
    return {"fsdp": True, "fsdp_config": {**wrapped, **config}}


def launch(ranks: StartedRanks, sigterm: bool) -> dict[str, Any]:
    """Ends ranks as torchrun does once one has failed, and tells how they ended."""
    began, failed = time.monotonic(), None
    while None in (codes := [each.poll() for each in ranks.processes]):
        now = time.monotonic()
        if failed is None and any(codes):
            failed = now
            for each, code in zip(ranks.processes, codes, strict=True):
                if sigterm and code is None:
                    os.kill(each.pid, signal.SIGTERM)
        if now - began > LAUNCH_SECONDS or (failed is not None and now - failed > GRACE_SECONDS):
            break
        time.sleep(0.1)
    last_after = 0.0 if failed is None else round(time.monotonic() - failed, 1)
    ranks.end()
    return {"codes": [each.poll() for each in ranks.processes], "hung": None in codes, "last_after": last_after}


def rehearse(directory: Path, ranks: int, sigterm: bool = True, **options: Any) -> list[dict[str, Any]]:
    """Starts the job until it ends, and gives how each launch ended."""
    given = json.dumps({"seed": 0, "arguments": {}, **options})
    launches: list[dict[str, Any]] = []
    while len(launches) < MOST_STARTS and (not launches or any(launches[-1]["codes"])):
        start = len(launches)
        environment = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": start}
        logs = directory / f"logs.{start}"
        job = (logs, ranks, "chaos_on_ranks.py", directory, given)
        launches.append(launch(StartedRanks(*job, **environment, TORCHELASTIC_MAX_RESTARTS=30), sigterm))
    return launches


def check(directory: Path, launches: list[dict[str, Any]], ranks: int, steps: int, sharded: bool) -> None:
    """What holds of every rehearsal."""
    assert not any(each["hung"] for each in launches), launches
    assert max(each["last_after"] for each in launches) <= BOUND, launches
    assert launches[-1]["codes"] == [0] * ranks, launches
    results = [json.loads((directory / f"results.{rank}.json").read_text()) for rank in range(ranks)]
    assert results == results[:1] * ranks
    assert (results[0]["finite"], results[0]["steps"], results[0]["sharded"]) == (True, steps, sharded)
    rows = survived(directory / "chaos.jsonl", directory / "run")
    assert all(row.survived for row in rows), [row for row in rows if not row.survived]
    # Each of them once, on the rank that was drawn for it.
    book = Ledger(directory / "chaos.jsonl")
    drawn = next(line["on"] for line in book.lines() if line["event"] == "run")
    struck = {strike.fault: strike.rank for strike in book.strikes()}
    assert len(book.strikes()) == len(struck)
    assert struck == dict(zip(book.asked_for(), drawn, strict=True))
    assert len(set(drawn)) > 1
    report = read_run(directory / "run")
    assert (report.state.name, report.state.step) == ("ended", steps)


@pytest.mark.parametrize("seed", range(3))
def test_four_ranks_survive_every_fault_on_any_of_them(seed: int, tmp_path: Path) -> None:
    launches = rehearse(tmp_path, ranks=4, steps=150, seed=seed, faults=every_fault())
    check(tmp_path, launches, ranks=4, steps=150, sharded=False)
    struck = {strike.kind for strike in Ledger(tmp_path / "chaos.jsonl").strikes() if strike.effect}
    assert struck == set(KINDS)


def test_ranks_that_no_launcher_ends_survive_as_well(tmp_path: Path) -> None:
    faults = "nan_gradient@6:rank=1, oom@10:rank=1, corrupted_weights@16:rank=0, sigkill@22:rank=0, bad_sample@26"
    launches = rehearse(tmp_path, ranks=2, steps=30, faults=faults, sigterm=False)
    check(tmp_path, launches, ranks=2, steps=30, sharded=False)


@pytest.mark.parametrize("state_dict", ["SHARDED", "FULL"])
def test_sharded_ranks_survive_every_fault_on_any_of_them(state_dict: str, tmp_path: Path) -> None:
    launches = rehearse(tmp_path, ranks=2, steps=150, seed=0, faults=every_fault(), arguments=sharded(state_dict))
    check(tmp_path, launches, ranks=2, steps=150, sharded=True)
    struck = {strike.kind for strike in Ledger(tmp_path / "chaos.jsonl").strikes() if strike.effect}
    assert struck == set(KINDS)
