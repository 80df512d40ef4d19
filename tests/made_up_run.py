"""A run without a trainer or a model: what healers of steps ask of a step and of its run, answered by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from self_healing import Action, HealingConfig, Incident, UnrecoverableTrainingError
from self_healing.healers.numerics.detectors.panel import DetectorPanel
from self_healing.healers.numerics.state import NumericsState
from self_healing.hf.hooks import Failsafe, Hooks
from self_healing.hf.patching import Replacements
from self_healing.journal.journal import Journal
from self_healing.run.healer import Healers, HealingContext
from self_healing.run.incidents import Outcomes
from self_healing.run.run import RankNotices, RecoveryBudget, Run


class MadeUpWindow:
    """A step, of which only the number of those before it is known."""

    size = 1

    def __init__(self, step: int) -> None:
        self.step = step


class MadeUpRollback:
    """There is no state to go back to, and no weight to be set aside for an experiment."""

    def __init__(self) -> None:
        self.states = SimpleNamespace(displaced=False)
        self.copies_in_doubt = False

    def can_go_back(self) -> bool:
        return False

    def fall_back(self) -> bool:
        return True


class MadeUpActions:
    """Writes down what is asked for, does what can be seen in the step, and ends the run where it is to end."""

    def __init__(self, run: MadeUpRun) -> None:
        self._run = run
        self.applied: list[Action] = []
        self.verdict = ""

    def apply(self, actions: Iterable[Action] | Action, context: HealingContext, args: Any) -> dict[str, Any]:
        for action in [actions] if isinstance(actions, Action) else actions:
            self.applied.append(action)
            self._run.journal.acted(context.incident, action.value)
            if action is Action.STOP:
                self.verdict = context.verdict
                raise UnrecoverableTrainingError(context.verdict, failure=context.incident.failure)
        return {}


class MadeUpRun:
    """A run whose steps are [`MadeUpWindow`]s."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.config = HealingConfig(**{"quarantine_text": False, **settings})
        self.directory = directory
        self.journal = Journal(directory, self.config, "made-up")
        self.budget = RecoveryBudget(self.config)
        self.outcomes = Outcomes(self.journal)
        self.numerics = NumericsState(self)  # type: ignore[arg-type]
        self.numerics.panel = DetectorPanel(self.config)
        self.rollback = MadeUpRollback()
        self.remedies = self.actions = MadeUpActions(self)
        self.nonfinite: list[str] = []
        view = SimpleNamespace(
            step=0,
            device=torch.device("cpu"),
            can_recompute=True,
            can_scale_rate=True,
            scheduled_rate=1e-3,
            learning_rate=1e-3,
            beta2=0.999,
            max_grad_norm=1.0,
            best_model_loaded=False,
            nonfinite_tensors=lambda: self.nonfinite,
            own_part_of=list,
        )
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(output_dir=str(directory), should_save=True),
            accelerator=SimpleNamespace(device=view.device),
            optimizer=None,
        )
        self.instrument = SimpleNamespace(
            view=view,
            window=None,
            leaving=SimpleNamespace(begun=False),
            optimizer_step=SimpleNamespace(weights_moved=True, undone=lambda: None),
            reentry=SimpleNamespace(interrupted=None),
            saves=SimpleNamespace(disown_best=lambda: None),
            trainer=trainer,
            failsafe=Failsafe(trainer, Hooks(), Replacements(), lambda: None),
        )
        self.attached = self.instrument
        self.healers = Healers(())
        self.stop_incident: Incident | None = None
        self.news = RankNotices()
        self.may_enter_again = False
        self.asked_to_leave = None

    def part(self, kind: type) -> Any:
        return {NumericsState: self.numerics}[kind]

    incident, dealing_with = Run.incident, Run.dealing_with

    def at(self, window: MadeUpWindow) -> MadeUpWindow:
        """The run has come to a step."""
        self.instrument.view.step = window.step
        self.instrument.window = window
        return window

    @property
    def step(self) -> int:
        """Of the window it has come to."""
        return int(self.instrument.view.step)

    @property
    def incidents(self) -> list[tuple[str, str]]:
        """Failure and outcome of each."""
        return [(str(incident.failure.value), incident.outcome) for incident in self.journal.incidents]
