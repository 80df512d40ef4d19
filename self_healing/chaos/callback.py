"""`Chaos`: injects faults into the training of one trainer, each as often as it was asked for, across restarts."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from transformers import Trainer, TrainerCallback

from ..data.proxy import Proxy
from ..instrument import find_trainer
from .calls import guard_rewards
from .checkpoint_faults import guard_saving, tear_checkpoint
from .data_faults import DataFaults
from .faults import ANY, KINDS, Fault, FaultError, parse_faults
from .ledger import Ledger
from .model_faults import ModelFaults
from .strikes import Strikes


logger = logging.getLogger("self_healing.chaos")


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
            What to inject: [`Fault`] objects, or how they are written down, `"nan_loss@12, sigkill@30"`.
        seed (`int`, *optional*, defaults to 0):
            Of everything that is drawn at random.
        ledger (`str`, `PathLike` or [`Ledger`], *optional*, defaults to `"chaos.jsonl"`):
            The file that remembers what has struck. Outside of the run's directory; another one, or none yet, for
            another rehearsal.
        min_gap (`int`, *optional*):
            Fewest steps between two faults at random. Defaults to half of the steps that each has.
        ranks (`"any"`, `int` or `Sequence[int]`, *optional*, defaults to `"any"`):
            With several processes, those that faults may strike which name no `rank` of their own.

    Example:

    ```python
    trainer = SFTTrainer(..., callbacks=[SelfHealingCallback(), Chaos("nan_loss@12, oom@20")])
    trainer.train()
    ```
    """

    def __init__(
        self,
        faults: str | Sequence[Fault | str],
        seed: int = 0,
        ledger: str | os.PathLike[str] | Ledger = "chaos.jsonl",
        min_gap: int | None = None,
        ranks: str | int | Sequence[int] = ANY,
    ) -> None:
        given = [faults] if isinstance(faults, str) else list(faults)
        self.faults: tuple[Fault, ...] = tuple(
            fault for each in given for fault in ([each] if isinstance(each, Fault) else parse_faults(each))
        )
        if not self.faults:
            raise FaultError(f"Chaos needs at least one fault; there are: {', '.join(KINDS)}.")
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        self._strikes = Strikes(self.faults, seed, self.ledger, min_gap, ranks)
        self._model = ModelFaults(self._strikes)
        self._data = DataFaults(self._strikes)
        self._last_word = _LastWord(self)
        self._trainer: Any = None
        self._undo = contextlib.ExitStack()

    # ---- attaching ----

    def attach(self, trainer: Trainer) -> Chaos:
        """Adds this callback to a trainer, before all others: what it breaks, they get to see."""
        trainer.add_callback(self)
        self._go_first(trainer)
        return self

    def _go_first(self, trainer: Any) -> None:
        callbacks = trainer.callback_handler.callbacks
        if callbacks[0] is not self:
            callbacks.remove(self)
            callbacks.insert(0, self)
        self._know(trainer)
        if self._strikes.at("data"):
            self._data.join_stream(trainer)

    def _know(self, trainer: Any) -> None:
        self._trainer = trainer
        self._strikes.has_rewards = bool(getattr(trainer, "reward_funcs", None))

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = find_trainer(self)
        if trainer is not None:
            self._go_first(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer: Any = find_trainer(self)
        # A call of `train()` that was left by an exception has had no end.
        self.detach()
        if trainer is None:
            logger.warning("Chaos found no trainer in the call stack and injects nothing. Please use Chaos.attach().")
            return
        if state.max_steps < 1:
            raise FaultError("Chaos needs to know how long the run is. Please set max_steps.")
        self._know(trainer)
        loader = kwargs.get("train_dataloader")
        self._strikes.draw(
            int(state.max_steps), args.process_index, args.world_size, not isinstance(loader, DataLoaderDispatcher)
        )
        for strike in self._strikes.read_ledger():
            self._model.take_over(strike.detail.get("rows", ()))
        self._strikes.step = int(state.global_step)
        callbacks = trainer.callback_handler.callbacks
        if self._last_word in callbacks:
            callbacks.remove(self._last_word)
        callbacks.append(self._last_word)
        run_dir = Path(_healing_dir(trainer) or args.output_dir).absolute()
        if run_dir in self.ledger.path.parents and run_dir != Path.cwd():
            logger.warning("The ledger %s lies in the run's directory; please keep it elsewhere.", self.ledger.path)
        self.ledger.write(
            "run",
            run_dir=str(run_dir),
            step=int(state.global_step),
            max_steps=int(state.max_steps),
            faults=list(self._strikes.keys),
            at=list(self._strikes.steps),
            on=list(self._strikes.ranks),
        )
        self._put_in_place(trainer, loader)

    def _put_in_place(self, trainer: Any, dataloader: Any) -> None:
        self._model.put_in_place(trainer, self._undo)
        if self._strikes.at("data") and not self._data.in_stream:
            dataset = getattr(dataloader, "dataset", None)
            while isinstance(dataset, Proxy):
                dataset = dataset.wrapped
            self._data.guard(dataset, self._undo)
        if self._strikes.at("reward"):
            guard_rewards(self._strikes, trainer, self._undo)
        if self._strikes.wanted("disk_full"):
            guard_saving(self._strikes, trainer, self._undo)

    def detach(self) -> None:
        """Takes all hooks and wrappers back."""
        self._undo.close()

    def end(self) -> None:
        """Gives the trainer back as it was; this callback stays with it, and does nothing before the next run."""
        self.detach()
        if self._trainer is not None:
            self._data.leave_stream(self._trainer)
            callbacks = self._trainer.callback_handler.callbacks
            if self._last_word in callbacks:
                callbacks.remove(self._last_word)
        self._trainer = None

    # ---- between two steps ----

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._strikes.step = int(state.global_step)
        if self._trainer is None:
            return
        with self._strikes.contained():
            for strike in self._strikes.found_by_others():
                self._model.take_over(strike.detail.get("rows", ()))
            for number in self._strikes.due("torn_checkpoint"):
                tear_checkpoint(self._strikes, number, args.output_dir)
            self._model.change_weights()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._strikes.step = int(state.global_step)


def _healing_dir(trainer: Any) -> str | None:
    for callback in trainer.callback_handler.callbacks:
        directory = getattr(getattr(callback, "config", None), "healing_dir", None)
        if directory:
            return str(directory)
    return None
