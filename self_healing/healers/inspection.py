"""Looks at data and weights before training, or when a ladder asks for it."""

from __future__ import annotations

import contextlib
import hashlib
import math
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from ..system.random_state import RandomState


FindingSeverity = Literal["error", "warning"]

# Rows or tensors that are named in a finding.
EXAMPLES = 5


# ---- data: checks of training data before the first step ----


# What TRL and transformers call the columns that a model reads, and those they are made from.
_TOKEN_COLUMNS = ("input_ids", "prompt_ids", "completion_ids", "chosen_ids", "rejected_ids")
_TEXT_COLUMNS = ("text", "prompt", "completion", "chosen", "rejected", "messages", "conversations")
_MASK_COLUMNS = ("completion_mask", "assistant_masks")
_IGNORED_LABEL = -100
# Below one row in a hundred, repeats are what large collections have anyway.
_DUPLICATES_WORTH_SAYING = 0.01


def vocabulary_of(model: Any) -> int | None:
    """Returns how many rows the embedding of a model has, or `None` for a model that has none."""
    try:
        embeddings = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    # Patches of images have no vocabulary; an adapter around the embedding keeps the original inside.
    for module in (embeddings, getattr(embeddings, "base_layer", None)):
        size = getattr(module, "num_embeddings", None)
        if isinstance(size, int) and size > 0:
            return size
    return None


def check_data_quality(
    dataset: Any, vocabulary: int | None = None, max_length: int | None = None, max_rows: int = 10_000
) -> Inspection:
    """
    Reads rows of a dataset and names those that cannot be trained on. The global random states stay as they are.

    A map-style dataset with more than `max_rows` rows is sampled, one row out of each of `max_rows` equal stretches;
    of a stream the first rows are read, from an iterator of its own. After half a minute the check ends with what it
    has seen, which is then spread over the whole dataset, too.

    Args:
        dataset (`Any`):
            A `datasets.Dataset`, a torch dataset with a length, a list of rows, or a stream of rows. Rows that are
            not dictionaries are checked for what does not need names.
        vocabulary (`int`, *optional*):
            Rows of the model's embedding: ids from here on do not exist. Without it ids are not checked.
        max_length (`int`, *optional*):
            Where the collator cuts rows off at the end: what is left must still have labels.
        max_rows (`int`, *optional*, defaults to 10000):
            How many rows to read at most; of a stream 1000 at most.

    Returns:
        [`Inspection`]: Findings with the indices of rows in `dataset`. Repeated rows are reported from one row
        in a hundred on.

    Raises:
        TypeError: If there is no way to read rows from `dataset`.
        ValueError: If a number is less than 1.
    """
    for name, number in (("vocabulary", vocabulary), ("max_length", max_length), ("max_rows", max_rows)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}; please give a number of at least 1.")
    scan = _DataScan(vocabulary, max_length)
    # Asking an idle GPU for its state would start it.
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = RandomState.capture(torch.device("cuda" if on_gpu else "cpu"))
    try:
        for row, content in read_rows(dataset, max_rows):
            scan.look(row, content)
    finally:
        states.restore()
    return Inspection(scan.findings(), scan.looked_at, "rows")


@dataclass(slots=True)
class _DataScan:
    """Rows found so far, by what is wrong with them."""

    vocabulary: int | None
    max_length: int | None
    looked_at: int = 0
    rows: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    # The ids, columns or errors that are wrong in them.
    details: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    digests: set[bytes] = field(default_factory=set)

    def look(self, row: int, content: Any) -> None:
        self.looked_at += 1
        for kind, details in self._wrong_with(content):
            self.rows[kind].append(row)
            self.details[kind].update(dict.fromkeys(details))

    def _wrong_with(self, content: Any) -> Iterator[tuple[str, Iterable[str]]]:
        if isinstance(content, Unreadable):
            yield "unreadable_rows", [f"{type(content.error).__name__}: {' '.join(str(content.error).split())[:200]}"]
            return
        columns = columns_of(content)
        digest = digest_of(columns)
        if digest in self.digests:
            yield "duplicates", ()
        elif digest is not None:
            self.digests.add(digest)
        if bad := [f'"{name}"' for name, value in columns.items() if not is_finite(value)]:
            yield "nonfinite_floats", bad
        if not isinstance(content, Mapping):
            return
        if _is_empty(columns):
            yield "empty_rows", ()
        elif (trained := _trained(columns, self.max_length)) is not None and not trained.any():
            yield "all_labels_masked", ()
        if outside := self._outside(columns):
            yield "ids_out_of_vocabulary", map(str, sorted(outside))

    def _outside(self, columns: Mapping[str, Any]) -> set[int]:
        """Token ids of a row that the model has no embedding for."""
        if self.vocabulary is None:
            return set()
        ids = [flatten(value) for name, value in columns.items() if name.endswith(_TOKEN_COLUMNS)]
        labels = flatten(columns.get("labels"))
        # A single number is a class or a score, and without tokens labels are classes as well.
        if ids and labels.size > 1:
            ids.append(labels[labels != _IGNORED_LABEL])
        whole = [array for array in ids if array.dtype.kind in "iu"]
        return {int(id_) for array in whole for id_ in array[(array < 0) | (array >= self.vocabulary)]}

    def findings(self) -> list[Finding]:
        if len(self.rows["duplicates"]) < _DUPLICATES_WORTH_SAYING * self.looked_at:
            self.rows["duplicates"].clear()
        found = [
            _finding(kind, sorted(rows), self.looked_at, "rows", list(self.details[kind]))
            for kind, rows in self.rows.items()
            if rows
        ]
        return sorted(found, key=lambda finding: finding.severity != "error")


def _is_empty(columns: Mapping[str, Any]) -> bool:
    tokens = [columns[name] for name in _TOKEN_COLUMNS if columns.get(name) is not None]
    if tokens:
        ids, labels = columns.get("input_ids"), columns.get("labels")
        # Each token is predicted from those before it, so the end-of-text token alone predicts nothing.
        alone = isinstance(ids, np.ndarray) and isinstance(labels, np.ndarray) and ids.shape == labels.shape == (1,)
        return alone or any(flatten(value).size == 0 for value in tokens)
    texts = [columns[name] for name in _TEXT_COLUMNS if name in columns]
    given = [text for text in texts if text is not None]
    blank = (not (text.strip() if isinstance(text, str) else text) for text in given if isinstance(text, (str, list)))
    # Columns that only some rows use are None in the others.
    return any(blank) or (bool(texts) and not given)


def _trained(columns: Mapping[str, Any], max_length: int | None) -> np.ndarray | None:
    """Mask of the first tokens of a row that count in the loss, of shape (T); `None` if the row does not say."""
    labels = columns.get("labels")
    if labels is not None:
        # A single number is a class or a score.
        per_token = isinstance(labels, list) or (isinstance(labels, np.ndarray) and labels.ndim > 0)
        flat = flatten(labels)
        return np.asarray(flat != _IGNORED_LABEL)[:max_length] if per_token and flat.size else None
    masks = [flatten(columns[name]) for name in _MASK_COLUMNS if columns.get(name) is not None]
    masks = [mask for mask in masks if mask.size]
    if masks:
        # Where a row has both, TRL trains on what both let through.
        length = min(mask.size for mask in masks)
        return np.asarray(np.logical_and.reduce([mask[:length] != 0 for mask in masks]))[:max_length]
    prompt = columns.get("prompt_ids")
    has_answer = any(columns.get(name) is not None for name in ("completion_ids", "chosen_ids", "rejected_ids"))
    if max_length is None or prompt is None or not has_answer:
        return None
    return np.asarray([flatten(prompt).size < max_length])


# ---- rows: reads rows of a dataset for a check: spread over all of it, limited in number and in time ----


_MAX_STREAMED_ROWS = 1_000
# Slow storage must not hold up a run for hours because of a check.
_TIME_LIMIT = 30.0


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a row that raised when it was read."""

    error: Exception


def read_rows(dataset: Any, max_rows: int) -> Iterator[tuple[int, Any]]:
    """Reads rows with their indices; a row that raises as [`Unreadable`]."""
    if dataset is None or isinstance(dataset, (Mapping, str)):
        raise TypeError(
            f"Rows cannot be read from a {type(dataset).__name__}; please give one dataset, such as "
            'dataset["train"], or a list of rows.'
        )
    # Abstract torch datasets have a `__getitem__` that only raises.
    streamed = isinstance(dataset, torch.utils.data.IterableDataset)
    if not streamed and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return _indexed_rows(dataset, max_rows)
    if hasattr(dataset, "__next__"):
        raise TypeError(
            f"{type(dataset).__name__} is an iterator: the rows read from it would be missing from training. Please "
            "give a dataset that iter() can read again from its beginning."
        )
    if not hasattr(dataset, "__iter__"):
        raise TypeError(f"{type(dataset).__name__} has neither a length and indices, nor can it be iterated over.")
    return _streamed_rows(dataset, min(max_rows, _MAX_STREAMED_ROWS))


def _indexed_rows(dataset: Any, max_rows: int) -> Iterator[tuple[int, Any]]:
    size, began = len(dataset), time.monotonic()
    indices = [part * size // max_rows for part in range(max_rows)] if size > max_rows else list(range(size))
    # In several sweeps, so that what was seen is from everywhere if time runs out.
    for index in [index for sweep in range(8) for index in indices[sweep::8]]:
        try:
            row = dataset[index]
        except Exception as error:
            row = Unreadable(error)
        yield index, row
        if time.monotonic() - began > _TIME_LIMIT:
            return


def _streamed_rows(dataset: Any, max_rows: int) -> Iterator[tuple[int, Any]]:
    began = time.monotonic()
    iterator = iter(dataset)
    try:
        for index in range(max_rows):
            yield index, next(iterator)
            if time.monotonic() - began > _TIME_LIMIT:
                return
    except StopIteration:
        return
    except Exception as error:
        # A stream that has raised does not go on.
        yield index, Unreadable(error)
    finally:
        # Not left to the garbage collector: files are open in it, and random states may be drawn from.
        getattr(iterator, "close", lambda: None)()


# ---- columns: columns of a row as numpy arrays, text and plain structure: what checks read, flatten and hash ----


def columns_of(content: Any) -> dict[str, Any]:
    """Plain values of a row by column."""
    if isinstance(content, Mapping):
        return {str(name): _plain(value) for name, value in content.items()}
    return {"the row": _plain(content)}


def _plain(value: Any) -> Any:
    """Converts numbers to numpy arrays and structure to lists and dictionaries; leaves the rest as it is."""
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(RuntimeError, TypeError):
            # numpy has neither bfloat16 nor float8.
            small = value.dtype.is_floating_point and value.dtype.itemsize < 4
            return (value.float() if small else value).detach().cpu().numpy()
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (int, float, np.number)):
            with contextlib.suppress(ValueError, OverflowError):
                array = np.asarray(value)
                if array.dtype.kind in "biuf":
                    return array
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return value


def _arrays(value: Any) -> Iterator[np.ndarray]:
    """Yields every array of numbers in a plain value."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            yield value
    elif isinstance(value, (int, float, np.number)):
        yield np.asarray(value)
    elif isinstance(value, list):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)


def flatten(value: Any) -> np.ndarray:
    """All numbers of a plain value, of shape (N)."""
    arrays = [array.reshape(-1) for array in _arrays(value)]
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


def is_finite(value: Any) -> bool:
    """Whether a plain value holds neither NaN nor Inf."""
    return all(array.dtype.kind not in "fc" or bool(np.isfinite(array).all()) for array in _arrays(value))


def digest_of(columns: Mapping[str, Any]) -> bytes | None:
    """Hashes the content of a row; `None` if it holds what cannot be pickled."""
    try:
        content = repr(_content(dict(columns))).encode("utf-8", "surrogatepass")
    except Exception:
        return None
    return hashlib.blake2b(content, digest_size=16).digest()


def _content(value: Any) -> Any:
    """What has the same `repr` wherever the content is the same."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, list):
        return [_content(item) for item in value]
    if isinstance(value, dict):
        return {name: _content(value[name]) for name in sorted(value)}
    # Images and the like: equal content may look different here, but never the other way round.
    return value if isinstance(value, str) else pickle.dumps(value)


# ---- findings: findings of a check, and how they are worded ----


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One kind of defect, and the rows or tensors that have it.

    Args:
        kind (`str`):
            `"empty_rows"`, `"all_labels_masked"`, `"ids_out_of_vocabulary"`, `"nonfinite_floats"`,
            `"duplicates"` or `"unreadable_rows"` in data; `"nonfinite_tensors"`, `"all_zero_tensors"` or
            `"wildly_scaled_tensors"` in a model.
        count (`int`):
            How many rows or tensors.
        total (`int`):
            Out of how many that were looked at.
        examples (`list[int | str]`):
            The first five: indices of rows, or names of tensors.
        message (`str`):
            For a person: what it is and what to do.
        severity (`"error"` or `"warning"`):
            Whether the run goes wrong with it, or only may.
    """

    kind: str
    count: int
    total: int
    examples: list[int | str]
    message: str
    severity: FindingSeverity


@dataclass(frozen=True, slots=True)
class Inspection:
    """
    Findings of one check of data or of a model.

    Args:
        findings (`list[Finding]`):
            Errors first.
        looked_at (`int`):
            How many rows or tensors were looked at.
        unit (`"rows"` or `"tensors"`, *optional*, defaults to `"rows"`):
            Which of the two.
    """

    findings: list[Finding] = field(default_factory=list)
    looked_at: int = 0
    unit: Literal["rows", "tensors"] = "rows"

    @property
    def clean(self) -> bool:
        """Whether there are no findings, not even warnings."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        return {"clean": self.clean, **asdict(self)}

    def __str__(self) -> str:
        unit = self.unit.removesuffix("s") if self.looked_at == 1 else self.unit
        looked = f"{self.looked_at:,} {unit} looked at"
        if self.clean:
            return f"{looked}: nothing wrong."
        return "\n".join([f"{looked}:", *(f"  {found.severity}: {found.message}" for found in self.findings)])


# By kind of finding: what the rows or tensors have, what to do, and whether the run goes wrong with it or only may.
_FINDINGS: dict[str, tuple[str, str, FindingSeverity]] = {
    "empty_rows": (
        "no text to learn from (no tokens, a single one, or only white space)",
        "Remove them before training, e.g. with dataset.filter(...).",
        "error",
    ),
    "all_labels_masked": (
        "no label to learn from: all are masked",
        "They add nothing to the loss, and a batch of nothing else makes it NaN: check the chat template and the "
        "masks, and whether a prompt alone is as long as max_length.",
        "error",
    ),
    "ids_out_of_vocabulary": (
        "token ids outside the model's vocabulary",
        "On a GPU that is a device-side assert: use the model's own tokenizer, or call "
        "model.resize_token_embeddings(len(tokenizer)).",
        "error",
    ),
    "nonfinite_floats": (
        "NaN or Inf",
        "If the training reads that, the loss becomes NaN: repair the values or remove the rows.",
        "error",
    ),
    "unreadable_rows": ("content that cannot be loaded", "Repair the files, or remove the rows.", "error"),
    "nonfinite_tensors": (
        "NaN or Inf",
        "Every loss will be NaN: load the weights again from a whole checkpoint, or check how they begin.",
        "error",
    ),
    "duplicates": (
        "exactly the content of an earlier row",
        "If they are not repeated on purpose, remove the repeats, or the model learns them by heart.",
        "warning",
    ),
    "all_zero_tensors": (
        "nothing but zeros",
        "Unless that is on purpose, they were missing from the checkpoint or never initialised: look for missing keys "
        "in what from_pretrained said.",
        "warning",
    ),
    "wildly_scaled_tensors": (
        "values of quite another size than the rest of the model",
        "Check how they were initialised, merged or converted, and whether the file is damaged.",
        "warning",
    ),
}


def _finding(kind: str, found: Sequence[int | str], total: int, unit: str, details: Sequence[str] = ()) -> Finding:
    what, remedy, severity = _FINDINGS[kind]
    has = "has" if len(found) == 1 else "have"
    more = f" ({_listed(details)})" if details else ""
    message = f"{len(found):,} of {total:,} {unit} {has} {what}{more}: {_listed(found)}. {remedy}"
    return Finding(kind, len(found), total, list(found[:EXAMPLES]), message, severity)


def _listed(examples: Sequence[object]) -> str:
    named = ", ".join(str(example) for example in examples[:EXAMPLES])
    return named if len(examples) <= EXAMPLES else f"{named} and {len(examples) - EXAMPLES:,} more"


# ---- model: checks of a model's weights before the first step ----


_TOO_LARGE, _TOO_SMALL = 100.0, 1e-3
# The median of fewer says nothing about which of them is the odd one.
_FEWEST_MATRICES = 4
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
        other than those of adapters, and matrices, but for embeddings and adapters, whose root mean square is more
        than 100 times or less than a thousandth of the median of the model's.
    """
    parameters = _measured(model.named_parameters())
    buffers = _measured(model.named_buffers())
    adapters = _adapter_parameters(model, parameters)
    names: dict[str, list[str]] = {
        "nonfinite_tensors": [
            *(name for name, size in parameters.items() if not math.isfinite(size.largest)),
            *(name for name, size in buffers.items() if math.isnan(size.largest)),
        ],
        "all_zero_tensors": [
            name for name, size in parameters.items() if size.is_weight and size.largest == 0 and name not in adapters
        ],
        "wildly_scaled_tensors": _wildly_scaled(model, parameters, adapters),
    }
    total = len(parameters) + len(buffers)
    findings = [
        _finding(kind, found, total if kind == "nonfinite_tensors" else len(parameters), "tensors")
        for kind, found in names.items()
        if found
    ]
    return Inspection(sorted(findings, key=lambda finding: finding.severity != "error"), total, "tensors")


@dataclass(frozen=True, slots=True)
class _Size:
    """Magnitude of one tensor: its largest absolute value and its root mean square."""

    largest: float
    rms: float
    is_weight: bool


def _measured(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, _Size]:
    return {name: size for name, tensor in named if (size := _size(name, tensor)) is not None}


def _size(name: str, tensor: torch.Tensor) -> _Size | None:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    # One byte per value: the scale that belongs to it is elsewhere.
    if local.is_meta or not local.is_floating_point() or local.dtype.itemsize < 2 or local.numel() == 0:
        return None
    try:
        # The square root of a sum of float16 squares need not be a float16.
        dtype = torch.float32 if local.dtype.itemsize < 4 else local.dtype
        largest, norm = (float(torch.linalg.vector_norm(local, order, dtype=dtype)) for order in (math.inf, 2))
    except (RuntimeError, TypeError):  # quantised, behind the face of a floating tensor
        return None
    kind = name.rpartition(".")[2].lower()
    is_weight = sum(extent > 1 for extent in tensor.shape) >= 2 and not any(part in kind for part in _NOT_A_WEIGHT)
    return _Size(largest, norm / math.sqrt(local.numel()), is_weight)


def _adapter_parameters(model: torch.nn.Module, parameters: Mapping[str, _Size]) -> set[str]:
    """Adapters begin as a zero product, of one factor that is zero, and may have learned next to nothing yet."""
    layers = {layer for module in model.modules() for layer in getattr(module, "adapter_layer_names", ())}
    return {name for name in parameters if any(part in layers or part.startswith("lora_") for part in name.split("."))}


def _wildly_scaled(model: torch.nn.Module, parameters: Mapping[str, _Size], adapters: set[str]) -> list[str]:
    # `nn.Embedding` begins at 1, a linear layer of width 4096 beside it at 0.009.
    embeddings = {
        f"{name}.weight".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    compared = {
        name: size.rms
        for name, size in parameters.items()
        if size.is_weight and name not in embeddings | adapters and 0 < size.rms < math.inf
    }
    if len(compared) < _FEWEST_MATRICES:
        return []
    median = statistics.median(compared.values())
    return [name for name, rms in compared.items() if not median * _TOO_SMALL <= rms <= median * _TOO_LARGE]
