"""Measures once in a run whether a step that is computed again repeats, and journals it where it matters."""

from __future__ import annotations

import logging

from ..hf.experiments import StepExperiments
from ..hf.step import Window
from ..journal.incident import Incident
from ..journal.journal import Journal
from ..system import processes
from ..system.random_state import Repeatability


logger = logging.getLogger("self_healing")

_KEEPS_A_STATE = (
    "Step %d, computed twice from the same weights, has gradients that differ by %.2g of themselves, more than by "
    "noise of the kernels: something keeps a state of its own that is not put back before a step is computed again (a "
    "counter or a running mean that is a plain attribute, a random generator of its own). What was computed again is "
    "in the weights, but not as it would have been. A buffer of the model (`register_buffer`) is put back."
)


class RepeatabilityCheck:
    """Journals of each incident that was healed by computing a step again whether that repeats bitwise."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.found: Repeatability | None = None
        # Incidents of which it is not journaled yet, and how far steps applied again were from what they had been.
        self.owed: list[tuple[Incident, float | None]] = []
        self._measured = False

    def owe(self, incident: Incident, apart: float | None = None) -> None:
        """Takes in that an incident was healed by computing a step again, or several, and how far these were apart."""
        if apart != 0:
            self.owed.append((incident, apart))

    def measure(self, window: Window) -> None:
        """Measures it with a healthy step, unless that was done, and journals it."""
        if not self._measured and processes.world_size() == 1:
            # On several processes, one on which it failed would leave the others waiting.
            self._measured = True
            self.found = StepExperiments(window).repeatability()
            if self.found is not None and self.found.beyond_noise:
                logger.warning(_KEEPS_A_STATE, window.step, self.found.gradient)
        self.tell(window.step)

    def tell(self, step: int) -> None:
        """Journals what is known, measured or not."""
        measured = {} if self.found is None else {"loss": self.found.loss, "gradient": self.found.gradient}
        for incident, apart in self.owed:
            repeats = "not measured" if self.found is None else str(self.found)
            self.journal.event("repeats", step, incident=incident.id, repeats=repeats, **measured)
            if apart and repeats != "within noise" and processes.world_size() == 1:
                self.journal.doubt = f"applied again, losses are {apart:.1g} off; a step computed twice: {repeats}"
                self.journal.dealt_with(incident)
        self.owed.clear()
