"""What a healer is asked, how it claims an exception, and how its actions are carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from ..failures.classify import classify_exception
from ..failures.recipes import FAILURE_RECIPES, Action, FailureType, Target
from ..hf.adapter import Instrument
from ..hf.batches import CallShape
from ..hf.hooks import Hooks
from ..hf.memory import BatchPlan
from ..hf.step import Window
from ..journal.incident import Incident
from ..journal.journal import Journal
from ..rollback.rollback import RollbackRecord
from .incidents import Diagnosis


# ---- healer: one part of what heals a `train()` call; and `Healers`, all of them in their order ----


class Healer(Hooks):
    """Heals one kind of failure, or does one thing that all need, in one `train()` call or several."""

    # What waits for an exception to leave `train()`, to be healed outside.
    claimed: Claim | Incident | None = None

    def attach(self, first: bool) -> None:
        """Called with the instrument attached, before the first step: wraps what it has to, until it is detached."""

    def read_logs(self, step: int, logs: Mapping[str, Any]) -> None:
        """Called with what the trainer has logged, by optimizer steps finished."""

    def heal_interrupted_step(self, context: HealingContext) -> None:
        """Called after an `optimizer.step()` that raised and may have updated some weights and not others."""

    def last_step_taken(self) -> None:
        """Called after the last step of the run, while it can still be healed."""

    def run_ends(self, step: int) -> None:
        """Called after that, with the outcomes known: nothing may be left open. Also where healing is off by then."""

    def process_ends(self) -> None:
        """Called beside the training thread, before the process is ended from the inside: writes down what is kept."""

    @property
    def has_claim(self) -> bool:
        """Whether an incident waits for an exception to leave `train()`, to be healed outside."""
        return self.claimed is not None

    def claim(self, error: BaseException) -> Claim | None:
        """Gives, once, the claim on the exception that left `train()`."""
        return None


# Questions among them are answered by one healer each.
_EVENTS = tuple(
    name
    for name, event in {**vars(Hooks), **vars(Healer)}.items()
    if callable(event) and not name.startswith("_") and name not in ("metrics", "claim")
)


class Healers(Healer):
    """
    The healers of a `train()` call, in their order: each event goes to those that take part in it, and to nobody else.
    """

    def __init__(self, healers: Sequence[Healer]) -> None:
        self._healers = tuple(healers)
        # Bound once: some come several times a step, and most are for one healer, which is then called directly.
        for event in _EVENTS:
            told = self._taking_part(event)
            if told:
                setattr(self, event, told[0] if len(told) == 1 else _to_each(told))
        self._metrics = self._taking_part("metrics")

    def _taking_part(self, event: str) -> tuple[Callable[..., Any], ...]:
        inherited = getattr(Healer, event)
        return tuple(getattr(each, event) for each in self._healers if getattr(type(each), event) is not inherited)

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        for metrics in self._metrics:
            found.update(metrics(training, summary))
        return found

    @property
    def has_claim(self) -> bool:
        return any(each.has_claim for each in self._healers)

    def claims(self, error: BaseException) -> list[Claim]:
        """Asks whose the exception is that left `train()`; the first claim heals it."""
        return [claim for each in self._healers if (claim := each.claim(error)) is not None]


def _to_each(told: tuple[Callable[..., Any], ...]) -> Callable[..., None]:
    def tell(*args: Any, **kwargs: Any) -> None:
        for each in told:
            each(*args, **kwargs)

    return tell


# ---- claims: the incident that an exception which left `train()` belongs to, and its remedy ----


@dataclass(frozen=True, slots=True)
class Claim:
    """An exception that left `train()`, with the incident it belongs to and what cures it."""

    incident: Incident
    remedy: Action
    wait: bool = False
    batch: BatchPlan | None = None


def claim_by_recipe(incident: Incident, failure: FailureType) -> Claim:
    """Claims an exception for the remedy outside of `train()` that its recipe names; `STOP` if it names none."""
    remedy = FAILURE_RECIPES[failure].reentry or Action.STOP
    return Claim(incident, remedy, wait=remedy is Action.WAIT_AND_RESUME)


def claim_for(incident: Incident | None, error: BaseException) -> Claim | None:
    """Claims an exception for an incident that waits for one; `None` without one."""
    return None if incident is None else claim_by_recipe(incident, classify_exception(error))


# ---- dispatch ----


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
        finished (`bool`, *optional*, defaults to `False`):
            Whether the step is over, for `ROLL_BACK` and `REPLAY_STEPS` between two steps.
        went_back ([`RollbackRecord`], *optional*):
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
    finished: bool = False
    went_back: RollbackRecord | None = None
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
        # The actions that can be carried out, by what does each.
        self.offered: dict[Action, CarryOut] = {}

    def apply(
        self,
        actions: Iterable[Action | str] | Action | str,
        context: HealingContext,
        training_args: TrainingArguments,
    ) -> dict[str, Any]:
        """Carries out actions in order and journals each."""
        results: dict[str, Any] = {}
        actions = [actions] if isinstance(actions, str) else list(actions)
        for unknown in set(actions).difference(self.offered):
            # The others are done where their failure is noticed.
            known = ", ".join(self.offered)
            raise ValueError(f"{str(unknown)!r} cannot be asked for; the actions are: {known}")
        for action in map(Action, actions):
            context.attempted.append(action)
            result = self.offered[action](context, training_args)
            # Where a remedy turned into the next rung of its ladder, that is what was done.
            done = Action.SKIP_STEP if result.get("skipped") else action
            happened = result.pop("happened", True)
            self._journal.acted(context.incident, done.value, happened=happened, **result)
            results.update(result)
        return results
