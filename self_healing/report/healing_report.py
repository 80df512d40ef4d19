"""`HealingReport`: the incidents of a run, from the run itself or from the journal on disk."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..failures.recipes import Action
from ..journal.incident import BECAME, HEALED, Incident, headline, lost_steps
from ..run.status import RunState, RunStatus
from .journals import Journals, incident_of, read_journals, read_postmortem, status_in, told_once
from .records import VERDICTS, render, sentence


logger = logging.getLogger("self_healing")

_OF_THE_RATE = ("lr_reductions", "learning_rate_scale", "learning_rate")


@dataclass(frozen=True, slots=True)
class HealingReport:
    """
    The incidents of a run.

    Args:
        incidents (`list[dict]`):
            One entry per incident: incident, step, symptom, failure, cause, evidence, actions, steps_lost,
            steps_repeated, seconds_lost, outcome.
        journal (`str` or `None`):
            Where the events lie.
        lr_reductions (`int`):
            Reductions of the learning rate that were in force in the end.
        learning_rate_scale (`float`):
            Factor on the schedule's learning rate in the end.
        learning_rate (`float` or `None`):
            The rate that worked: the one in force after the last reduction. `None` if it was never reduced.
        status ([`RunStatus`], *optional*):
            Whether the newest run goes on, has ended or died, at which step. `None` if nothing tells.
        attempts (`int`, *optional*, defaults to 0):
            How often `train()` was entered, as far as it is known.
        last_good_step (`int`, *optional*):
            The newest optimizer step that was found fit and applied.
        zclip_total_clips (`int`, *optional*):
            Steps that adaptive clipping has clipped in this process; `None` of a run that is read from the disk.
        verdict (`str`, *optional*):
            On the weights of a run that is over in this process, however it ended; [`RunReport`] has that of any run.
    """

    incidents: list[dict[str, Any]] = field(default_factory=list)
    journal: str | None = None
    lr_reductions: int = 0
    learning_rate_scale: float = 1.0
    learning_rate: float | None = None
    status: RunStatus | None = None
    attempts: int = 0
    last_good_step: int | None = None
    zclip_total_clips: int | None = None
    verdict: str = ""

    def __getitem__(self, key: str) -> Any:
        """Gives any of its values by name, as `report["steps_lost"]`."""
        if key.startswith("_") or not hasattr(self, key):
            raise KeyError(key)
        return getattr(self, key)

    @property
    def converged(self) -> bool:
        """Whether the run has come to its end."""
        return self.status is not None and self.status.state is RunState.ENDED

    @property
    def recovery_history(self) -> list[dict[str, Any]]:
        """The incidents in which something was done."""
        return [incident for incident in self.incidents if incident["actions"]]

    @property
    def total_recoveries(self) -> int:
        """Incidents in which something was done, and all was well again."""
        return sum(incident["outcome"] in HEALED for incident in self.recovery_history)

    @property
    def callback_actions(self) -> list[dict[str, Any]]:
        """All that was done, one entry for each action: its step, the failure, the action."""
        return [
            {"step": incident["step"], "failure": incident["failure"], "action": str(action)}
            for incident in self.incidents
            for action in incident["actions"]
        ]

    @property
    def nan_count(self) -> int:
        """Incidents in which loss, gradient or weights were not finite."""
        return sum(incident["symptom"].startswith("nonfinite") for incident in self.incidents)

    @property
    def batch_reductions(self) -> int:
        """How often the batch was made smaller."""
        return sum(each["action"] == Action.REDUCE_BATCH_SIZE for each in self.callback_actions)

    @property
    def postmortem_data(self) -> dict[str, Any] | None:
        """What `postmortem.json` says of the newest run; `None` if there is none."""
        if self.journal is None or self.status is None:
            return None
        return read_postmortem(Path(self.journal).parent, self.status.run)

    @property
    def steps_lost(self) -> int:
        """Optimizer steps that are missing from the weights."""
        return sum(incident["steps_lost"] for incident in self.incidents)

    @property
    def lost(self) -> str:
        """How many steps are missing from the weights, in words."""
        return lost_steps(self.steps_lost, *(incident["evidence"] for incident in self.incidents))

    @property
    def steps_repeated(self) -> int:
        """Optimizer steps that were finished, were in no checkpoint, and had to be done again."""
        return sum(incident["steps_repeated"] for incident in self.incidents)

    @property
    def seconds_lost(self) -> float:
        """Seconds that diagnosis and remedies took."""
        return float(sum(incident["seconds_lost"] for incident in self.incidents))

    @property
    def of_earlier_runs(self) -> int:
        """Incidents of other runs than the newest: a journal is that of all runs into its directory."""
        if self.status is None:
            return 0
        return sum(incident["incident"].rpartition("-")[0] != self.status.run for incident in self.incidents)

    @property
    def healthy(self) -> bool:
        """Whether nothing had to be healed."""
        return not self.incidents

    @classmethod
    def from_run_dir(cls, directory: str | Path) -> HealingReport:
        """
        Reads the journals of all ranks of a run, or of several that wrote to the same directory.

        Args:
            directory (`str` or `Path`):
                The `output_dir` or `healing_dir`, or a journal; that of a later rank is read alone.

        Returns:
            [`HealingReport`]: Of all of them.

        Raises:
            FileNotFoundError: If there is no journal.
            ValueError: If the file is no journal. An empty one that bears a journal's name is that of a run to which
                nothing has happened yet.
        """
        journals = read_journals(directory)
        if journals.damage:
            logger.warning("%s: %s", journals.path, journals.damage)
        return cls.of_journals(journals)

    @classmethod
    def of_journals(cls, journals: Journals, run: str | None = None) -> HealingReport:
        """Makes the report of journals that were read, or of one run in them."""
        events = journals.events if run is None else journals.of_run(run)
        status = journals.status if journals.status is not None and run in (None, journals.status.run) else None
        rate: dict[str, Any] = {}
        for event in events:
            if event["kind"] in ("run_started", "run_ended"):
                rate.update({key: event[key] for key in _OF_THE_RATE if key in event})
            if event.get("action") == "reduce_learning_rate":
                told = ("reductions", "scale", "learning_rate")
                rate = {ours: event[key] for ours, key in zip(_OF_THE_RATE, told, strict=True) if key in event}
        incidents = [incident_of(lines).to_dict() for _, lines in told_once(events)]
        status = status or status_in(events, run)
        last = None if status is None else status.step
        entered = max((event.get("attempt", 1) for event in events), default=1)
        return cls(incidents, str(journals.path), **rate, status=status, attempts=entered, last_good_step=last)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "steps_lost": self.steps_lost,
            "steps_repeated": self.steps_repeated,
            "seconds_lost": round(self.seconds_lost, 3),
            "status": None if self.status is None else {**asdict(self.status), "told": str(self.status)},
        }

    @property
    def rate(self) -> str:
        """The learning rate in force, in a sentence; empty if it is the schedule's."""
        if self.learning_rate is None:
            return ""
        times = "once" if self.lr_reductions == 1 else f"{self.lr_reductions} times"
        if any(incident["failure"] == "learning_rate" for incident in self.incidents):
            return f"The learning rate was reduced, last to {self.learning_rate:.3g}, and it still failed."
        if self.learning_rate_scale == 1.0:
            return (
                f"The learning rate was reduced for a time, to {self.learning_rate:.3g}; it is the schedule's again."
            )
        # Of a run that ended with an incident it is not known.
        fatal = any(incident["outcome"] == "fatal" for incident in self.incidents)
        reached = f", to {self.learning_rate:.3g}" if fatal else f": {self.learning_rate:.3g} worked"
        return (
            f"The learning rate was reduced {times}{reached}. In the end "
            f"{self.learning_rate_scale:.3g} of the schedule's was in force."
        )

    @property
    def ending(self) -> str:
        """The newest run's end and what to do, from its postmortem; empty if there is none."""
        told = self.postmortem_data
        if told is None:
            return ""
        verdict = sentence(told["verdict"])
        return f"The run ended at step {told['step']}: {verdict} What to do: {told['what_to_do']}"

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        told = map(Incident.from_dict, self.incidents)
        return render(
            "notebook.html",
            tone=VERDICTS.get(self.verdict.partition(":")[0].lower(), "calm"),
            verdict=self.verdict,
            told="" if self.status is None else str(self.status),
            next_steps=(),
            incidents=[(BECAME[each.outcome], headline(each)) for each in told],
            checkpoints=(),
            remarks=[text for text in (self.ending, self.rate) if text],
        )

    def __str__(self) -> str:
        """The verdict, the state, and a line for each incident."""
        told = map(Incident.from_dict, self.incidents)
        lines = [
            f"Verdict: {self.verdict}" if self.verdict else "",
            "" if self.status is None else str(self.status),
            *(f"{BECAME[each.outcome]}: {headline(each)}" for each in told),
        ]
        return "\n".join(filter(None, [*lines, "" if self.incidents else "Nothing had to be healed."]))
