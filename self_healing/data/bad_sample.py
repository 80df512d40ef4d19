"""One sample that cannot be used, as it is journalled and written down."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..failures.recipes import text_of
from .problems import Problem
from .sample_names import SampleName, describe_name


PREVIEW_LENGTH = 200


@dataclass(frozen=True, slots=True)
class BadSample:
    """One sample that cannot be used."""

    problem: str
    error_type: str
    error: str
    raised_at: str | None = None
    dataset_index: int | None = None
    shard: int | None = None
    stream_ordinal: int | None = None
    stage: int | None = None
    preview: str | None = None
    attempts: int = 2
    replaced_by: int | None = None
    worker: int | None = None
    text_hash: str | None = None

    @classmethod
    def with_problem(cls, problem: Problem, **fields: Any) -> BadSample:
        """A sample that raises nothing and cannot be trained on."""
        return cls(problem.name, "", problem.text, **fields)

    @classmethod
    def that_raised(cls, problem: str, error: BaseException, **fields: Any) -> BadSample:
        """A sample that raised, with type, message and place of the exception."""
        trace = traceback.extract_tb(error.__traceback__)
        raised_at = f"{trace[-1].filename}:{trace[-1].lineno}" if trace else None
        return cls(problem, type(error).__name__, text_of(error)[:500], raised_at, **fields)

    @property
    def name(self) -> SampleName:
        """Name it is known by."""
        if self.dataset_index is not None:
            return self.dataset_index
        if self.stream_ordinal is None:
            # Unknown where it is: told from others by what it looks like.
            return f"?:{self.text_hash or content_name(self.preview, self.error)}"
        stage = "" if self.stage is None else f"@{self.stage}"
        return f"{self.shard}:{self.stream_ordinal}{stage}"

    @property
    def why(self) -> str:
        """Reason it cannot be used, in a line."""
        return ": ".join(part for part in (self.error_type, self.error) if part)

    def without_text(self) -> BadSample:
        """Leaves out its text, and that of what was raised, which may quote it."""
        if self.text_hash is not None:
            return self
        # Without a type, the text is our own.
        error = "" if self.error_type else self.error
        return replace(self, preview=None, error=error, text_hash=content_name(self.preview, self.error))

    def __str__(self) -> str:
        return f"{describe_name(self.name)} ({self.why[:PREVIEW_LENGTH]})"


def content_name(*parts: str | None) -> str:
    """Hashes what is known of something to a short name."""
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:12]


def preview_of(sample: Any) -> str | None:
    """Shows the first characters of a sample's text, or of its `repr`."""
    try:
        if isinstance(sample, Mapping):
            for key in ("text", "prompt", "messages", "content", "question", "instruction", "completion"):
                if key in sample:
                    return str(sample[key])[:PREVIEW_LENGTH]
        return repr(sample)[:PREVIEW_LENGTH]
    except Exception:
        return None
