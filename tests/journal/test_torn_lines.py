"""What a process leaves that is killed while it writes costs nothing of what is written afterwards."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import plain_trainer

from self_healing import HealingConfig, HealingReport, SelfHealingCallback
from self_healing.checkpoints.marker import read_marker, set_standing, write_marker
from self_healing.healers.data.quarantine import BadSample, Quarantine
from self_healing.journal.journal import Journal
from self_healing.system.files import append_line, parse_lines, remove_leftovers, replace_file
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
    ledger.strike("nan@1", "nan", step, 1, {})
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


def test_the_report_is_made_of_the_other_lines_and_mentions_the_torn_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torn(journalled(tmp_path, 1))
    journalled(tmp_path, 2)
    report = HealingReport.from_run_dir(tmp_path)
    assert [incident["outcome"] for incident in report.incidents] == ["open", "resolved"]
    assert "1 line of the journal cannot be read" in caplog.text


def test_samples_in_other_lines_of_the_quarantine_are_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quarantined(tmp_path, 3)
    torn(quarantined(tmp_path, 4))
    quarantined(tmp_path, 5)
    findings = Quarantine(tmp_path).watch("run", "data")
    assert set(findings.bad) == {3, 5}
    assert "1 line(s) cannot be read" in caplog.text


def test_a_line_that_the_disk_took_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, text: write(descriptor, text[:3]))
    with pytest.raises(OSError, match="No space left") as caught:
        append_line(tmp_path / "lines.jsonl", {"a": 1})
    assert caught.value.errno == errno.ENOSPC


# ---- files that were to take the place of others ----


def a_checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(bytes(8))
    write_marker(directory, "run", 2, {}, emergency=False)
    return directory


def test_a_marker_that_could_not_be_replaced_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = a_checkpoint(tmp_path / "checkpoint-2")

    def refused(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match="Input/output"):
        set_standing(checkpoint, "verified")
    assert sorted(file.name for file in checkpoint.iterdir()) == ["healing.json", "model.safetensors"]


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool) -> None:
    path, synced = tmp_path / "below" / "file.json", []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path))
    replace_file(path, "first", sync=sync)
    replace_file(path, "second", sync=sync)
    assert len(synced) == (2 if sync else 0)

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "third", sync=sync)
    assert path.read_text() == "second"
    assert [each.name for each in path.parent.iterdir()] == ["file.json"]


def test_a_file_in_a_directory_that_is_gone_does_not_bring_it_back(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "gone" / "file.json", "text", make_directory=False)
    assert not (tmp_path / "gone").exists()


def test_half_a_marker_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path / "checkpoint-2")
    (checkpoint / "healing.json.tmp").write_text('{"half')
    write_marker(checkpoint, "run", 2, {}, emergency=False)
    assert json.loads((checkpoint / "healing.json").read_text())["files"].keys() == {"model.safetensors"}
    (checkpoint / "healing.json.tmp").unlink(missing_ok=True)
    assert read_marker(checkpoint) is not None


def test_a_run_begins_by_removing_what_killed_processes_have_left(tmp_path: Path, tokenizer: Any) -> None:
    run, journal = tmp_path / "run", tmp_path / "journal"
    kept = [a_checkpoint(run / "checkpoint-2"), a_checkpoint(run / "last-known-good" / "checkpoint-2")]
    (run / ".checkpoint-4.gone").mkdir()
    leftovers = [
        *(checkpoint / "healing.json.tmp" for checkpoint in kept),
        run / "healing_run.tmp",
        run / ".checkpoint-4.gone" / "model.safetensors",
        journal / "postmortem.tmp",
    ]
    theirs = [run / "notes.tmp", run / "checkpoint-2" / "model.safetensors"]
    journal.mkdir()
    for path in (*leftovers, theirs[0]):
        path.write_text("half")
    healing = SelfHealingCallback({"healing_dir": str(journal)})
    plain_trainer(run, tokenizer, callbacks=[healing], max_steps=1).train()
    assert [path for path in leftovers if path.exists()] == []
    assert [path for path in theirs if not path.exists()] == []


def test_what_is_no_leftover_is_not_removed(tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "checkpoint-2")
    (tmp_path / "healing_events.jsonl").touch()
    assert remove_leftovers(tmp_path) == []
