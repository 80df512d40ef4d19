"""`GenerationGuard`: has all ranks look at their weights before any of them generates rows with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..hf.hooks import Failsafe
from ..hf.view import TrainerView
from ..ranks import votes


class NotGenerated(FloatingPointError):
    """Raised on all ranks in place of generating rows, where the weights of one are not finite."""


class GenerationGuard:
    """Looks at the weights before a trainer generates the rows it trains on."""

    def __init__(self, view: TrainerView, failsafe: Failsafe, judges: Callable[[], bool]) -> None:
        self._view = view
        self._failsafe = failsafe
        self._judges = judges

    def generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps what generates the rows of a step, and scores them."""
        # An evaluation has no loss that could be taken for one that is not finite.
        if self._view.in_training_mode and self._spoiled():
            raise NotGenerated("the weights are not finite: nothing is generated with them")
        return original(*args, **kwargs)

    def _spoiled(self) -> bool:
        if self._judges():
            return self._any_rank_has_spoiled_weights()
        spoiled = False
        with self._failsafe.contained(), self._failsafe.together():
            spoiled = self._any_rank_has_spoiled_weights()
        return spoiled

    def _any_rank_has_spoiled_weights(self) -> bool:
        view = self._view
        return votes.any_rank("weights to generate with", bool(view.nonfinite_weights()), view.device)
