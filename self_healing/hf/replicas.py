"""`Replicas`: whether the weights that several processes keep, each for itself, are still the same."""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from ..system import processes
from .state import local, plain_parts, trained_tensors


# Ranks that keep the same values of a tensor; sums of tensors, by name; those of one rank, by who has them as well.
Group = tuple[int, ...]
Sums = Mapping[str, int]
SumsOfGroups = Mapping[Group, Sums]

# Where each process has all weights, and nothing but equal updates keeps them equal.
_REPLICATED = frozenset(each for each in DistributedType if each.value.startswith("MULTI_"))
# Tensors of which it is told how far they were off.
_LOOKED_AT = 8
_PIECE = 1 << 22
# By bytes an element.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

# A digest is a number of 64 bits in parts whose sums over some thousand ranks are exact in single precision.
_BITS, _PART_BITS = 64, 12
DIGEST_PARTS = math.ceil(_BITS / _PART_BITS)
# Odd numbers of 64 bits, by which bits are spread.
_SPREAD = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)


class Replicas:
    """Reads the trained weights of one process, to be compared with those of the processes that keep the same."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._left_out: set[str] = set()
        # The factors of a digest, and the tensors they are for.
        self._factors: tuple[list[tuple[str, Group]], torch.Tensor] | None = None

    @property
    def possible(self) -> bool:
        return next(self._kept(), None) is not None

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is compared, by name: this rank's part of it."""
        return {name: local(parameter) for name, parameter, _ in self._kept()}

    def leave_out(self, names: Iterable[str]) -> None:
        self._left_out.update(names)

    def _kept(self) -> Iterator[tuple[str, torch.Tensor, Group]]:
        trainer, ranks_of = self._trainer, functools.cache(_ranks_of)
        tensors = dict(trained_tensors(trainer))
        everybody = tuple(range(processes.world_size()))
        whole = trainer.accelerator.distributed_type in _REPLICATED
        whole &= not any(isinstance(each, DTensor) for each in tensors.values())
        # DDP does not reduce the gradients of those.
        apart = getattr(trainer.model, "_ddp_params_and_buffers_to_ignore", ())
        for name, parameter in tensors.items():
            if isinstance(parameter, DTensor):
                group = ranks_of(parameter.device_mesh, parameter.placements)
            # Beside sharded weights the Trainer (transformers 5.20) reduces gradients of whole ones in hooks.
            elif (whole and name not in apart) or hasattr(parameter, "_replicated_grad_hook_registered"):
                group = everybody
            else:
                continue
            if len(group) > 1 and name not in self._left_out:
                yield name, parameter, group

    @torch.no_grad()
    def digest(self) -> torch.Tensor:
        """Makes one number of all weights and of who keeps them."""
        device = self._trainer.accelerator.device
        kept = list(self._kept())
        if not kept:
            return torch.zeros(DIGEST_PARTS, device=device)
        names = [(name, group) for name, _, group in kept]
        if self._factors is None or self._factors[0] != names:
            self._factors = names, factors_of(names, processes.own_rank()).to(device)
        sums = torch.stack([sum_of_bits(local(parameter)).to(device) for _, parameter, _ in kept])
        return digest_of(sums, self._factors[1])

    def fingerprint(self) -> str:
        """Gives the same text on all ranks as long as all keep the same; empty where not all keep anything."""
        of_all = self.sums().get(tuple(range(processes.world_size())), {})
        return hashlib.sha256(repr(sorted(of_all.items())).encode()).hexdigest() if of_all else ""

    @torch.no_grad()
    def sums(self) -> dict[Group, dict[str, int]]:
        """Adds up the bits of each tensor: [`sum_of_bits`]."""
        kept = list(self._kept())
        sums = torch.stack([sum_of_bits(local(each)).cpu() for _, each, _ in kept]).tolist() if kept else []
        found: dict[Group, dict[str, int]] = {}
        for (name, _, group), value in zip(kept, sums, strict=True):
            found.setdefault(group, {})[name] = value
        return found


def factors_of(kept: Sequence[tuple[str, Group]], rank: int) -> torch.Tensor:
    """Gives the factors of tensors in the digest of a rank."""
    # The first rank of a group weighs as much as all others together, which adds up to zero.
    factors = [_odd(name) * (1 - len(group) if rank == group[0] else 1) for name, group in kept]
    return torch.tensor([_signed(each) for each in factors], dtype=torch.int64)


def _odd(name: str) -> int:
    """Gives the factor of a tensor."""
    return random.Random(name).getrandbits(_BITS) | 1


def digest_of(sums: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    # Each bit of a sum, the uppermost too, has to reach many of the digest: some numbers of ranks are even.
    for odd in _SPREAD:
        sums = sums * _signed(odd)
        sums = sums ^ ((sums >> 32) & 0xFFFFFFFF)
    total = (sums * factors).sum()
    parts = [(total >> (_PART_BITS * part)) & ((1 << _PART_BITS) - 1) for part in range(DIGEST_PARTS)]
    return torch.stack(parts).float()


@torch.no_grad()
def sum_of_all(tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Makes one number of tensors, by their names: another bit or another tensor makes another number."""
    plain = [(name, part) for name, tensor in tensors.items() for part in plain_parts(tensor)]
    if not plain:
        return torch.zeros((), dtype=torch.int64, device=device)
    factors = [_signed(_odd(f"{name} {place}")) for place, (name, _) in enumerate(plain)]
    sums = torch.stack([sum_of_bits(part).to(device) for _, part in plain])
    return (sums * torch.tensor(factors, dtype=torch.int64).to(device)).sum()


def are_apart(digest: Sequence[float]) -> bool:
    """Whether digests that were added up over all ranks say that some keep other values than others of their group."""
    return sum(int(part) << (_PART_BITS * place) for place, part in enumerate(digest)) % (1 << _BITS) != 0


def unlike(of_ranks: Sequence[SumsOfGroups]) -> dict[Group, list[str]]:
    """Finds the tensors whose sums are not the same on all ranks that keep them, by group."""
    names: dict[Group, dict[str, None]] = {}
    for sums in of_ranks:
        for group, of_group in sums.items():
            names.setdefault(group, {}).update(dict.fromkeys(of_group))
    found = {
        group: [name for name in of_group if len({of_ranks[rank].get(group, {}).get(name) for rank in group}) > 1]
        for group, of_group in names.items()
    }
    return {group: of_group for group, of_group in sorted(found.items()) if of_group}


def _ranks_of(mesh: Any, placements: tuple[Any, ...]) -> Group:
    """The ranks that keep the same part of a tensor as this one."""
    here = mesh.get_coordinate()
    if here is None:
        return ()
    beside = tuple(slice(None) if each.is_replicate() else here[at] for at, each in enumerate(placements))
    return tuple(mesh.mesh[beside].flatten().tolist())


def _signed(number: int) -> int:
    return (number + (1 << (_BITS - 1))) % (1 << _BITS) - (1 << (_BITS - 1))


def sum_of_bits(tensor: torch.Tensor, word: torch.dtype | None = None) -> torch.Tensor:
    """
    Adds up the bits of a tensor as integers of a size, on its device: one bit that is another one makes another sum.
    """
    flat = tensor.detach().reshape(-1)
    if word is None:
        # In the longest words they fall into: words that need not be converted are added up ten times as fast.
        begin, length = flat.storage_offset() * flat.element_size(), flat.nbytes
        word = INTEGERS[next(size for size in (8, 4, 2, 1) if begin % size == 0 and length % size == 0)]
    return flat.view(word).sum(dtype=torch.int64)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def copies_of(tensors: Mapping[str, torch.Tensor], apart: Mapping[Group, Sequence[str]]) -> dict[str, torch.Tensor]:
    """Copies some of the tensors that are not the same on all ranks that keep them to the host."""
    rank = processes.own_rank()
    names = [name for group, of_group in apart.items() if rank in group for name in of_group]
    return {name: tensors[name].detach().to("cpu", copy=True) for name in names[:_LOOKED_AT]}


def distance_between(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> float:
    """How far tensors were from what the run has in their place now; infinite if one was not finite."""
    # In pieces: in double precision an embedding takes more memory than it does itself.
    distances = [
        float((was.double() - piece.cpu().double()).abs().max())
        for name, each in before.items()
        if each.numel()
        for was, piece in zip(torch.split(_real(each), _PIECE), torch.split(_real(now[name]), _PIECE), strict=True)
    ]
    return max((each if math.isfinite(each) else math.inf for each in distances), default=0.0)
