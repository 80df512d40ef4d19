"""`CallShape`: the size of one model call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


Kind = Literal["train", "forward", "generate"]


@dataclass(frozen=True, slots=True)
class CallShape:
    """
    The size of one model call.

    Args:
        kind (`"train"`, `"forward"` or `"generate"`):
            With or without gradients, or generation.
        rows (`int`):
            Rows, B; of a flattened batch its tokens.
        length (`int`):
            Padded length, T, in tokens (of generation: with what may be generated); 1 for a flattened batch.
    """

    kind: Kind
    rows: int
    length: int

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{self.rows} tokens" if self.length == 1 else f"{rows} x {self.length}"
