"""`postmortem.json`, and one for each further rank: what ended a run, for the person who has to resume it."""

from __future__ import annotations

import logging
import os
import platform
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from ..failures.classify import match_known_error
from ..failures.recipes import FAILURE_RECIPES, FailureType, text_of
from .incident import Incident


logger = logging.getLogger("self_healing")

SCHEMA_VERSION = 1
_OF_A_KNOWN_ERROR = ("name", "cause", "fix", "reference")
# Of what the trainer logged: the end.
_LOGGED = 20


def directions_to(step: int, postmortem: str | None, resume_with: str | None) -> str:
    """The last lines of a run that ended badly: where its postmortem is, and how to resume."""
    written = postmortem or "could not be written; the log above says why"
    go_on = resume_with or "not possible: this run has no checkpoint, please start it again"
    return f"self_healing: stopped at step {step}. Postmortem: {written}\nself_healing: to resume: {go_on}"


def where_to_go_on(checkpoint: str | None) -> str:
    """Returns the sentence of a postmortem about the checkpoint to resume from."""
    if checkpoint is None:
        return "This run has no checkpoint to resume from: please start it again."
    return f"The checkpoint to resume from: {checkpoint}."


@dataclass(frozen=True, slots=True)
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
    # Of the process.
    exit_code: int | None = None
    other_ranks: Sequence[Mapping[str, Any]] = ()
    ranks: Mapping[str, Any] | None = None
    # For known errors that are not for all trainers.
    trained: str = ""

    @property
    def resume_with(self) -> str | None:
        """The line that resumes; `None` if there is no checkpoint."""
        resume = self.checkpoint or self.older_checkpoint
        return None if resume is None else f"trainer.train(resume_from_checkpoint={resume!r})"

    def to_dict(
        self, run_id: str, attempts: Sequence[Mapping[str, Any]], incidents: Sequence[Incident], journal: Path
    ) -> dict[str, Any]:
        """Returns the content of the file; says in the log what is known of the error."""
        recipe, known = FAILURE_RECIPES[self.failure], match_known_error(self.error, self.exit_code, self.trained)
        what_to_do = self.advice or recipe.advice
        if known is not None:
            what_to_do += f" Known error {known.name}: {known.cause} {known.fix}"
            text = "The error that ended the run is known (%s): %s What to do: %s"
            logger.error(text, known.name, known.cause, known.fix)
        return {
            "schema": SCHEMA_VERSION,
            "time": time.time(),
            "run": run_id,
            "verdict": self.verdict,
            "failure": self.failure.value,
            "diagnosis": recipe.diagnosis,
            "what_to_do": what_to_do,
            "known_error": None if known is None else {key: getattr(known, key) for key in _OF_A_KNOWN_ERROR},
            "step": self.step,
            "error": None
            if self.error is None
            else {
                "type": f"{type(self.error).__module__}.{type(self.error).__qualname__}",
                "message": text_of(self.error),
                "traceback": traceback.format_exception(self.error),
            },
            "other_ranks": list(self.other_ranks),
            "ranks": None if self.ranks is None else dict(self.ranks),
            "emergency_checkpoint": self.checkpoint,
            "resume_with": self.resume_with,
            "attempts": list(attempts),
            "chain": [incident.to_dict() for incident in incidents],
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
