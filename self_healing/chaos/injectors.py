"""Finds the places in any network where a fault reaches the loss, whichever head computes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def output_module(model: nn.Module) -> nn.Module:
    """
    The module whose output all of the loss comes from: the last norm after the blocks, else the last block, else the
    last layer with weights.

    Not the model itself, nor its head: TRL computes the loss from `lm_head.weight`, past both.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    blocks = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=None)
    if blocks is not None:
        inside = {id(module) for module in blocks.modules()}
        last, begun = None, False
        for module in model.modules():
            begun = begun or module is blocks
            norm = "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
            if begun and norm and id(module) not in inside:
                last = module
        return blocks[-1] if last is None else last
    layers = [
        module
        for module in model.modules()
        if not any(True for _ in module.children()) and any(True for _ in module.parameters(recurse=False))
    ]
    return layers[-1] if layers else model


def changed(output: Any, change: Any) -> tuple[Any, bool]:
    """The output with its first floating tensor changed, and whether there was one."""
    if isinstance(output, torch.Tensor):
        return (change(output), True) if output.is_floating_point() else (output, False)
    if isinstance(output, (tuple, list)):
        for place, value in enumerate(output):
            other, done = changed(value, change)
            if done:
                return type(output)([*output[:place], other, *output[place + 1 :]]), True
    elif isinstance(output, Mapping):
        for name, value in output.items():
            other, done = changed(value, change)
            if done:
                output[name] = other  # type: ignore[index]  # transformers' outputs can be written to
                return output, True
    return output, False


def trained_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained weights of floating type, matrices if there are any."""
    found = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point() and parameter.numel() > 0
    ]
    return [entry for entry in found if entry[1].ndim > 1] or found


def middle_weight(model: nn.Module) -> tuple[str, nn.Parameter] | None:
    """One that every row of every batch goes through: not the embedding, which comes first."""
    found = trained_weights(model)
    return found[len(found) // 2] if found else None


def last_weight(model: nn.Module) -> tuple[str, nn.Parameter] | None:
    """That of the head, or what comes closest to it."""
    found = trained_weights(model)
    return found[-1] if found else None


class _OnUnsharded:
    """Hooks a weight that FSDP2 gathers for each call of its module: gradients reach what it is gathered into."""

    def __init__(self, module: nn.Module, name: str, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._name, self._hook = name, hook
        self._hooked: Any = None
        self._handle: Any = None
        self._before_calls = module.register_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, inputs: Any) -> None:
        gathered = getattr(module, self._name)
        if gathered is not self._hooked and gathered.requires_grad:
            self._let_go()
            self._hooked, self._handle = gathered, gathered.register_hook(self._hook)

    def _let_go(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._hooked = self._handle = None

    def remove(self) -> None:
        self._before_calls.remove()
        self._let_go()


def on_gradient(
    model: nn.Module, name: str, weight: nn.Parameter, change: Callable[[str, torch.Tensor], torch.Tensor | None]
) -> Any:
    """Has a function change the gradient of a weight, until what it gives is removed."""
    if not isinstance(weight, DTensor):
        tensor: Any = weight  # torch has no types for its hooks
        return tensor.register_hook(partial(change, name))
    module, _, own_name = name.rpartition(".")
    return _OnUnsharded(model.get_submodule(module), own_name, partial(change, name))


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence of a batch: its row, where in the row it is, what identifies its content, and its tokens."""

    row: int
    begin: int
    end: int
    content: str
    tokens: frozenset[int] = frozenset()


def pieces_of(inputs: Mapping[str, Any], pad_token_id: int | None) -> Iterator[Piece]:
    """
    The sequences of a batch, with the same identity however the batch is cut or padded.

    Args:
        inputs (`Mapping[str, Any]`):
            What the model was called with.
        pad_token_id (`int`, *optional*):
            What is padding where there is no attention mask.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim > 0]
        for row, value in enumerate(tensors[0] if tensors else ()):
            yield Piece(row, 0, -1, _identity(value.tolist()))
        return
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    for row, tokens in enumerate(ids):
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            real = mask[row].bool()
        elif pad_token_id is not None:
            real = tokens != pad_token_id
        else:
            real = torch.ones_like(tokens, dtype=torch.bool)
        places = real.nonzero().flatten()
        if len(places) == 0:
            continue
        begin, end = int(places[0]), int(places[-1]) + 1
        starts = [begin]
        if isinstance(positions, torch.Tensor) and positions.shape == ids.shape and len(ids) == 1:
            # Packed without padding: positions begin again with every sequence.
            starts += [int(place) for place in (positions[row] == 0).nonzero().flatten() if begin < place < end]
        for first, last in zip(starts, [*starts[1:], end], strict=True):
            values = tokens[first:last].tolist()
            yield Piece(row, first, last, _identity(values), frozenset(values))


def _identity(values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def spoiled(output: torch.Tensor, bad: list[Piece]) -> torch.Tensor:
    """The output with NaN for some sequences."""
    mask = torch.zeros(output.shape[:2] if output.ndim > 2 else output.shape[:1], dtype=torch.bool)
    for piece in bad:
        if mask.ndim == 2 and piece.end >= 0:
            mask[piece.row, piece.begin : piece.end] = True
        else:
            mask[piece.row] = True
    mask = mask.to(output.device)
    return output.masked_fill(mask.reshape(*mask.shape, *[1] * (output.ndim - mask.ndim)), float("nan"))


class SeenInputs:
    """Keeps what the models of a network were last called with, for hooks further inside."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[str, Any] = {}
        outer = [module for module in model.modules() if module is model or _takes_ids(module)]
        self._handles = [module.register_forward_pre_hook(self._see, with_kwargs=True) for module in outer]

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        for place, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                known.setdefault("input_ids" if not value.is_floating_point() else f"argument_{place}", value)
        if "input_ids" in known or not self.inputs or not _takes_ids(module):
            self.inputs = known

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.inputs = {}


def _takes_ids(module: nn.Module) -> bool:
    return hasattr(module, "get_input_embeddings") and hasattr(module, "config")
