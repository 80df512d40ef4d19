"""
The journal of a run under every fault there is, line by line as it was when it was last looked through.

Times, names and what depends on the machine are left out; kinds of events, steps, symptoms, failures, causes, actions
and outcomes are compared in their order. Where a journal is meant to change, look at each difference and write it
down: `python tests/test_chaos_journals.py`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tokenizer, every_fault, sft_trainer
from constants import only_on_disk, settings_among

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.tools.chaos.callback import Chaos
from self_healing.tools.chaos.faults import KINDS, Ledger, parse_fault


pytestmark = pytest.mark.slow

EXPECTED = Path(__file__).with_name("data") / "chaos_journals"
SEEDS = (0, 1, 2)
STEPS = 240
MOST_STARTS = 12
FAULTS = every_fault()
CONFIG = {
    "api_retry_base_delay": 0.01,
    "api_retry_max_delay": 0.05,
    # No step of this model takes as long, however busy the machine is.
    "hang_floor_seconds": 12.0,
    "REFUND_STEPS": 10,
    # Else it follows from how long a step and a copy take.
    "snapshot_interval": 5,
}


# ---- the run ----


def train(directory: Path, seed: int) -> None:
    torch.set_num_threads(1)
    trainer = sft_trainer(
        directory / "run",
        build_tokenizer(),
        max_steps=STEPS,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        seed=seed,
        save_strategy="steps",
        save_steps=10,
        save_total_limit=3,
        callbacks=[Chaos(FAULTS, seed=seed, ledger=directory / "chaos.jsonl")],
    )
    only_on_disk()
    SelfHealingTrainer(trainer, HealingConfig.aggressive(**settings_among(CONFIG)), sleep=lambda _: None).train()


def start(directory: Path, seed: int, restarts: int) -> int:
    """Trains in a process of its own, as a launcher starts it, and gives its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            log = os.open(directory / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(
                TORCHELASTIC_RUN_ID="job",
                TORCHELASTIC_RESTART_COUNT=str(restarts),
                TORCHELASTIC_MAX_RESTARTS="30",
            )
            train(directory, seed)
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def rehearse(directory: Path, seed: int) -> list[dict[str, Any]]:
    """Starts the run until it ends: how its processes ended, what struck, and its journal."""
    codes = [start(directory, seed, 0)]
    while codes[-1] != 0 and len(codes) < MOST_STARTS:
        codes.append(start(directory, seed, len(codes)))
    return [{"exit_codes": codes}, *written_in(directory)]


def written_in(directory: Path) -> list[dict[str, Any]]:
    """What struck, and the journal."""
    strikes = [
        {"struck": strike.fault, "step": strike.step, "effect": strike.effect}
        for strike in Ledger(directory / "chaos.jsonl").strikes()
    ]
    written = (directory / "run" / "healing_events.jsonl").read_text(encoding="utf-8")
    events = [comparable(json.loads(line), str(directory)) for line in written.splitlines()]
    return strikes + events


# ---- what of a journal is the same on every machine ----

# Exact in an action, however the kernels of the CPU round.
EXACT = frozenset({"learning_rate", "scale"})
# Measured, or the machine's.
MEASURED = re.compile(r"pid|host|bytes|memory|seconds|time|version|hash|share|waits_at|raised_(at|in)")
IN_TEXT = (
    (re.compile(r"waits at .*"), "waits at <place>"),
    (re.compile(r"\b\d{8}-\d{6}[-\w]*|\b[0-9a-f]{8,}\b"), "<id>"),
    (re.compile(r"\d+ bytes, the marker healing.json says \d+"), "<bytes>"),
    (re.compile(r"-?\d+\.\d+(e[-+]?\d+)?|\b\d+e[-+]?\d+"), "<number>"),
)


def comparable(value: Any, directory: str, path: tuple[str, ...] = ()) -> Any:
    """The same line with what depends on the machine replaced by its type."""
    name = path[-1] if path else ""
    if isinstance(value, dict):
        return {key: comparable(each, directory, (*path, key)) for key, each in value.items()}
    if isinstance(value, list):
        return [comparable(each, directory, path) for each in value]
    if path == ("incident",):
        # Of the run, which has a name of its own.
        return int(value.rsplit("-", 1)[1])
    if path == ("run",) or MEASURED.search(name):
        return f"<{type(value).__name__}>"
    if isinstance(value, float):
        return float(f"{value:.6g}") if len(path) == 1 and name in EXACT else "<float>"
    if isinstance(value, str):
        value = value.replace(directory, "<directory>")
        for pattern, instead in IN_TEXT:
            value = pattern.sub(instead, value)
    return value


def lines_of(seed: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXPECTED / f"seed{seed}.jsonl").read_text(encoding="utf-8").splitlines()]


# ---- the tests ----


@pytest.mark.parametrize("seed", SEEDS)
def test_the_journal_is_the_one_on_record(seed: int, tmp_path: Path) -> None:
    found, expected = rehearse(tmp_path, seed), lines_of(seed)
    different = [number for number, pair in enumerate(zip(found, expected, strict=False), 1) if pair[0] != pair[1]]
    assert not different, f"line {different[0]}: {found[different[0] - 1]} was {expected[different[0] - 1]}"
    assert len(found) == len(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_fault_strikes_in_the_run_on_record(seed: int) -> None:
    lines = lines_of(seed)
    assert lines[0]["exit_codes"][-1] == 0
    assert {parse_fault(line["struck"]).kind for line in lines if line.get("effect")} == set(KINDS)


def write_down() -> None:
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as directory:
            found = rehearse(Path(directory), seed)
        text = "".join(json.dumps(line) + "\n" for line in found)
        (EXPECTED / f"seed{seed}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_down()
