"""`DemoSize`: how large model, text and run of the demo are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSize:
    """
    Size of model, text and run. With the defaults, three runs take two CPU cores about a minute.

    Args:
        steps (`int`, *optional*, defaults to 120):
            Optimizer steps, at least 8; the training set is as large as they need for one epoch.
        rows (`int`, *optional*, defaults to 8):
            Rows of a micro-batch. A step has two micro-batches.
        tokens (`int`, *optional*, defaults to 96):
            Longest row, in tokens.
        vocabulary (`int`, *optional*, defaults to 1024):
            Size of the tokenizer's vocabulary, at least 300.
        width (`int`, *optional*, defaults to 128):
            Size of the hidden states; a multiple of 8.
        layers (`int`, *optional*, defaults to 2):
            Transformer blocks.
        held_out (`int`, *optional*, defaults to 128):
            Rows the loss is compared on at the end.

    Raises:
        ValueError: If there are too few steps for three faults.
    """

    steps: int = 120
    rows: int = 8
    tokens: int = 96
    vocabulary: int = 1024
    width: int = 128
    layers: int = 2
    held_out: int = 128

    def __post_init__(self) -> None:
        if self.steps < 8:
            raise ValueError(f"steps is {self.steps}; please give at least 8, so that three faults have room.")

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return 2

    @property
    def training_rows(self) -> int:
        """Rows of the training set: one epoch."""
        return self.steps * self.rows * self.accumulation
