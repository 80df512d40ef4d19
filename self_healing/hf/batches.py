"""Rows and shapes of prepared batches."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate.utils.operations import recursively_apply
from transformers import Trainer

from .objective import Objective
from .patching import Replacements


# ---- batch layout ----


Batch = Mapping[str, Any]
# The entry that says how many rows a batch has is the first of these that it has.
_LEADING = ("input_ids", "completion_ids", "prompt_ids", "inputs_embeds", "pixel_values", "input_features")


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of a prepared batch that can be left out one by one."""

    kind: Literal["rows", "pairs", "segments"]
    rows: int
    starts: tuple[int, ...] = ()

    def alone(self, row: int) -> list[int]:
        """
        Names one row, to be selected without the others: twice where the batch has several, because statistics over a
        batch (batch norm) need more than one; once where it has one, for which there is memory.
        """
        return [row] * min(self.rows, 2)


def layout_of(batch: Any, objective: Objective) -> Layout | None:
    """Finds the rows of a prepared batch; `None` where they cannot be told apart (some vision batches)."""
    if not isinstance(batch, Mapping):
        return None
    sizes = {key: each.size(0) for key, each in batch.items() if isinstance(each, torch.Tensor) and each.dim() > 0}
    if not sizes:
        return None
    total = sizes[next(filter(sizes.__contains__, _LEADING), next(iter(sizes)))]
    allowed = {total}
    if objective.paired:
        if total % 2:
            return None
        allowed.add(total // 2)
    # Images are laid out by patch or tile: their rows belong to no single row of text.
    if any(key.startswith(("pixel", "image", "spatial")) and size not in allowed for key, size in sizes.items()):
        return None
    if objective.paired:
        return Layout("pairs", total // 2)
    return segments_of(batch) or Layout("rows", total)


def segments_of(batch: Batch) -> Layout | None:
    """Finds the sequences of a flattened batch, which begin where the positions do; `None` if it is not one."""
    position_ids = batch.get("position_ids")
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2 or position_ids.size(0) != 1:
        return None
    if batch.get("attention_mask") is not None:
        return None
    starts = (position_ids[0] == 0).nonzero().flatten().tolist()
    if not starts or starts[0] != 0:
        return None
    return Layout("segments", len(starts), (*starts, position_ids.size(-1)))


def select_rows(batch: Batch, layout: Layout, keep: Sequence[int]) -> dict[str, Any]:
    """Returns a batch with only some of its rows, in their order; nothing is trimmed."""
    if layout.kind == "segments":
        return _select_segments(batch, layout, keep)
    by_size = {layout.rows: list(keep)}
    if layout.kind == "pairs":
        by_size[2 * layout.rows] = [*keep, *(layout.rows + row for row in keep)]
    return {key: _select(value, by_size) for key, value in batch.items()}


def _select(value: Any, by_size: dict[int, list[int]]) -> Any:
    if isinstance(value, torch.Tensor):
        rows = by_size.get(value.size(0)) if value.dim() > 0 else None
        return value if rows is None else value[torch.tensor(rows, dtype=torch.long, device=value.device)]
    if isinstance(value, list):
        rows = by_size.get(len(value))
        return value if rows is None else [value[row] for row in rows]
    if isinstance(value, Mapping):
        return {key: _select(inner, by_size) for key, inner in value.items()}
    return value


def _select_segments(batch: Batch, layout: Layout, keep: Sequence[int]) -> dict[str, Any]:
    length = layout.starts[-1]
    spans = [range(layout.starts[row], layout.starts[row + 1]) for row in keep]
    tokens = [token for span in spans for token in span]
    selected: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.size(1) == length:
            selected[key] = value[:, torch.tensor(tokens, dtype=torch.long, device=value.device)]
        else:
            selected[key] = value
    # Boundaries that TRL's padding-free collator hands to the attention kernels.
    lengths = torch.tensor([len(span) for span in spans], dtype=torch.int32)
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if isinstance(batch.get(key), torch.Tensor):
            boundaries = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
            selected[key] = boundaries.to(batch[key].device, batch[key].dtype)
    for key in ("max_length_q", "max_length_k"):
        if key in batch:
            selected[key] = int(lengths.max())
    if isinstance(batch.get("seq_idx"), torch.Tensor):
        indices = torch.repeat_interleave(torch.arange(len(spans), dtype=torch.int32), lengths)
        selected["seq_idx"] = indices[None].to(batch["seq_idx"].device, batch["seq_idx"].dtype)
    return selected


def own_token_count(batch: Batch, layout: Layout, rows: Sequence[int]) -> torch.Tensor | None:
    """Counts the tokens that rows add to the count a generated batch carries (0-d); `None` if it carries none."""
    mask: Any = batch.get("completion_mask")
    if "num_items_in_batch" not in batch or not isinstance(mask, torch.Tensor):
        return None
    if isinstance(batch.get("tool_mask"), torch.Tensor):
        mask = mask * batch["tool_mask"]
    kept: torch.Tensor = select_rows({"mask": mask}, layout, rows)["mask"]
    return kept.sum()


# Keys whose values are the same for every row that is padded alike, or that only say where rows begin.
_NOT_CONTENT = frozenset(
    {"attention_mask", "position_ids", "seq_idx", "use_cache", "num_items_in_batch", "advantages"}
)


def content_hash(batch: Batch, layout: Layout, row: int) -> str:
    """Computes the SHA-256 of one row."""
    alone = select_rows(batch, layout, [row])
    digest = hashlib.sha256()
    for key in sorted(alone):
        value = alone[key]
        if key in _NOT_CONTENT or key.endswith(("_mask", "_logps")) or not isinstance(value, torch.Tensor):
            continue
        if value.dim() == 0 or (layout.kind != "segments" and value.size(0) not in (1, 2)):
            continue
        mask = alone.get(_mask_for(key))
        if isinstance(mask, torch.Tensor) and mask.shape == value.shape:
            value = value[mask.bool()]
        digest.update(f"{key}:{value.dtype}:".encode())
        digest.update(value.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _mask_for(key: str) -> str:
    if key.endswith("_ids") and key != "input_ids":
        stem = key.removesuffix("input_ids") if key.endswith("input_ids") else key.removesuffix("ids")
        return f"{stem}attention_mask" if key.endswith("input_ids") else f"{stem}mask"
    return "attention_mask"


def row_text(batch: Batch, layout: Layout, row: int, tokenizer: Any, keys: Sequence[str]) -> str | None:
    """Decodes one row for a person, from the first of `keys` the batch has; `None` where that cannot be done."""
    decode = getattr(tokenizer, "decode", None)
    if decode is None:
        return None
    alone = select_rows(batch, layout, [row])
    for key in keys:
        ids = alone.get(key)
        if isinstance(ids, torch.Tensor) and not ids.is_floating_point():
            mask = alone.get(_mask_for(key))
            ids, mask = ids[0], mask[0] if isinstance(mask, torch.Tensor) else None
            kept = ids[mask.bool()] if mask is not None and mask.shape == ids.shape else ids
            try:
                return str(decode(kept.tolist(), skip_special_tokens=False))
            except Exception:
                # An id that no tokenizer has.
                return str(kept.tolist())
    return None


# ---- trained tokens: which tokens of a batch count in its loss ----


def trained_tokens(batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """
    Gives the token ids of a prepared batch, which of them count in the loss, and which are no padding, each of shape
    (B, T); `None` where the batch does not say.
    """
    if not isinstance(batch, Mapping):
        return None
    ids, labels, trained = (batch.get(key) for key in ("input_ids", "labels", "completion_mask"))
    present = batch.get("attention_mask")
    if isinstance(labels, torch.Tensor):
        trained = labels != -100
    elif batch.get("completion_ids") is not None:
        prompt = batch["prompt_mask"]
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        present = torch.cat([prompt, batch["completion_mask"]], dim=1)
        trained = torch.cat([torch.zeros_like(prompt), batch["completion_mask"] * batch.get("tool_mask", 1)], dim=1)
    if not isinstance(ids, torch.Tensor) or not isinstance(trained, torch.Tensor) or ids.shape != trained.shape:
        return None
    if not isinstance(present, torch.Tensor) or present.shape != ids.shape:
        # Rows laid end to end have no padding.
        present = torch.ones_like(ids)
    return ids, trained.bool() & present.bool(), present.bool()


# ---- call shape: the size of one model call ----


Kind = Literal["train", "forward", "generate"]


@dataclass(frozen=True, slots=True)
class CallShape:
    """The size of one model call."""

    kind: Kind
    rows: int
    length: int

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{self.rows} tokens" if self.length == 1 else f"{rows} x {self.length}"


# ---- preparing ----


def only_moves(prepare: Any) -> bool:
    """Whether what prepares the micro-batches of a trainer draws and counts nothing, and may come twice."""
    return getattr(prepare, "__func__", None) is Trainer._prepare_inputs


@contextlib.contextmanager
def preparing(trainer: Any, change: Callable[[Any], Any], prepared: Any = None) -> Iterator[None]:
    """Passes what `_prepare_inputs` of a trainer returns through `change`, once."""
    attributes, original, changes = vars(trainer), trainer._prepare_inputs, [change]
    own = {"_prepare_inputs": original} if "_prepare_inputs" in attributes else {}

    def prepare(*args: Any, **kwargs: Any) -> Any:
        if not changes:
            return original(*args, **kwargs)
        batch = original(*args, **kwargs) if prepared is None else copy.copy(prepared)
        return changes.pop()(batch)

    trainer._prepare_inputs = prepare
    try:
        yield
    finally:
        del trainer._prepare_inputs
        attributes.update(own)


# ---- uneven rows ----


@contextlib.contextmanager
def gathering_uneven_rows(accelerator: Any) -> Iterator[None]:
    """
    Lets a loss gather what it has computed for each row, such as the rewards of DPO, on ranks of which one has fewer
    rows.
    """
    with Replacements() as replaced:
        replaced.wrap(accelerator, "gather", _gather)
        yield


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
