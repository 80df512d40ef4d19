"""Keeps what has struck, on disk before it strikes, so that it outlives the processes of a rehearsal."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import append_line, of_rank, parse_lines, rank_in


@dataclass(slots=True)
class Strike:
    """
    One strike of one fault.

    Args:
        fault (`str`):
            As it was written down, numbered where there are several alike.
        kind (`str`):
            Which fault it is.
        step (`int`):
            Optimizer steps finished when it struck.
        count (`int`):
            The how many-th strike of this fault, from 1.
        pid (`int`):
            The process.
        time (`float`):
            Seconds since the epoch.
        effect (`bool`):
            Whether it took place. One that the process did not survive did.
        detail (`dict`):
            What it was done to.
        ended (`float`):
            When it was over, for one that takes time.
        rank (`int`):
            The rank that it struck.
    """

    fault: str
    kind: str
    step: int
    count: int
    pid: int
    time: float
    effect: bool = True
    detail: dict[str, Any] = field(default_factory=dict)
    ended: float = 0.0
    rank: int = 0


class Ledger:
    """
    Appends to a file of JSON lines, each on the disk before the call returns. Each rank has a file of its own beside
    that of the first one (`chaos.rank1.jsonl`), because not every shared disk appends for several machines at once;
    what is read is that of all ranks.

    Args:
        path (`str` or `PathLike`):
            The file of the first rank, outside of the run's directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        # Of this process.
        self.rank = 0

    def write(self, event: str, **fields: Any) -> None:
        """Appends one line."""
        line = {"event": event, "time": time.time(), "pid": os.getpid(), **fields}
        # What comes next may be SIGKILL.
        append_line(of_rank(self.path, self.rank), line, sync=True)

    def strike(self, fault: str, kind: str, step: int, count: int, detail: Mapping[str, Any]) -> None:
        """Writes down that a fault is about to strike."""
        self.write("strike", fault=fault, kind=kind, step=step, count=count, detail=dict(detail))

    def effect(self, fault: str, count: int, effect: bool, detail: Mapping[str, Any]) -> None:
        """Writes down what came of it."""
        self.write("effect", fault=fault, count=count, effect=effect, detail=dict(detail))

    def lines(self) -> list[dict[str, Any]]:
        """Reads what all ranks have written, by time; a line torn by a killed process is passed over."""
        found: list[dict[str, Any]] = []
        for path in (self.path, *self.path.parent.glob(f"{glob.escape(self.path.stem)}.rank*{self.path.suffix}")):
            rank = 0 if path == self.path else rank_in(path)
            try:
                lines, _ = parse_lines(path.read_text(encoding="utf-8", errors="replace"))
            except FileNotFoundError:
                continue
            found += [{**entry, "rank": rank} for entry in lines if "event" in entry]
        return sorted(found, key=lambda entry: float(entry.get("time", 0.0)))

    def strikes(self) -> list[Strike]:
        """Reads all strikes in the order they came."""
        found: list[Strike] = []
        latest: dict[tuple[str, int, int], Strike] = {}
        for line in self.lines():
            if line["event"] == "strike":
                strike = Strike(
                    line["fault"],
                    line["kind"],
                    line["step"],
                    line["count"],
                    line["pid"],
                    line["time"],
                    rank=line["rank"],
                )
                strike.detail.update(line.get("detail", {}))
                found.append(strike)
                latest[strike.fault, strike.count, strike.rank] = strike
            elif line["event"] == "effect":
                known = latest.get((line["fault"], line["count"], line["rank"]))
                if known is not None:
                    known.effect, known.ended = bool(line["effect"]), line["time"]
                    known.detail.update(line.get("detail", {}))
        return found

    def run_dirs(self) -> list[str]:
        """Gives the directories of the rehearsal's journals, each once."""
        return list(dict.fromkeys(line["run_dir"] for line in self.lines() if line["event"] == "run"))

    def asked_for(self) -> list[str]:
        """Gives the faults of the rehearsal."""
        return list(dict.fromkeys(name for line in self.lines() if line["event"] == "run" for name in line["faults"]))
