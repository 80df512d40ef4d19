"""What ended a run, written down for the person who has to go on: `postmortem.json`, and one for each further rank."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from .. import consensus
from ..classify import text_of
from ..failures import FAILURE_RECIPES, FailureType
from ..known_errors import KnownError, match_known_error
from .incident import Incident


logger = logging.getLogger("self_healing")

POSTMORTEM_FILE = "postmortem.json"
SCHEMA_VERSION = 1
_OF_RANK = re.compile(r"postmortem\.rank(\d+)\.json")
# Of what the trainer logged: the end.
_LOGGED = 20


@dataclass(frozen=True, slots=True)
class Directions:
    """
    Where to read what ended a run, and how to go on.

    Args:
        postmortem (`str`, *optional*):
            Its path; `None` if it could not be written.
        resume_with (`str`, *optional*):
            The line that resumes; `None` if there is no checkpoint.
    """

    postmortem: str | None
    resume_with: str | None

    def __str__(self) -> str:
        told = self.postmortem or "could not be written; the log above says why"
        go_on = self.resume_with or "not possible: there is no checkpoint of this run, it has to start again"
        return f"self_healing: the postmortem: {told}\nself_healing: to go on: {go_on}"


def where_to_go_on(checkpoint: str | None) -> str:
    """What a postmortem says about the checkpoint to resume from."""
    if checkpoint is None:
        return "There is no checkpoint of this run to go on from: it has to start anew."
    return f"The checkpoint to go on from: {checkpoint}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Postmortem:
    """
    What started it, what followed, what was tried, what to do next.

    Args:
        verdict (`str`):
            Why the run ends.
        failure ([`FailureType`]), step (`int`), error (`BaseException`, *optional*):
            What ended it, and where.
        log_history (`Sequence[Mapping]`):
            Of the trainer; its tail is kept.
        checkpoint (`str`, *optional*):
            The emergency checkpoint.
        advice (`str`, *optional*):
            What to do. Defaults to that of the failure.
        older_checkpoint (`str`, *optional*):
            Where there is no emergency checkpoint, one from before the failure that can be resumed from.
        known (`KnownError`, *optional*):
            What is known about the error.
        other_ranks (`Sequence[Mapping]`, *optional*):
            What other processes of the job ended with.
    """

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
        """
        As it is written.

        Args:
            run_id (`str`), attempts (`Sequence[Mapping]`):
                The run, and the processes it has had.
            incidents (`Sequence[Incident]`), journal (`Path`):
                What has happened in it, and where that is told.
        """
        return {
            "schema": SCHEMA_VERSION,
            "time": time.time(),
            "run": run_id,
            "verdict": self.verdict,
            "failure": self.failure.value,
            "diagnosis": FAILURE_RECIPES[self.failure].diagnosis,
            "what_to_do": self.what_to_do,
            "known_error": None if self.known is None else self.known.to_dict(),
            "step": self.step,
            "error": None if self.error is None else _told(self.error),
            "other_ranks": list(self.other_ranks),
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


def _told(error: BaseException) -> dict[str, Any]:
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": text_of(error),
        "traceback": traceback.format_exception(error),
    }


def find_known_error(error: BaseException | None, exit_code: int | None) -> KnownError | None:
    """What is known about the error that ends a run, or the exit code of its process; it is logged as well."""
    known = match_known_error(error, exit_code)
    if known is not None:
        told = "The error that ended the run is known (%s): %s What to do: %s"
        logger.error(told, known.name, known.cause, known.fix)
    return known


def postmortem_of_rank(directory: Path, rank: int) -> Path:
    """Where a process writes its own."""
    return directory / (POSTMORTEM_FILE if rank == 0 else f"postmortem.rank{rank}.json")


def set_aside_postmortems(directory: Path, rank: int, run_id: str) -> None:
    """
    Renames the postmortem of an earlier run, so that one that is there always speaks of the last run. Every rank does
    so with its own, and the first with those of ranks that there are no longer.

    Args:
        directory (`Path`):
            The run directory.
        rank (`int`), run_id (`str`):
            This process, and the run that begins.
    """
    gone = [path for other, path in _of_other_ranks(directory) if other >= consensus.world_size()]
    for stale in [postmortem_of_rank(directory, rank), *(gone if rank == 0 else ())]:
        if stale.exists():
            stale.rename(stale.with_name(f"{stale.stem}.before-{run_id}.json"))


def read_errors_of_other_ranks(directory: Path, run_id: str, since: int = 0) -> list[dict[str, Any]]:
    """
    What the other ranks of a run ended with, as far as they could write it down.

    Args:
        directory (`Path`), run_id (`str`):
            The run.
        since (`int`, *optional*, defaults to 0):
            Ends before this step are left out: the run has got over them.
    """
    found: list[dict[str, Any]] = []
    for rank, path in _of_other_ranks(directory):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["run"] == run_id and told["step"] >= since and told["error"] is not None:
                found.append({"rank": rank} | {key: told[key] for key in ("step", "failure", "error")})
        except (OSError, ValueError, LookupError, TypeError):
            logger.warning("%s cannot be read; what that process ended with is not known.", path)
    return found


def _of_other_ranks(directory: Path) -> list[tuple[int, Path]]:
    """Those of all ranks but the first."""
    found = ((_OF_RANK.fullmatch(path.name), path) for path in directory.glob("postmortem.rank*"))
    return sorted((int(match[1]), path) for match, path in found if match is not None)
