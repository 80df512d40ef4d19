"""What a process leaves that is killed while it writes costs nothing of what is written afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import plain_trainer

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.checkpoints.marker import write_marker
from self_healing.healers.data.quarantine import BadSample, Quarantine
from self_healing.journal.journal import Journal
from self_healing.system.files import parse_lines
from self_healing.tools.chaos.faults import Ledger


def torn(path: Path) -> None:
    """The last line is cut in the middle, as a kill or a full disk leaves it."""
    raw = path.read_bytes()
    path.write_bytes(raw[: -len(raw.splitlines()[-1]) // 2])


def journalled(directory: Path, step: int) -> Path:
    journal = Journal(directory, HealingConfig(), f"run{step}")
    journal.closed(journal.open(step, "nonfinite_loss", {}), "resolved")
    return journal.path


def quarantined(directory: Path, step: int) -> Path:
    findings = Quarantine(directory).watch("run", "data")
    findings.add(BadSample("loading", "ValueError", "bad", dataset_index=step))
    return Path(findings.path)


def noted(directory: Path, step: int) -> Path:
    ledger = Ledger(directory / "ledger.jsonl")
    ledger.write("strike", fault="nan@1", kind="nan", step=step, count=1, detail={})
    return ledger.path


@pytest.mark.parametrize("write", [journalled, quarantined, noted], ids=["journal", "quarantine", "ledger"])
def test_a_torn_last_line_swallows_no_other(tmp_path: Path, write: Callable[[Path, int], Path]) -> None:
    whole = parse_lines(write(tmp_path, 1).read_text())[0]
    path = write(tmp_path, 2)
    torn(path)
    before = len(parse_lines(path.read_text())[0])
    write(tmp_path, 3)
    found, unread = parse_lines(path.read_text())
    assert unread == 1
    assert len(found) == before + len(whole)


# ---- files that were to take the place of others ----


def a_checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(bytes(8))
    write_marker(directory, "run", 2, {}, emergency=False)
    return directory


def test_a_run_begins_by_removing_what_killed_processes_have_left(tmp_path: Path, tokenizer: Any) -> None:
    run = tmp_path / "run"
    users = [".checkpoint-best", ".checkpoint-2.old", ".checkpoint-best.new"]
    kept = [a_checkpoint(run / name) for name in ("checkpoint-2", *users)]
    leftovers = [run / ".checkpoint-4.gone", run / "last-known-good" / ".checkpoint-3.new"]
    for path in leftovers:
        a_checkpoint(path)
    plain_trainer(run, tokenizer, callbacks=[SelfHealingCallback()], max_steps=1).train()
    assert [path for path in leftovers if path.exists()] == []
    assert all((path / "model.safetensors").exists() for path in kept)
