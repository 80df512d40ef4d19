"""Checks the best model of a run before the Trainer loads it in place of what was trained last."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..ranks import votes
from ..system import processes


logger = logging.getLogger("self_healing")


@dataclass(frozen=True, slots=True)
class BestChoice:
    """The checkpoint that holds the best model."""

    path: str | None
    step: int | None
    metric: float | None
    refused: str = ""


class BestModel:
    """Chooses the best model of one run among checkpoints that can be loaded, and loads it."""

    def __init__(
        self,
        trainer: Any,
        places: list[Path],
        refusal: Callable[[Path], str | None],
        may_be_loaded: Callable[[Path], bool],
        on_refused: Callable[[str, BestChoice], None],
    ) -> None:
        self._trainer = trainer
        self._places = places
        self._refusal = refusal
        self._may_be_loaded = may_be_loaded
        self._on_refused = on_refused
        # By step; callbacks may have changed what was logged.
        self._noted: dict[int, float] = {}

    def note_evaluation(self, metrics: Any) -> None:
        """Notes the metric of an evaluation."""
        value = metrics.get(self._metric) if isinstance(metrics, Mapping) else None
        if isinstance(value, int | float):
            self._noted[int(self._trainer.state.global_step)] = float(value)

    @property
    def _metric(self) -> str:
        name = str(self._trainer.args.metric_for_best_model or "loss")
        return name if name.startswith("eval_") else f"eval_{name}"

    def choose(self) -> None:
        """
        Chooses the checkpoint to load at the end of the run: in place of one that is torn or not finite the next best,
        or the weights of the last step. With several processes the first one decides. Collective.
        """
        args, state = self._trainer.args, self._trainer.state
        if not args.load_best_model_at_end:
            return
        theirs = state.best_model_checkpoint

        def look() -> BestChoice | None:
            if theirs is None:
                return None
            try:
                return self._choose()
            except Exception:
                # The other ranks wait for the answer.
                logger.warning("The best checkpoint could not be looked at.", exc_info=True)
                return None

        choice = votes.looked_up_by_first_rank("best model", look, args.device)
        if choice is None or not choice.refused or theirs is None:
            return
        state.best_model_checkpoint = choice.path
        state.best_global_step, state.best_metric = choice.step, choice.metric
        self._on_refused(theirs, choice)

    def _choose(self) -> BestChoice:
        state = self._trainer.state
        theirs = str(state.best_model_checkpoint)
        refused = self._refusal(Path(theirs))
        if refused is None:
            return BestChoice(theirs, state.best_global_step, state.best_metric)
        for metric, step in self._evaluations():
            for place in self._places:
                candidate = place / f"{PREFIX_CHECKPOINT_DIR}-{step}"
                if os.path.abspath(candidate) != os.path.abspath(theirs) and self._may_be_loaded(candidate):
                    return BestChoice(str(candidate), step, metric, refused)
        return BestChoice(None, None, None, refused)

    def _evaluations(self) -> list[tuple[float, int]]:
        """Lists the metric of each evaluation with its step, the best one first."""
        name, history = self._metric, self._trainer.state.log_history
        logged = {int(entry["step"]): entry[name] for entry in history if isinstance(entry.get(name), int | float)}
        found = [(float(value), step) for step, value in (logged | self._noted).items() if math.isfinite(value)]
        return sorted(found, reverse=bool(self._trainer.args.greater_is_better))

    def load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the Trainer's `_load_best_model`; if nothing of it arrived in the model, the trained weights stay."""
        before = self._versions()
        try:
            return original(*args, **kwargs)
        except Exception as error:
            if processes.world_size() > 1 or self._versions() != before:
                raise
            state = self._trainer.state
            theirs, state.best_model_checkpoint = str(state.best_model_checkpoint), None
            self._on_refused(theirs, BestChoice(None, None, None, f"{type(error).__name__}: {error}"))
            return None

    def _versions(self) -> list[int]:
        """Version counters of parameters and buffers: each write changes one."""
        model = self._trainer.model
        return [tensor._version for tensor in (*model.parameters(), *model.buffers())]
