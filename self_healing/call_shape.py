"""`CallShape`: the size of one model call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
