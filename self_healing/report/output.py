"""Shows a report in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..restarts.status import RunState
from .healing_report import HealingReport
from .records import NextStep, RunReport
from .words import counted, goodput_line, moment, printable, size


# Of rows, files and checkpoints: all of them are in the JSON.
_SHOWN = 8
_STATE_STYLES = {"running": "cyan", "ended": "green", "stopped": "bold red", "died": "bold red", "left": "yellow"}
_VERDICT_STYLES = {"good": "green", "look first": "yellow", "do not use": "bold red"}


def show(report: RunReport, summary: HealingReport, console: Console) -> None:
    """
    Shows what to know of a run: incidents first, and last, where the eye is, what to do next.

    Args:
        report ([`RunReport`]):
            Of the run.
        summary ([`HealingReport`]):
            Its incidents as a table; those of earlier runs into the directory as well, unless one was chosen.
        console (`Console`):
            Where to.
    """
    _show_incidents(summary, console)
    _line(console, report.learning_rate)
    _line(console, "" if report.goodput is None else goodput_line(report.goodput))
    for budget in report.budgets:
        if budget.used:
            _line(console, f"Budget, {budget.name}: {budget.left:g} of {budget.limit:g} left ({budget.setting}).")
    _show_named(report, console)
    for table in _tables(report):
        if table.row_count:
            console.print(table)
    for remark in report.remarks:
        _line(console, remark, "yellow")
    _line(console, report.state.told, _STATE_STYLES.get(report.state.name, ""))
    _line(console, summary.ending)
    if report.verdict is not None:
        _line(console, f"Verdict: {report.verdict}", _VERDICT_STYLES[report.verdict.name])
    if summary.status is not None:
        _show_next_steps(report.next_steps, console)
    if report.other_runs:
        names = ", ".join(f"{each.run} ({each.state})" for each in report.other_runs[-_SHOWN:])
        _line(console, f"Other runs in this directory (--run NAME): {names}.")
    _line(console, f"Journal: {summary.journal}")


def _line(console: Console, text: str, style: str = "") -> None:
    if text:
        console.print(Text(printable(text), style=style), soft_wrap=True)


def _show_incidents(summary: HealingReport, console: Console) -> None:
    if summary.healthy:
        known = summary.status is None or summary.status.state is RunState.ENDED
        _line(console, "Nothing had to be healed." if known else "Nothing had to be healed as far as is written down.")
        return
    console.print(summary.table())
    again = f", {counted(summary.steps_repeated, 'step')} done again." if summary.steps_repeated else "."
    cost = f"{summary.lost.removesuffix(' lost')} and {summary.seconds_lost:.1f} s lost{again}"
    _line(console, f"{counted(len(summary.incidents), 'incident')}, {cost}")
    if earlier := summary.of_earlier_runs:
        _line(console, f"Of these, {counted(earlier, 'incident')} of earlier runs in this directory.")


def _show_named(report: RunReport, console: Console) -> None:
    rows = report.quarantine
    if rows:
        _line(console, f"Left out of training: {_some([row.name for row in rows])}.")
    for incident in report.incidents[-_SHOWN:]:
        for file in incident.files:
            if file.what != "checkpoint":
                _line(console, f"Step {incident.step}, {file.what}: {file.path}")


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _tables(report: RunReport) -> Iterable[Table]:
    checkpoints = _table("Checkpoints", "checkpoint", "step", "standing", "complete", "written", "size")
    for each in report.checkpoints[:_SHOWN]:
        whose = "" if each.of_this_run or each.run is None else f" (run {each.run})"
        _add_row(
            checkpoints,
            f"{each.path}{whose}",
            str(each.step),
            each.standing,
            "yes" if each.complete else "no",
            moment(each.time),
            size(each.bytes),
        )
    yield checkpoints
    attempts = _table("Processes of this run", "number", "began", "steps", "ending", "why")
    for attempt in report.attempts if len(report.attempts) > 1 else ():
        steps = f"{attempt.first_step} to {attempt.last_step}"
        _add_row(attempts, str(attempt.number), moment(attempt.began), steps, attempt.ending, attempt.why[:80])
    yield attempts
    ranks = _table("Ranks", "rank", "step", "last seen", "incidents", "error")
    for rank in report.ranks:
        step = "-" if rank.step is None else str(rank.step)
        _add_row(ranks, str(rank.rank), step, moment(rank.seen), str(rank.incidents), (rank.error or "-")[:80])
    yield ranks


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in ("step", "number", "rank") else "left")
    return table


def _add_row(table: Table, *cells: str) -> None:
    # Not as markup: a path may hold brackets.
    table.add_row(*(Text(printable(cell)) for cell in cells))


def _show_next_steps(steps: Sequence[NextStep], console: Console) -> None:
    _line(console, "What to do next:", "bold")
    for number, step in enumerate(steps, start=1):
        _line(console, f"  {number}. {step.text}{f' ({step.why})' if step.why else ''}")
        _line(console, f"     {step.command}" if step.command else "", "cyan")
