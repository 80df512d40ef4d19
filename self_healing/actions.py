"""`HealingActions`: carries out actions in the run that a callback heals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from transformers import TrainingArguments

from .failures.recipes import Action
from .healers.assembly import Run
from .run.healer import HealingContext


class HasRun(Protocol):
    """Is attached to a run, or to none."""

    @property
    def run(self) -> Run | None:
        """The run that goes on, or has come to its end; `None` before the first."""


class HealingActions:
    """
    Carries out actions, for code of your own that decides what is to be done.

    Args:
        healing ([`HasRun`]):
            The callback, asked at each call for the run it is attached to.
    """

    def __init__(self, healing: HasRun) -> None:
        self._healing = healing

    def apply(
        self,
        actions: Iterable[Action | str] | Action | str,
        context: HealingContext,
        training_args: TrainingArguments,
    ) -> dict[str, Any]:
        """
        Carries out actions in order and journals each.

        Args:
            actions (`Iterable[Action | str]` or `str`):
                What to do.
            context ([`HealingContext`]):
                Where to do it; without an instrument, in the run the callback is attached to.
            training_args (`TrainingArguments`):
                The arguments of the run.

        Returns:
            `dict`: what the actions gave, merged.

        Raises:
            UnrecoverableTrainingError: For `STOP`.
            ValueError: For an action that is not known.
        """
        run = self._healing.run
        if run is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        if context.instrument is None:
            context.instrument = run.instrument
        return run.context.remedies.apply(actions, context, training_args)
