"""Records the votes in which a process takes part, and compares them with those of the other ranks."""

from __future__ import annotations

from io import FileIO
from pathlib import Path
from typing import Any

import torch

from self_healing.ranks import votes


ANY = "any"


class RecordedVotes:
    """
    Notes the question of every vote of this process, from here on to its end.

    That ranks are in two votes at one time is noticed by the votes themselves. What is compared here is the sequence
    as a whole: a vote that a rank has taken part in alone, after all others.
    """

    def __init__(self) -> None:
        self.questions: list[str] = []
        self._last: FileIO | None = None
        self._cast = votes._cast
        votes._cast = self._recorded  # type: ignore[assignment]

    def keep_last_in(self, path: Path) -> None:
        """Has a file hold the last of them, also when the process is killed."""
        self._last = FileIO(path, "w")

    def _recorded(self, question: str, ballot: torch.Tensor, ranks: int) -> list[float]:
        # One that tells of an exception takes part in whatever vote the others are in.
        tells = bool(ballot[votes._RAISED])
        self.questions.append(ANY if tells else question)
        if self._last is not None:
            self._last.seek(0)
            self._last.write(f"vote {len(self.questions)}: {question}".encode().ljust(200))
        return self._cast(question, ballot, ranks)

    def compare(self) -> None:
        """Compares them with those of all other ranks, at the end of each."""
        of_all: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_all, self.questions)
        for rank, questions in enumerate(of_all):
            for number, (mine, theirs) in enumerate(zip(self.questions, questions, strict=False)):
                same = mine == theirs or ANY in (mine, theirs)
                assert same, f"vote {number}: {mine!r} here, {theirs!r} on rank {rank}"
            count = len(self.questions), len(questions)
            assert count[0] == count[1], f"{count[0]} votes here, {count[1]} on rank {rank}"
