"""Computes one step of given micro-batches as a trainer computes any other, and applies nothing."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DefaultFlowCallback, Trainer, TrainerCallback

from ..failures.recipes import TrainingFault
from ..hf.adapter import Instrument
from ..system.random_state import RandomState
from .hooks import Hooks
from .window import Window


def compute_one_step(
    trainer: Any,
    micro_batches: Sequence[Any],
    items: Any,
    random_state: RandomState,
    judge: Callable[[Window], None],
    load_from: str | None = None,
) -> None:
    """
    Computes one step of a trainer: its models are prepared by its own `train()`, with mixed precision, activation
    checkpointing and whatever else it puts around them.
    """
    if load_from is not None:
        trainer._load_from_checkpoint(load_from)
    loader: Any = torch.utils.data.DataLoader(list(micro_batches), batch_size=None)  # type: ignore[arg-type]
    trainer.get_train_dataloader = lambda: loader
    # As the step had them: neither counted again, which with several processes would give another number, ...
    trainer.get_batch_samples = lambda *_: (list(micro_batches), _on_device(items, trainer.args.device))
    # ... nor generated again.
    trainer._prepare_inputs = types.MethodType(Trainer._prepare_inputs, trainer)
    stage = _Stage(trainer, random_state, judge)
    trainer.callback_handler.callbacks = [DefaultFlowCallback(), stage]
    trainer.train()
    if stage.error is not None:
        raise stage.error
    if not stage.judged:
        raise RuntimeError("train() ended without a step; please report this, with the versions of `doctor`")


def _on_device(items: Any, device: torch.device) -> Any:
    return items.to(device) if isinstance(items, torch.Tensor) else items


class _Stage(TrainerCallback, Hooks):
    """Attaches an instrument to the call of `train()`, and has its one step judged."""

    def __init__(self, trainer: Any, random_state: RandomState, judge: Callable[[Window], None]) -> None:
        self._trainer = trainer
        self._random_state = random_state
        self._judge = judge
        self._instrument: Instrument | None = None
        self.error: Exception | None = None
        self.judged = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._instrument = Instrument(self._trainer, self, heals_exceptions=True, started_at=0.0)
        self._instrument.attach()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.instrument.epoch_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._random_state.restore()
        self.instrument.step_begins()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.instrument.before_optimizer_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.instrument.detach()

    @property
    def instrument(self) -> Instrument:
        if self._instrument is None:
            raise RuntimeError("train() has not begun")
        return self._instrument

    def judge(self, window: Window) -> None:
        self.judged = True
        try:
            self._judge(window)
        except TrainingFault as fault:
            self.error = fault.error
        except Exception as error:
            # What is raised here would be taken for a failure that training has to be kept from.
            self.error = error
        finally:
            window.skip(None)
