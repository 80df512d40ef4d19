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
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from markupsafe import Markup

from ...journal.incident import BECAME, counted
from ...system.files import replace_file
from ..records import (
    VERDICTS,
    Entry,
    Goodput,
    IncidentStory,
    NextStep,
    RunReport,
    capital,
    digits,
    goodput_line,
    moment,
    percent,
    plain,
    render,
    short_duration,
    spoken,
)
from .charts import charts_of, tables_of


_MOST_STORIES, _MOST_NOTICES, _MOST_ROWS = 300, 200, 50
# From one thing to do, to the newest incidents it is about.
_MOST_LINKS = 5

_STATES = {
    "running": ("busy", "The run is in progress"),
    "ended": ("good", "The run reached its end"),
    "stopped": ("bad", "The run stopped before its end"),
    "left": ("warn", "The run left, to be started again"),
    "died": ("bad", "The run died"),
    "unknown": ("calm", "Whether the run is still going is not known"),
}
_COLOURS = {"good": "%2315803d", "bad": "%23b91c1c", "warn": "%23a84b05", "busy": "%231d4ed8", "calm": "%235b6473"}
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Ccircle cx='8' cy='8' r='7' fill='{}'/%3E%3C/svg%3E"
)
# Classes of colours, the worst last.
_TONES = ("calm", "good", "busy", "warn", "bad")
_TONE_OF = {"resolved": "good", "self_recovered": "good", "reported": "calm", "fatal": "bad"}
# What the sentences of a story say, and the head of it.
_TOLD = frozenset(
    {
        *("action", "cause", "evidence", "failure", "happened", "outcome", "symptom"),
        *("loss_after", "seconds_lost", "steps_lost", "steps_repeated", "trend"),
    }
)
# By which a page is known again.
_GENERATOR = b'<meta name="generator" content="self-healing-trl'


def write_page(report: RunReport, path: str | Path) -> None:
    """Writes the page of a run, whole or not at all; an older page of that name is replaced."""
    path = Path(path)
    if path.is_char_device() or path.is_block_device() or path.is_fifo() or path.is_socket():
        # Replaced as any file is, `/dev/null` would be one from then on.
        raise OSError(errno.EINVAL, "it is not a regular file")
    if not path.name:
        raise OSError(errno.EISDIR, "it is a directory")
    # Of this version or another.
    if path.is_file() and not re.match(rb"(?s)<!doctype html>.{,4096}" + _GENERATOR, path.read_bytes()):
        raise FileExistsError(errno.EEXIST, "there is a file of that name that is not such a page, and it stays")
    replace_file(path, page_of(report), make_directory=False)


def page_of(report: RunReport) -> str:
    """Returns the page of a run as text."""
    tellings = [_tell(incident, number) for number, incident in enumerate(report.incidents, 1)]
    # Of too many the worst, of equals the newest; in their order.
    worst = sorted(tellings, key=lambda told: (_TONES.index(told["tone"]), told["number"]))[-_MOST_STORIES:]
    stories = sorted(worst, key=lambda told: int(told["number"]))
    anchors = {story["id"]: story["anchor"] for story in stories}
    charts = charts_of(report)
    first, last = _range(charts, report)
    tables = tables_of(report, anchors)
    goodput = _goodput(report.goodput)
    contents = [("charts", "Charts"), ("incidents", "Incidents")]
    contents += [("goodput", "Where the time went")] if goodput else []
    script, uplot = _text("page.js"), _text("vendored/uplot/uPlot.iife.min.js")
    style = f"{_text('vendored/uplot/uPlot.min.css')}\n{_text('page.css')}"
    top = _top(report)
    more = len(tellings) - len(stories)
    name = Path(report.output_dir).name or report.run
    return render(
        "page.html",
        policy=_policy(uplot, script, style),
        title=f"{top['title']}: {name}",
        icon=_ICON.format(_COLOURS[top["tone"]]),
        style=Markup(style),
        script=Markup(script),
        uplot=Markup(uplot),
        version=_version(),
        name=name,
        report=report,
        made=moment(report.made),
        made_for_machines=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(report.made)),
        verdict=top,
        next_steps=[(step, _links(step, anchors)) for step in report.next_steps],
        figures=_figures(report, tellings),
        contents=contents + [(table["name"], table["title"]) for table in tables],
        charts=charts,
        charts_lead=_about_charts(report),
        first_step=first,
        last_step=last,
        stories=stories,
        left_out=f"And {more} more, less severe or older: they are in the journal." if more else "",
        notices=report.notices[-_MOST_NOTICES:],
        notices_title=counted(len(report.notices), "notice"),
        goodput=goodput,
        tables=tables,
        drawn={"range": (first, last), "charts": charts, "marks": _marks(stories)},
    )


# ---- the template ----


@cache
def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(uplot: str, script: str, style: str) -> str:
    """Lets these scripts run and no other; nothing is loaded, sent or embedded (Content Security Policy, level 2)."""
    return (
        f"default-src 'none'; script-src {_hashed(uplot)} {_hashed(script)}; style-src {_hashed(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _version() -> str:
    try:
        return f" {importlib.metadata.version('self-healing-trl')}"
    except importlib.metadata.PackageNotFoundError:
        # Run from its source.
        return ""


# ---- the top ----


def _top(report: RunReport) -> Entry:
    state = report.state
    tone, title = _STATES.get(state.name, _STATES["unknown"])
    if state.name == "ended" and report.verdict is not None:
        tone = VERDICTS[report.verdict.name]
    share = min(state.step / state.max_steps, 1.0) if state.max_steps else None
    return {
        "tone": tone,
        "title": title,
        "told": state.told,
        "weights": "" if report.verdict is None else f"Verdict: {report.verdict}",
        "share": share,
        "progress": f"Step {state.step}" + (f" of {state.max_steps}" if state.max_steps else ""),
        "percent": "" if share is None else f"{math.floor(100 * share)} %",
    }


def _links(step: NextStep, anchors: Mapping[str, str]) -> list[tuple[str, str]]:
    found = [anchors[incident] for incident in step.incidents if incident in anchors]
    return [(anchor, f"Incident {anchor.rpartition('-')[2]}") for anchor in found[-_MOST_LINKS:]]


def _figures(report: RunReport, tellings: Sequence[Entry]) -> list[tuple[str, str, str]]:
    """The numbers at the top: title, value, and what stands beside it."""
    outcomes = Counter(told["outcome"] for told in tellings)
    became = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    found = [("Incidents", str(len(tellings)), became or "nothing had to be healed")]
    if (goodput := report.goodput) is not None:
        found.append(("Goodput", percent(goodput.share), f"of {short_duration(goodput.wall)} of wall time"))
    lost = "not known" if report.lost.endswith("known") else str(report.steps_lost)
    again = f"{counted(report.steps_repeated, 'step') if report.steps_repeated else 'none'} done again"
    found.append(("Steps lost", lost, again))
    found.append(("Time spent on healing", short_duration(report.seconds_lost), "diagnosis and remedies"))
    if report.learning_rate:
        scales = [scale for scale in report.series["kept"]["learning_rate_scale"] if scale is not None]
        found.append(("Learning rate", f"× {digits(scales[-1])}" if scales else "reduced", report.learning_rate))
    return found


# ---- charts ----


def _about_charts(report: RunReport) -> str:
    source = "Every step, as it was applied." if report.series["source"] == "steps" else ""
    undone = " Grey: steps that were rolled back or repeated." if report.series["discarded"] else ""
    marks = " The numbers are incidents: click one for its story." if report.incidents else ""
    return f"{source}{undone}{marks}".strip()


def _marks(stories: Sequence[Entry]) -> list[Entry]:
    # The number is for all; in the order of steps, as a run is rolled back.
    return [
        {
            "label": str(story["number"]),
            **{key: story[key] for key in ("step", "tone", "anchor")},
            "title": f"Incident {story['number']}, step {story['step']}: {story['title']} ({story['outcome']})",
        }
        for story in sorted(stories, key=lambda story: (story["step"], story["number"]))
    ]


def _range(charts: Sequence[Entry], report: RunReport) -> tuple[int, int]:
    steps = [step for chart in charts for line in chart["lines"] for step in (line["steps"][0], line["steps"][-1])]
    steps += [incident.step for incident in report.incidents]
    return (min(steps), max(max(steps), min(steps) + 1)) if steps else (0, 1)


# ---- incidents and time ----


def _tell(incident: IncidentStory, number: int) -> Entry:
    """An incident as the page tells it; its number, from 1, is on the charts as well."""
    outcome, tone = BECAME[incident.outcome], _TONE_OF.get(incident.outcome, "warn")
    if incident.outcome == "reported" and incident.severity in ("warning", "error"):
        tone = "warn"
    cost = [f"step {incident.step}"]
    if incident.actions:
        cost.append(", ".join(spoken(action) for action in dict.fromkeys(incident.actions)))
    cost.append(incident.lost)
    if incident.steps_repeated:
        cost.append(f"{counted(incident.steps_repeated, 'step')} done again")
    if incident.seconds_lost:
        cost.append(short_duration(incident.seconds_lost))
    if incident.rank:
        cost.append(f"rank {incident.rank}")
    chapters = [
        (capital(spoken(part)), [(line, _facts(line)) for line in lines])
        for part, lines in groupby(incident.story, key=lambda line: str(line["part"]))
    ]
    return {
        "number": number,
        # Its name might be anything.
        "anchor": f"incident-{number}",
        "id": incident.id,
        "step": incident.step,
        "title": capital(incident.title),
        "beside": " · ".join(cost),
        "advice": incident.advice,
        "outcome": outcome,
        "tone": tone,
        "chapters": chapters,
        "rows": incident.rows[:_MOST_ROWS],
        "files": incident.files,
    }


def _facts(line: Entry) -> list[tuple[str, str]]:
    """The values behind a sentence that it does not tell itself."""
    details = {**line["details"], **line["details"].get("evidence", {})}
    return [
        (spoken(name), plain(value))
        for name, value in details.items()
        if name not in _TOLD and value not in (None, "", [], {}) and f"{spoken(name)} " not in line["text"]
    ]


def _goodput(goodput: Goodput | None) -> Entry | None:
    """The bar of a thousand units that shows where the wall time went."""
    if goodput is None or goodput.wall <= 0:
        return None
    parts: list[Entry] = []
    begin = 0.0
    for title, seconds, tone in (
        ("steps in the weights", goodput.useful, "good"),
        ("steps that are not", goodput.lost_steps, "bad"),
        ("healing", goodput.healing, "warn"),
        ("between two processes", goodput.down, "busy"),
        ("start-up, evaluation, checkpoints", goodput.other, "calm"),
    ):
        if seconds >= 0.05:
            width = round(1000 * seconds / goodput.wall, 1)
            shown = short_duration(seconds)
            parts.append({"title": title, "value": shown, "tone": tone, "begin": begin, "width": width})
            begin = round(begin + width, 1)
    return {
        "lead": goodput_line(goodput),
        "told": ", ".join(f"{part['title']} {part['value']}" for part in parts),
        "parts": parts,
    }
