"""`HealingActions`: carries out actions in the run that a callback heals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import TrainingArguments

from .assembly import Run
from .failures import Action
from .run.remedies import HealingContext


class HealingActions:
    """
    Carries out actions, for code of your own that decides what is to be done.

    Args:
        run ([`Run`], *optional*):
            The run; `None` before a trainer is attached to, where no action can be carried out.
    """

    def __init__(self, run: Run | None) -> None:
        self._run = run

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
        run = self._run
        if run is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        if context.instrument is None:
            context.instrument = run.instrument
        return run.context.remedies.apply(actions, context, training_args)
