"""`postmortem.json`, and one for each further rank: what ended a run, for the person who has to resume it."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from ..failures.classify import KnownError, match_known_error
from ..failures.recipes import FAILURE_RECIPES, FailureType, text_of
from ..system import processes
from ..system.files import POSTMORTEM_FILE
from .incident import Incident


logger = logging.getLogger("self_healing")

SCHEMA_VERSION = 1
_OF_RANK = re.compile(r"postmortem\.rank(\d+)\.json")
# Of what the trainer logged: the end.
_LOGGED = 20


@dataclass(frozen=True, slots=True)
class Directions:
    """The last lines of a run that ended badly: where its postmortem is, and how to resume."""

    postmortem: str | None
    resume_with: str | None

    def __str__(self) -> str:
        written = self.postmortem or "could not be written; the log above says why"
        go_on = self.resume_with or "not possible: this run has no checkpoint, please start it again"
        return f"self_healing: postmortem: {written}\nself_healing: to resume: {go_on}"


def where_to_go_on(checkpoint: str | None) -> str:
    """Returns the sentence of a postmortem about the checkpoint to resume from."""
    if checkpoint is None:
        return "This run has no checkpoint to resume from: please start it again."
    return f"The checkpoint to resume from: {checkpoint}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Postmortem:
    """The end of a run: what ended it, what is known about that, what to do next."""

    verdict: str
    failure: FailureType
    step: int
    error: BaseException | None
    log_history: Sequence[Mapping[str, Any]]
    checkpoint: str | None
    advice: str | None = None
    older_checkpoint: str | None = None
    known: KnownError | None = None
    other_ranks: Sequence[Mapping[str, Any]] = ()
    ranks: Mapping[str, Any] | None = None

    @property
    def resume_with(self) -> str | None:
        """The line that resumes; `None` if there is no checkpoint."""
        resume = self.checkpoint or self.older_checkpoint
        return None if resume is None else f"trainer.train(resume_from_checkpoint={resume!r})"

    @property
    def what_to_do(self) -> str:
        advice = self.advice or FAILURE_RECIPES[self.failure].advice
        if self.known is not None:
            advice += f" Known error {self.known.name}: {self.known.cause} {self.known.fix}"
        return advice

    def to_dict(
        self, run_id: str, attempts: Sequence[Mapping[str, Any]], incidents: Sequence[Incident], journal: Path
    ) -> dict[str, Any]:
        """Returns the content of the file."""
        return {
            "schema": SCHEMA_VERSION,
            "time": time.time(),
            "run": run_id,
            "verdict": self.verdict,
            "failure": self.failure.value,
            "diagnosis": FAILURE_RECIPES[self.failure].diagnosis,
            "what_to_do": self.what_to_do,
            "known_error": None if self.known is None else asdict(self.known),
            "step": self.step,
            "error": None if self.error is None else _error_entry(self.error),
            "other_ranks": list(self.other_ranks),
            "ranks": None if self.ranks is None else dict(self.ranks),
            "emergency_checkpoint": self.checkpoint,
            "resume_with": self.resume_with,
            "attempts": list(attempts),
            "chain": [incident.to_dict() for incident in incidents],
            "initiating_incident": incidents[0].id if incidents else None,
            "metric_tail": list(self.log_history)[-_LOGGED:],
            "journal": str(journal),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "accelerate": accelerate.__version__,
            },
            "pid": os.getpid(),
        }


def _error_entry(error: BaseException) -> dict[str, Any]:
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": text_of(error),
        "traceback": traceback.format_exception(error),
    }


def find_known_error(error: BaseException | None, exit_code: int | None, trained: str) -> KnownError | None:
    """Looks up the error that ends a run, or the exit code of its process, and logs what is known."""
    known = match_known_error(error, exit_code, trained)
    if known is not None:
        logger.error(
            "The error that ended the run is known (%s): %s What to do: %s", known.name, known.cause, known.fix
        )
    return known


def postmortem_of_rank(directory: Path, rank: int) -> Path:
    """Returns the path of the postmortem of one rank."""
    return directory / (POSTMORTEM_FILE if rank == 0 else f"postmortem.rank{rank}.json")


def set_aside_postmortems(directory: Path, rank: int, run_id: str) -> None:
    """Renames the postmortem of an earlier run, so that one that is there is always that of the last run."""
    gone = [path for other, path in _of_other_ranks(directory) if other >= processes.world_size()]
    for stale in [postmortem_of_rank(directory, rank), *(gone if rank == 0 else ())]:
        if stale.exists():
            stale.rename(stale.with_name(f"{stale.stem}.before-{run_id}.json"))


def read_errors_of_other_ranks(directory: Path, run_id: str, since: int = 0) -> list[dict[str, Any]]:
    """Reads the errors that ended the other ranks of a run, as far as they could be written."""
    found: list[dict[str, Any]] = []
    for rank, path in _of_other_ranks(directory):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["run"] == run_id and content["step"] >= since and content["error"] is not None:
                found.append({"rank": rank} | {key: content[key] for key in ("step", "failure", "error")})
        except (OSError, ValueError, LookupError, TypeError):
            logger.warning("%s cannot be read; how that process ended is not known.", path)
    return found


def _of_other_ranks(directory: Path) -> list[tuple[int, Path]]:
    """Returns the postmortems of all ranks but the first, by rank."""
    found = ((_OF_RANK.fullmatch(path.name), path) for path in directory.glob("postmortem.rank*"))
    return sorted((int(match[1]), path) for match, path in found if match is not None)
