"""Records of a place in a run from which `train()` can be entered again, and of what is still to be done there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from transformers.trainer_callback import DefaultFlowCallback, TrainerControl

from ..hf.trainer_state import Bookkeeping
from ..system.random_state import RandomState


@dataclass(slots=True)
class Pending:
    """The events that the Trainer still owed a finished step when it was interrupted."""

    step_end: bool = False
    log: bool = False
    evaluate: bool = False
    save: bool = False
    epoch_end: bool = False
    grad_norm: Any = None
    learning_rate: float | None = None
    ignore_keys: Any = None

    def __bool__(self) -> bool:
        return self.step_end or self.log or self.evaluate or self.save or self.epoch_end

    def deliver(self, trainer: Any, started_at: float, tell: Any = None) -> None:
        """Delivers the events, in the Trainer's order."""
        tell = tell or trainer.callback_handler

        def log_evaluate_save() -> None:
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss,
                self.grad_norm,
                trainer.model_wrapped,
                None,
                trainer.state.epoch,
                self.ignore_keys,
                started_at,
                learning_rate=self.learning_rate,
            )

        trainer.control.should_log = self.log
        trainer.control.should_evaluate = self.evaluate
        trainer.control.should_save = self.save
        if self.step_end:
            # Delivered again to every callback: which of them have had it cannot be known.
            trainer.control = tell.on_step_end(trainer.args, trainer.state, trainer.control)
        log_evaluate_save()
        if self.epoch_end:
            trainer.control = tell.on_epoch_end(trainer.args, trainer.state, trainer.control)
            log_evaluate_save()

    def meetings(self, trainer: Any, leave: Leave) -> str:
        """
        Names what of it all ranks take part in: one that has delivered an event and one that has not owe the others
        the same if nothing follows from it.
        """
        args, state = trainer.args, trainer.state
        flow, owed = DefaultFlowCallback(), list[str]()
        control = TrainerControl(should_log=self.log, should_evaluate=self.evaluate, should_save=self.save)
        if self.step_end:
            flow.on_step_end(args, state, control)
        for event in ("step", "epoch"):
            flags = control.should_log, control.should_evaluate, control.should_save
            owed += [f"{event} {name}" for name, flag in zip(("log", "evaluate", "save"), flags, strict=True) if flag]
            control.should_log = control.should_evaluate = control.should_save = False
            if event == "step" and self.epoch_end:
                flow.on_epoch_end(args, state, control)
        return ", ".join([*owed, *(["stop"] if leave.stop or control.should_training_stop else [])])

    def to_dict(self) -> dict[str, Any]:
        """Gives them as JSON, for the process that continues the run."""
        keys = self.ignore_keys
        return {
            **asdict(replace(self, grad_norm=None, ignore_keys=None)),
            "grad_norm": None if self.grad_norm is None else float(self.grad_norm),
            "ignore_keys": None if keys is None else [str(key) for key in keys],
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Reads what [`to_dict`] has written, in another process or version."""
        return cls(**{each.name: entry[each.name] for each in fields(cls) if each.name in entry})


@dataclass(slots=True)
class Leave:
    """The place in its epoch where a run was left."""

    epoch_rng: RandomState | None
    stop: bool
    epoch_ended: bool


@dataclass(slots=True)
class ResumePoint:
    """A place in the run from which `train()` can be entered again as if it had never been left."""

    step: int
    path: str
    bookkeeping: Bookkeeping
    pending: Pending
    leave: Leave
