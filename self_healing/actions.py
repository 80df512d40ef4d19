"""`HealingActions`: carries out actions in the run that a callback heals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import TrainingArguments

from .failures import Action
from .run.remedies import HealingContext
from .session import Session


class HealingActions:
    """
    Carries out actions, for code of your own that decides what is to be done.

    Args:
        session ([`Session`], *optional*):
            The run; `None` before a trainer is attached to, where no action can be carried out.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session

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
        session = self._session
        if session is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        if context.instrument is None:
            context.instrument = session.instrument
        return session.remedies.apply(actions, context, training_args)
