"""Reads what a run has left beside its journal: quarantine, checkpoints, files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint_files import MARKER_FILE, PINNED_DIR, number_of
from ..checkpoints.listing import checkpoints_in
from ..checkpoints.marker import load_marker, read_marker
from ..files import parse_lines
from ..journal.step_log import step_log_of
from ..own_files import BRIEFING_FILE, EVENTS_FILE, POSTMORTEM_FILE, REPORT_FILE
from .journals import moment
from .records import CheckpointRow, FileNamed, RowNamed
from .stories import Places
from .values import QUARANTINED, taken
from .words import counted


_QUARANTINE_FILE = "quarantine.jsonl"
_FILES = {
    EVENTS_FILE: "journal",
    _QUARANTINE_FILE: "quarantine",
    POSTMORTEM_FILE: "postmortem",
    REPORT_FILE: "this report, for programs",
    BRIEFING_FILE: "this report, for whoever decides what to do next",
    "incidents": "offending batches",
    "hangs": "stacks of all threads",
}


def read_quarantine(directory: Path, run: str, incidents: set[str], remarks: list[str]) -> list[RowNamed]:
    """
    Reads the rows and samples that a run has left out.

    Args:
        directory (`Path`), run (`str`):
            Where its journal lies, and its name.
        incidents (`set[str]`):
            Those of the run: a row of a data set that was not known bears no other name.
        remarks (`list[str]`):
            Gets what could not be read.
    """
    try:
        text = (directory / _QUARANTINE_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        remarks.append(f"{_QUARANTINE_FILE} cannot be read ({error}).")
        return []
    lines, torn = parse_lines(text)
    entries, odd = [], 0
    for line in lines:
        entry, left_out = taken(line, QUARANTINED)
        entries.append(entry)
        odd += left_out
    for number_of_them, what in ((torn, "line"), (odd, "value")):
        if number_of_them:
            remarks.append(f"{counted(number_of_them, what)} of {_QUARANTINE_FILE} cannot be read.")
    return [_row(entry) for entry in entries if entry.get("run") == run or entry.get("incident") in incidents]


def _row(entry: Mapping[str, Any]) -> RowNamed:
    sample = entry.get("kind") == "bad_sample"
    why = "it makes a step non-finite"
    if sample:
        raised = ": ".join(str(entry[key]) for key in ("error_type", "error") if entry.get(key))
        why = f"{entry.get('problem', 'it cannot be used')}{f' ({raised})' if raised else ''}"
    return RowNamed(
        name=_name(entry, "sample" if sample else "row"),
        kind="sample" if sample else "row",
        why=why[:300],
        step=entry.get("step"),
        epoch=entry.get("epoch"),
        time=entry.get("time"),
        incident=entry.get("incident"),
        dataset_index=entry.get("dataset_index"),
        content_hash=entry.get("content_hash") or entry.get("text_hash"),
        preview=entry.get("preview"),
        details=dict(entry),
    )


def _name(entry: Mapping[str, Any], what: str) -> str:
    if entry.get("dataset_index") is not None:
        part = "" if entry.get("segment") is None else f", sequence {entry['segment']} packed into it"
        return f"{what} {entry['dataset_index']} of train_dataset{part}"
    if entry.get("stream_ordinal") is not None:
        shard = "" if entry.get("shard") is None else f" of shard {entry['shard']}"
        return f"{what} {entry['stream_ordinal']}{shard} of the stream"
    if entry.get("micro_batch") is not None:
        return f"{what} {entry.get('row')} of micro-batch {entry['micro_batch']}"
    return f"a {what}"


def list_checkpoints(output_dir: Path, run: str) -> list[CheckpointRow]:
    """
    Lists the checkpoints in an output directory by their markers, newest first.

    Args:
        output_dir (`Path`), run (`str`):
            Where to look, and which run is asked about.
    """
    return [_checkpoint(each, output_dir, run) for each in checkpoints_in(output_dir)]


def _checkpoint(path: Path, output_dir: Path, run: str) -> CheckpointRow:
    marker = load_marker(path)
    place = str(path.relative_to(output_dir))
    pinned = path.parent.name == PINNED_DIR
    if marker is None:
        standing = "damaged" if (path / MARKER_FILE).exists() else "unmarked"
        return CheckpointRow(place, number_of(path) or 0, standing, False, pinned=pinned, of_this_run=False)
    finite, incident, wrote = marker.get("finite"), marker.get("incident"), marker.get("run")
    return CheckpointRow(
        path=place,
        step=int(marker["step"]),
        standing=str(marker.get("standing", "unverified")),
        complete=read_marker(path) is not None,
        emergency=bool(marker.get("emergency")),
        pinned=pinned,
        finite=finite if isinstance(finite, bool) else None,
        time=moment(marker.get("time")),
        bytes=sum(marker["files"].values()),
        run=None if wrote is None else str(wrote),
        of_this_run=wrote == run,
        incident=None if incident is None else str(incident),
    )


def list_files(places: Places, run: str) -> list[FileNamed]:
    """Lists what a run has left beside its checkpoints."""
    found = [
        places.named(what, places.directory / name)
        for name, what in _FILES.items()
        if (places.directory / name).exists()
    ]
    steps = step_log_of(places.directory, run)
    return [*found, places.named("every step", steps)] if os.path.exists(steps) else found


def read_postmortem(path: Path, run: str) -> dict[str, Any] | None:
    """Reads a postmortem, if it is that of a run; `None` if there is none, or of another one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("run") == run else None
