"""`SideChannel`: a connection to the store of the job, for what ranks have to say while collectives are blocked."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed

from . import votes


# Any: the stores are there only where torch was built with distributed, and it does not say that it exports them.
dist: Any = torch.distributed
logger = logging.getLogger("self_healing")

# What connecting may take, in seconds. Nothing else waits: what is read is asked for first.
_CONNECTING = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this process in a job of several."""

    rank: int
    ranks: int
    host: str
    port: int


class SideChannel:
    """Reads and writes small records in the store that the ranks of a job have found each other by."""

    def __init__(self, place: Place, name: str) -> None:
        self._place = place
        store = self._connected()
        # A launcher that starts the job again may keep the store, and a script may train several times.
        prefix = f"self_healing/{votes.meeting()}/{name}"
        times = dist.PrefixStore(prefix, store).add(f"opened/{place.rank}", 1)
        self._prefix = f"{prefix}/{times}"
        self._store = dist.PrefixStore(self._prefix, store)

    def connect_again(self) -> None:
        """Goes on over another connection, where the one there was is lost."""
        # What torch says of a store that is not there is many lines.
        socket.create_connection((self._place.host, self._place.port), _CONNECTING.total_seconds()).close()
        self._store = dist.PrefixStore(self._prefix, self._connected())

    def _connected(self) -> Any:
        host, port = self._place.host, self._place.port
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECTING)

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Writes a record."""
        self._store.set(key, json.dumps(record))

    def read(self, keys: Sequence[str]) -> list[dict[str, Any]] | None:
        """Reads records; `None` as long as one of them is not there."""
        if not self._store.check(list(keys)):
            return None
        return [json.loads(content) for content in self._store.multi_get(list(keys))]

    def add(self, key: str, number: int) -> int:
        """Adds to a number that begins with 0, and returns it."""
        return int(self._store.add(key, number))


def place_in_job() -> Place | None:
    """Gives the place of this process; `None` where there is only one, or no store that can be connected to."""
    if votes.world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        logger.info("The store of this job cannot be connected to: ranks do not tell each other what ends them.")
        return None
    return Place(dist.get_rank(), dist.get_world_size(), store.host, store.port)
