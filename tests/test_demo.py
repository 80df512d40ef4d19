"""The demo: what it shows is what happened, and what did not happen it does not show."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import journal, quarantined
from demo_output import KEPT, demo_in_terminal, in_every_run
from rich.console import Console

from self_healing import HealingConfig
from self_healing.tools.chaos.rehearsal import Survival
from self_healing.tools.demo.model import DemoSize, stdlib_docstrings
from self_healing.tools.demo.show import DemoResult, RehearsalResult, run_demo


SMALL = DemoSize(steps=12, rows=2, tokens=32, vocabulary=400, width=32, layers=1, held_out=16)

Show = Callable[..., tuple[DemoResult, str]]


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Runs a small demo and returns its result and what it printed."""
    few = stdlib_docstrings(most=400)
    monkeypatch.setattr("self_healing.tools.demo.episode.stdlib_docstrings", lambda: few)

    def show(**kwargs: Any) -> tuple[DemoResult, str]:
        terminal = io.StringIO()
        result = run_demo(tmp_path, size=SMALL, console=Console(file=terminal, width=100), **kwargs)
        return result, terminal.getvalue()

    return show


def test_three_faults_are_healed_and_shown(show: Show, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result, text = show()

    assert result.problems == []
    # Row 0 of step 6 is row 6 * 2 * 2; the second row of its first micro-batch holds the broken character.
    assert [row["dataset_index"] for row in quarantined(tmp_path)] == [25]
    outcomes = journal(tmp_path, "outcome")
    assert [event["failure"] for event in outcomes] == ["nonfinite_transient", "nonfinite_poison_rows", "network"]
    assert [event["step"] for event in outcomes] == [3, 6, 9]
    for shown in (
        "step 6: NaN/Inf in loss, poison row 25 -> quarantined, dropped; 0 steps lost",
        "step 9: ConnectionError, network -> saved, waits, then resumes",
        "dead at step 9: ConnectionError",
        "came to step 9 of 12, held-out loss nan",
        "came to step 12 of 12, held-out loss ",
        f"Report: {tmp_path / 'report.html'}",
        f"Journal: {tmp_path / 'healing_events.jsonl'}",
        "Every fault was found and healed, and no step was lost.",
    ):
        assert shown in text
    assert (tmp_path / "report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    assert not list(tmp_path.glob("checkpoint-*"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_what_was_not_healed_is_not_shown_as_healed(show: Show) -> None:
    result, text = show(config=HealingConfig(api_retry_base_delay=0.0, on_nonfinite="skip"))
    assert any("2 steps lost" in found for found in result.problems), result.problems
    assert "Not as it should be:" in text
    assert "Every fault was found" not in text


@pytest.mark.slow
def test_without_healing_the_run_is_poisoned_and_killed(show: Show, tmp_path: Path) -> None:
    result, text = show(healing=False)
    assert result.problems == []
    assert "step 4: NaN in 11 of 11 weight tensors" in text
    assert "dead at step 9: ConnectionError" in text
    # The Trainer's log hides the NaN: logging_nan_inf_filter is on by default.
    assert "loss 0.0000, gradient norm nan" in text
    assert not list(tmp_path.iterdir())


# ---- chaos ----


SURVIVED = Survival("oom@20", 20, True, "f1-001", "resolved", True)


@pytest.mark.parametrize(
    ("result", "problems"),
    [
        (RehearsalResult(0, [SURVIVED]), []),
        (RehearsalResult(75, [SURVIVED]), ["the job came out with exit code 75"]),
        (RehearsalResult(0, []), ["no fault struck"]),
        (
            RehearsalResult(0, [replace(SURVIVED, survived=False, outcome="no incident")]),
            ["oom@20 was not survived: no incident"],
        ),
        (RehearsalResult(0, [replace(SURVIVED, effect=False)]), ["oom@20 never struck"]),
    ],
)
def test_what_was_not_survived_is_said(result: RehearsalResult, problems: list[str]) -> None:
    assert result.problems == problems


# ---- all of it ----


@pytest.mark.slow
def test_the_demo_prints_what_is_kept() -> None:
    assert in_every_run(demo_in_terminal()) == in_every_run(KEPT.read_text(encoding="utf-8"))
