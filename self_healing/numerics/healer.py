"""Common to the healers of steps: the run they belong to, and what several of them do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..failures.recipes import FailureType, Symptom
from ..healers.numerics.detectors.panel import DetectorPanel
from ..healers.numerics.state import NumericsState
from ..hf.adapter import Instrument
from ..hf.objective import StepSignals
from ..hf.step import Window
from ..journal.incident import Incident
from ..ranks import votes
from ..rollback.rollback import Rollback
from ..run.incidents import OpenIncident
from ..run.run import RunContext
from ..system import processes
from .offending_batch import save_offending_batch


class NumericsHealer:
    """Heals one kind of failure of a step."""

    def __init__(self, run: RunContext, numerics: NumericsState, rollback: Rollback) -> None:
        self.run = run
        self.config = run.config
        self.actions = run.remedies
        self.numerics = numerics
        self.rollback = rollback

    @property
    def instrument(self) -> Instrument:
        """Of the running `train()` call."""
        return self.run.instrument

    @property
    def panel(self) -> DetectorPanel:
        """Detectors of the run."""
        if self.numerics.panel is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        return self.numerics.panel

    @property
    def args(self) -> Any:
        """Arguments of the trainer."""
        return self.instrument.trainer.args

    @property
    def acts(self) -> bool:
        """Whether anything is done about a step that is not finite."""
        return self.config.on_nonfinite != "warn" and self.instrument.view.can_reexecute

    def on_any_rank(self, question: str, flag: bool) -> bool:
        """Whether something is so on any rank. Every rank has to come."""
        return votes.any_rank(question, flag, self.instrument.view.device)

    def ranks_where(self, question: str, flag: bool) -> dict[str, list[int]]:
        """Evidence of the ranks on which something is so; none on one process. Every rank has to come."""
        found = votes.ranks_where(question, flag, self.instrument.view.device)
        return {"ranks": found} if found and processes.world_size() > 1 else {}

    def ranks_with(self, nonfinite: Sequence[str]) -> dict[str, list[int]]:
        """Evidence of the ranks whose state is not finite, and not only gathered from others. As [`ranks_where`]."""
        own = self.instrument.view.own_part_of(nonfinite)
        source = self.ranks_where("its own part of the state is not finite here", bool(own))
        return source or self.ranks_where("the state is not finite here", bool(nonfinite))

    def clip(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        """Clips the gradient of a step that is about to be applied by what is usual, if that is asked for."""
        if self.numerics.clipping is not None:
            ceiling = min(self.instrument.view.max_grad_norm or math.inf, clipped_to)
            # A gradient that is clipped on some ranks and not on others makes other weights of each.
            with self.instrument.failsafe.together():
                self.numerics.clipping.apply(window, signals, ceiling, may_clip=self.instrument.view.can_reexecute)

    def incident(self, step: int, symptom: str, evidence: Mapping[str, Any], severity: Any = None) -> OpenIncident:
        """Opens an incident of this family ([`RunContext.incident`]): what is seen in a step, by all ranks alike."""
        self.numerics.opened += 1
        return self.run.incident(step, symptom, evidence, severity)

    def open(self, symptom: Symptom, failure: FailureType, cause: str) -> OpenIncident:
        """Opens an incident whose failure and cause are clear from what was seen."""
        opened = self.incident(symptom.step, symptom.name, symptom.evidence, symptom.severity)
        opened.diagnosed(failure, cause)
        return opened

    def keep_batch(self, window: Window, incident: Incident) -> None:
        """Keeps the batch of a step for replay, if that is asked for."""
        # A batch is text in another alphabet.
        if self.config.save_offending_batch and self.config.quarantine_text:
            incident.evidence["batch_file"] = save_offending_batch(window, self.run.directory, incident)
