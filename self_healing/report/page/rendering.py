"""
Puts a report on one HTML page.

What comes from the run goes through a template that escapes all of it, or into JSON that no markup can leave; and the
page's own policy lets no other script run than the two that are written here, and nothing be loaded from anywhere.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import importlib.metadata
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from ...files import replace_file
from .. import words
from ..records import Goodput, NextStep, RunReport
from . import wording
from .chapters import Told, tell, worst_first
from .charts import Chart, charts_of
from .sheets import names, sheets_of


_MOST_STORIES = 300
_MOST_NOTICES = 200
# From one thing to do, to the newest incidents it is about.
_MOST_LINKS = 5
# Marks beyond these could not be told apart.
_MOST_MARKS = 1000

_STATES = {
    "running": ("busy", "The run is in progress"),
    "ended": ("good", "The run reached its end"),
    "stopped": ("bad", "The run stopped before its end"),
    "left": ("warn", "The run left, to be started again"),
    "died": ("bad", "The run died"),
    "unknown": ("calm", "Whether the run is still going is not known"),
}
_VERDICTS = {"good": "good", "look first": "warn", "do not use": "bad"}
# Of the first bytes of a page, by which it is known again.
_HEAD, _GENERATOR = 4096, b'<meta name="generator" content="self-healing-trl'
_ICON = {"good": "%2315803d", "bad": "%23b91c1c", "warn": "%23a84b05", "busy": "%231d4ed8", "calm": "%235b6473"}


def write_page(report: RunReport, path: str | Path) -> None:
    """
    Writes the page of a run, whole or not at all.

    Args:
        report ([`~self_healing.report.records.RunReport`]):
            What is known of the run.
        path (`str` or `Path`):
            The file, in a directory that is there; an older page of that name is replaced.

    Raises:
        OSError: If it could not be written, or there is a file of that name that is not such a page.
    """
    path = Path(path)
    if path.is_char_device() or path.is_block_device() or path.is_fifo() or path.is_socket():
        # Replaced as any file is, `/dev/null` would be one from then on.
        raise OSError(errno.EINVAL, "it is not a regular file")
    if not path.name:
        raise OSError(errno.EISDIR, "it is a directory")
    if path.is_file() and not _is_page(path):
        raise FileExistsError(errno.EEXIST, "there is a file of that name that is not such a page, and it stays")
    replace_file(path, page_of(report), make_directory=False)


def _is_page(path: Path) -> bool:
    """Whether a file begins as the page of a run does, of this version or another."""
    with path.open("rb") as file:
        begins = file.read(_HEAD)
    return begins.startswith(b"<!doctype html>") and _GENERATOR in begins


def page_of(report: RunReport) -> str:
    """Returns the page of a run as text."""
    tellings = [tell(incident, number) for number, incident in enumerate(report.incidents, 1)]
    stories = worst_first(tellings, _MOST_STORIES)
    told = {story.id: story.anchor for story in stories}
    charts = charts_of(report)
    first, last = _range(charts, report)
    sheets = sheets_of(report, told)
    goodput = _goodput(report.goodput)
    contents = [("charts", "Charts"), ("incidents", "Incidents")]
    contents += [("goodput", "Where the time went")] if goodput else []
    script, uplot = _text("page.js"), _text("vendored/uplot/uPlot.iife.min.js")
    style = f"{_text('vendored/uplot/uPlot.min.css')}\n{_text('page.css')}"
    verdict = _verdict(report)
    more = len(tellings) - len(stories)
    name = Path(report.output_dir).name or report.run
    page = _template().render(
        policy=_policy((uplot, script), style),
        title=f"{verdict['title']}: {name}",
        icon=_icon(verdict["tone"]),
        style=Markup(style),
        script=Markup(script),
        uplot=Markup(uplot),
        version=_version(),
        name=name,
        run=report.run,
        directory=report.directory,
        objective=report.objective,
        made=words.moment(report.made),
        made_for_machines=wording.moment_for_machines(report.made),
        verdict=verdict,
        next_steps=[_next_step(step, told) for step in report.next_steps],
        figures=_figures(report, tellings),
        contents=contents + names(sheets),
        charts=charts,
        charts_lead=_about_charts(report),
        nothing_to_draw="no step was written down, and nothing was logged.",
        first_step=first,
        last_step=last,
        stories=stories,
        incidents_lead=_about_incidents(report),
        left_out=f"And {wording.number(more)} more, less severe or older: they are in the journal." if more else "",
        notices=report.notices[-_MOST_NOTICES:],
        notices_title=words.counted(len(report.notices), "notice"),
        goodput=goodput,
        tables=sheets,
        remarks=report.remarks,
        drawn=_drawn(charts, _marks(stories), (first, last)),
    )
    # Parts of file names that no encoding has.
    return page.encode("utf-8", errors="replace").decode("utf-8")


# ---- the template ----


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_text("page.html"))


@cache
def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str], style: str) -> str:
    """Lets these scripts run and no other; nothing is loaded, sent or embedded (Content Security Policy, level 2)."""
    allowed = " ".join(_hashed(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hashed(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _icon(tone: str) -> str:
    circle = f"%3Ccircle cx='8' cy='8' r='7' fill='{_ICON[tone]}'/%3E"
    return f"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E{circle}%3C/svg%3E"


def _version() -> str:
    try:
        return f" {importlib.metadata.version('self-healing-trl')}"
    except importlib.metadata.PackageNotFoundError:
        # Run from its source.
        return ""


# ---- the top ----


def _verdict(report: RunReport) -> dict[str, Any]:
    state = report.state
    tone, title = _STATES.get(state.name, _STATES["unknown"])
    if state.name == "ended" and report.verdict is not None:
        tone = _VERDICTS[report.verdict.name]
    share = min(state.step / state.max_steps, 1.0) if state.max_steps else None
    of = f" of {wording.number(state.max_steps)}" if state.max_steps else ""
    return {
        "tone": tone,
        "title": title,
        "told": state.told,
        "weights": "" if report.verdict is None else f"Verdict: {report.verdict}",
        "share": share,
        "progress": f"Step {wording.number(state.step)}{of}",
        "percent": "" if share is None else f"{math.floor(100 * share)} %",
    }


def _next_step(step: NextStep, told: dict[str, str]) -> dict[str, Any]:
    anchors = [told[incident] for incident in step.incidents if incident in told]
    return {
        "text": step.text,
        "why": step.why,
        "command": step.command,
        "anchors": [(anchor, f"Incident {anchor.rpartition('-')[2]}") for anchor in anchors[-_MOST_LINKS:]],
    }


def _figures(report: RunReport, tellings: Sequence[Told]) -> list[dict[str, str]]:
    outcomes = Counter(told.outcome for told in tellings)
    found = [
        (
            "Incidents",
            wording.number(len(report.incidents)),
            ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()) or "nothing had to be healed",
        )
    ]
    if report.goodput is not None and report.goodput.share is None:
        found.append(("Wall time", wording.duration(report.goodput.wall), "from the first process to the newest"))
    elif report.goodput is not None:
        found.append(
            (
                "Goodput",
                wording.share(report.goodput.share),
                f"of {wording.duration(report.goodput.wall)} of wall time",
            )
        )
    again = (
        f"{words.counted(report.steps_repeated, 'step')} done again" if report.steps_repeated else "none done again"
    )
    lost = "not known" if report.lost.endswith("known") else wording.number(report.steps_lost)
    found.append(("Steps lost", lost, again))
    found.append(("Time spent on healing", wording.duration(report.seconds_lost), "diagnosis and remedies"))
    if report.quarantine:
        found.append(("Left out of training", wording.number(len(report.quarantine)), "rows and samples"))
    verified = [each for each in report.checkpoints if each.standing == "verified" and each.complete]
    if verified:
        newest = max(verified, key=lambda each: each.step)
        found.append(("Newest verified checkpoint", f"step {wording.number(newest.step)}", newest.path))
    if report.learning_rate:
        scales = [scale for scale in report.series.kept.learning_rate_scale if scale is not None]
        value = f"× {wording.number(scales[-1])}" if scales else "reduced"
        found.append(("Learning rate", value, report.learning_rate))
    return [{"title": title, "value": value, "beside": beside} for title, value, beside in found]


# ---- charts ----


def _about_charts(report: RunReport) -> str:
    source = {
        "steps": "Every step, as it was applied.",
        "logs": "Only what the trainer logged: averages over its logging steps.",
    }.get(report.series.source, "")
    undone = " Grey: steps that were rolled back or repeated." if report.series.discarded else ""
    marks = " The numbers are incidents: click one for its story." if report.incidents else ""
    return f"{source}{undone}{marks}".strip()


def _marks(stories: Sequence[Told]) -> list[dict[str, Any]]:
    # The number is for all; in the order of steps, as a run goes back.
    return [
        {
            "label": str(story.number),
            "step": story.step,
            "tone": story.tone,
            "anchor": story.anchor,
            "title": f"Incident {story.number}, step {story.step}: {story.title} ({story.outcome})",
        }
        for story in sorted(stories[-_MOST_MARKS:], key=lambda story: (story.step, story.number))
    ]


def _range(charts: Sequence[Chart], report: RunReport) -> tuple[int, int]:
    steps = [step for chart in charts for line in chart.lines for step in (line.steps[0], line.steps[-1])]
    steps += [incident.step for incident in report.incidents]
    return (min(steps), max(max(steps), min(steps) + 1)) if steps else (0, 1)


def _drawn(charts: Sequence[Chart], marks: Sequence[dict[str, Any]], steps: tuple[int, int]) -> dict[str, Any]:
    return {
        "range": steps,
        "charts": [
            {
                **{
                    name: getattr(chart, name)
                    for name in ("name", "title", "unit", "summary", "logarithmic", "from_zero")
                },
                "lines": [
                    {name: getattr(line, name) for name in ("label", "kind", "steps", "values")}
                    for line in chart.lines
                ],
            }
            for chart in charts
        ],
        "marks": marks,
    }


# ---- incidents and time ----


def _about_incidents(report: RunReport) -> str:
    if not report.incidents:
        return "Nothing had to be healed."
    return "In the order in which they were seen: evidence, experiment, cause, remedy and outcome of each."


@dataclass(frozen=True, slots=True)
class _Part:
    title: str
    value: str
    tone: str
    begin: float
    width: float


def _goodput(goodput: Goodput | None) -> dict[str, Any] | None:
    """The bar of a thousand units that shows where the wall time went."""
    if goodput is None or goodput.wall <= 0 or goodput.share is None:
        return None
    parts: list[_Part] = []
    begin = 0.0
    for title, seconds, tone in (
        ("steps in the weights", goodput.useful, "good"),
        ("steps that are not", goodput.lost_steps, "bad"),
        ("healing", goodput.healing, "warn"),
        ("between two processes", goodput.down, "busy"),
        ("start-up, evaluation, checkpoints", goodput.other, "calm"),
    ):
        if seconds < 0.05:
            continue
        width = round(1000 * max(seconds, 0.0) / goodput.wall, 1)
        parts.append(_Part(title, wording.duration(seconds), tone, begin, width))
        begin = round(begin + width, 1)
    of_steps = f"{wording.number(goodput.steps_useful)} of the {words.counted(goodput.steps_done, 'step')} computed"
    return {
        "lead": f"{wording.share(goodput.share)} of {wording.duration(goodput.wall)} went into steps that are in the "
        f"weights: {of_steps}.",
        "told": ", ".join(f"{part.title} {part.value}" for part in parts),
        "parts": parts,
    }
