"""`agent.md`: what an assistant, or a colleague, needs to decide what to do next, in at most 60 lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from .records import CheckpointRow, IncidentStory, NextStep, RunReport, StepColumns
from .words import counted, duration, goodput_line, headline, moment, printable


LINES = 60
_INCIDENTS, _CHECKPOINTS, _STEPS, _ROWS, _PROCESSES = 12, 5, 6, 5, 4
_WIDTH = 400


def briefing_of(report: RunReport) -> str:
    """
    Tells of a run as Markdown: state, what to do next, incidents with rows and files, what can be resumed from.

    Args:
        report ([`RunReport`]):
            Of the run.
    """
    lines = [_cut(line) for line in _lines(report)]
    return "\n".join(lines[:LINES]) + "\n"


def _lines(report: RunReport) -> Iterable[str]:
    yield "<!-- self_healing: what to know to decide what to do next -->"
    yield f"# Run {report.run}: {headline(report)}"
    yield ""
    yield f"{report.state.told} Read {moment(report.made)}."
    if report.verdict is not None:
        yield f"Verdict: {report.verdict}"
    if report.goodput is not None:
        yield goodput_line(report.goodput)
    if report.learning_rate:
        yield report.learning_rate
    yield ""
    yield "## What to do next"
    yield from _next_steps(report.next_steps)
    yield ""
    yield "## Incidents"
    yield from _incidents(report.incidents)
    yield ""
    yield "## What is left"
    for budget in report.budgets:
        yield f"- {budget.name}: {budget.left:g} of {budget.limit:g} left (`{budget.setting}`)"
    yield from _checkpoints(report.checkpoints)
    if report.quarantine:
        rows = "; ".join(f"{row.name}: {row.why[:60]}" for row in report.quarantine[:_ROWS])
        yield f"- left out of training, {counted(len(report.quarantine), 'row')}: {rows}"
    if len(report.attempts) > 1:
        ends = ", ".join(
            f"{each.number}: {each.ending} at step {each.last_step}" for each in report.attempts[-_PROCESSES:]
        )
        yield f"- processes, {len(report.attempts)} so far: {ends}"
    for rank in [each for each in report.ranks if each.error][:_PROCESSES]:
        yield f"- rank {rank.rank} ended at step {rank.step}: {rank.error}"
    yield from _numbers(report.series.kept)
    yield from (f"- {remark}" for remark in report.remarks[:3])
    yield ""
    yield "## Where to read on"
    where = shlex.quote(report.directory)
    yield f"- `self-healing report {where} --json`: all of this, with the story of each incident and every step"
    yield f"- files in {report.directory}: {', '.join(file.path for file in report.files)}"
    yield f"- checkpoints, read through: `self-healing check {shlex.quote(report.output_dir)}`"


def _next_steps(steps: Sequence[NextStep]) -> Iterable[str]:
    for number, step in enumerate(steps[:_STEPS], start=1):
        line, why = f"{number}. {step.text}{f' `{step.command}`' if step.command else ''}", f"({step.why})"
        # Neither advice nor diagnosis is cut for the other.
        yield from [f"{line} {why}" if step.why else line] if len(line + why) < _WIDTH else [line, f"   {why}"]


def _incidents(incidents: Sequence[IncidentStory]) -> Iterable[str]:
    if not incidents:
        yield "None."
        return
    # What is not healed matters most; of the rest the newest.
    open_ones = [each for each in incidents if each.outcome in ("fatal", "unresolved", "open")]
    rest = [each for each in incidents if each not in open_ones]
    chosen = (open_ones[-_INCIDENTS:] + rest[::-1])[:_INCIDENTS]
    for incident in sorted(chosen, key=lambda each: (each.time or 0.0, each.id)):
        done = ", ".join(action.replace("_", " ") for action in incident.actions) or "nothing"
        cost = f"{incident.lost.removesuffix(' lost')}, {duration(incident.seconds_lost)} lost"
        named = [row.name for row in incident.rows[:_ROWS]] + [file.path for file in incident.files]
        told = f" See: {', '.join(named)}." if named else ""
        yield (
            f"- step {incident.step}: {incident.title} -> {incident.outcome}; done: {done}; {cost}. "
            f"`{incident.id}`.{told}"
        )
    if len(incidents) > len(chosen):
        yield f"- and {len(incidents) - len(chosen)} more"


def _checkpoints(checkpoints: Sequence[CheckpointRow]) -> Iterable[str]:
    for each in checkpoints[:_CHECKPOINTS]:
        notes = [each.standing, *(["not complete"] if not each.complete else [])]
        notes += ["emergency"] if each.emergency else []
        notes += ["of another run"] if not each.of_this_run else []
        yield f"- checkpoint {each.path}: step {each.step}, {', '.join(notes)}"
    if not checkpoints:
        yield "- no checkpoint"


def _numbers(kept: StepColumns) -> Iterable[str]:
    """The newest row, and where the loss was lowest."""
    at = [place for place, loss in enumerate(kept.loss) if loss is not None]
    if not at:
        return
    last, best = at[-1], min(at, key=lambda place: kept.loss[place] or 0.0)
    shown = [
        f"loss {kept.loss[last]:.4g} at step {kept.step[last]} (lowest {kept.loss[best]:.4g} at {kept.step[best]})"
    ]
    if (norm := kept.grad_norm[last]) is not None:
        bound = kept.grad_norm_bound[last]
        shown.append(f"gradient norm {norm:.4g}" + ("" if bound is None else f" (looked into above {bound:.4g})"))
    if (rate := kept.learning_rate[last]) is not None:
        shown.append(f"learning rate {rate:.3g}")
    if (seconds := kept.seconds[last]) is not None:
        shown.append(f"{seconds:.3g} s per step")
    yield f"- newest numbers: {', '.join(shown)}"


def _cut(line: str) -> str:
    line = " ".join(printable(line).split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."
