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
        parameters = list(trainer.model.parameters())
        self._mesh = _replicating(parameters)
        whole = not any(isinstance(each, DTensor) for each in parameters)
        # Whether there are several: with DDP of all weights, with HSDP of each shard; not with FSDP or DeepSpeed.
        self.possible = consensus.world_size() > 1 and (
            self._mesh is not None or (whole and trainer.accelerator.distributed_type in _REPLICATED)
        )

    @property
    def place(self) -> tuple[int, ...]:
        """Tells which part of the weights this rank has: those of the same place have the same."""
        if self._mesh is None:
            return ()
        mesh, dimension = self._mesh
        coordinate = mesh.get_coordinate() or ()
        return tuple(at for each, at in enumerate(coordinate) if each != dimension)

    @property
    def _group(self) -> Any:
        """The ranks that have the same part, where not all have."""
        return None if self._mesh is None else self._mesh[0].get_group(self._mesh[1])

    def unlike(self, question: str, sums: torch.Tensor) -> list[int]:
        """
        Finds the tensors of which not all replicas are the same, on whichever rank. Collective.

        Args:
            question (`str`):
                Names the vote.
            sums (`torch.Tensor`):
                What [`sums`] gives.
        """
        device = self._trainer.accelerator.device
        found = consensus.unlike_over_ranks(question, sums, device, self._group)
        if self._mesh is None:
            return found
        marked = torch.zeros(len(sums))
        marked[found] = 1.0
        anywhere = consensus.largest("replicas of any shard differ", marked, device)
        return [at for at, differs in enumerate(anywhere) if differs]

    def apart(self, names: Iterable[str]) -> Apart:
        """Finds elements of some tensors that are not the same in all replicas: [`Apart.among`]. Collective."""
        return Apart.among(self.tensors(), names, self._trainer.accelerator.device, self._group)

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


def _replicating(parameters: list[torch.nn.Parameter]) -> tuple[Any, int] | None:
    """The mesh that all parameters are sharded over, and its one dimension along which they are replicated (HSDP)."""
    found = set[tuple[Any, tuple[int, ...]]]()
    for each in parameters:
        if not isinstance(each, DTensor):
            return None
        along = tuple(at for at, placement in enumerate(each.placements) if placement.is_replicate())
        found.add((each.device_mesh, along))
    if len(found) != 1:
        return None
    ((mesh, along),) = found
    return (mesh, along[0]) if len(along) == 1 and mesh.size(along[0]) > 1 else None


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
    def among(
        cls, tensors: Mapping[str, torch.Tensor], names: Iterable[str], device: torch.device, group: Any = None
    ) -> Self:
        """
        Finds elements of some tensors that are not the same on all ranks, or on those of a group. Collective.

        Args:
            tensors (`Mapping[str, torch.Tensor]`), names (`Iterable[str]`):
                Those of the run, and which of them to look at: a few of them, and of each the beginning.
            device (`torch.device`):
                Where the run trains.
            group (*optional*):
                The ranks that have the same.
        """
        places, values = {}, {}
        for name in list(names)[:_LOOKED_AT]:
            bits, flat = _bits_of(tensors[name]), _real(tensors[name])
            # A shard of one group may have fewer elements than that of another, and all ranks come as often.
            longest = round(consensus.largest("elements to look at", [float(len(bits))], device)[0])
            found = [
                begin + place
                for begin in range(0, min(longest, _LOOKED_AT * _AT_A_TIME), _AT_A_TIME)
                for place in consensus.unlike_over_ranks(
                    "elements are the same", bits[begin : begin + _AT_A_TIME].to(device, torch.int64), device, group
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
