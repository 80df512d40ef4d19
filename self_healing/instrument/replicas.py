"""`Replicas`: whether the weights that several processes keep, each for itself, are still the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from .. import consensus
from .live_state import live_state_of


# Where each process has all weights, and nothing but equal updates keeps them equal.
_REPLICATED = frozenset(each for each in DistributedType if each.value.startswith("MULTI_"))
# Tensors that are looked into, and parts of each, of so many elements.
_LOOKED_AT, _AT_A_TIME = 8, 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """
    Reads the trained weights of one process, to be compared with those of the others.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def possible(self) -> bool:
        """Whether there are several, each whole: with DDP, not with FSDP or DeepSpeed."""
        trainer = self._trainer
        replicated = trainer.accelerator.distributed_type in _REPLICATED and consensus.world_size() > 1
        return replicated and not any(isinstance(each, DTensor) for each in trainer.model.parameters())

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is compared, by name."""
        return live_state_of(self._trainer).parameters

    @torch.no_grad()
    def sums(self) -> torch.Tensor:
        """
        Adds up the bits of each tensor as integers, on its device: one bit that is another one makes another sum.

        Returns:
            `torch.Tensor` of shape `(tensors,)` and type int64; nothing has waited for the device.
        """
        device = self._trainer.accelerator.device
        return torch.stack([_sum_of_bits(each).to(device) for each in self.tensors().values()])


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = _real(tensor)
    # In the longest words they fall into: words that need not be converted are added up ten times as fast.
    begin, length = flat.storage_offset() * flat.element_size(), flat.nbytes
    size = next(size for size in (8, 4, 2, 1) if begin % size == 0 and length % size == 0)
    return flat.view(_INTEGERS[size]).sum(dtype=torch.int64)


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = _real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


@dataclass(frozen=True, slots=True)
class Apart:
    """
    Some weights of one rank, where they are not those of the others.

    Args:
        places (`dict[str, torch.Tensor]`):
            By tensor, which of its elements.
        values (`dict[str, torch.Tensor]`):
            What they are on this rank.
    """

    places: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]

    @classmethod
    def among(cls, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> Self:
        """
        Finds elements of some tensors that are not the same on all ranks. Collective.

        Args:
            tensors (`Mapping[str, torch.Tensor]`), names (`Iterable[str]`):
                Those of the run, and which of them to look at: a few of them, and of each the beginning.
        """
        places, values = {}, {}
        for name in list(names)[:_LOOKED_AT]:
            bits, flat = _bits_of(tensors[name]), _real(tensors[name])
            found = [
                begin + place
                for begin in range(0, min(len(bits), _LOOKED_AT * _AT_A_TIME), _AT_A_TIME)
                for place in consensus.unlike_over_ranks(
                    "elements are the same", bits[begin : begin + _AT_A_TIME].to(torch.int64), bits.device
                )
            ]
            places[name] = torch.tensor(found, dtype=torch.int64)
            values[name] = flat[places[name].to(flat.device)].cpu()
        return cls(places, values)

    def distance_from(self, tensors: Mapping[str, torch.Tensor]) -> float:
        """How far they were from what the run has in their place now; infinite if one was not finite."""
        farthest = 0.0
        for name, places in self.places.items():
            flat = _real(tensors[name])
            now = flat[places.to(flat.device)].cpu().double()
            distance = float((self.values[name].double() - now).abs().max()) if len(places) else 0.0
            farthest = max(farthest, distance if math.isfinite(distance) else math.inf)
        return farthest
