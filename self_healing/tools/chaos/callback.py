"""`Chaos`: injects faults into the training of one trainer, each as often as it was asked for, across restarts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from ...callback import callback_of
from ...healers.data.guard import Proxy
from ...hf.patching import find_trainer
from .faults import KINDS, Fault, FaultError, Ledger, Schedule, parse_faults
from .injectors import ModelFaults, guard_dataset, guard_rewards, guard_saving, plain_rewards, tear_checkpoint


class _LastWord(TrainerCallback):
    """Undoes what [`Chaos`] did after all others have undone what they put on top of it."""

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.chaos.end()


class Chaos(TrainerCallback):
    """
    Injects faults into a training run, to rehearse what it survives.

    A fault that has struck is written to the ledger before it strikes and does not strike again, neither when the
    step is computed again nor in a restarted process, unless it was asked for more often. The run's random states
    are not touched, and all hooks are gone when training ends. With several processes (ranks), each fault strikes one
    of them, at random but the same for the same seed; what is wrong with the data is so on all of them.

    Args:
        faults (`str` or `Sequence[Fault | str]`):
            What to inject: `Fault` objects, or how they are written down, `"nan_loss@12, sigkill@30"`.
        seed (`int`, *optional*, defaults to 0):
            Of everything that is drawn at random.
        ledger (`str`, `PathLike` or `Ledger`, *optional*, defaults to `"chaos.jsonl"`):
            The file that remembers what has struck. Outside of the run's directory; another one, or none yet, for
            another rehearsal.
    """

    def __init__(
        self,
        faults: str | Sequence[Fault | str],
        seed: int = 0,
        ledger: str | os.PathLike[str] | Ledger = "chaos.jsonl",
    ) -> None:
        given = [faults] if isinstance(faults, str) else faults
        parsed = ([each] if isinstance(each, Fault) else parse_faults(each) for each in given)
        self.faults = tuple(fault for each in parsed for fault in each)
        if not self.faults:
            raise FaultError(f"Chaos needs at least one fault; there are: {', '.join(KINDS)}.")
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        self._schedule = Schedule(self.faults, seed, self.ledger)
        self._model = ModelFaults(self._schedule)
        self._trainer: Any = None
        self._undo = contextlib.ExitStack()

    def attach(self, trainer: Trainer) -> Chaos:
        """Adds this callback to a trainer, before all others: what it breaks, they get to see."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer: Any = find_trainer(self)
        if trainer is not None:
            trainer.callback_handler.callbacks.remove(self)
            self.attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer: Any = find_trainer(self)
        if trainer is None or state.max_steps < 1:
            raise FaultError("Chaos needs a trainer that calls it, and to know how long the run is (max_steps).")
        # A call of `train()` that was left by an exception has had no end.
        self.end()
        self._trainer, schedule = trainer, self._schedule
        schedule.has_rewards = bool(plain_rewards(trainer))
        schedule.draw(int(state.max_steps), args.process_index, args.world_size)
        schedule.step.value = int(state.global_step)
        healer = callback_of(trainer)
        run_dir = str(Path((None if healer is None else healer.config.healing_dir) or args.output_dir).absolute())
        told = {"faults": schedule.keys, "at": schedule.steps, "on": schedule.ranks}
        self.ledger.write("run", run_dir=run_dir, step=int(state.global_step), max_steps=int(state.max_steps), **told)
        callbacks, last_word = trainer.callback_handler.callbacks, _LastWord(self)
        callbacks.append(last_word)
        self._undo.callback(lambda: last_word in callbacks and callbacks.remove(last_word))
        self._model.attach(trainer, self._undo)
        places = {schedule.place_of(fault) for fault in self.faults}
        if "data" in places:
            dataset = getattr(kwargs.get("train_dataloader"), "dataset", None)
            while isinstance(dataset, Proxy):
                dataset = dataset.wrapped
            guard_dataset(schedule, dataset, self._undo)
        if "reward" in places:
            guard_rewards(schedule, trainer, self._undo)
        if schedule.has("disk_full"):
            guard_saving(schedule, trainer, self._undo)

    def end(self) -> None:
        """Gives the trainer back as it was; this callback stays with it, and does nothing before the next run."""
        self._undo.close()
        self._trainer = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._schedule.step.value = int(state.global_step)
        if self._trainer is None:
            return
        for number in self._schedule.due("torn_checkpoint"):
            tear_checkpoint(self._schedule, number, args.output_dir)
        self._model.change_weights()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._schedule.step.value = int(state.global_step)
