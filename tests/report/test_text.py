"""The report as it is printed."""

from __future__ import annotations

import io

from rich.console import Console

from self_healing import Action, FailureType, Incident
from self_healing.report import HealingReport
from self_healing.report.output import _line


def test_text_of_an_exception_steers_no_terminal_and_can_be_encoded() -> None:
    with io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as stream:
        _line(Console(file=stream, width=80), "  No file \x1b[31mr\udce9sum\u00e9\nPlease look.")
        stream.flush()
        stream.seek(0)
        assert stream.read() == "  No file  [31mr sum\u00e9\nPlease look.\n"


def test_in_a_narrow_terminal_no_word_of_the_table_is_broken() -> None:
    incident = Incident(
        "run-001", 122, "ConnectionError", FailureType.NETWORK, "nonfinite gradient", outcome="resolved"
    )
    incident.actions += [Action.EMERGENCY_CHECKPOINT, Action.WAIT_AND_RESUME, Action.USE_REEXECUTED_STEP]
    incident.steps_lost, incident.steps_repeated, incident.seconds_lost = 2, 1000, 3.25
    stream = io.StringIO()
    Console(file=stream, width=80).print(HealingReport.from_incidents([incident]))
    text = stream.getvalue()
    for word in ("ConnectionError", "nonfinite", "gradient", "checkpoint", "reexecuted", "resolved"):
        assert word in text
    assert [each for each in ("2 steps lost", "1,000 repeated", "3.2 s") if each not in text] == []


def test_what_cost_nothing_has_a_dash() -> None:
    stream = io.StringIO()
    Console(file=stream, width=80).print(HealingReport.from_incidents([Incident("run-001", 3, "plateau")]))
    assert stream.getvalue().splitlines()[-1].split()[-2:] == ["-", "open"]
