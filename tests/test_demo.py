"""The demo: what it shows is what happened, and what did not happen it does not show."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import journal, quarantined
from demo_output import FILES, OUTPUT_DIR, demo_in_terminal, in_every_run, torn_lines
from replayed_terminal import screen
from rich.console import Console

from self_healing import HealingConfig
from self_healing.chaos.faults import Ledger
from self_healing.chaos.rehearsal import Survival
from self_healing.demo import (
    BROKEN_CHARACTER,
    DemoFault,
    DemoResult,
    DemoSize,
    RehearsalResult,
    demo_faults,
    faults,
    launch,
    rehearsal,
    run_demo,
    run_rehearsal,
    stdlib_docstrings,
    text,
)
from self_healing.demo.events import Ended, Event, Healed, Loaded, Ruined, Stepped, Stopped, Struck
from self_healing.demo.launch import in_turn
from self_healing.demo.record import RunRecord, first_difference
from self_healing.demo.rehearsal import rehearsal_faults
from self_healing.demo.runs import HEALED, PLAIN, TWIN
from self_healing.demo.tiny import unigram_loss
from self_healing.files import append_line


SMALL = DemoSize(steps=12, rows=2, tokens=32, vocabulary=400, width=32, layers=1, held_out=16)

Show = Callable[..., tuple[DemoResult, str]]


@pytest.fixture(scope="session")
def docstrings() -> list[str]:
    return stdlib_docstrings()


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, docstrings: list[str]) -> Show:
    """Runs a small demo and returns its result and what it printed."""
    monkeypatch.setattr(text, "stdlib_docstrings", lambda: docstrings)

    def show(**kwargs: Any) -> tuple[DemoResult, str]:
        terminal = io.StringIO()
        result = run_demo(tmp_path, size=SMALL, console=Console(file=terminal, width=100), launch=in_turn, **kwargs)
        return result, terminal.getvalue()

    return show


def test_three_faults_are_healed_and_shown(show: Show, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result, text = show()

    assert result.problems == []
    assert [incident["failure"] for incident in result.incidents] == [
        "nonfinite_transient",
        "nonfinite_poison_rows",
        "network",
    ]
    assert [incident["step"] for incident in result.incidents] == [3, 6, 9]
    assert result.twin_loss is not None
    assert result.held_out_loss == pytest.approx(result.twin_loss, rel=0.02)
    # Row 0 of step 6 is row 6 * 2 * 2; the second row of its first micro-batch holds the broken character.
    assert [row["dataset_index"] for row in quarantined(tmp_path)] == [25]
    assert [event["incident"] for event in journal(tmp_path, "outcome")] == [
        incident["incident"] for incident in result.incidents
    ]
    for shown in (
        "poison rows: row 25",
        "network: ConnectionError",
        f"Held-out loss: {result.held_out_loss:.4f} healed, {result.twin_loss:.4f} fault-free twin",
        "dead at step 9 of 12",
        "Bitwise equal to the fault-free twin up to the poison row: all weights, compared after each of the",
        f"Report: {tmp_path / 'report.html'}",
        f"Journal: {tmp_path / 'healing_events.jsonl'}",
        "Every fault was found and healed, and no step was lost.",
    ):
        assert shown in text
    assert (tmp_path / "report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    assert not list(tmp_path.glob("checkpoint-*"))
    assert capfd.readouterr() == ("", "")


def losses_of(name: str, text: str) -> list[str]:
    return [line.split()[-1] for line in text.splitlines() if line.split()[:1] == [name] and "  loss " in line]


def test_up_to_the_dropped_row_the_losses_are_those_of_the_twin(show: Show) -> None:
    _, text = show(seed=3)
    losses = [losses_of("healed", text), losses_of("twin", text)]
    assert len(losses[0]) == len(losses[1]) == SMALL.steps
    assert losses[0][:6] == losses[1][:6]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"on_nonfinite": "skip"}, "the transient NaN is the cause of 0 incidents, not of one"),
        ({"on_nonfinite": "skip"}, "the weights differ from the fault-free twin's from step 4 on, and should be"),
        ({"on_nonfinite": "warn"}, "the held-out loss, nan, is more than 2 % off the twin's"),
        ({"drop_poison_rows": False}, "the poison sample at step 6 was not healed without loss"),
        ({"max_recovery_attempts": 0}, "the run ended with UnrecoverableTrainingError"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_was_not_healed_is_not_shown_as_healed(show: Show, settings: dict[str, Any], problem: str) -> None:
    result, text = show(config=HealingConfig(retry_initial_seconds=0.0, **settings))
    assert any(problem in found for found in result.problems), result.problems
    assert "Not as it should be:" in text
    assert "Every fault was found" not in text


def test_a_fault_that_never_struck_is_not_shown_as_healed(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(steps: int) -> tuple[DemoFault, ...]:
        first, *others = demo_faults(steps)
        return replace(first, step=steps), *others

    monkeypatch.setattr(faults, "demo_faults", late)
    result, text = show()
    assert result.problems == ["the transient NaN never struck"]
    assert "never struck" in text


def test_without_healing_the_run_is_poisoned_and_killed(show: Show, tmp_path: Path) -> None:
    result, text = show(healing=False)
    assert result.problems == []
    assert math.isnan(result.held_out_loss)
    assert "weight tensors hold NaN since step 4" in text
    assert "Run: killed by ConnectionError at step 9 of 12; no checkpoint was written." in text
    assert "Held-out loss: nan." in text
    # The Trainer's log hides the NaN: logging_nan_inf_filter is on by default.
    assert "loss 0.0000   gradient norm nan" in text
    assert not list(tmp_path.iterdir())


def test_the_text_is_the_same_every_time_and_clean(docstrings: list[str]) -> None:
    assert len(docstrings) == len(set(docstrings)) >= DemoSize().training_rows + DemoSize().held_out
    assert not any(BROKEN_CHARACTER in text for text in docstrings)
    assert stdlib_docstrings() == docstrings


def test_too_few_docstrings_are_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "stdlib_docstrings", lambda: ["Only this one."])
    with pytest.raises(RuntimeError, match="needs 64 docstrings and found 1 in"):
        run_demo(tmp_path, size=SMALL, launch=in_turn, console=Console(file=io.StringIO()))


def test_too_few_steps_are_a_clear_error() -> None:
    with pytest.raises(ValueError, match="steps is 7; please give at least 8"):
        DemoSize(steps=7)


def test_so_many_docstrings_are_read_as_are_asked_for(docstrings: list[str]) -> None:
    assert stdlib_docstrings(most=30) == docstrings[:30]


def run_with(*weights: str) -> RunRecord:
    """A run as it is known after steps with these digests of its weights."""
    run = RunRecord(len(weights))
    for step, digest in enumerate(weights, 1):
        run.take_in(Stepped(step, 5.0, 1.0, digest))
    return run


def test_the_first_step_with_other_weights_is_found() -> None:
    assert first_difference(run_with("a", "b", "c"), run_with("a", "b", "d")) == 3
    assert first_difference(run_with("a", "b"), run_with("a", "b")) is None


def test_a_process_that_dies_says_what_it_has_written(tmp_path: Path) -> None:
    log = tmp_path / "plain.log"
    log.write_text("\n".join(f"line {number}" for number in range(40)))
    told = launch._told_by("plain", log)
    assert told.startswith("The plain run ended without a result.")
    assert "line 39" in told
    assert "line 3\n" not in told


def test_the_terminal_does_not_wait_for_torch() -> None:
    code = "import sys, self_healing.demo; print(sorted({'torch', 'transformers', 'trl'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- chaos ----


SURVIVED = Survival("oom@20", 20, True, "f1-001", "resolved", True)


@pytest.mark.parametrize(
    ("result", "problems"),
    [
        (RehearsalResult(0, [SURVIVED], 4.0, 5.2), []),
        (RehearsalResult(75, [SURVIVED]), ["the job came out with exit code 75"]),
        (RehearsalResult(0, []), ["no fault struck"]),
        (
            RehearsalResult(0, [replace(SURVIVED, survived=False, outcome="no incident")]),
            ["oom@20 was not survived: no incident"],
        ),
        (RehearsalResult(0, [replace(SURVIVED, effect=False)]), ["oom@20 never took place"]),
        (
            RehearsalResult(0, [SURVIVED], 5.3, 5.2),
            ["the held-out loss, 5.300, is not below the 5.200 of token frequencies alone"],
        ),
    ],
)
def test_what_was_not_survived_is_said(result: RehearsalResult, problems: list[str]) -> None:
    assert result.problems == problems


def test_token_frequencies_alone_give_their_entropy() -> None:
    assert unigram_loss([0] * 9999 + [1] * 9999, [0, 1], vocabulary=2) == pytest.approx(math.log(2))


@pytest.mark.slow
def test_a_job_that_learns_survives_chaos(tmp_path: Path) -> None:
    terminal = io.StringIO()
    result = run_rehearsal(tmp_path / "chaos", console=Console(file=terminal, width=100))
    assert result.problems == []
    assert [row.fault.partition("@")[0] for row in result.rows] == ["oom", "hang", "sigkill"]
    assert result.held_out_loss is not None
    assert result.unigram_loss is not None
    assert result.held_out_loss < result.unigram_loss - 0.5
    assert "goes on from the checkpoint of step 60" in terminal.getvalue()
    assert f"Ledger: {tmp_path / 'chaos.jsonl'}" in terminal.getvalue()


# ---- what it prints, as it is kept in docs/img ----


WIDTHS = pytest.mark.parametrize("columns", FILES, ids=str)


def kept(columns: int | None) -> list[str]:
    """The two halves of what is kept."""
    text = FILES[columns].read_text(encoding="utf-8")
    contrast, begins, rehearsed = text.partition("\nChaos:")
    return [contrast, begins + rehearsed]


def printed(show: Callable[[Console], Any], columns: int | None) -> str:
    """What is on a terminal of some width in the end, or piped."""
    console = Console(file=io.StringIO(), width=columns or 80, height=24, force_terminal=columns is not None)
    show(console)
    text = console.file.getvalue()
    # A terminal begins the next line at its left edge.
    return text if columns is None else "\n".join(screen(text.replace("\n", "\r\n"), columns))


@pytest.fixture
def in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the demo was when what is kept was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")


@WIDTHS
def test_no_line_of_what_is_kept_is_torn(columns: int | None) -> None:
    text = FILES[columns].read_text(encoding="utf-8")
    assert torn_lines(text, columns or 80) == []
    assert "\x1b" not in text
    for ending in ("Every fault was found and healed, and no step was lost.\n", "Every fault was survived.\n"):
        assert text.count(ending) == 1


def test_a_torn_line_is_found() -> None:
    whole = "┏━━┓\n│ x│\n└──┘\nSome words"
    assert torn_lines(whole, 10) == []
    assert torn_lines(whole, 9) == ["Some words"]
    for torn in ("│ x", "│  x│", " x│", "│ x│[self_healing] step 1"):
        assert torn_lines(whole.replace("│ x│", torn), 30) == [torn]


def incident(fault: DemoFault, cause: str, symptom: str, *actions: str, **evidence: Any) -> dict[str, Any]:
    return {
        "step": fault.step,
        "symptom": symptom,
        "failure": fault.failure.value,
        "cause": cause,
        "evidence": evidence,
        "actions": list(actions),
        "outcome": "resolved",
        "steps_lost": 0,
        "seconds_lost": 1.5,
    }


def made_up_runs(*_: Any) -> Iterator[tuple[str, Event]]:
    """What the three runs of the demo tell when all is well."""
    steps = DemoSize().steps
    nan, poison, connection = demo_faults(steps)
    rows = [{"dataset_index": 964}]
    incidents = [
        incident(nan, "transient", "nonfinite_loss", "use_reexecuted_step"),
        incident(poison, "poison rows", "nonfinite_loss", "quarantine_rows", "drop_rows", rows=rows),
        incident(connection, "network", "ConnectionError", "emergency_checkpoint", "wait_and_resume"),
    ]
    struck = frozenset(fault.kind for fault in (nan, poison, connection))
    for name in (PLAIN, HEALED, TWIN):
        yield name, Loaded()
        for step in range(1, steps + 1):
            ruined = name == PLAIN and step > nan.step
            weights = f"{step} {name if ruined or step > poison.step else ''}"
            yield name, Stepped(step, 0.0 if ruined else 6 - step / 150, math.nan if ruined else 1.0, weights)
            for fault, healed in zip((nan, poison, connection), incidents, strict=True):
                if step == fault.step and name != TWIN:
                    yield name, Struck(step, fault.what)
                    if name == HEALED:
                        yield name, Healed(step, healed)
            if name == PLAIN and step == nan.step + 1:
                yield name, Ruined(step, "20 of 20 weight tensors")
            if name == PLAIN and step == connection.step:
                error = "[Errno 104] Connection reset by peer (rehearsed by self_healing.chaos)"
                yield name, Stopped(step, "ConnectionError", error)
                yield name, Ended(step, math.nan, struck, [])
                break
        else:
            yield name, Ended(steps, 5.1784, struck, incidents if name == HEALED else [])


def show_made_up_runs(console: Console) -> None:
    started = {"schema": 1, "time": 0.0, "run": "20260101-000000-abcdef", "rank": 0, "attempt": 1, "step": 0}
    Path(OUTPUT_DIR).mkdir(parents=True)
    append_line(Path(OUTPUT_DIR) / "healing_events.jsonl", started | {"kind": "run_started"})
    run_demo(OUTPUT_DIR, console=console, launch=made_up_runs)


@WIDTHS
def test_the_contrast_prints_what_is_kept(in_a_terminal: None, columns: int | None) -> None:
    text = printed(show_made_up_runs, columns)
    assert torn_lines(text, columns or 80) == []
    assert in_every_run(text) == in_every_run(kept(columns)[0])


def made_up_job(directory: Path, steps: int, seed: int, ledger: Ledger, log: Path) -> Iterator[dict[str, Any] | int]:
    """What a job that survives tells, and writes down."""
    directory.mkdir(parents=True)
    asked_for = rehearsal_faults(steps).split(",")
    ledger.write("run", run_dir=str(directory), faults=asked_for)
    yield {"pid": 1000}
    actions = {
        "out_of_memory": ["free_memory"],
        "hang": ["write_stacks", "interrupt", "emergency_checkpoint", "resume"],
        "process_died": ["resume"],
    }
    due = dict(zip((20, 40, 62), zip(asked_for, actions.items(), strict=True), strict=True))
    run = "20260101-000000-abcdef"
    for step in range(steps + 1):
        if step:
            yield {"step": step, "loss": 6 - step / 50}
        if step not in due:
            continue
        fault, (failure, done) = due[step]
        ledger.strike(fault, fault.partition("@")[0], step, 1, {})
        yield {}
        if failure == "process_died":
            yield {"pid": 1001}
            yield from ({"step": again, "loss": 5.0} for again in (61, 62))
        incident = {"time": time.time(), "step": step, "incident": f"{run}-{asked_for.index(fault) + 1:03}"}
        events = [{"kind": "action", "action": action, "happened": True} for action in done]
        for event in [*events, {"kind": "outcome", "failure": failure, "outcome": "resolved"}]:
            append_line(directory / "healing_events.jsonl", incident | event)
    yield {"held_out_loss": 4.0, "unigram_loss": 5.0}
    yield 0


def show_made_up_job(console: Console) -> None:
    run_rehearsal(Path(OUTPUT_DIR) / "chaos", console=console)
    console.print(f"Again: self-healing report {OUTPUT_DIR}")


@WIDTHS
def test_chaos_prints_what_is_kept(in_a_terminal: None, columns: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_lines_of", made_up_job)
    text = printed(show_made_up_job, columns)
    assert torn_lines(text, columns or 80) == []
    assert in_every_run(text) == in_every_run(kept(columns)[1])


@pytest.mark.parametrize("columns", [60, 79, 100, 200])
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_no_line_is_torn_in_other_terminals(
    in_a_terminal: None, columns: int, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "_lines_of", made_up_job)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def show(console: Console) -> None:
        show_made_up_runs(console)
        show_made_up_job(console)

    text = printed(show, columns)
    assert torn_lines(text, columns) == []


@pytest.mark.slow
@WIDTHS
def test_the_demo_prints_what_is_kept(columns: int | None, tmp_path: Path) -> None:
    text = demo_in_terminal(columns, tmp_path)
    assert torn_lines(text, columns or 80) == []
    assert in_every_run(text) == in_every_run("".join(kept(columns)))


# ---- all of it ----


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--no-chaos"], ["--seed", "1"]], ids=["seed 0", "seed 1, with chaos"])
def test_the_demo_as_a_user_runs_it(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "self_healing.cli", "demo", "--output-dir", str(tmp_path / "new"), *arguments]
    # Without the variables that keep the Hub client offline: the demo has to see to that itself.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Every fault was found and healed, and no step was lost." in done.stdout
    assert ("Every fault was survived." in done.stdout) == ("--no-chaos" not in arguments)
