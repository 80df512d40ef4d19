"""Agreement of all ranks on the chunks of a call that they make together."""

from __future__ import annotations

import torch

from ... import consensus


class Lockstep:
    """
    Has all ranks call a sharded model equally often: each call gathers its weights from all of them.

    Args:
        device (`torch.device`):
            Where votes are counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def chunks(self, wanted: int, most: int) -> int:
        """
        Gives the number of chunks that every rank splits its call into.

        Args:
            wanted (`int`):
                How many it takes for the chunks of this rank to fit.
            most (`int`):
                How many this rank could make; 1 where it cannot split.
        """
        most_wanted, fewest = consensus.largest("the chunks of a call", [wanted, -most], self._device)
        return round(min(most_wanted, -fewest))

    def any_rank(self, flag: bool) -> bool:
        """Whether a flag is set on any rank."""
        return consensus.any_rank("a part of a call differs", flag, self._device)
