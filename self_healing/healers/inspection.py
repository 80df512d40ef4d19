"""Checks of training data before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..inspection.columns import columns_of, digest_of, flatten, is_finite
from ..inspection.findings import EXAMPLES, Finding, FindingSeverity, Inspection, errors_first, listed
from ..inspection.rows import Unreadable, read_rows
from ..system.random_state import RandomState


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
    with _random_states_kept():
        for row, content in read_rows(dataset, max_rows):
            scan.look(row, content)
    return Inspection(errors_first(scan.findings()), scan.looked_at, "rows")


@contextmanager
def _random_states_kept() -> Iterator[None]:
    # Asking an idle GPU for its state would start it.
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = RandomState.capture(torch.device("cuda" if on_gpu else "cpu"))
    try:
        yield
    finally:
        states.restore()


@dataclass(slots=True)
class _DataScan:
    """Rows found so far, by what is wrong with them."""

    vocabulary: int | None
    max_length: int | None
    looked_at: int = 0
    empty: list[int] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    cut_off: list[int] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)
    outside_ids: set[int] = field(default_factory=set)
    nonfinite: list[int] = field(default_factory=list)
    nonfinite_columns: set[str] = field(default_factory=set)
    unreadable: dict[int, Exception] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)

    def look(self, row: int, content: Any) -> None:
        self.looked_at += 1
        if isinstance(content, Unreadable):
            self.unreadable[row] = content.error
            return
        columns = columns_of(content)
        digest = digest_of(columns)
        if digest is not None:
            self.digests[row] = digest
        bad = [name for name, value in columns.items() if not is_finite(value)]
        if bad:
            self.nonfinite.append(row)
            self.nonfinite_columns.update(bad)
        if not isinstance(content, Mapping):
            return
        if _is_empty(columns):
            self.empty.append(row)
        else:
            self._look_at_labels(row, columns)
        self._look_at_ids(row, columns)

    def _look_at_labels(self, row: int, columns: Mapping[str, Any]) -> None:
        trained = _trained(columns)
        if trained is not None and not trained.any():
            self.masked.append(row)
        elif self.max_length is not None and _is_cut_off(columns, trained, self.max_length):
            self.cut_off.append(row)

    def _look_at_ids(self, row: int, columns: Mapping[str, Any]) -> None:
        if self.vocabulary is None:
            return
        ids = [flatten(value) for name, value in columns.items() if name.endswith(_TOKEN_COLUMNS)]
        labels = flatten(columns.get("labels"))
        # A single number is a class or a score, and without tokens labels are classes as well.
        if ids and labels.size > 1:
            ids.append(labels[labels != _IGNORED_LABEL])
        outside = [id_ for array in ids if array.dtype.kind in "iu" for id_ in self._outside(array)]
        if outside:
            self.outside.append(row)
            self.outside_ids.update(outside)

    def _outside(self, ids: np.ndarray) -> list[int]:
        return [int(id_) for id_ in ids[(ids < 0) | (ids >= self.vocabulary)]]

    def findings(self) -> list[Finding | None]:
        """One for each kind of check; `None` where it found nothing."""
        repeated = self._repeated()
        if len(repeated) < _DUPLICATES_WORTH_SAYING * self.looked_at:
            repeated = []
        return [
            self._finding(
                "empty_rows",
                self.empty,
                "no text to learn from (no tokens, a single one, or only white space)",
                "Remove them before training, e.g. with dataset.filter(...).",
            ),
            self._finding("all_labels_masked", [*self.masked, *self.cut_off], *self._on_masked()),
            self._finding("ids_out_of_vocabulary", self.outside, *self._on_outside()),
            self._finding(
                "nonfinite_floats",
                self.nonfinite,
                f"NaN or Inf in {self._nonfinite_names()}",
                "If the training reads that, the loss becomes NaN: repair the values or remove the rows.",
            ),
            self._finding("unreadable_rows", [*self.unreadable], *self._on_unreadable()),
            self._finding(
                "duplicates",
                repeated,
                "exactly the content of an earlier row",
                "If they are not repeated on purpose, remove the repeats, or the model learns them by heart.",
                severity="warning",
            ),
        ]

    def _finding(
        self, kind: str, rows: list[int], what: str, remedy: str, severity: FindingSeverity = "error"
    ) -> Finding | None:
        if not rows:
            return None
        examples: list[int | str] = [*sorted(rows)[:EXAMPLES]]
        share = f"{len(rows) / self.looked_at:.2%}"
        verb, plural = ("has", "") if len(rows) == 1 else ("have", "s")
        message = (
            f"{len(rows):,} of {self.looked_at:,} rows ({share}) {verb} {what}: "
            f"row{plural} {listed(examples, len(rows))}. {remedy}"
        )
        return Finding(kind, len(rows), self.looked_at, examples, message, severity)

    def _nonfinite_names(self) -> str:
        names = [f'"{name}"' for name in sorted(self.nonfinite_columns)]
        return listed(names[:EXAMPLES], len(names))

    def _on_masked(self) -> tuple[str, str]:
        harm = "They add nothing to the loss, and a batch of nothing else makes it NaN"
        if not self.cut_off:
            return "no label to learn from (all are masked)", f"{harm}: check the chat template and the masks."
        some = f", or for {len(self.cut_off):,} of them" if self.masked else ""
        return (
            f"no label to learn from (all are masked{some} in the first {self.max_length:,} tokens)",
            f"{harm}: raise max_length, or shorten or remove the rows with long prompts.",
        )

    def _on_outside(self) -> tuple[str, str]:
        ids, vocabulary = sorted(self.outside_ids), self.vocabulary or 0
        return (
            f"token ids outside the model's 0 to {vocabulary - 1} ({listed(ids[:EXAMPLES], len(ids))})",
            "On a GPU that is a device-side assert: use the model's own tokenizer, or call "
            "model.resize_token_embeddings(len(tokenizer)).",
        )

    def _on_unreadable(self) -> tuple[str, str]:
        if not self.unreadable:
            return "", ""
        first = self.unreadable[min(self.unreadable)]
        text = " ".join(str(first).split())[:200]
        shown = f"{type(first).__name__}: {text}" if text else type(first).__name__
        return f"content that cannot be loaded ({shown})", "Repair the files, or remove the rows."

    def _repeated(self) -> list[int]:
        seen: set[bytes] = set()
        repeated = []
        for row in sorted(self.digests):
            if self.digests[row] in seen:
                repeated.append(row)
            seen.add(self.digests[row])
        return repeated


def _is_empty(columns: Mapping[str, Any]) -> bool:
    tokens = [columns[name] for name in _TOKEN_COLUMNS if columns.get(name) is not None]
    if tokens:
        ids, labels = columns.get("input_ids"), columns.get("labels")
        # Each token is predicted from those before it, so the end-of-text token alone predicts nothing.
        alone = isinstance(ids, np.ndarray) and isinstance(labels, np.ndarray) and ids.shape == labels.shape == (1,)
        return alone or any(flatten(value).size == 0 for value in tokens)
    texts = [columns[name] for name in _TEXT_COLUMNS if name in columns]
    given = [text for text in texts if text is not None]
    # Columns that only some rows use are None in the others.
    return any(_is_blank(text) for text in given) or (bool(texts) and not given)


def _is_blank(text: Any) -> bool:
    if isinstance(text, str):
        return not text.strip()
    return isinstance(text, list) and not text


def _trained(columns: Mapping[str, Any]) -> np.ndarray | None:
    """Mask of the tokens that count in the loss, of shape (T); `None` if the row does not say."""
    labels = columns.get("labels")
    if labels is not None:
        # A single number is a class or a score.
        per_token = isinstance(labels, list) or (isinstance(labels, np.ndarray) and labels.ndim > 0)
        flat = flatten(labels)
        return np.asarray(flat != _IGNORED_LABEL) if per_token and flat.size else None
    masks = [flatten(columns[name]) for name in _MASK_COLUMNS if columns.get(name) is not None]
    masks = [mask for mask in masks if mask.size]
    if not masks:
        return None
    # Where a row has both, TRL trains on what both let through.
    length = min(mask.size for mask in masks)
    return np.asarray(np.logical_and.reduce([mask[:length] != 0 for mask in masks]))


def _is_cut_off(columns: Mapping[str, Any], trained: np.ndarray | None, max_length: int) -> bool:
    if trained is not None:
        return not trained[:max_length].any()
    prompt = columns.get("prompt_ids")
    has_answer = any(columns.get(name) is not None for name in ("completion_ids", "chosen_ids", "rejected_ids"))
    return prompt is not None and has_answer and flatten(prompt).size >= max_length
