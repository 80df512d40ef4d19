"""A run without a trainer or a model: what healers of steps ask of a step and of its run, answered by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from self_healing import Action, HealingConfig, UnrecoverableTrainingError
from self_healing.healers.numerics.detectors.panel import DetectorPanel
from self_healing.healers.numerics.state import NumericsState
from self_healing.hf.hooks import Failsafe, Hooks
from self_healing.hf.objective import StepSignals
from self_healing.hf.patching import Replacements
from self_healing.journal.journal import Journal
from self_healing.rollback.rollback import WentBack
from self_healing.run.healer import HealingContext
from self_healing.run.incidents import Outcomes
from self_healing.run.run import Attachment, News, RecoveryBudget, RunContext, StopRequest


class MadeUpWindow:
    """
    A step whose numbers are given.

    Args:
        step (`int`):
            Optimizer steps finished before it.
        loss (`float`), grad_norm (`float`):
            What comes out of it.
        again (`tuple[float, float]`, *optional*):
            What comes out of it when it is computed again. Defaults to the same.
    """

    size, scaler_active, stop_wanted, rollback_wanted, apart = 1, False, False, False, False
    has_news = False
    engine = SimpleNamespace(left_out_by_itself=False)
    objective = SimpleNamespace(online=False, name="sft")

    def __init__(
        self, step: int, loss: float = 1.0, grad_norm: float = 1.0, again: tuple[float, float] | None = None
    ) -> None:
        self.step = step
        self.found = StepSignals(step, loss, grad_norm)
        self.losses = [torch.tensor(loss)]
        self._again = self.found if again is None else StepSignals(step, *again)
        self.skipped = self.accepted = False
        self.computed = 1
        self.scaled_by: list[float] = []

    @property
    def sound(self) -> bool:
        return self.computed == 1 and self.found.finite

    def signals(self, **wanted: Any) -> StepSignals:
        return self.found

    def reexecute(self) -> None:
        self.computed += 1
        self.found = replace(self._again)

    def compute_again(self) -> StepSignals:
        self.reexecute()
        return self.found

    def accept(self) -> None:
        self.accepted = True

    def skip(self, loss: float | None, keep_buffers: bool = False) -> None:
        self.skipped = True

    def scale_gradients(self, factor: float) -> None:
        self.scaled_by.append(factor)

    def layout(self, index: int) -> None:
        """Rows that cannot be told apart."""

    def inputs(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.zeros(1, 1)}

    def control(self, loss: float, largest: int) -> None:
        """Nothing to be computed again."""

    def restore_buffers(self) -> None: ...

    def discard(self) -> None: ...


class MadeUpRollback:
    """States that can be gone back to: those of some steps."""

    def __init__(self, trusted: Iterable[int] = ()) -> None:
        self.trusted = list(trusted)
        self.scanned: list[tuple[int, bool]] = []
        self.batches = SimpleNamespace(healthy_inputs=None, first_steps=[], note_healthy=lambda window: None)
        self.ring = SimpleNamespace(initial=None)
        self.in_place = SimpleNamespace(displaced=False)
        self.copies_in_doubt = False
        self.states = MadeUpStates()
        self.checkpoints = SimpleNamespace(note_search=lambda step, finite: self.scanned.append((step, finite)))
        # There is no weight to be set aside for an experiment.
        self.trials = SimpleNamespace(begin=lambda step: False)

    def can_go_back(self) -> bool:
        return bool(self.trusted)

    def fall_back(self) -> bool:
        return not self.in_place.displaced


class MadeUpStates:
    """States of a run that is past its beginning; counts healthy steps."""

    def __init__(self) -> None:
        self.streak = 0

    def early(self, step: int) -> bool:
        return False

    def keep_batch(self, window: Any, loss: float) -> None:
        """Nothing to be computed again."""

    def step_taken(self, step: int, healthy: bool, control: Any, vouched: Any) -> bool:
        self.streak = self.streak + 1 if healthy else 0
        return False

    def verify_checkpoints(self, step: int) -> None: ...


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
            if action is Action.USE_REEXECUTED_STEP:
                context.window.accept()
            elif action is Action.SKIP_STEP:
                context.window.skip(None)
            elif action is Action.ROLL_BACK and self._run.rollback.trusted:
                newest = self._run.rollback.trusted[-1]
                context.went_back = WentBack(newest, context.target, context.window.step + 1 - newest, newest)
            elif action is Action.STOP:
                self.verdict = context.verdict
                raise UnrecoverableTrainingError(context.verdict, failure=context.incident.failure)
        return {}


class MadeUpRun:
    """
    A run whose steps are [`MadeUpWindow`]s.

    Args:
        directory (`Path`):
            Where its journal is written.
        trusted (`Iterable[int]`, *optional*):
            Steps whose state can be gone back to.
        settings:
            Of the configuration.
    """

    def __init__(self, directory: Path, trusted: Iterable[int] = (), **settings: Any) -> None:
        self.config = HealingConfig(**{"save_offending_batch": False, **settings})
        self.directory = directory
        self.journal = Journal(directory, self.config, "made-up")
        self.budget = RecoveryBudget(self.config)
        self.outcomes = Outcomes(
            self.journal, self.config.outcome_steps, lambda: self.numerics.detector.trend(), lambda: math.inf
        )
        self.numerics = NumericsState(self.config, self.journal, self.budget, self.outcomes)
        self.numerics.panel = DetectorPanel(self.config)
        self.rollback = MadeUpRollback(trusted)
        self.remedies = self.actions = MadeUpActions(self)
        self.nonfinite: list[str] = []
        view = SimpleNamespace(
            step=0,
            device=torch.device("cpu"),
            can_reexecute=True,
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
        self.stop = StopRequest()
        self.news = News()
        self.attachment = Attachment()
        self.may_enter_again = False

    @property
    def parts(self) -> tuple[Any, ...]:
        """What every healer of steps is built from."""
        return self, self.numerics, self.rollback

    incident, dealing_with = RunContext.incident, RunContext.dealing_with

    def leave_asked(self) -> bool:
        return False

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
