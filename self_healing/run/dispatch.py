"""Dispatches actions to the families that carry them out: in order, each with its result into the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from ..failures.recipes import IN_PLACE, Action
from ..hf.adapter import Instrument
from ..hf.batches import CallShape
from ..hf.memory import BatchPlan
from ..hf.step import Window
from ..journal.incident import Incident
from ..journal.journal import Journal
from .diagnosis import Diagnosis
from .went_back import Target, WentBack


@dataclass(slots=True)
class HealingContext:
    """
    What an action needs to know.

    Args:
        incident ([`Incident`]):
            The incident it belongs to.
        instrument ([`Instrument`], *optional*):
            Of the trainer, for what is done while it is attached.
        window ([`Window`], *optional*):
            The step, for what is healed inside it.
        diagnosis ([`Diagnosis`], *optional*):
            Its diagnosis.
        error (`BaseException`, *optional*):
            The exception, for what left `train()`.
        verdict (`str`, *optional*):
            Why the run ends, for `STOP`.
        clip_to (`float`, *optional*):
            Usual norm of the gradient, for `CLIP_GRADIENT`.
        target ([`Target`], *optional*, defaults to `Target.NEWEST`):
            Which state to go back to, for `ROLL_BACK`.
        unlike_from (`int`, *optional*):
            The first step that may have been computed with weights that were not the same on all ranks, for
            `REPLAY_STEPS`.
        rate_scale (`float`, *optional*):
            Factor on the schedule's learning rate that an experiment has found, for `REDUCE_LEARNING_RATE`.
        blamed_step (`int`, *optional*):
            The step whose learning rate did the damage, if not the one that is judged, for `REDUCE_LEARNING_RATE`.
        shape ([`CallShape`], *optional*):
            Size of the model call that did not fit, for `SPLIT_BATCH`.
        batch ([`BatchPlan`], *optional*):
            Sizes to go on with, for `REDUCE_BATCH_SIZE`.
        resume_from (`str`, *optional*):
            For `STOP`: the checkpoint to go on from, if it is not the newest of the run.
        went_back ([`WentBack`], *optional*):
            Set by `ROLL_BACK`: what it did.
        attempted (`list[Action]`):
            Set by [`Remedies.apply`]: what has been tried so far.
    """

    incident: Incident
    instrument: Instrument | None = None
    window: Window | None = None
    diagnosis: Diagnosis | None = None
    error: BaseException | None = None
    verdict: str = ""
    clip_to: float | None = None
    target: Target = Target.NEWEST
    unlike_from: int | None = None
    rate_scale: float | None = None
    blamed_step: int | None = None
    shape: CallShape | None = None
    batch: BatchPlan | None = None
    resume_from: str | None = None
    went_back: WentBack | None = None
    attempted: list[Action] = field(default_factory=list)

    @property
    def running(self) -> Instrument:
        """
        The instrument, for actions that need a running trainer.

        Raises:
            ValueError: If there is none.
        """
        if self.instrument is None:
            raise ValueError("this action works on a running trainer and needs `context.instrument`")
        return self.instrument

    @property
    def step_in_hand(self) -> Window:
        """
        The window, for actions that heal inside a step.

        Raises:
            ValueError: If there is none.
        """
        if self.window is None:
            raise ValueError("this action heals inside a step and needs `context.window`")
        return self.window


CarryOut = Callable[[HealingContext, TrainingArguments], dict[str, Any]]


class Remedies:
    """Carries out actions."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._carry_out: dict[Action, CarryOut] = {}

    def offer(self, remedies: Mapping[Action, CarryOut]) -> None:
        """Adds actions that can be carried out."""
        self._carry_out.update(remedies)

    @property
    def offered(self) -> frozenset[Action]:
        """The actions that can be carried out."""
        return frozenset(self._carry_out)

    def apply(
        self,
        actions: Iterable[Action | str] | Action | str,
        context: HealingContext,
        training_args: TrainingArguments,
    ) -> dict[str, Any]:
        """Carries out actions in order and journals each."""
        results: dict[str, Any] = {}
        actions = [actions] if isinstance(actions, str) else actions
        for action in [_known(action) for action in actions]:
            context.attempted.append(action)
            result = self._carry_out[action](context, training_args)
            # Where a remedy turned into the next rung of its ladder, that is what was done.
            done = Action.SKIP_STEP if result.get("skipped") else action
            happened = result.pop("happened", True)
            self._journal.acted(context.incident, done.value, happened=happened, **result)
            results.update(result)
        return results


def _known(action: Action | str) -> Action:
    known = ", ".join(member.value for member in Action if member not in IN_PLACE)
    try:
        found = Action(action)
    except ValueError:
        raise ValueError(f"unknown action {action!r}; the actions are: {known}") from None
    if found in IN_PLACE:
        raise ValueError(
            f"{found.value} is done where its failure is noticed and cannot be asked for; the actions are: {known}"
        )
    return found
