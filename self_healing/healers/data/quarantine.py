"""Bad samples of one data set, shared by the processes that load it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ...data.bad_sample import BadSample
from ...data.sample_names import SampleName
from ...failures.classify import describe_exception
from ...system.files import append_line, parse_lines


logger = logging.getLogger(__name__)

# Why a row is not used that a step has failed for, and not the data.
POISON = "it makes a step non-finite"


class KnownBadSamples:
    """
    Samples of one data set that are not to be used: added by the guards of any process, and known to all of them.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        fingerprint: str,
        blocked: dict[SampleName, str],
        rank: int = 0,
        keep_text: bool = True,
        dropped_in: dict[SampleName, int] | None = None,
    ) -> None:
        self._keep_text = keep_text
        self.path = str(path)
        self.run = run
        self.fingerprint = fingerprint
        self.blocked = blocked
        self.dropped_in = {} if dropped_in is None else dropped_in
        self.rank = rank
        # Since they were last taken: found by this process, or by its workers.
        self.new: list[BadSample] = []
        self.retried: list[str] = []
        # Rows that an earlier process has dropped in steps that are done again, as the quarantine knows them.
        self.ahead: set[str] = set()
        self._read = 0
        self._unwritable = False

    @property
    def bad(self) -> dict[SampleName, str]:
        """Those of the blocked that could not be loaded or collated; the others made a step non-finite."""
        return {name: why for name, why in self.blocked.items() if why != POISON}

    def use_another_file(self, path: Path) -> None:
        """Has the processes share what they find through another file, where `quarantine.jsonl` cannot be written."""
        self.path, self._read = str(path), 0

    def that_raised(self, problem: str, error: BaseException, **fields: Any) -> BadSample:
        """Describes a sample that raised, as [`BadSample.that_raised`]; without text if that may not be kept."""
        return self._as_written(BadSample.that_raised(problem, error, **fields))

    def _as_written(self, sample: BadSample) -> BadSample:
        return sample if self._keep_text else sample.without_text()

    def add(self, sample: BadSample, replaced_by: SampleName | None = None) -> None:
        """Blocks a sample, and writes it down for the other processes."""
        if isinstance(replaced_by, int):
            sample = replace(sample, replaced_by=replaced_by)
        sample = self._as_written(sample)
        if sample.name in self.blocked:
            return
        self.blocked[sample.name] = sample.why
        self.new.append(sample)
        line = {
            "kind": "bad_sample",
            "time": time.time(),
            "run": self.run,
            "fingerprint": self.fingerprint,
            "rank": self.rank,
            **asdict(sample),
        }
        try:
            append_line(self.path, line)
        except OSError as error:
            if not self._unwritable:
                self._unwritable = True
                logger.warning(
                    "%s could not be written (%s); the samples are replaced all the same.", self.path, error
                )

    def loaded_on_retry(self, what: str, error: BaseException) -> None:
        """Notes that a second attempt has succeeded."""
        raised = describe_exception(error) if self._keep_text else type(error).__name__
        self.retried.append(f"{what} ({raised})")
        # The incident tells of it.
        logger.info("%s raised %s; the second attempt succeeded.", what, raised)

    def read_new_lines(self, before: int | None = None) -> None:
        """Reads what other processes have written since the last time, if they have."""
        try:
            if os.stat(self.path).st_size <= self._read:
                return
            with open(self.path, "rb") as file:
                file.seek(self._read)
                lines, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return
        self._read += len(lines) + len(newline)
        entries, torn = parse_lines(lines.decode("utf-8", errors="replace"))
        if torn:
            logger.warning(
                "%s: %d line(s) cannot be read, probably because a process was killed while it wrote them; a sample "
                "named there is found again when it is drawn.",
                self.path,
                torn,
            )
        for entry in entries:
            self._take_in(entry, before)

    def _take_in(self, entry: dict[str, Any], before: int | None) -> None:
        if entry.get("run") != self.run or entry.get("fingerprint") != self.fingerprint:
            return
        if entry.get("kind") != "bad_sample":
            at = entry.get("step")
            if before is not None and isinstance(at, int) and at >= before:
                self.ahead.add(row_key(entry))
            elif entry.get("dataset_index") is not None and entry.get("segment") is None:
                self.blocked.setdefault(entry["dataset_index"], POISON)
                if isinstance(at, int):
                    self.dropped_in.setdefault(entry["dataset_index"], at)
            return
        sample = BadSample(**{field.name: entry[field.name] for field in fields(BadSample) if field.name in entry})
        if sample.name not in self.blocked:
            self.blocked[sample.name] = sample.why
            if entry.get("rank") == self.rank:
                self.new.append(sample)

    def take(self) -> tuple[list[BadSample], list[str]]:
        """Returns what was found since the last call, and what could be loaded at the second attempt."""
        new, retried = self.new, self.retried
        self.new, self.retried = [], []
        return new, retried


def row_key(row: Mapping[str, Any]) -> str:
    """Key that tells a row from all others."""
    return ":".join(str(row.get(name)) for name in ("content_hash", "dataset_index", "segment", "stream_ordinal"))
