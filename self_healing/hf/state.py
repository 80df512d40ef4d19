"""Live weights, gradients and optimizer state: where they are, their norm, and the search for NaN in them."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from .deepspeed import Partitioning, Zero, own_part, zero_of


# ---- live state ----


@dataclass(frozen=True, slots=True)
class LiveState:
    """The tensors of one trainer, as they are now."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    scaler: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    partitioning: Partitioning | None = None
    model: torch.nn.Module | None = None

    @property
    def updated(self) -> list[Any]:
        """What the optimizer updates, in its order."""
        if self.partitioning is not None:
            # With ZeRO-3 its groups have parameters in its step alone.
            return list(self.partitioning.masters)
        groups = getattr(self.optimizer, "param_groups", ())
        return [parameter for group in groups for parameter in group["params"]]

    def replace_buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Puts a tensor in the place of a buffer of another shape."""
        module, _, own = name.rpartition(".")
        if self.model is None or name not in self.buffers:
            was = f"{tensor.dtype} of {tuple(tensor.shape)}"
            raise ValueError(f"{name} was {was} when the snapshot was taken, and is not now: it cannot be put back")
        setattr(self.model.get_submodule(module), own, tensor)


def live_state_of(trainer: Any) -> LiveState:
    """Collects the tensors that training changes in a trainer. Between two computations, on all ranks alike."""
    reshard(trainer.model)
    optimizer, zero = unwrap_optimizer(trainer.optimizer), zero_of(trainer)
    optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    changing: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in _changing(trainer, optimizer, zero):
        changing.setdefault(id(parameter), (name, parameter))
    frozen = {
        name: local(parameter) if (part := own_part(parameter)) is None else part
        for name, parameter in trainer.model.named_parameters()
        if id(parameter) not in changing and not parameter.requires_grad and not parameter.is_meta
    }
    inside = {name: getattr(trainer.accelerator.scaler, name, None) for name in ("_scale", "_growth_tracker")}
    return LiveState(
        {name: local(parameter) for name, parameter in changing.values() if not parameter.is_meta},
        {name: local(buffer) for name, buffer in trainer.model.named_buffers() if not buffer.is_meta},
        optimizer,
        {name: value for name, value in inside.items() if isinstance(value, torch.Tensor)},
        frozen,
        {} if zero is None else zero.loss_scaler(),
        None if zero is None else zero.partitioning(),
        trainer.model,
    )


def _changing(
    trainer: Any, optimizer: torch.optim.Optimizer | None, zero: Zero | None
) -> Iterator[tuple[str, torch.Tensor]]:
    if zero is not None:
        # The parameters of the model are views of these, or are gathered from them.
        yield from zero.partitions().items()
        yield from _of_following_reference(trainer)
        return
    yield from trained_tensors(trainer)
    # A loss with parameters of its own is trained beside the model.
    for group, entry in enumerate(getattr(optimizer, "param_groups", ())):
        for index, parameter in enumerate(entry["params"]):
            yield f"group {group}, parameter {index}", parameter


def trained_tensors(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of the model that are trained, and of a reference model that follows it; whole, if sharded."""
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and not parameter.is_meta:
            yield name, parameter
    yield from _of_following_reference(trainer)


def _of_following_reference(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    reference = getattr(trainer, "ref_model", None)
    if isinstance(reference, torch.nn.Module) and getattr(trainer.args, "sync_ref_model", False):
        # It follows the model, so what went into the model went into it.
        yield from ((f"ref_model.{name}", parameter) for name, parameter in reference.named_parameters())


def nonfinite_tensors(
    model: torch.nn.Module, optimizer: Any, partitions: Mapping[str, torch.Tensor] | None = None
) -> list[str]:
    """Names what is not finite in all that a checkpoint holds of a model and its optimizer."""
    search = Search()
    for name, partition in (partitions or {}).items():
        search.add(name, partition, inf=True)
    for name, parameter in model.named_parameters():
        search.add(name, parameter, inf=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        # A causal mask kept as a buffer or a frozen parameter holds -inf on purpose: there only NaN is wrong.
        search.add(name, buffer, inf=False)
    names = {id(each): name for name, each in (*model.named_parameters(), *(partitions or {}).items())}
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        for number, parameter in enumerate(group["params"]):
            # A loss with parameters of its own is trained beside the model.
            name = names.setdefault(id(parameter), f"group {index}, parameter {number}")
            if name.startswith("group "):
                search.add(name, parameter, inf=True)
        settings = {name: value for name, value in group.items() if name != "params"}
        _search_in(search, f"optimizer:group {index}", settings, inf=False)
    for parameter, state in getattr(optimizer, "state", {}).items():
        _search_in(search, f"optimizer:{names.get(id(parameter), '?')}", state, inf=True)
    return search.nonfinite()


def _search_in(search: Search, name: str, value: Any, inf: bool) -> None:
    """Looks for NaN and Inf in nested values."""
    if isinstance(value, (torch.Tensor, float)):
        search.add(name, value, inf)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _search_in(search, f"{name}.{key}", inner, inf)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _search_in(search, f"{name}[{index}]", inner, inf)


def nonfinite_copies(trainer: Any) -> dict[str, dict[str, int]]:
    """Finds copies of the weights beside the model that are not finite: by who keeps them as what, with numbers."""
    callbacks, model = trainer.callback_handler.callbacks, trainer.model
    own = [*model.parameters(), *model.buffers(), *(each for _, each in _of_following_reference(trainer))]
    flat = torch.Size([sum(each.numel() for each in own if each.requires_grad)])
    shapes, found = {flat: True}, dict[str, dict[str, int]]()
    for each in sorted(own, key=lambda each: each.requires_grad):
        alike = (each.shape, local(each).shape, getattr(each, "ds_shape", each.shape))
        shapes |= dict.fromkeys(alike, each.requires_grad)
    apart = (trainer, model, trainer.model_wrapped, unwrap_optimizer(trainer.optimizer), *own, *callbacks)
    seen = {id(each): each for each in apart}
    for keeper, name in [(each, name) for each in (*callbacks, trainer) for name in vars(each)]:
        # Whatever it is, it may refuse to be looked at.
        with contextlib.suppress(Exception):
            kept, search = [each for each in tensors_in(vars(keeper)[name], seen) if each.shape in shapes], Search()
            # Vectors alone may be anything: a history that is filled by and by.
            if any(each.dim() > 1 or each.shape == flat for each in kept):
                for number, each in enumerate(kept):
                    search.add(str(number), each, inf=shapes[each.shape])
            extents = [extent_of(kept[int(number)]) for number in search.nonfinite()]
            # Inf is meant in a mask, which has nothing above 0, and where there is one value only.
            if bad := [each for each in extents if each and not (each.high <= 0 or each.low == each.high)]:
                found[f"NaN/Inf in {type(keeper).__name__}.{name}"] = {"copied": len(kept), "not_finite": len(bad)}
    return found


def tensors_in(value: Any, seen: dict[int, Any], most: int = 100_000) -> Iterator[torch.Tensor]:
    """Yields the tensors among so many values nested in one, of whatever kind, the nearest first; runs none's code."""
    found = [value]
    for each in found:
        if id(each) not in seen and not isinstance(each, (type, ModuleType, FunctionType, FrameType)):
            seen[id(each)] = each
            if isinstance(each, torch.Tensor):
                yield each
            elif type(each).__module__.split(".")[0] not in ("self_healing", "accelerate", "datasets"):
                found += gc.get_referents(each)[: most - len(found)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Gives this rank's part of a sharded tensor; any other one detached."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor.detach()


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside accelerate's wrapper, and DeepSpeed's."""
    while hasattr(getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = optimizer.optimizer
    return optimizer


def optimizer_in_training_mode(trainer: Any) -> None:
    """Switches a schedule-free optimizer, which keeps other weights for evaluation, to those that are trained."""
    switch = getattr(trainer.optimizer, "train", None)
    if switch is not None:
        switch()


def reset_moments(trainer: Any) -> bool:
    """Clears the optimizer's state, so that it begins as in the first step."""
    optimizer = unwrap_optimizer(trainer.optimizer)
    known = type(optimizer).__module__.split(".")[0] in ("torch", "transformers", "bitsandbytes", "torchao")
    if not known or isinstance(optimizer, torch.optim.Adagrad):
        return False
    optimizer.state.clear()
    return True


def reload_checkpoint(trainer: Any, checkpoint: str) -> None:
    """Puts weights, optimizer state and scaler of a checkpoint into a trainer in the middle of a run."""
    schedule = copy.deepcopy(trainer.lr_scheduler.state_dict())
    groups = trainer.optimizer.param_groups
    rates = [{name: group[name] for name in ("lr", "initial_lr") if name in group} for group in groups]
    reshard(trainer.model)
    zero = zero_of(trainer)
    if zero is None:
        trainer._load_from_checkpoint(checkpoint, model=trainer.model)
    else:
        zero.load(checkpoint, strict=not hasattr(trainer.model, "peft_config"))
    trainer._load_optimizer_and_scheduler(checkpoint)
    if trainer.accelerator.scaler is not None:
        trainer._load_scaler(checkpoint)
    trainer.lr_scheduler.load_state_dict(schedule)
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
        group.update(rate)


# ---- search ----


# Elements that are converted or laid out again at a time, where that has to be.
_AT_A_TIME = 1 << 22
# Packed 4-bit numbers have no NaN, and no arithmetic of their own either.
_ALWAYS_FINITE = frozenset({getattr(torch, "float4_e2m1fn_x2", None)})
# A device is given few kernels for all tensors of a kind; where there is nothing to launch, one by one is faster.
ONE_BY_ONE = {"cpu"}

_Kind = tuple[torch.device, torch.dtype]


@dataclass(frozen=True, slots=True)
class Extent:
    """The smallest and the largest value of a tensor, NaN if it holds one."""

    low: torch.Tensor
    high: torch.Tensor


@torch.no_grad()
def extent_of(tensor: torch.Tensor) -> Extent | None:
    """Finds the extent of a tensor, or of this rank's part of one; `None` where nothing could be NaN or Inf."""
    found = [torch.aminmax(piece) for plain in _plain(tensor) for piece in _in_place(plain)]
    if not found:
        return None
    lows, highs = zip(*found, strict=True)
    return Extent(torch.stack(lows).min(), torch.stack(highs).max())


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """
    Yields what a sharded or quantised tensor is made of, and any other one itself: its own arithmetic is a collective,
    or copies all of it.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        # A DTensor names its device mesh among them.
        if isinstance(part := getattr(tensor, name), torch.Tensor):
            yield from plain_parts(part)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the plain tensors of floating-point numbers in one."""
    for part in plain_parts(tensor.detach()):
        part = part._values() if part.is_sparse else part
        part = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
        if part.is_floating_point() and part.numel() and not part.is_meta and part.dtype not in _ALWAYS_FINITE:
            yield part


def _in_place(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields a tensor in pieces that can be searched without much memory."""
    # 8-bit floats have no arithmetic of their own.
    converted = torch.bfloat16 if tensor.element_size() == 1 else tensor.dtype
    if not tensor.is_contiguous():
        # A transposed weight is contiguous in another order of its dimensions.
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if tensor.is_contiguous() and converted == tensor.dtype:
        yield tensor
        return
    pieces = [tensor]
    while pieces:
        piece = pieces.pop()
        if piece.numel() <= _AT_A_TIME:
            yield piece.to(converted)
        else:
            pieces += piece.tensor_split(2, dim=max(range(piece.dim()), key=piece.size))


@dataclass(slots=True)
class Search:
    """Searches several tensors for NaN and Inf together."""

    # By name, whether Inf is wrong as well.
    _names: dict[str, bool] = field(default_factory=dict)
    # What is still to be searched, and the largest numbers of what was, which are still to be read.
    _left: dict[_Kind, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    _ends: dict[_Kind, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    _bad: set[str] = field(default_factory=set)

    @torch.no_grad()
    def add(self, name: str, value: torch.Tensor | float, inf: bool) -> None:
        self._names[name] = inf or self._names.get(name, False)
        if not isinstance(value, torch.Tensor):
            self._note(name, value)
            return
        for tensor in _plain(value):
            kind = tensor.device, tensor.dtype
            if tensor.element_size() > 1 and tensor.device.type not in ONE_BY_ONE:
                self._left.setdefault(kind, []).append((name, tensor))
                continue
            for piece in _in_place(tensor):
                low, high = piece.aminmax()
                self._ends.setdefault((piece.device, piece.dtype), []).extend(((name, low), (name, high)))

    @torch.no_grad()
    def nonfinite(self) -> list[str]:
        """Returns the names of values that are not finite, each once. Waits once for each device and dtype."""
        for kind, left in self._left.items():
            norms = torch._foreach_norm([tensor for _, tensor in left], ord=math.inf)
            self._ends.setdefault(kind, []).extend((name, norm) for (name, _), norm in zip(left, norms, strict=True))
        self._left.clear()
        for ends in self._ends.values():
            for (name, _), end in zip(ends, torch.stack([end for _, end in ends]).tolist(), strict=True):
                self._note(name, end)
        self._ends.clear()
        return [name for name in self._names if name in self._bad]

    def _note(self, name: str, value: float) -> None:
        if math.isnan(value) or (self._names[name] and math.isinf(value)):
            self._bad.add(name)


class WeightSearch:
    """Searches the weights of one model again and again: what there is to search is listed once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Held, so that no other module gets the `id` of one; with those of what they had when the list was made.
        self._modules: list[nn.Module] = []
        self._had: list[tuple[int, ...]] | None = None
        # By name, with whether it is a parameter.
        self._tensors: list[tuple[str, Tensor, bool]] = []

    def finds_nothing(self) -> bool:
        """Whether all weights are finite, as [`nonfinite_tensors`] has it. Waits once for plain ones."""
        if self._have() != self._had:
            self._modules = list(self._model.modules())
            self._had = self._have()
            self._tensors = [(name, each, True) for name, each in self._model.named_parameters()]
            self._tensors += [(name, each, False) for name, each in self._model.named_buffers()]
        # Of the tensors as they are now: trained or not, and what they hold may be other memory, on another device.
        search, plain, inf = Search(), list[Tensor](), list[bool]()
        for name, tensor, parameter in self._tensors:
            simple = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
            # A causal mask kept as a buffer or a frozen parameter holds -inf on purpose: there only NaN is wrong.
            wrong = parameter and tensor.requires_grad
            if simple and tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
                plain.append(tensor.detach())
                inf.append(wrong)
            else:
                search.add(name, tensor, wrong)
        if search.nonfinite():
            return False
        norms = torch._foreach_norm(plain, ord=math.inf) if plain else ()
        values = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist() if norms else []
        return not any(map(math.isnan, values)) and math.inf not in compress(values, inf)

    def _have(self) -> list[tuple[int, ...]]:
        return [
            tuple(map(id, held.values()))
            for module in self._modules
            for held in (module._parameters, module._buffers, module._modules)
        ]


# ---- gradients: finds the gradients of a computation while its step is judged, and discards all of them ----


def named_gradients_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yields the gradients a model holds, each with the name of its parameter, also those that FSDP2 keeps beside the
    parameters until they are reduced: under `no_sync`, that is all of them.
    """
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        if parameter.grad is not None:
            yield name, parameter.grad
    for sharded in _sharded_parameters(model):
        # The gathered parameter, which exists from the first forward on.
        unsharded = getattr(sharded, "_unsharded_param", None)
        name = names.get(id(sharded.sharded_param)) or names.get(id(unsharded), "?")
        for gradient in (sharded.unsharded_accumulated_grad, getattr(unsharded, "grad", None)):
            if gradient is not None:
                yield name, gradient


def discard_gradients(model: torch.nn.Module) -> None:
    """Drops all gradients of a computation that is thrown away, finished or not."""
    model.zero_grad()
    for parameter in model.parameters():
        # Even where a model's own `zero_grad` only fills with zeros: with those AdamW would still move the weights.
        parameter.grad = None
    sharded_modules = fsdp2_modules(model)
    if not sharded_modules:
        return
    for module in sharded_modules:
        if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root:
            # From torch 2.13 on: puts the parameters back that a forward which raised has left gathered.
            module.reset_iter_state()
    # Neither `zero_grad` nor `reset_iter_state` (torch 2.13) drops what was accumulated under `no_sync`: without this
    # the next backward adds it to its own.
    for group in _parameter_groups(model):
        # Of HSDP, reduced within a replica and not yet across them.
        group._partial_reduce_output = None
    for sharded in _sharded_parameters(model):
        sharded.unsharded_accumulated_grad = None
        unsharded = getattr(sharded, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None


@contextlib.contextmanager
def without_reduction(model: torch.nn.Module) -> Iterator[None]:
    """Has each rank keep the gradients of an FSDP2 model that it computes to itself."""
    modules = fsdp2_modules(model)
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def is_sharded(model: torch.nn.Module) -> bool:
    """
    Whether weights of a model are spread over ranks (FSDP2, ZeRO-3, or while it was loaded), all of which then take
    part in each call of it.
    """
    # What ZeRO-3 spreads has a number of DeepSpeed's.
    return any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters())


def _sharded_parameters(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's own records of the parameters: torch has no public way to the gradients they hold."""
    for group in _parameter_groups(model):
        yield from group.fsdp_params


def _parameter_groups(model: torch.nn.Module) -> Iterator[Any]:
    for module in fsdp2_modules(model):
        state = module._get_fsdp_state()
        # Several groups per module from torch 2.13 on, one or none before.
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        yield from (group for group in groups if group is not None)


def reshard(model: torch.nn.Module) -> None:
    """
    Gives back weights that a forward without a backward (an evaluation) has left gathered under FSDP2: accelerate
    (1.15) has norm and head stay so.
    """
    for module in fsdp2_modules(model):
        module.reshard()


def fsdp2_modules(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# ---- gradients: gradients of plain and sharded parameters: their total norm, and scaling them ----


Parameters = nn.Module | Iterable[Tensor]


@torch.no_grad()
def total_gradient_norm(parameters: Parameters) -> Tensor:
    """
    Returns the 2-norm of all gradients together, as a tensor without dimensions on the device of the first gradient.
    """
    groups = by_mesh(_gradients(parameters))
    if not groups:
        return torch.tensor(0.0)
    norms = [whole(get_total_norm(group)) for group in groups]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]))


@torch.no_grad()
def scale_gradients(parameters: Parameters, factor: float) -> None:
    if not 0 <= factor < math.inf:
        raise ValueError(f"Gradients cannot be scaled by {factor}. Please give a finite factor that is at least 0.")
    if factor == 1:
        return
    for group in by_mesh(_gradients(parameters)):
        torch._foreach_mul_(group, factor)


def tensors_of(parameters: Parameters) -> list[Tensor]:
    """Lists the tensors of a model, or of an iterable, each once."""
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Tensor):
        # It would pass as an iterable: of its rows, which have no gradients.
        return [parameters]
    # Each once: a tied weight that is listed twice has one gradient, not two.
    return list(dict.fromkeys(parameters))


def _gradients(parameters: Parameters) -> list[Tensor]:
    return [tensor.grad for tensor in tensors_of(parameters) if tensor.grad is not None]


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by device mesh, plain ones apart, because one operation cannot take both."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor, for which all ranks have to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
