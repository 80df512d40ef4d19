"""Ranks that a launcher starts again meet each other, and none of those before them, whose words the store keeps."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed

from self_healing.config.schema import ConfigurationError
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


def test_what_ranks_before_these_were_set_to_is_not_compared_with() -> None:
    meeting = Meeting()
    for each in [meeting.come(rank) for rank in (0, 1)]:
        each.result(60)
    for each in [meeting.come(rank, nan_patience=5) for rank in (0, 1)]:
        each.result(60)
    for each in [meeting.come(0, nan_patience=5), meeting.come(1, nan_patience=6)]:
        with pytest.raises(ConfigurationError, match="nan_patience is 5 on rank 0, and another value on rank 1"):
            each.result(60)


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_does_not_come_is_named(rank: int, other: int, again: bool) -> None:
    meeting = Meeting()
    if again:
        for each in [meeting.come(each) for each in (0, 1)]:
            each.result(60)
    with pytest.raises(ConfigurationError, match=f"Rank {other} has not begun a healed run, and rank {rank} has"):
        meeting.come(rank, seconds=0.3).result(60)
