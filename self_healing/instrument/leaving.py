"""`Leaving`: ends a run before its last step, and notes what is left to the process that continues it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..hf.dataloader import DataPosition
from ..hf.view import TrainerView
from .window import Window


class Leaving:
    """Ends one trainer's run with the step that is under way."""

    def __init__(
        self, trainer: Any, view: TrainerView, position: DataPosition, window: Callable[[], Window | None]
    ) -> None:
        self._trainer = trainer
        self._view = view
        self._position = position
        self._window = window
        self._theirs: tuple[Any, Any] | None = None
        # What the ranks have said of it in the vote of the step; 0 on one process.
        self.wishes = 0.0
        # Whether the run ends with the step that is under way.
        self.begun = False
        # Whether the evaluation that was due is left to the process that continues the run.
        self.owes_evaluation = False

    def leaves(self, asked: bool) -> bool:
        """Whether the run ends with this step, because some process (`asked`: this one) has to leave."""
        if self._view.world_size > 1:
            window = self._window()
            self.wishes = 0.0 if window is None else window.leave_wanted
            asked = self.wishes > 0
        if self._view.last_step_done:
            # Only the end of the run is left, with the last evaluation and the best model: it is not cut short.
            return False
        if asked and not self.begun:
            self.begun = True
            self._keep_what_is_saved()
        return asked

    def _keep_what_is_saved(self) -> None:
        """Keeps the newest checkpoint: a run that leaves is not at its end, where the best one would replace it."""
        args = self._trainer.args
        self._theirs = args.load_best_model_at_end, args.save_total_limit
        args.load_best_model_at_end, args.save_total_limit = False, None

    def detach(self) -> None:
        """Gives the training arguments back as they were."""
        if self._theirs is not None:
            args = self._trainer.args
            args.load_best_model_at_end, args.save_total_limit = self._theirs
            self._theirs = None

    def owe_evaluation(self) -> None:
        """Leaves the evaluation that is due, for which there is no time, to the process that continues the run."""
        self.owes_evaluation = True

    def epoch_ended(self, control: Any) -> None:
        """Called after the callbacks' `on_epoch_end`, which comes in mid-epoch here: the checkpoint is written."""
        if not self.begun:
            return
        if control.should_evaluate and self._position.at_epoch_end():
            self.owe_evaluation()
        control.should_log = control.should_evaluate = control.should_save = False
