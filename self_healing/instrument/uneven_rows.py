"""Gathers values of rows where ranks have different numbers of rows: some were left out of a step on one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils.operations import recursively_apply

from ..hf.patching import Replacements


@contextlib.contextmanager
def gathering_uneven_rows(accelerator: Any) -> Iterator[None]:
    """
    Lets a loss gather what it has computed for each row, such as the rewards of DPO, on ranks of which one has fewer
    rows.
    """
    replaced = Replacements()
    replaced.wrap(accelerator, "gather", _gather)
    try:
        yield
    finally:
        replaced.give_back()


def _gather(original: Callable[[Any], Any], values: Any) -> Any:
    def gather(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            gathered: torch.Tensor = original(tensor)
            return gathered
        rows = [int(count) for count in original(torch.tensor([len(tensor)], device=tensor.device))]
        padded = torch.cat([tensor, tensor.new_zeros(max(rows) - len(tensor), *tensor.shape[1:])])
        parts = original(padded).split(max(max(rows), 1))
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    return recursively_apply(gather, values, error_on_other_type=True)
