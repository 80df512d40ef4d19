"""The tables of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .. import words
from ..records import RunReport
from . import wording


_MOST_ROWS = 500

_STANDINGS = {"verified": "good", "unverified": "calm", "suspect": "bad", "unmarked": "calm"}
_ENDINGS = {"running": "busy", "finished": "good", "preempted": "warn", "restart": "warn", "interrupted": "warn"}


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in one cell; a link to an anchor, in the colour of a tone, or set as code."""

    text: str
    anchor: str = ""
    tone: str = ""
    code: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column."""

    title: str
    numeric: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """
    One table.

    Args:
        name (`str`):
            Its anchor.
        title (`str`), lead (`str`):
            Above it.
        columns (`tuple[Column, ...]`), rows (`Sequence[tuple[Cell, ...]]`):
            Its content.
        none (`str`):
            What is said where there are no rows.
        left_out (`str`):
            What is said of rows that are left out.
    """

    name: str
    title: str
    lead: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Cell, ...]] = ()
    none: str = ""
    left_out: str = ""


def sheets_of(report: RunReport, anchors: Mapping[str, str]) -> list[Sheet]:
    """
    Makes the tables.

    Args:
        report ([`RunReport`]):
            What is known of the run.
        anchors (`Mapping[str, str]`):
            Where the story of each incident is on the page, by the incident's name.
    """
    made = [_budgets(report), _quarantine(report, anchors), _checkpoints(report, anchors), _attempts(report)]
    if len(report.ranks) > 1:
        made.append(_ranks(report))
    if report.other_runs:
        made.append(_other_runs(report))
    return [_without_empty_columns(sheet) for sheet in made if sheet.rows or sheet.none]


def _without_empty_columns(sheet: Sheet) -> Sheet:
    shown = [place for place in range(len(sheet.columns)) if any(row[place].text for row in sheet.rows)]
    return replace(
        sheet,
        columns=tuple(sheet.columns[place] for place in shown),
        rows=[tuple(row[place] for place in shown) for row in sheet.rows],
    )


def _budgets(report: RunReport) -> Sheet:
    return Sheet(
        "budgets",
        "Budgets",
        "How often something may still happen before the run ends.",
        (Column("budget"), Column("used", True), Column("of", True), Column("what is counted"), Column("setting")),
        [
            (
                Cell(budget.name),
                Cell(wording.number(budget.used), tone="warn" if budget.limit and budget.left == 0 else ""),
                Cell(wording.number(budget.limit)),
                Cell(budget.told),
                Cell(budget.setting, code=True),
            )
            for budget in report.budgets
        ],
    )


def _quarantine(report: RunReport, anchors: Mapping[str, str]) -> Sheet:
    rows = [
        (
            Cell(row.name),
            # Not its text: a page is passed on more easily than the file it would come from.
            Cell(row.why),
            Cell("" if row.step is None else wording.number(row.step)),
            Cell(_short(row.content_hash), code=True),
            _incident(row.incident, anchors),
        )
        for row in report.quarantine[:_MOST_ROWS]
    ]
    more = len(report.quarantine) - len(rows)
    return Sheet(
        "quarantine",
        "Quarantine",
        "Rows and samples that are left out of training. Their text is in quarantine.jsonl, as far as it may be kept.",
        (Column("row"), Column("why"), Column("step", True), Column("SHA-256"), Column("incident")),
        rows,
        "No row and no sample was left out.",
        f"And {wording.number(more)} more, in quarantine.jsonl." if more > 0 else "",
    )


def _checkpoints(report: RunReport, anchors: Mapping[str, str]) -> Sheet:
    rows = []
    for checkpoint in report.checkpoints[:_MOST_ROWS]:
        remarks = [
            remark
            for remark, holds in (
                ("not complete", not checkpoint.complete),
                ("not finite", checkpoint.finite is False),
                ("emergency", checkpoint.emergency),
                ("kept as last known good", checkpoint.pinned),
                ("of another run", not checkpoint.of_this_run),
            )
            if holds
        ]
        rows.append(
            (
                Cell(checkpoint.path, code=True),
                Cell(wording.number(checkpoint.step)),
                Cell(checkpoint.standing, tone=_STANDINGS.get(checkpoint.standing, "calm")),
                Cell(", ".join(remarks)),
                Cell(words.size(checkpoint.bytes) if checkpoint.bytes is not None else ""),
                Cell(words.moment(checkpoint.time) if checkpoint.time is not None else ""),
                _incident(checkpoint.incident, anchors),
            )
        )
    more = len(report.checkpoints) - len(rows)
    return Sheet(
        "checkpoints",
        "Checkpoints",
        "Newest first, as their markers say; verified means that healthy steps followed.",
        (
            *(Column("checkpoint"), Column("step", True), Column("standing"), Column("remarks")),
            *(Column("size", True), Column("written"), Column("incident")),
        ),
        rows,
        "There is no checkpoint on disk.",
        f"And {wording.number(more)} more." if more > 0 else "",
    )


def _attempts(report: RunReport) -> Sheet:
    rows = []
    for attempt in report.attempts[-_MOST_ROWS:]:
        lasted = (
            ""
            if attempt.began is None or attempt.ended is None
            else wording.duration(max(attempt.ended - attempt.began, 0))
        )
        rows.append(
            (
                Cell(str(attempt.number)),
                Cell(wording.spoken(attempt.ending), tone=_ENDINGS.get(attempt.ending, "bad")),
                Cell(f"{wording.number(attempt.first_step)} to {wording.number(attempt.last_step)}"),
                Cell(words.moment(attempt.began) if attempt.began is not None else ""),
                Cell(lasted),
                Cell(attempt.why),
                Cell(attempt.resumed_from or "", code=True),
                Cell(_where(attempt.pid, attempt.host)),
            )
        )
    more = len(report.attempts) - len(rows)
    return Sheet(
        "restarts",
        "Processes and restarts",
        "What each process did, and how it ended.",
        (
            *(Column("process", True), Column("ending"), Column("steps", True), Column("began")),
            *(Column("lasted", True), Column("why it ended"), Column("went on from"), Column("where")),
        ),
        rows,
        "The processes of this run are not known.",
        f"And {wording.number(more)} before these." if more > 0 else "",
    )


def _ranks(report: RunReport) -> Sheet:
    return Sheet(
        "ranks",
        "Ranks",
        "What each process of the distributed job has logged.",
        (
            *(Column("rank", True), Column("step", True), Column("last seen"), Column("incidents", True)),
            *(Column("what ended it"), Column("journal")),
        ),
        [
            (
                Cell(str(rank.rank)),
                Cell("" if rank.step is None else wording.number(rank.step)),
                Cell(words.moment(rank.seen) if rank.seen is not None else ""),
                Cell(wording.number(rank.incidents)),
                Cell(wording.plain(rank.error) if rank.error else "", tone="bad" if rank.error else ""),
                Cell(rank.journal or "", code=True),
            )
            for rank in report.ranks
        ],
    )


def _other_runs(report: RunReport) -> Sheet:
    return Sheet(
        "runs",
        "Other runs in this directory",
        "Not on this page.",
        (Column("run"), Column("began"), Column("step", True), Column("incidents", True), Column("state")),
        [
            (
                Cell(run.run, code=True),
                Cell(words.moment(run.began) if run.began is not None else ""),
                Cell(wording.number(run.step)),
                Cell(wording.number(run.incidents)),
                Cell(run.state),
            )
            for run in report.other_runs[-_MOST_ROWS:]
        ],
    )


def _incident(name: str | None, anchors: Mapping[str, str]) -> Cell:
    if name is None:
        return Cell("")
    anchor = anchors.get(name, "")
    return Cell(f"incident {anchor.rpartition('-')[2]}" if anchor else name, anchor)


def _short(content_hash: str | None) -> str:
    return "" if content_hash is None else content_hash[:12]


def _where(pid: int | None, host: str | None) -> str:
    return " on ".join(part for part in ("" if pid is None else f"process {pid}", host or "") if part)


def names(sheets: Sequence[Sheet]) -> list[tuple[str, str]]:
    """Anchor and title of each, for a list of contents."""
    return [(sheet.name, sheet.title) for sheet in sheets]
