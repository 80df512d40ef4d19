"""
Decides what makes a sample bad that raises nothing: for data that are indexed, for streams, and for batches.

Everything about another such problem goes here: the [`Problem`], and where it is recognised, which is [`find_problem`]
if the sample shows it by itself. What raises is found by the guards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Problem:
    """Defect of a sample that can be loaded and collated, and cannot be trained on."""

    name: str
    text: str


EMPTY = Problem("empty", "a sequence of length 0")
NO_LABELS = Problem("no_labels", "all labels are -100: none of its tokens counts")


def find_problem(sample: Any) -> Problem | None:
    """Finds what is wrong with a sample as the dataset gives it; called for each one that is loaded."""
    # A dictionary is known at once; abstract classes are asked for in twice the time.
    if type(sample) is not dict and not isinstance(sample, Mapping):
        return None
    if _is_empty(sample.get("input_ids")):
        return EMPTY
    return None


def _is_empty(ids: Any) -> bool:
    if isinstance(ids, (list, tuple)):
        return not ids
    shape = getattr(ids, "shape", None)
    return shape is not None and len(shape) > 0 and shape[-1] == 0


def has_no_labels(batch: Any) -> bool:
    """Whether none of the tokens of a batch counts in the loss."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.ndim < 2 or labels.numel() == 0:
        return False
    if labels.is_floating_point() or labels.device.type != "cpu":
        # On a device, asking would make the host wait for it.
        return False
    return int(labels.max()) == IGNORED_LABEL


def comes_without_labels(sample: Any) -> bool:
    """Whether a sample has labels of its own, all of them masked, before any collator has drawn which ones count."""
    labels = sample.get("labels") if isinstance(sample, Mapping) else None
    if labels is None:
        return False
    try:
        return bool((torch.as_tensor(labels) == IGNORED_LABEL).all())
    except (TypeError, ValueError, RuntimeError):
        return False
