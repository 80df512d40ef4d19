"""Findings of a check, and how they are worded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


FindingSeverity = Literal["error", "warning"]

# Rows or tensors that are named in a finding.
EXAMPLES = 5


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
        """Converts it to types that JSON has."""
        return {"clean": self.clean, **asdict(self)}

    def __str__(self) -> str:
        unit = self.unit.removesuffix("s") if self.looked_at == 1 else self.unit
        looked = f"{self.looked_at:,} {unit} looked at"
        if self.clean:
            return f"{looked}: nothing wrong."
        return "\n".join([f"{looked}:", *(f"  {found.severity}: {found.message}" for found in self.findings)])


def errors_first(findings: Iterable[Finding | None]) -> list[Finding]:
    """Drops `None`, and sorts errors before warnings."""
    return sorted((each for each in findings if each is not None), key=lambda finding: finding.severity != "error")


def listed(examples: Sequence[object], count: int) -> str:
    """Joins examples, and says how many more there are."""
    named = ", ".join(str(example) for example in examples)
    return named if count <= len(examples) else f"{named} and {count - len(examples):,} more"
