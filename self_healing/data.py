"""Rows that were taken out of the training: what they are and where they came from, in `quarantine.jsonl`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .journal import jsonable


logger = logging.getLogger(__name__)

QUARANTINE_FILE = "quarantine.jsonl"


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """
    One row that makes a step non-finite by itself. What is not known is `None`.

    Args:
        dataset_index (`int` or `None`):
            Its position in `trainer.train_dataset`, as the batch sampler gave it (after TRL's filtering and packing).
        segment (`int` or `None`):
            Which of the sequences packed into that position.
        stream_ordinal (`int` or `None`):
            For an iterable dataset: how many rows the stream gave before it in this epoch.
        content_hash (`str`):
            SHA-256 of what the row holds, padding apart.
        prompt (`str` or `None`):
            For trainers that generate: the prompt.
        preview (`str` or `None`):
            The beginning of its text.
        micro_batch (`int`), row (`int`):
            Its place in the step.
    """

    dataset_index: int | None
    segment: int | None
    stream_ordinal: int | None
    content_hash: str
    prompt: str | None
    preview: str | None
    micro_batch: int
    row: int


class Quarantine:
    """
    Appends to `quarantine.jsonl`; a row seen again in a later epoch is counted, not written twice.

    Args:
        directory (`Path`):
            The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / QUARANTINE_FILE
        self.seen: set[str] = set()

    def add(self, rows: Iterable[QuarantinedRow], step: int, epoch: float | None, incident: str) -> None:
        """Writes rows down. A file that cannot be written is reported, not raised."""
        lines = []
        for row in rows:
            key = f"{row.content_hash}:{row.dataset_index}:{row.segment}:{row.stream_ordinal}"
            if key in self.seen:
                continue
            self.seen.add(key)
            lines.append({"time": time.time(), "incident": incident, "step": step, "epoch": epoch, **asdict(row)})
        if not lines:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(jsonable(line)) + "\n" for line in lines)
        except OSError:
            logger.warning("%s could not be written; the rows were dropped all the same.", self.path, exc_info=True)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": sorted(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = set(state["seen"])
