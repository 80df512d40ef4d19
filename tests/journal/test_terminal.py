"""What the terminal shows: a line for each incident, past progress bars, in whatever way the program logs."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from incidents_of_each_kind import EACH_KIND, SECRET, A, F, incident
from replayed_terminal import terminal_of
from rich.console import Console
from rich.logging import RichHandler
from tqdm import tqdm

from self_healing import FAILURE_RECIPES, Action, FailureType, HealingConfig, HealingReport, Incident
from self_healing.journal.incident import _DONE, headline
from self_healing.journal.journal import Journal
from self_healing.journal.terminal import Terminal, announce


TEXTS = Path(__file__).resolve().parent.parent / "data" / "terminal"
logger = logging.getLogger("self_healing")


@pytest.fixture(autouse=True)
def _nobody_has_configured_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pytest has: without its handlers, as in a program of a user."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    yield
    assert [each for each in logger.handlers if isinstance(each, Terminal)] == []


def tell(directory: Path, *incidents: Incident, rank: int = 0) -> None:
    """Tells of incidents as a run does."""
    journal = Journal(directory, HealingConfig(), "a-run", rank)
    with Terminal(rank).speaking():
        for each in incidents:
            journal.dealt_with(each)


def piped(directory: Path, *incidents: Incident, rank: int = 0) -> list[str]:
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        tell(directory, *incidents, rank=rank)
    return stream.getvalue().splitlines()


# ---- what a line says ----


@pytest.mark.parametrize("columns", [80, 120, None], ids=["80 columns", "120 columns", "piped"])
def test_each_kind_of_incident_is_told_of_as_written_down(columns: int | None, tmp_path: Path) -> None:
    if columns is None:
        found = piped(tmp_path, *EACH_KIND)
    else:
        with terminal_of(columns) as shown:
            tell(tmp_path, *EACH_KIND)
        found = shown.lines
    path = TEXTS / ("piped.txt" if columns is None else f"{columns}_columns.txt")
    text = "\n".join(found).rstrip("\n") + "\n"
    if os.environ.get("WRITE_TERMINAL_TEXTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_every_kind_of_failure_is_among_them() -> None:
    assert {each.failure for each in EACH_KIND} == set(FailureType) == set(FAILURE_RECIPES)


def test_every_action_has_its_words() -> None:
    assert set(_DONE) == set(Action)


def test_a_line_has_at_most_100_characters_and_no_text_of_the_data(tmp_path: Path) -> None:
    lines = piped(tmp_path, *EACH_KIND)
    assert len(lines) == len(EACH_KIND)
    assert [line for line in lines if len(line) > 100 or not line.startswith("[self_healing] step ")] == []
    assert SECRET not in "\n".join(lines)


def test_step_and_cost_stay_whole_where_there_is_no_room_for_the_rest() -> None:
    long = incident(12345, "divergence", F.DIVERGENCE, "x" * 500, *A, steps_lost=10, steps_repeated=5)
    line = headline(long, 85)
    assert len(line) == 85
    assert line.startswith("step 12345: loss diverged, xx")
    assert line.endswith("...; 10 steps lost, 5 repeated")


def test_what_was_done_is_told_with_the_numbers_that_it_changed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, HealingConfig(), "a-run")
    slower = journal.open(163, "divergence", {})
    journal.acted(slower, "roll_back")
    journal.acted(slower, "skip_step", skipped=True)
    journal.acted(slower, "reduce_learning_rate", **{"from": 1.0, "learning_rate": 0.03})
    journal.acted(slower, "reduce_learning_rate", **{"from": 0.03, "learning_rate": 0.00092})
    assert headline(slower) == "step 163: loss diverged -> rolled back, LR 1 -> 0.00092; 0 steps lost"

    smaller = journal.open(7, "out_of_memory", {})
    journal.acted(smaller, "split_batch", did_not_fit=[5, 64], at_a_time=2)
    journal.acted(smaller, "reduce_batch_size", rows_before=8, rows=4)
    assert "-> split 5 rows -> 2 + 2 + 1, batch 8 -> 4;" in headline(smaller)

    # The same is read from the journal.
    read = [headline(Incident.from_dict(each)) for each in HealingReport.from_run_dir(tmp_path).incidents]
    assert read == [headline(slower), headline(smaller)]


def test_a_cause_can_neither_break_the_line_nor_steer_the_terminal() -> None:
    line = headline(incident(1, "odd", F.NETWORK, "a\nname\x1b[2J\r\x07of a service"), 100)
    assert line == "step 1: odd, a name [2J of a service -> only reported; 0 steps lost"


def test_the_ranks_that_something_was_found_on_are_named() -> None:
    found = [("transient", [1]), ("transient", [0, 3])]
    lines = [
        headline(incident(1, "nonfinite_loss", F.NONFINITE_TRANSIENT, c, evidence={"ranks": r}), 100) for c, r in found
    ]
    assert [line.partition(" ->")[0] for line in lines] == [
        "step 1: NaN/Inf in loss, transient on rank 1",
        "step 1: NaN/Inf in loss, transient on ranks 0, 3",
    ]


def test_what_a_user_does_about_an_incident_is_named_as_they_named_it() -> None:
    own = incident(1, "odd", None, "unknown")
    own.actions.append("phone_home")
    assert "-> phone home;" in headline(own, 85)


# ---- how often ----


def test_repeats_are_told_of_three_times_then_at_powers_of_ten(tmp_path: Path) -> None:
    spikes = [incident(step, "gradient_spike", F.GRADIENT_SPIKE, "the same again", A.SKIP_STEP) for step in range(101)]
    other = incident(200, "hang", F.HANG, "nothing moves in 'data'", A.WRITE_STACKS)
    lines = piped(tmp_path, *spikes, other)
    assert [re.search(r"step (\d+)", line)[1] for line in lines] == ["0", "1", "2", "9", "99", "200"]
    assert [line.partition(" lost (")[2] for line in lines] == [
        *("", "", "3 so far; next at 10)"),
        *("10 so far; next at 100)", "100 so far; next at 1000)", ""),
    ]
    assert max(map(len, lines)) <= 100


def test_samples_are_of_one_kind_whatever_their_names(tmp_path: Path) -> None:
    samples = [
        incident(step, "bad_sample", F.BAD_DATA, f"sample {step}", A.QUARANTINE_SAMPLE, A.REPLACE_SAMPLE)
        for step in range(9)
    ]
    assert len(piped(tmp_path, *samples)) == 3


def test_errors_are_told_of_every_time(tmp_path: Path) -> None:
    ends = [incident(step, "x", F.NETWORK, "x", A.STOP, outcome="fatal") for step in range(5)]
    assert len(piped(tmp_path, *ends)) == 5


def test_other_messages_are_collapsed_by_what_they_say_beside_numbers() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as stream, Terminal().speaking():
        for step in range(20):
            logging.getLogger("self_healing.numerics").warning("Step %d: odd, for %.1f s.", step, step / 3)
            logger.warning("Fault %s strikes at step %d.", chr(ord("a") + step), step)
    lines = stream.getvalue().splitlines()
    assert sum("odd" in line for line in lines) == 4
    assert sum("strikes" in line for line in lines) == 20


# ---- colours ----


def test_severity_is_a_colour_on_a_terminal(tmp_path: Path) -> None:
    healed, left_out, ended = EACH_KIND[0], EACH_KIND[2], EACH_KIND[4]
    with terminal_of(120) as shown:
        tell(tmp_path, healed, left_out, ended)
    assert re.findall(r"\x1b\[(\d+)m\[self_healing\]\x1b\[0m step", shown.raw) == ["32", "33", "31"]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_there_are_no_colours_where_they_are_not_wanted(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with terminal_of(120) as shown:
        tell(tmp_path, EACH_KIND[0])
    assert "\x1b" not in shown.raw
    assert shown.raw.startswith("[self_healing] step 30")


# ---- progress bars ----


@pytest.mark.parametrize("columns", [40, 120])
def test_a_progress_bar_is_not_torn(columns: int, tmp_path: Path) -> None:
    with terminal_of(columns) as shown, tqdm(total=30, mininterval=0, dynamic_ncols=True) as bar:
        for step in range(30):
            bar.update()
            if step in (10, 20):
                tell(tmp_path, incident(step, "co_spike", F.GRADIENT_SPIKE, "the same again", A.SKIP_STEP))
    assert [line for line in shown.lines if "%|" in line] == [shown.lines[-2]]
    assert "30/30" in shown.lines[-2]
    assert "".join(shown.lines[:-2]).count("the same again -> step skipped; 0 steps lost") == 2


def test_a_forked_process_writes_without_the_lock_of_the_bars(tmp_path: Path) -> None:
    with terminal_of(100) as shown, tqdm(total=2, mininterval=0) as bar, Terminal().speaking():
        bar.update()
        with tqdm.get_lock():
            child = os.fork()
            if child == 0:
                # Another thread's lock, which no one gives back here.
                tqdm.set_lock(None)
                logger.warning("From a worker.")
                os._exit(0)
        os.waitpid(child, 0)
        bar.update()
    assert [line for line in shown.lines if line] == ["[self_healing] From a worker.", shown.lines[-2]]
    assert "2/2" in shown.lines[-2]


# ---- where the program logs itself ----


def test_where_the_program_logs_to_the_terminal_its_own_format_is_used_and_bars_make_room(tmp_path: Path) -> None:
    with terminal_of(120) as shown:
        logging.getLogger().addHandler(handler := logging.StreamHandler())
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        with tqdm(total=4, mininterval=0) as bar:
            bar.update()
            tell(tmp_path, EACH_KIND[0])
            bar.update(3)
    message = "WARNING self_healing: step 30: NaN/Inf in loss, transient -> computed again; 0 steps lost, 0.2 s"
    assert [line for line in shown.lines if line] == [message, shown.lines[-2]]
    assert "4/4" in shown.lines[-2]


def test_a_handler_of_rich_counts_as_the_programs_own(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=150)
    logging.getLogger().addHandler(RichHandler(console=console))
    assert piped(tmp_path, EACH_KIND[0]) == []
    assert "step 30: NaN/Inf in loss" in console.file.getvalue()


def test_a_log_file_gets_the_same_lines_in_plain_text_beside_the_terminal(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log.txt")
    logging.getLogger().addHandler(handler)
    with terminal_of(120) as shown:
        tell(tmp_path, *EACH_KIND[:2])
    handler.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [f"[self_healing] {line}" for line in lines] == [line for line in shown.lines if line]
    assert all(character in string.printable for line in lines for character in line)


def test_the_fields_of_the_incident_go_with_the_record(tmp_path: Path) -> None:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    piped(tmp_path, EACH_KIND[0])
    assert [Incident.from_dict(record.incident) for record in found] == [EACH_KIND[0]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("each", EACH_KIND, ids=lambda each: f"{each.failure}-{each.id}")
def test_what_goes_with_the_record_is_strict_json(each: Incident, tmp_path: Path) -> None:
    each = Incident.from_dict(each.to_dict())
    each.evidence |= {"value": math.inf, "rows": {7}, "batch": (torch.ones(2), Path("x")), 3: F.HANG}
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    piped(tmp_path, each)
    (record,) = found
    usual = vars(logging.makeLogRecord({}))
    assert json.dumps({name: value for name, value in vars(record).items() if name not in usual}, allow_nan=False)


def test_the_whole_story_is_logged_as_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    lines = piped(tmp_path, EACH_KIND[0])
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    assert len(lines) == 2
    assert "a transient fault of hardware" in lines[1]


# ---- quiet ----


def said(level: int = logging.INFO, rank: int = 0) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as stream, Terminal(rank).speaking():
        announce("on: heals everything", level)
        logger.warning("A warning.")
        logger.error("An error.")
    return stream.getvalue()


@pytest.fixture
def level_of_the_logger() -> Iterator[None]:
    yield
    logger.setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)


ALL = ["[self_healing] on: heals everything", "[self_healing] A warning.", "[self_healing] An error."]


@pytest.mark.usefixtures("level_of_the_logger")
@pytest.mark.parametrize(
    ("level", "lines"),
    [
        (logging.NOTSET, ALL),
        (logging.INFO, ALL),
        (logging.WARNING, ALL[1:]),
        (logging.ERROR, ALL[2:]),
        (logging.CRITICAL, []),
    ],
)
def test_the_level_of_the_logger_decides(level: int, lines: list[str]) -> None:
    logger.setLevel(level)
    assert said().splitlines() == lines


@pytest.mark.usefixtures("level_of_the_logger")
def test_logging_that_is_disabled_is_silent() -> None:
    logging.disable(logging.WARNING)
    assert said().splitlines() == ALL[2:]


@pytest.mark.parametrize(("value", "lines"), [("info", ALL), ("WARNING", ALL[1:]), ("error", ALL[2:]), ("", ALL)])
def test_a_variable_of_the_environment_does_as_well(
    value: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELF_HEALING_VERBOSITY", value)
    assert said().splitlines() == lines


def test_a_verbosity_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELF_HEALING_VERBOSITY", "quiet")
    message, *others = said().splitlines()
    assert message == (
        "[self_healing] SELF_HEALING_VERBOSITY='quiet' is not known, and is ignored. "
        "Please use info or warning or error or critical."
    )
    assert others == ALL


def test_other_ranks_speak_of_errors_only() -> None:
    assert said(rank=3).splitlines() == ["[self_healing rank 3] An error."]


def test_without_a_terminal_that_speaks_announcements_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    announce("on: heals everything")
    assert capsys.readouterr() == ("", "")


# ---- several at once, and terminals that fail ----


def test_two_runs_share_a_terminal() -> None:
    first, second = Terminal(), Terminal()
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        first.start()
        second.start()
        logger.warning("Both.")
        first.stop()
        logger.warning("The second.")
        second.stop()
        second.stop()
    assert stream.getvalue().splitlines() == ["[self_healing] Both.", "[self_healing] The second."]


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_stream_that_is_gone_ends_nothing(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = None
    if stream == "closed":
        gone = io.StringIO()
        gone.close()
    with Terminal().speaking():
        monkeypatch.setattr(sys, "stderr", gone)
        logger.error("Nobody hears this.")
        announce("Nor this.")


def test_a_traceback_is_shown_whole() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as stream, Terminal().speaking():
        try:
            raise ValueError("a bug of ours")
        except ValueError:
            logger.exception("Something failed.")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["[self_healing] Something failed.", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: a bug of ours"


def test_the_page_about_it_shows_lines_that_are_printed() -> None:
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "report.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\[self_healing\] step .*$", page, re.MULTILINE)
    printed = (TEXTS / "piped.txt").read_text(encoding="utf-8").splitlines()
    assert len(shown) == 3
    assert [line for line in shown if line not in printed] == []
