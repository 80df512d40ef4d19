"""Ranks that a launcher starts again meet each other, and none of those before them, whose words the store keeps."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed

from self_healing.ranks.votes import _meet


HASH_STORE: Any = torch.distributed.HashStore


class Meeting:
    """Ranks in threads, at one place of a store that a launcher keeps from one start to the next."""

    def __init__(self) -> None:
        self.store, self._threads = HASH_STORE(), ThreadPoolExecutor(4)

    def come(self, rank: int, nan_patience: int = 3, seconds: float = 60.0) -> Future[str]:
        return self._threads.submit(_meet, self.store, "here", {"nan_patience": nan_patience}, seconds, rank, 2)


def test_ranks_that_are_started_again_meet_each_other_and_none_of_those_before_them() -> None:
    meeting = Meeting()
    before = [meeting.come(rank) for rank in (0, 1)]
    (first,) = {each.result(60) for each in before}
    early = meeting.come(1)
    with pytest.raises(TimeoutError):
        # What has come to the place is of the ranks before these.
        early.result(0.5)
    late = meeting.come(0)
    assert early.result(60) == late.result(60) != first
