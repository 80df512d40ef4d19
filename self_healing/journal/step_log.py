"""
`StepLog`: every optimizer step of a run in one small file, for charts; written and read without torch.

The file begins with a line of JSON that names the run, and goes on with rows of a fixed size. It is not synced, a step
waits for no disk, and a process that is killed takes about the last second with it. However long the run is, the file
stays below 1.1 MB: when it is full, neighbouring rows are merged, with the mean and the maximum of what they held.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..system.files import replace_file


SCHEMA_VERSION = 1
# Rows of a file before they are merged: enough for every pixel of a wide screen.
ROWS = 1 << 13
# Seconds between two writes, and of the training time the share that they may take, however slow the disk is.
_EVERY, _SHARE = 1.0, 0.01

_ROW = struct.Struct("<qIIId13d")
_NAN = math.nan
# What several rows in one hold: the mean of these, and the largest of those; of all others the newest.
_MEANS = ("seconds", "busy", "loss", "grad_norm")
_LARGEST = ("loss_max", "grad_norm_max", "memory", "memory_peak", "host_memory")


class StepRow(NamedTuple):
    """One optimizer step, or several next to each other."""

    step: int
    steps: int = 1
    skipped: int = 0
    attempt: int = 0
    time: float = 0.0
    seconds: float = _NAN
    busy: float = _NAN
    loss: float = _NAN
    loss_max: float = _NAN
    grad_norm: float = _NAN
    grad_norm_max: float = _NAN
    grad_norm_usual: float = _NAN
    grad_norm_bound: float = _NAN
    learning_rate: float = _NAN
    learning_rate_scale: float = _NAN
    memory: float = _NAN
    memory_peak: float = _NAN
    host_memory: float = _NAN


class StepLog:
    """Appends steps to the file of a run; one that is there is continued."""

    def __init__(self, path: Path, about: dict[str, Any], rows: int = ROWS) -> None:
        self._path = path
        self._most = rows
        self._about = {"schema": SCHEMA_VERSION, **about, "row_bytes": _ROW.size}
        # Steps that are not written yet, as tuples of the columns of a `StepRow`. They are appended as they come.
        self.kept: list[tuple[Any, ...]] = []
        # When they are to be written next, by `time.perf_counter`.
        self.due = -math.inf
        try:
            _, written, torn = _read(path.read_bytes())
        except (FileNotFoundError, ValueError):
            self._replace(())
        else:
            self._rows = len(written)
            os.truncate(path, path.stat().st_size - torn)

    def write(self) -> None:
        """Writes what is kept."""
        if not self.kept:
            return
        began, size = time.perf_counter(), self._path.stat().st_size
        rows, self.kept[:] = self.kept[:], ()
        try:
            with self._path.open("ab") as file:
                file.write(_packed(rows))
        except OSError:
            # After a part of a row, none of those that follow could be read.
            os.truncate(self._path, size)
            raise
        self._rows += len(rows)
        if self._rows > self._most:
            self._thin()
        now = time.perf_counter()
        self.due = now + max(_EVERY, (now - began) / _SHARE)

    def _thin(self) -> None:
        """Makes room for as many steps as there are rows now: those that are written have more steps each."""
        rows, stride = _read(self._path.read_bytes())[1], 1
        while len(rows) > self._most // 2 and stride < 1 << 30:
            stride *= 2
            rows = list(merged(rows, stride))
        self._replace(rows)

    def _replace(self, rows: Collection[StepRow]) -> None:
        replace_file(self._path, json.dumps(self._about).encode() + b"\n" + _packed(rows))
        self._rows = len(rows)


def merged(rows: Iterable[StepRow], stride: int) -> Iterator[StepRow]:
    """
    Merges rows that follow each other, up to so many steps in one; in one entry into `train()`, and without a gap.
    """
    group: list[StepRow] = []
    steps = 0
    for row in rows:
        follows = group and row.step == group[-1].step + group[-1].steps and row.attempt == group[-1].attempt
        if group and not (follows and steps + row.steps <= stride):
            yield _merge(group)
            group, steps = [], 0
        group.append(row)
        steps += row.steps
    if group:
        yield _merge(group)


def _merge(rows: list[StepRow]) -> StepRow:
    if len(rows) == 1:
        return rows[0]
    columns: dict[str, Any] = {"step": rows[0].step}
    columns |= {column: sum(getattr(row, column) for row in rows) for column in ("steps", "skipped")}
    for column in (*_MEANS, *_LARGEST):
        # What was left out has no loss.
        known = [(getattr(row, column), row.steps) for row in rows if math.isfinite(getattr(row, column))]
        if not known:
            columns[column] = _NAN
        elif column in _LARGEST:
            columns[column] = max(value for value, _ in known)
        else:
            total = sum(steps for _, steps in known)
            columns[column] = sum(value * steps for value, steps in known) / total if total else _NAN
    return rows[-1]._replace(**columns)


def _packed(rows: Collection[tuple[Any, ...]]) -> bytes:
    return b"".join([_ROW.pack(*row) for row in rows])


def step_log_of(directory: Path, run: str) -> Path:
    """Returns the path of the step log of a run."""
    return directory / f"healing_steps-{run}.bin"


def read_step_log(path: Path) -> tuple[dict[str, Any], list[StepRow]]:
    """Reads a step log as far as it is whole, also while it is written."""
    about, rows, _ = _read(path.read_bytes())
    return about, rows


def _read(content: bytes) -> tuple[dict[str, Any], list[StepRow], int]:
    first, _, rest = content.partition(b"\n")
    about = json.loads(first.decode())
    if not isinstance(about, dict) or about.get("schema") != SCHEMA_VERSION or about.get("row_bytes") != _ROW.size:
        raise ValueError("it is no step log of a known version")
    torn = len(rest) % _ROW.size
    rows = [StepRow._make(row) for row in _ROW.iter_unpack(rest[: len(rest) - torn])]
    return about, rows, torn
