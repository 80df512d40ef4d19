"""What made a step non-finite, found out by experiment: compute it again, scan the state, bisect the rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import consensus
from .config import HealingConfig
from .failures import FailureType
from .instrument import Instrument, TrainingFault, Window


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """
    The cause of a failure and the experiments that showed it.

    Args:
        failure (`FailureType`):
            What it is.
        cause (`str`):
            In a few words.
        evidence (`dict`):
            What the experiments gave.
        poison (`dict[int, list[int]]`):
            Rows (pairs, segments) of each micro-batch that are non-finite by themselves.
        rows (`int`):
            Rows in the step, on all ranks.
        poison_rows (`int`):
            How many of them are poison, on all ranks.
    """

    failure: FailureType
    cause: str
    evidence: dict[str, Any] = field(default_factory=dict)
    poison: dict[int, list[int]] = field(default_factory=dict)
    rows: int = 0
    poison_rows: int = 0


def diagnose(window: Window, instrument: Instrument, config: HealingConfig, healthy_inputs: Any) -> Diagnosis:
    """
    Finds out why a step is not finite. On return a transient fault has already been replaced by the re-executed step.

    Args:
        window ([`Window`]):
            The step.
        instrument ([`Instrument`]):
            Of the trainer.
        config ([`HealingConfig`]):
            How far to go.
        healthy_inputs (`Any`):
            A micro-batch that was finite in an earlier step, as a control, or `None`.
    """
    for attempt in range(1, config.reexecute_attempts + 1):
        window.reexecute()
        if window.signals().finite:
            return Diagnosis(FailureType.NONFINITE_TRANSIENT, "transient", {"reexecutions": attempt})
    device = instrument.trainer.accelerator.device
    # What a failing forward left in batch norm statistics is a consequence, not a cause.
    window.restore_buffers()
    corrupted = instrument.nonfinite_tensors()
    if consensus.any_rank(bool(corrupted), device):
        return Diagnosis(
            FailureType.CORRUPTED_STATE,
            "corrupted state",
            {"tensors": corrupted[:20], "tensors_total": len(corrupted)},
        )
    if config.reexecute_attempts == 0:
        window.reexecute()
    layouts = [window.layout(index) for index in range(window.size)]
    if consensus.any_rank(any(layout is None for layout in layouts), device):
        return _numerical("the rows of this batch cannot be told apart")
    sizes = [layout.rows for layout in layouts if layout is not None]
    try:
        poison = find_poison_rows(window, sizes, device)
    except TrainingFault as fault:
        # A batch of a shape the user never trains on: what it raises is our doing.
        logger.info("Rows could not be tried alone.", exc_info=fault.error)
        return _numerical(f"its rows cannot be tried alone: {type(fault.error).__name__}: {fault.error}")
    counts = torch.tensor([sum(sizes), sum(len(rows) for rows in poison.values())], device=device)
    total, count = consensus.sum_over_ranks(counts).tolist()
    if count == 0:
        return _numerical("no row is non-finite by itself")
    if count > config.max_poison_fraction * total:
        # Many bad rows look the same as a model that overflows on most of them. A batch that was fine before tells.
        control_is_finite = healthy_inputs is not None and window.probe_batch(healthy_inputs)
        if consensus.any_rank(not control_is_finite, device):
            control = (
                "there is no earlier batch to compare with" if healthy_inputs is None else "so is an earlier batch"
            )
            return _numerical(f"{count} of {total} rows are non-finite, and {control}")
    return Diagnosis(
        FailureType.NONFINITE_POISON_ROWS,
        "poison rows",
        {"poison_rows": count, "rows_in_step": total},
        poison=poison,
        rows=total,
        poison_rows=count,
    )


def _numerical(why: str) -> Diagnosis:
    return Diagnosis(FailureType.NONFINITE_NUMERICAL, "numerical", {"why": why})


def find_poison_rows(window: Window, sizes: Sequence[int], device: Any) -> dict[int, list[int]]:
    """
    Rows of each micro-batch that are non-finite by themselves, in forward or backward.

    One process bisects. Several probe row by row in lockstep, because a loss may contain collectives.
    """
    if consensus.world_size() > 1:
        return _probe_in_lockstep(window, sizes, device)
    # Every micro-batch, also those with a finite loss: a row may be bad in its gradient alone.
    found = {index: _bisect(window, index, list(range(sizes[index]))) for index in range(window.size)}
    return {index: rows for index, rows in found.items() if rows}


def _bisect(window: Window, index: int, rows: list[int]) -> list[int]:
    if len(rows) == 1:
        return [] if _is_finite_alone(window, index, rows[0]) else rows
    if window.probe(index, rows):
        return []
    middle = len(rows) // 2
    return _bisect(window, index, rows[:middle]) + _bisect(window, index, rows[middle:])


def _is_finite_alone(window: Window, index: int, row: int) -> bool:
    # Twice, not once: batch norm and other statistics over a batch need more than one row.
    return window.probe(index, [row, row])


def _probe_in_lockstep(window: Window, sizes: Sequence[int], device: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index in range(window.size):
        row = 0
        while consensus.any_rank(row < sizes[index], device):
            finite = _is_finite_alone(window, index, min(row, sizes[index] - 1))
            if not finite and row < sizes[index]:
                found.setdefault(index, []).append(row)
            row += 1
    return found
