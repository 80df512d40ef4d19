"""Ranks that a launcher starts again meet each other, and none of those before them, whose words the store keeps."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from threading import current_thread
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


class CountedStore:
    """Counts the bytes that each thread reads."""

    def __init__(self) -> None:
        self._store, self.read = HASH_STORE(), Counter[str]()

    def get(self, key: str) -> bytes:
        content: bytes = self._store.get(key)
        self.read[current_thread().name] += len(content)
        return content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_what_a_rank_reads_to_meet_the_others_does_not_grow_with_their_number() -> None:
    def most_read(ranks: int) -> int:
        store = CountedStore()

        def come(rank: int) -> None:
            current_thread().name = f"{rank}"
            _meet(store, "here", {"nan_patience": 3}, 60.0, rank, ranks)

        with ThreadPoolExecutor(ranks) as threads:
            list(threads.map(come, range(ranks)))
        # The first one compares what all have answered.
        return max(read for rank, read in store.read.items() if rank != "0")

    # One that has been asked late reads the name of the call as often as it looks.
    assert most_read(64) < most_read(2) + 1_000
