"""`News`: what one rank of several learns by itself, and all of them have to know."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..ranks import votes
from ..system import processes
from ..system.files import jsonable


# The vote in which it is told.
NEWS = "news of the ranks"

Record = Mapping[str, Any]


class News:
    """
    Tells all ranks what one of them has learned: rows and samples that are not to be used, sizes that do not fit,
    incidents of its own.
    """

    def __init__(self) -> None:
        self._untold: list[tuple[str, Callable[[], Record]]] = []
        self._takers: dict[str, Callable[[int, Record], None]] = {}

    @property
    def waiting(self) -> bool:
        """Whether this rank has something to tell."""
        return bool(self._untold)

    def tell(self, subject: str, record: Callable[[], Record]) -> None:
        """Tells the other ranks, when all of them meet the next time. Does nothing in a job of one process."""
        if processes.world_size() > 1:
            self._untold.append((subject, record))

    def on(self, subject: str, take: Callable[[int, Record], None]) -> None:
        """Has what other ranks tell taken in."""
        self._takers[subject] = take

    def exchange(self, device: torch.device) -> None:
        """Tells, and takes in what the others tell; every rank has to come."""
        if processes.world_size() == 1:
            return
        # Told from other threads as well.
        told = self._untold[:]
        content = json.dumps([[subject, jsonable(record())] for subject, record in told])
        of_all = votes.from_every_rank(NEWS, content, device)
        del self._untold[: len(told)]
        own = torch.distributed.get_rank()
        for rank, text in enumerate(of_all):
            for subject, record in json.loads(text) if rank != own else []:
                if subject in self._takers:
                    self._takers[subject](rank, record)
