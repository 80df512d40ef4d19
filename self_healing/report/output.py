"""Where a report goes: the terminal, and `report.json` and `agent.md` beside the journal."""

from __future__ import annotations

import json
import logging
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..journal.incident import BECAME, Incident, counted, headline, printable
from ..run.status import RunState
from ..system.files import BRIEFING_FILE, REPORT_FILE, is_foreign, replace_file
from ..system.processes import contained
from .healing_report import HealingReport
from .reading import read_run
from .records import (
    Entry,
    IncidentStory,
    NextStep,
    RunReport,
    duration,
    goodput_line,
    in_short,
    moment,
    size,
    spoken,
)


if TYPE_CHECKING:
    # It imports torch.
    from ..run.run import Run


logger = logging.getLogger("self_healing")

# In the terminal, of rows, files and checkpoints: all of them are in the JSON.
_SHOWN, _MOST_INCIDENTS = 8, 20
# Paths, and names of settings.
_WORDS_STAY_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_STATE_STYLES = {"running": "cyan", "ended": "green", "stopped": "bold red", "died": "bold red", "left": "yellow"}
_OUTCOME_STYLES = {"resolved": "green", "self_recovered": "green", "fatal": "bold red"}
_VERDICT_STYLES = {"good": "green", "look first": "yellow", "do not use": "bold red"}

# Of `agent.md`.
LINES = 60
_INCIDENTS, _CHECKPOINTS, _STEPS, _ROWS, _PROCESSES = 12, 5, 6, 5, 4
_WIDTH = 400


# ---- in the terminal ----


def show(report: RunReport, summary: HealingReport, console: Console) -> None:
    """Shows what to know of a run: the verdict and what to do next, then what has happened, then all else."""
    if report.verdict is not None:
        _line(console, f"Verdict: {report.verdict}", _VERDICT_STYLES[report.verdict.name])
    _line(console, report.state.told, _STATE_STYLES.get(report.state.name, ""))
    if summary.status is not None:
        _show_next_steps(report.next_steps, console)
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
    if report.other_runs:
        names = ", ".join(f"{each['run']} ({each['state']})" for each in report.other_runs[-_SHOWN:])
        _line(console, f"Other runs in this directory (--run NAME): {names}.")
    _line(console, f"Journal: {summary.journal}")


def _line(console: Console, text: str, style: str = "", begin: str = "") -> None:
    """Prints a paragraph: wrapped between words in a terminal, where `begin` stands out; one line to a program."""
    if not text:
        return
    text = printable(text)
    if console.is_terminal:
        text = textwrap.fill(
            text, console.width, initial_indent=begin, subsequent_indent=" " * len(begin), **_WORDS_STAY_WHOLE
        )
    else:
        text = begin + text
    console.print(Text(text, style=style), soft_wrap=True)


def _show_incidents(summary: HealingReport, console: Console) -> None:
    if summary.healthy:
        known = summary.status is None or summary.status.state is RunState.ENDED
        _line(console, "Nothing had to be healed." if known else "Nothing had to be healed as far as is written down.")
        return
    again = f", {counted(summary.steps_repeated, 'step')} done again." if summary.steps_repeated else "."
    cost = f"{summary.lost.removesuffix(' lost')} and {summary.seconds_lost:.1f} s lost{again}"
    _line(console, f"{counted(len(summary.incidents), 'incident')}, {cost}", "bold")
    if earlier := summary.of_earlier_runs:
        _line(console, f"Of these, {counted(earlier, 'incident')} of earlier runs in this directory.")
    if (more := len(summary.incidents) - _MOST_INCIDENTS) > 0:
        _line(console, f"The newest of them; --json has {more} more.")
    shown = [(Incident.from_dict(each), BECAME[each["outcome"]]) for each in summary.incidents[-_MOST_INCIDENTS:]]
    longest = max(len(became) for _, became in shown)
    for incident, became in shown:
        style = _OUTCOME_STYLES.get(incident.outcome, "yellow")
        _line(console, headline(incident), style, f"  {became + ':':<{longest + 2}}")


def _show_named(report: RunReport, console: Console) -> None:
    if names := [row["name"] for row in report.quarantine]:
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        _line(console, f"Left out of training: {', '.join(names[:_SHOWN])}{more}.")
    for incident in report.incidents[-_SHOWN:]:
        for file in incident.files:
            if file["what"] != "checkpoint":
                _line(console, f"Step {incident.step}, {file['what']}: {file['path']}")


def _tables(report: RunReport) -> Iterable[Table]:
    rows: list[tuple[object, ...]] = []
    for each, standing in report.listed()[:_SHOWN]:
        whose = "" if each.of_this_run or each.run is None else f" (run {each.run})"
        standing += "" if each.complete else ", not complete"
        standing += ", kept" if each.pinned else ""
        rows.append((each.path + whose, standing, size(each.bytes), moment(each.time)))
    yield _table("Checkpoints", ("checkpoint", "standing", "size", "written"), rows)
    rows = []
    for one in report.attempts if len(report.attempts) > 1 else ():
        steps = f"{one['first_step']} to {one['last_step']}"
        rows.append((one["number"], moment(one["began"]), steps, one["ending"], one["why"][:80]))
    yield _table("Processes of this run", ("number", "began", "steps", "ending", "why"), rows)
    rows = []
    for rank in report.ranks:
        step = "-" if rank["step"] is None else rank["step"]
        rows.append((rank["rank"], step, moment(rank["seen"]), rank["incidents"], (rank["error"] or "-")[:80]))
    yield _table("Ranks", ("rank", "step", "last seen", "incidents", "error"), rows)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(
        title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in ("step", "number", "rank") else "left")
    for row in rows:
        # Not as markup: a path may hold brackets.
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    return table


def _show_next_steps(steps: Sequence[NextStep], console: Console) -> None:
    _line(console, "What to do next:", "bold")
    for number, step in enumerate(steps, start=1):
        _line(console, f"{step.text}{f' ({step.why})' if step.why else ''}", begin=f"  {number}. ")
        if step.command:
            # Not wrapped: it is to be copied.
            console.print(Text(f"     {printable(step.command)}", style="cyan"), soft_wrap=True)


# ---- as Markdown, in at most 60 lines ----


def briefing_of(report: RunReport) -> str:
    """Tells what an assistant, or a colleague, needs to decide what to do next: `agent.md`."""
    lines = (" ".join(printable(line).split()) for line in _briefing(report))
    shown = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in lines]
    return "\n".join(shown[:LINES]) + "\n"


def _briefing(report: RunReport) -> Iterable[str]:
    yield "<!-- self_healing: what to know to decide what to do next -->"
    yield f"# Run {report.run}: {in_short(report)}"
    yield ""
    yield f"{report.state.told} Read {moment(report.made)}."
    if report.verdict is not None:
        yield f"Verdict: {report.verdict}"
    if report.goodput is not None:
        yield goodput_line(report.goodput)
    if report.learning_rate:
        yield report.learning_rate
    yield from ("", "## What to do next", *_briefly_next(report.next_steps))
    yield from ("", "## Incidents", *_briefly_incidents(report.incidents))
    yield from ("", "## What is left", *_what_is_left(report))
    where = shlex.quote(report.directory)
    yield from ("", "## Where to read on")
    yield f"- `self-healing report {where} --json`: all of this, with the story of each incident and every step"
    yield f"- files in {report.directory}: {', '.join(file['path'] for file in report.files)}"
    yield f"- checkpoints, read through: `self-healing check {shlex.quote(report.output_dir)}`"


def _briefly_next(steps: Sequence[NextStep]) -> Iterable[str]:
    for number, step in enumerate(steps[:_STEPS], start=1):
        line, why = f"{number}. {step.text}{f' `{step.command}`' if step.command else ''}", f"({step.why})"
        # Neither advice nor diagnosis is cut for the other.
        yield from [f"{line} {why}" if step.why else line] if len(line + why) < _WIDTH else [line, f"   {why}"]


def _briefly_incidents(incidents: Sequence[IncidentStory]) -> Iterable[str]:
    if not incidents:
        yield "None."
        return
    # What is not healed matters most; of the rest the newest.
    open_ones = [each for each in incidents if each.outcome in ("fatal", "unresolved", "open")]
    rest = [each for each in incidents if each not in open_ones]
    chosen = (open_ones[-_INCIDENTS:] + rest[::-1])[:_INCIDENTS]
    for incident in sorted(chosen, key=lambda each: (each.time or 0.0, each.id)):
        done = ", ".join(map(spoken, incident.actions)) or "nothing"
        cost = f"{incident.lost.removesuffix(' lost')}, {duration(incident.seconds_lost)} lost"
        named = [row["name"] for row in incident.rows[:_ROWS]] + [file["path"] for file in incident.files]
        told = f" See: {', '.join(named)}." if named else ""
        yield (
            f"- step {incident.step}: {incident.title} -> {incident.outcome}; done: {done}; {cost}. "
            f"`{incident.id}`.{told}"
        )
    if len(incidents) > len(chosen):
        yield f"- and {len(incidents) - len(chosen)} more"


def _what_is_left(report: RunReport) -> Iterable[str]:
    for budget in report.budgets:
        yield f"- {budget.name}: {budget.left:g} of {budget.limit:g} left (`{budget.setting}`)"
    for checkpoint, standing in report.listed()[:_CHECKPOINTS]:
        notes = [standing] + ["not complete"] * (not checkpoint.complete) + ["emergency"] * checkpoint.emergency
        notes += [] if checkpoint.of_this_run else ["of another run"]
        yield f"- checkpoint {checkpoint.path}: step {checkpoint.step}, {', '.join(notes)}"
    if not report.checkpoints:
        yield "- no checkpoint"
    if report.quarantine:
        rows = "; ".join(f"{row['name']}: {row['why'][:60]}" for row in report.quarantine[:_ROWS])
        yield f"- left out of training, {counted(len(report.quarantine), 'row')}: {rows}"
    if len(report.attempts) > 1:
        ends = [f"{one['number']}: {one['ending']} at step {one['last_step']}" for one in report.attempts]
        yield f"- processes, {len(report.attempts)} so far: {', '.join(ends[-_PROCESSES:])}"
    for rank in [each for each in report.ranks if each["error"]][:_PROCESSES]:
        yield f"- rank {rank['rank']} ended at step {rank['step']}: {rank['error']}"
    yield from _newest_numbers(report.series["kept"])
    yield from (f"- {remark}" for remark in report.remarks[:3])


def _newest_numbers(kept: Entry) -> Iterable[str]:
    at = [place for place, loss in enumerate(kept["loss"]) if loss is not None]
    if not at:
        return
    loss, step, newest = kept["loss"], kept["step"], {name: values[at[-1]] for name, values in kept.items()}
    best = min(at, key=lambda place: loss[place])
    shown = [f"loss {newest['loss']:.4g} at step {newest['step']} (lowest {loss[best]:.4g} at {step[best]})"]
    if newest["grad_norm"] is not None:
        bound = newest["grad_norm_bound"]
        above = "" if bound is None else f" (looked into above {bound:.4g})"
        shown.append(f"gradient norm {newest['grad_norm']:.4g}{above}")
    if newest["learning_rate"] is not None:
        shown.append(f"learning rate {newest['learning_rate']:.3g}")
    if newest["seconds"] is not None:
        shown.append(f"{newest['seconds']:.3g} s per step")
    yield f"- newest numbers: {', '.join(shown)}"


# ---- at the end of a run ----


def write_closing_report(run: Run) -> None:
    """
    Writes `report.json` and `agent.md` beside the journal when `train()` is left, and keeps the verdict for the report
    of the run.
    """
    if run.journal.rank > 0:
        return
    directory, name_of_run = run.journal.directory, run.journal.run_id
    with contained(logger, f"The report of run {name_of_run} in {directory} could not be written.", logging.WARNING):
        report = read_run(directory, name_of_run)
        # Without every step: a program asks `--json` for that, and an assistant had better not read it.
        content = json.dumps(report.to_dict(series=False), indent=1) + "\n"
        for name, text in ((REPORT_FILE, content), (BRIEFING_FILE, briefing_of(report))):
            path = directory / name
            if is_foreign(path):
                logger.info(
                    "%s was not written by self_healing, and stays as it is: `self-healing report` shows it.", path
                )
            else:
                replace_file(path, text, make_directory=False)
        if report.verdict is not None:
            run.verdict, run.doubtful = str(report.verdict), report.verdict.name != "good"
