"""Copies of samples: datasets and collators may change what they are given in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def shallow_copy(sample: Any) -> Any:
    """Copies a sample whose entries may be taken out or replaced; returns itself if it cannot be copied."""
    if type(sample) is dict:
        return sample.copy()
    if not isinstance(sample, Mapping | list):
        return sample
    try:
        return copy.copy(sample)
    except Exception:
        return sample


def copies_of(samples: Any) -> Any:
    """Copies each sample of a list."""
    return [shallow_copy(sample) for sample in samples] if isinstance(samples, list) else shallow_copy(samples)
