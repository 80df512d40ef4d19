"""Keeps rows and samples out of a run for as long as it lasts: `quarantine.jsonl`, and checkpoints."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..healers.data.quarantine import POISON, KnownBadSamples, row_key
from ..system.files import append_line
from .bad_sample import BadSample
from .sample_names import SampleName


logger = logging.getLogger(__name__)

QUARANTINE_FILE = "quarantine.jsonl"


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """One row that makes a step non-finite by itself."""

    dataset_index: int | None
    segment: int | None
    stream_ordinal: int | None
    content_hash: str
    prompt: str | None
    preview: str | None
    micro_batch: int
    row: int


class Quarantine:
    """Rows and samples that a run does not use any more, also after it was resumed from a checkpoint."""

    def __init__(self, directory: Path, keep_text: bool = True) -> None:
        self.path = directory / QUARANTINE_FILE
        self._keep_text = keep_text
        self.seen: set[str] = set()
        # By the fingerprint of the data set, and by name: why, and the step in which a row was dropped first.
        self.blocked: dict[str, dict[SampleName, str]] = {}
        self._dropped_in: dict[str, dict[SampleName, int]] = {}
        self.known: KnownBadSamples | None = None
        # By the epoch: a digest of the row that a stream began with.
        self.first_rows: dict[int, bytes | None] = {}
        # Tells the other ranks, when all of them meet the next time.
        self.tell: Callable[[Callable[[], Mapping[str, Any]]], None] = lambda record: None

    def watch(self, run: str, fingerprint: str, rank: int = 0, step: int | None = None) -> KnownBadSamples:
        """Begins to keep the bad samples of a data set."""
        blocked = self.blocked.setdefault(fingerprint, {})
        dropped_in = self._dropped_in.setdefault(fingerprint, {})
        for name in [name for name, at in dropped_in.items() if step is not None and at >= step]:
            blocked.pop(name, None)
            del dropped_in[name]
        self.known = KnownBadSamples(self.path, run, fingerprint, blocked, rank, self._keep_text, dropped_in)
        self.known.read_new_lines(before=step)
        # They are written down already.
        self.seen |= self.known.ahead
        return self.known

    def add(self, rows: Iterable[QuarantinedRow], step: int, epoch: float | None, incident: str) -> None:
        """Writes rows down. A file that cannot be written is reported, not raised."""
        lines, blocked, keys = [], list[tuple[SampleName, str, int | None]](), list[str]()
        known = self.known
        of_the_run = {} if known is None else {"run": known.run, "fingerprint": known.fingerprint, "rank": known.rank}
        for row in rows:
            if known is not None and row.dataset_index is not None and row.segment is None:
                known.blocked.setdefault(row.dataset_index, POISON)
                known.dropped_in.setdefault(row.dataset_index, step)
                blocked.append((row.dataset_index, POISON, step))
            key = row_key(asdict(row))
            if key in self.seen:
                continue
            self.seen.add(key)
            keys.append(key)
            line = {"time": time.time(), "incident": incident, "step": step, "epoch": epoch, **asdict(row)}
            lines.append(line | of_the_run)
        self._share(blocked, keys)
        try:
            for line in lines:
                append_line(str(self.path), line)
        except OSError:
            logger.warning("%s could not be written; the rows were dropped all the same.", self.path, exc_info=True)

    # ---- the other ranks ----

    def share(self, samples: Iterable[BadSample]) -> None:
        """Tells the other ranks of samples that this one has found, so that none of them uses them."""
        self._share([(sample.name, sample.why, None) for sample in samples])

    def _share(self, blocked: Sequence[tuple[SampleName, str, int | None]], keys: Sequence[str] = ()) -> None:
        known = self.known
        if known is not None and (blocked or keys):
            record = {"fingerprint": known.fingerprint, "blocked": blocked, "seen": keys}
            self.tell(lambda: record)

    def take_in(self, rank: int, record: Mapping[str, Any]) -> None:
        """Takes in what another rank does not use any more: whichever rank draws it next leaves it out."""
        blocked = self.blocked.setdefault(record["fingerprint"], {})
        dropped_in = self._dropped_in.setdefault(record["fingerprint"], {})
        for name, why, step in record["blocked"]:
            blocked.setdefault(name, why)
            if step is not None:
                dropped_in.setdefault(name, step)
        self.seen.update(record["seen"])

    def state_dict(self) -> dict[str, Any]:
        blocked = {name: [[*entry] for entry in names.items()] for name, names in self.blocked.items() if names}
        dropped_in = {name: [[*entry] for entry in steps.items()] for name, steps in self._dropped_in.items() if steps}
        return {"seen": sorted(self.seen), "blocked": blocked, "dropped_in": dropped_in}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = set(state["seen"])
        # Written by an earlier version of the library, it holds no samples.
        for fingerprint, entries in state.get("blocked", {}).items():
            self.blocked.setdefault(fingerprint, {}).update({name: why for name, why in entries})
        for fingerprint, entries in state.get("dropped_in", {}).items():
            self._dropped_in.setdefault(fingerprint, {}).update({name: step for name, step in entries})


def dataset_fingerprint(dataset: Any) -> str:
    """Fingerprint of a data set: where it is the same, an index names the same sample."""
    own = getattr(dataset, "_fingerprint", None)
    if isinstance(own, str):
        return own
    try:
        length: int | None = len(dataset)
    except Exception:
        length = None
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}:{length}"


def why_not_appendable(path: Path) -> OSError | None:
    """Tries whether a file can be appended to, and returns the error if not; leaves nothing behind."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        else:
            # Not the file itself: another process may be the one that creates it.
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        return error
    return None
