"""An incident as the page tells it: what it is called, in which colour, and its story in chapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .. import words
from ..records import FileNamed, IncidentStory, RowNamed, StoryLine
from . import wording


# Classes of colours, the worst last.
TONES = ("calm", "good", "busy", "warn", "bad")
_OUTCOMES = {
    "resolved": ("healed", "good"),
    "self_recovered": ("recovered by itself", "good"),
    "reported": ("reported", "calm"),
    "open": ("open", "warn"),
    "unresolved": ("not resolved", "warn"),
    "fatal": ("ended the run", "bad"),
}
_CHAPTERS = {
    "evidence": "Evidence",
    "experiment": "Experiment",
    "cause": "Cause",
    "remedy": "Remedy",
    "outcome": "Outcome",
}
# What the sentences of a story say, and the head of it.
_TOLD = frozenset(
    {
        *("action", "cause", "evidence", "failure", "happened", "outcome", "symptom"),
        *("loss_after", "seconds_lost", "steps_lost", "steps_repeated", "trend"),
    }
)
_MOST_FACTS = 40
_MOST_ROWS = 50


@dataclass(frozen=True, slots=True)
class ChapterLine:
    """A sentence of a story, with the values behind it."""

    text: str
    happened: bool
    facts: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Chapter:
    """Sentences of the same part of a story, next to each other."""

    title: str
    lines: list[ChapterLine]


@dataclass(frozen=True, slots=True)
class Told:
    """
    An incident, in words.

    Args:
        number (`int`):
            Among those of the run, from 1: on the charts as well.
        anchor (`str`):
            Where its story is on the page.
        id (`str`), step (`int`):
            Those of the incident.
        title (`str`), beside (`str`), advice (`str`):
            What it was; what it cost; what to do about it.
        outcome (`str`), tone (`str`):
            What became of it, and the class of its colour.
        chapters (`list[Chapter]`):
            Its story.
        rows (`Sequence[RowNamed]`), files (`Sequence[FileNamed]`):
            What it put into quarantine, and what it left on disk.
    """

    number: int
    anchor: str
    id: str
    step: int
    title: str
    beside: str
    advice: str
    outcome: str
    tone: str
    chapters: list[Chapter]
    rows: Sequence[RowNamed]
    files: Sequence[FileNamed]


def anchor_of(number: int) -> str:
    """Where the story of an incident is on the page; its name might be anything."""
    return f"incident-{number}"


def tell(incident: IncidentStory, number: int) -> Told:
    """Puts an incident into words."""
    outcome, tone = _OUTCOMES.get(incident.outcome, (wording.spoken(incident.outcome), "warn"))
    if incident.outcome == "reported" and incident.severity in ("warning", "error"):
        tone = "warn"
    cost = [f"step {wording.number(incident.step)}"]
    if incident.actions:
        cost.append(", ".join(wording.spoken(action) for action in dict.fromkeys(incident.actions)))
    cost.append(incident.lost)
    if incident.steps_repeated:
        cost.append(f"{words.counted(incident.steps_repeated, 'step')} done again")
    if incident.seconds_lost:
        cost.append(wording.duration(incident.seconds_lost))
    if incident.rank:
        cost.append(f"rank {incident.rank}")
    title = incident.title or f"{wording.spoken(incident.symptom)}: {incident.cause}"
    return Told(
        number,
        anchor_of(number),
        incident.id,
        incident.step,
        title[:1].upper() + title[1:],
        " · ".join(cost),
        incident.advice,
        outcome,
        tone,
        _chapters(incident.story) or [Chapter("Story", [ChapterLine(incident.text or title, True, [])])],
        incident.rows[:_MOST_ROWS],
        incident.files,
    )


def _chapters(story: Sequence[StoryLine]) -> list[Chapter]:
    return [
        Chapter(
            _CHAPTERS.get(part, wording.spoken(part)),
            [ChapterLine(line.text, line.happened, _facts(line)) for line in lines],
        )
        for part, lines in groupby(story, key=lambda line: line.part)
    ]


def _facts(line: StoryLine) -> list[tuple[str, str]]:
    """The values behind a sentence that it does not tell itself."""
    details = {**line.details, **_mapping(line.details.get("evidence"))}
    return [
        (wording.spoken(str(name)), wording.plain(value))
        for name, value in list(details.items())[:_MOST_FACTS]
        if name not in _TOLD and value not in (None, "", [], {}) and f"{wording.spoken(str(name))} " not in line.text
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def worst_first(tellings: Sequence[Told], most: int) -> list[Told]:
    """Chooses which are told where there are too many: the worst, of equals the newest; in their order."""
    chosen = sorted(tellings, key=lambda told: (TONES.index(told.tone), told.number))[-most:]
    return sorted(chosen, key=lambda told: told.number)
