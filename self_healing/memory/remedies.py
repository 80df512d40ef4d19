"""The actions of this family: frees memory, splits calls, keeps fewer activations, makes batches smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from ..failures import Action
from ..instrument import change_batch, free_memory
from ..run.dispatch import CarryOut, HealingContext
from .splitting import KnownSizes


@dataclass(slots=True)
class MemoryState:
    """
    Sizes and settings that a run is known to fit into memory with.

    Args:
        sizes ([`KnownSizes`]):
            Which sizes of model calls fit, and which do not.
        checkpointing_activations (`bool`, *optional*, defaults to `False`):
            Whether activation checkpointing was switched on to make steps fit.
    """

    sizes: KnownSizes
    checkpointing_activations: bool = False


class MemoryRemedies:
    """
    Makes a step need less memory.

    Args:
        state ([`MemoryState`]):
            What is known to fit.
    """

    def __init__(self, state: MemoryState) -> None:
        self.state = state

    def table(self) -> dict[Action, CarryOut]:
        """The actions, and what does each."""
        return {
            Action.FREE_MEMORY: self._free_memory,
            Action.SPLIT_BATCH: self._split_batch,
            Action.CHECKPOINT_ACTIVATIONS: self._checkpoint_activations,
            Action.REDUCE_BATCH_SIZE: self._reduce_batch_size,
        }

    def _free_memory(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        free_memory(context.running.trainer.accelerator.device)
        return {}

    def _split_batch(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        shape, sizes = context.shape, self.state.sizes
        if shape is None:
            raise ValueError("split_batch needs the size of the call that did not fit")
        sizes.failed(shape, with_gradients=context.window is not None)
        at_a_time = sizes.known_rows(shape)
        return {"call": shape.kind, "did_not_fit": [shape.rows, shape.length], "at_a_time": at_a_time}

    def _checkpoint_activations(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        done = context.running.activation_checkpointing.switch_on()
        if not done:
            return {"checkpointing": False, "happened": False, "why": "it is on already, or the model cannot do it"}
        self.state.checkpointing_activations = True
        self.state.sizes.more_room()
        context.incident.figures.append("activation checkpointing is on from here on")
        return {"checkpointing": True}

    def _reduce_batch_size(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        plan = context.batch
        if plan is None:
            raise ValueError("reduce_batch_size needs the sizes to go on with")
        change_batch(context.running.trainer, plan)
        context.incident.figures.append(
            f"per_device_train_batch_size from {plan.rows_before} to {plan.rows}, gradient_accumulation_steps from "
            f"{plan.accumulation_before} to {plan.accumulation}"
        )
        if context.running.objective.name not in ("sft", "dpo", "reward", "generic"):
            context.incident.figures.append("a loss that looks at the whole micro-batch sees fewer rows from here on")
        return plan.to_dict()
