"""
What is known of a run, and its numbers in words.

What code asks questions of is a record; what is only passed on to the reader is a dict. Either way its keys are those
of the JSON (docs/report.md). Steps are optimizer steps finished before the one that is spoken of, times are seconds
since the epoch, sizes are bytes, and what is not known is `None`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from rich import filesize

from ..journal.incident import BECAME, Incident, lost_steps
from ..journal.incident import counted as counted
from ..journal.step_log import StepRow
from ..system.files import jsonable


# Named in every JSON file and output; the number goes up when a key is renamed, removed, or means something else.
SCHEMA = "self_healing.report/1"

# The tones of verdicts, which are classes of the page.
VERDICTS = {"good": "good", "look first": "warn", "do not use": "bad"}
# Of a value of the journal in one line.
_LONGEST = 600

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class State:
    """What has become of a run."""

    name: str  # of a RunState
    step: int = 0
    max_steps: int | None = None
    # Of a run that goes on or died, its last sign of life; else when it ended.
    since: float | None = None
    pid: int | None = None
    host: str | None = None
    why: str = ""
    told: str = ""


@dataclass(slots=True)
class IncidentStory(Incident):
    """An incident as a report tells it, from what was seen to what came of it."""

    title: str = ""
    line: str = ""
    text: str = ""
    diagnosis: str = ""
    advice: str = ""
    time: float | None = None
    closed: float | None = None
    rank: int = 0
    attempt: int = 0
    story: list[Entry] = field(default_factory=list)
    rows: list[Entry] = field(default_factory=list)
    files: list[Entry] = field(default_factory=list)

    @property
    def lost(self) -> str:
        """How many steps it has cost, in words."""
        return lost_steps(self.steps_lost, self.evidence)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the wall time of a run went, in seconds; the parts add up to `wall`."""

    wall: float
    useful: float
    lost_steps: float
    healing: float
    down: float
    other: float
    share: float
    steps_useful: int
    steps_done: int


@dataclass(frozen=True, slots=True)
class Budget:
    """How often something may still happen before the run ends."""

    name: str
    setting: str
    used: float
    limit: float
    told: str

    @property
    def left(self) -> float:
        return max(self.limit - self.used, 0)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk, as its marker has it; nothing of it is read through."""

    path: str
    step: int
    # "damaged": its marker cannot be read; "unmarked": it has none; else as the marker says.
    standing: str
    complete: bool
    emergency: bool = False
    pinned: bool = False
    finite: bool | None = None
    time: float | None = None
    bytes: int | None = None
    run: str | None = None
    of_this_run: bool = True
    incident: str | None = None

    @property
    def usable(self) -> bool:
        """Whether this run can be resumed from it, as far as its marker says."""
        trusted = self.standing in ("verified", "unverified") and self.finite is not False
        return self.of_this_run and self.complete and trusted


@dataclass(frozen=True, slots=True)
class Verdict:
    """`"good"`, `"look first"` or `"do not use"`: what is known of the weights that a run has left."""

    name: str
    why: list[str]
    learned: str = ""

    @property
    def reasons(self) -> str:
        """What it rests on, in a sentence."""
        return f"{capital('; '.join(self.why))}."

    def __str__(self) -> str:
        return f"{self.name.capitalize()}: {'; '.join(self.why)}. {self.learned}".rstrip()


@dataclass(frozen=True, slots=True)
class NextStep:
    """One thing to do, and the incidents it is about."""

    text: str
    why: str = ""
    command: str | None = None
    incidents: list[str] = field(default_factory=list)


def no_series() -> Entry:
    """What can be drawn of a run of which no step is known."""
    return {
        "source": "none",
        "kept": {name: [] for name in StepRow._fields},
        "discarded": [],
        "logged": {},
        "memory_total": None,
    }


@dataclass(frozen=True, slots=True)
class RunReport:
    """All that is known of one run."""

    run: str
    directory: str
    output_dir: str
    made: float
    state: State
    objective: str | None = None
    detectors: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    began: float | None = None
    incidents: list[IncidentStory] = field(default_factory=list)
    notices: list[Entry] = field(default_factory=list)
    goodput: Goodput | None = None
    budgets: list[Budget] = field(default_factory=list)
    attempts: list[Entry] = field(default_factory=list)
    ranks: list[Entry] = field(default_factory=list)
    quarantine: list[Entry] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)  # newest first
    learning_rate: str = ""
    verdict: Verdict | None = None
    next_steps: list[NextStep] = field(default_factory=list)
    series: Entry = field(default_factory=no_series)
    files: list[Entry] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    other_runs: list[Entry] = field(default_factory=list)

    @property
    def steps_lost(self) -> int:
        return sum(incident.steps_lost for incident in self.incidents)

    @property
    def lost(self) -> str:
        """How many steps are missing from the weights, in words."""
        return lost_steps(self.steps_lost, *(each.evidence for each in self.incidents))

    @property
    def steps_repeated(self) -> int:
        return sum(incident.steps_repeated for incident in self.incidents)

    @property
    def seconds_lost(self) -> float:
        return float(sum(incident.seconds_lost for incident in self.incidents))

    def listed(self) -> list[tuple[Checkpoint, str]]:
        """The checkpoints to show, newest first, each with its standing in words; one that is kept as well is one."""
        calm = self.state.name in ("running", "ended") and not any(
            incident.outcome in ("unresolved", "fatal", "open") for incident in self.incidents
        )
        found: dict[Any, tuple[Checkpoint, str]] = {}
        for each in self.checkpoints:
            words = each.standing
            if calm and words == "unverified" and each.of_this_run:
                words = "not yet confirmed" if found else "newest, not yet confirmed"
            same = (each.run, each.time, each.standing) if each.time is not None else each.path
            if same in found:
                first, words = found[same]
                # The one among the Trainer's own is the one that people look for.
                each = replace(min(first, each, key=lambda one: one.pinned), pinned=True)
            found[same] = each, words
        return list(found.values())

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return render(
            "notebook.html",
            tone="" if self.verdict is None else VERDICTS[self.verdict.name],
            verdict=self.verdict,
            told=self.state.told,
            next_steps=self.next_steps,
            incidents=[(BECAME[each.outcome], each.line) for each in self.incidents],
            checkpoints=self.listed(),
            remarks=self.remarks,
        )

    def to_dict(self, series: bool = True) -> Entry:
        """Returns all of it as strict JSON; `series`, which can be drawn, is most of its size."""
        content: Entry = jsonable(asdict(self))
        if not series:
            del content["series"]
        content |= {"steps_lost": self.steps_lost, "steps_repeated": self.steps_repeated}
        return {"schema": SCHEMA, **content, "seconds_lost": round(self.seconds_lost, 3)}


def render(template: str, **values: Any) -> str:
    """Fills in a template of the page; what comes from a run is escaped."""
    # Which takes longer than to read a run.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("self_healing.report", "page")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Parts of file names that no encoding has.
    return environment.get_template(template).render(**values).encode("utf-8", errors="replace").decode("utf-8")


# ---- in words ----


def sentence(text: str) -> str:
    text = text.rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def spoken(name: str) -> str:
    """A name of the journal, to be read: `quarantine_rows` as `quarantine rows`."""
    return name.replace("_", " ")


def duration(seconds: float) -> str:
    """A time in two units at most: `"0.4 s"`, `"3 min 20 s"`, `"5 h 12 min"`, `"2 d 3 h"`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = round(seconds)
    for (large, length), (small, below) in pairwise(units):
        if whole >= length:
            rest = whole % length // below
            return f"{whole // length} {large}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def size(count: float | None) -> str:
    """Bytes, in the largest unit that leaves a digit before the point."""
    return "-" if count is None else filesize.decimal(int(count))


def moment(at: float | None) -> str:
    """Date and time here."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def digits(value: float | None) -> str:
    """`1234`, `0.0123`, `1.2e-05`: four digits that count, and whole numbers whole; most are steps."""
    if value is None or isinstance(value, bool) or not math.isfinite(value):
        return "–" if value is None else str(value)
    text = f"{int(value)}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
    return text.replace("-", "−", 1) if value < 0 else text


def short_duration(seconds: float) -> str:
    """`360 ms`, `41.0 s`, `2 min 5 s`."""
    return f"{1000 * seconds:.3g} ms" if 0.0005 <= seconds < 1 else duration(seconds)


def percent(part: float) -> str:
    """`97.3 %`; never 100 % of what is not whole."""
    return "> 99.9 %" if 99.95 <= 100 * part < 100 else f"{100 * part:.3g} %"


def plain(value: Any) -> str:
    """A value of the journal in one line; what is long is cut, and says so."""
    if isinstance(value, Mapping):
        text = ", ".join(f"{spoken(str(key))} {plain(each)}" for key, each in value.items()) or "none"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        shown = (f"({plain(each)})" if isinstance(each, Mapping) else plain(each) for each in value)
        text = ", ".join(shown) or "none"
    else:
        text = digits(value) if isinstance(value, int | float) or value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def goodput_line(goodput: Goodput) -> str:
    """Where the wall time went, in a line."""
    steps = f"{goodput.steps_useful:,} of {counted(goodput.steps_done, 'step')} computed are in the weights"
    parts = (
        ("lost steps", goodput.lost_steps),
        ("healing", goodput.healing),
        ("between processes", goodput.down),
        ("start-up, data, evaluation, checkpoints", goodput.other),
    )
    rest = ", ".join(f"{what} {duration(seconds)}" for what, seconds in parts if seconds >= 0.05)
    return (
        f"Goodput: {100 * goodput.share:.1f} % of {duration(goodput.wall)} were spent on steps that are in the weights"
        f"{f' ({rest})' if rest else ''}. {capital(steps)}."
    )


def in_short(report: RunReport) -> str:
    """State and incidents, in a line."""
    of = "" if report.state.max_steps is None else f" of {report.state.max_steps:,}"
    cost = f", {report.lost.removesuffix(' lost')} and {duration(report.seconds_lost)} lost"
    incidents = counted(len(report.incidents), "incident") + (cost if report.incidents else "")
    return f"{report.state.name}, step {report.state.step:,}{of}; {incidents}"
