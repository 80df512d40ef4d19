"""Which runs the demo has."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import HealingConfig
from .faults import DemoFault
from .size import DemoSize


PLAIN, HEALED, TWIN = "plain", "healed", "twin"


@dataclass(frozen=True, slots=True)
class Episode:
    """
    One run of the demo.

    Args:
        name (`str`):
            `"plain"` and `"healed"` meet the faults, `"twin"` does not.
        size ([`DemoSize`]):
            How much is trained.
        seed (`int`):
            Of weights and order.
        faults (`tuple[DemoFault, ...]`):
            What strikes.
        config ([`HealingConfig`]):
            Of the healing.
        output_dir (`str`):
            Where the healed run writes its journal.
    """

    name: str
    size: DemoSize
    seed: int
    faults: tuple[DemoFault, ...]
    config: HealingConfig
    output_dir: str
