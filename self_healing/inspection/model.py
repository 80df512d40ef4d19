"""Checks of a model's weights before the first step."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .findings import EXAMPLES, Finding, FindingSeverity, Inspection, errors_first, listed


_TOO_LARGE, _TOO_SMALL = 100.0, 1e-3
# Embeddings are on a scale of their own: `nn.Embedding` begins at 1, a linear layer of width 4096 beside it at 0.009.
_TOO_LARGE_EMBEDDING = 1_000.0
_LARGEST_VALUE = 1e4
# The median of fewer says nothing about which of them is the odd one.
_FEWEST_MATRICES = 4
_ELEMENTS_AT_ONCE = 1 << 24
# Not multiplied with activations, and zero or large by design in one architecture or another.
_NOT_A_WEIGHT = ("bias", "token", "pos", "log", "scale", "mask")


@torch.no_grad()
def check_model_init(model: torch.nn.Module) -> Inspection:
    """
    Reads the weights of a model and names those that training cannot begin from. Sharded weights are judged by the
    part that lies on this process; quantised ones and those on the meta device are left out.

    Args:
        model (`torch.nn.Module`):
            The model, as it is before training.

    Returns:
        [`Inspection`]: Tensors with NaN or Inf (in buffers only NaN: masks hold -inf on purpose), matrices of zeros
        other than the half of an adapter that begins at zero, and matrices whose root mean square is more than 100
        times or less than a thousandth of the median of the model's (embeddings: more than 1000 times), or that hold
        values beyond 10000.
    """
    parameters = _measured(model.named_parameters())
    buffers = _measured(model.named_buffers())
    adapters = _adapter_groups(model, parameters)
    findings = [
        _tensors_finding(
            "nonfinite_tensors",
            [name for name, size in parameters.items() if not math.isfinite(size.largest)]
            + [name for name, size in buffers.items() if math.isnan(size.largest)],
            len(parameters) + len(buffers),
            "NaN or Inf",
            "Every loss will be NaN: load the weights again from a whole checkpoint, or check how they begin.",
        ),
        _tensors_finding(
            "all_zero_tensors",
            _all_zero(parameters, adapters),
            len(parameters),
            "nothing but zeros",
            "Unless that is on purpose, they were missing from the checkpoint or never initialised: look for missing "
            "keys in what from_pretrained said.",
            severity="warning",
        ),
        _tensors_finding(
            "wildly_scaled_tensors",
            _wildly_scaled(model, parameters, adapters),
            len(parameters),
            "values of quite another size than the rest of the model",
            "Check how they were initialised, merged or converted, and whether the file is damaged.",
            severity="warning",
        ),
    ]
    return Inspection(errors_first(findings), len(parameters) + len(buffers), "tensors")


@dataclass(frozen=True, slots=True)
class _Size:
    """Magnitude of one tensor: its largest absolute value and its root mean square."""

    largest: float
    rms: float
    dims: int
    is_weight: bool


def _measured(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, _Size]:
    sizes = {}
    for name, tensor in named:
        size = _size(name, tensor)
        if size is not None:
            sizes[name] = size
    return sizes


def _size(name: str, tensor: torch.Tensor) -> _Size | None:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    # One byte per value: the scale that belongs to it is elsewhere.
    if local.is_meta or not local.is_floating_point() or local.dtype.itemsize < 2 or local.numel() == 0:
        return None
    try:
        largest, norm = _largest_and_norm(local)
    except (RuntimeError, TypeError):  # quantised, behind the face of a floating tensor
        return None
    kind = name.rpartition(".")[2].lower()
    is_weight = sum(extent > 1 for extent in tensor.shape) >= 2 and not any(part in kind for part in _NOT_A_WEIGHT)
    return _Size(largest, norm / math.sqrt(local.numel()), tensor.dim(), is_weight)


def _largest_and_norm(tensor: torch.Tensor) -> tuple[float, float]:
    # The square root of a sum of float16 squares need not be a float16. In parts, as the CPU converts them first.
    dtype = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    rows = max(1, _ELEMENTS_AT_ONCE * max(1, tensor.size(0)) // tensor.numel()) if tensor.dim() else 1
    parts = torch.split(tensor, rows) if tensor.dim() else (tensor,)
    largest = torch.stack([torch.linalg.vector_norm(part, math.inf, dtype=dtype) for part in parts])
    norms = torch.stack([torch.linalg.vector_norm(part, dtype=dtype) for part in parts])
    both = torch.stack([torch.linalg.vector_norm(largest, math.inf), torch.linalg.vector_norm(norms)]).tolist()
    return both[0], both[1]


def _adapter_groups(model: torch.nn.Module, parameters: Mapping[str, _Size]) -> dict[str, tuple[str, str]]:
    """Adapters by parameter, each as the path of its layer and what follows the name of the factor."""
    layers = {layer for module in model.modules() for layer in getattr(module, "adapter_layer_names", ())}
    groups = {}
    for name in parameters:
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part in layers or part.startswith("lora_"):
                groups[name] = (".".join(parts[:place]), ".".join(parts[place + 1 :]))
                break
    return groups


def _all_zero(parameters: Mapping[str, _Size], adapters: Mapping[str, tuple[str, str]]) -> list[str]:
    zero = {name for name, size in parameters.items() if size.is_weight and size.largest == 0}
    factors: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, group in adapters.items():
        if parameters[name].is_weight:
            factors[group].append(name)
    # An adapter begins as a zero product, of one factor that is zero. With all of them zero it never gets a gradient.
    begins = {name for names in factors.values() if len(names) < 2 or not zero.issuperset(names) for name in names}
    return [name for name in parameters if name in zero and name not in begins]


def _wildly_scaled(
    model: torch.nn.Module, parameters: Mapping[str, _Size], adapters: Mapping[str, tuple[str, str]]
) -> list[str]:
    embeddings = {
        f"{name}.weight".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    usual = [
        size.rms
        for name, size in parameters.items()
        if size.is_weight and name not in embeddings and name not in adapters and 0 < size.rms < math.inf
    ]
    median = statistics.median(usual) if len(usual) >= _FEWEST_MATRICES else None
    wild = []
    for name, size in parameters.items():
        if size.dims < 2 or not math.isfinite(size.largest) or size.largest == 0:
            continue
        odd = size.largest > _LARGEST_VALUE
        if median is not None and size.is_weight:
            odd |= size.rms > median * (_TOO_LARGE_EMBEDDING if name in embeddings else _TOO_LARGE)
            # Some architectures begin with tiny embeddings, and an adapter may have learned next to nothing yet.
            odd |= name not in embeddings and name not in adapters and size.rms < median * _TOO_SMALL
        if odd:
            wild.append(name)
    return wild


def _tensors_finding(
    kind: str, names: Sequence[str], total: int, what: str, remedy: str, severity: FindingSeverity = "error"
) -> Finding | None:
    if not names:
        return None
    examples: list[int | str] = [*names[:EXAMPLES]]
    verb = "holds" if len(names) == 1 else "hold"
    message = f"{len(names):,} of {total:,} tensors {verb} {what}: {listed(examples, len(names))}. {remedy}"
    return Finding(kind, len(names), total, examples, message, severity)
