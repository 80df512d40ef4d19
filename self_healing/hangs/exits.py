"""Keeps the exits of a job because of hangs for its next process: where it hung, and for how long."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ..config.healing_config import HealingConfig
from ..system.files import replace_file
from ..system.processes import launch_of


logger = logging.getLogger("self_healing")

HANGS_FILE = "healing_hangs.json"
# A job that was ended more often than that is told by the newest times.
_KEPT = 50


class HangExits:
    """
    The exits of one job because of hangs, in the run directory: what was no hang but slow must not end it each time.
    """

    def __init__(self, directory: Path, rank: int = 0) -> None:
        self.path = directory / (HANGS_FILE if rank == 0 else f"healing_hangs.rank{rank}.json")
        self._exits: list[dict[str, Any]] = []

    def read(self, config: HealingConfig) -> dict[str, float]:
        """Reads what earlier processes of the same job left."""
        if not (launch_of().started_again or config.launcher_restarts == "yes"):
            # Of another run in the same directory.
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            exits: list[dict[str, Any]] = [
                {"step": int(entry["step"]), "section": str(entry["section"]), "seconds": float(entry["seconds"])}
                for entry in content["exits"]
            ]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            logger.warning("%s cannot be read (%s); how long parts of a step took is learned again.", self.path, error)
            return {}
        self._exits = exits
        longest: dict[str, float] = {}
        for entry in exits:
            longest[entry["section"]] = max(longest.get(entry["section"], 0.0), entry["seconds"])
        return longest

    def has_left(self, step: int, section: str) -> bool:
        """Whether a process of this job was ended at this place before."""
        return any(entry["step"] == step and entry["section"] == section for entry in self._exits)

    def note_exit(self, step: int, section: str, seconds: float) -> None:
        """Writes down where the process is about to be ended, and after how many seconds without a sign of life."""
        exits = [*self._exits, {"step": step, "section": section, "seconds": seconds}][-_KEPT:]
        try:
            replace_file(self.path, json.dumps({"exits": exits}))
        except OSError as error:
            logger.warning("%s cannot be written (%s): the next process knows nothing of this hang.", self.path, error)
