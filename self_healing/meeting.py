"""Ranks meet before their first vote, and in no collective: all of them have to heal, by the same settings."""

from __future__ import annotations

import itertools
import json
import logging
import time
import zlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from . import consensus
from .config import ConfigurationError


logger = logging.getLogger("self_healing")

# Each rank may have its own: nothing that is decided together follows from them.
_OF_A_RANK = frozenset({"healing_dir", "rules_file", "trackio_alerts", "upload_healing_files"})
# After so many seconds it is said who is missing.
_PATIENCE = 30.0
_NAMED = 8

# The same on all ranks as long as all of them heal.
_meetings = itertools.count(1)


def meet(settings: Mapping[str, Any], seconds: float) -> None:
    """
    Waits for all ranks to begin a healed run, and compares their settings. A rank that trains without healing is in a
    collective of the training meanwhile, and would take a vote for a part of that.

    Args:
        settings (`Mapping[str, Any]`):
            Of this rank.
        seconds (`float`):
            How long the others may take.

    Raises:
        ConfigurationError: If a rank does not come, or on all of them, if settings differ.
    """
    store = consensus.job_store()
    if store is None:
        return
    compared = {name: value for name, value in settings.items() if name not in _OF_A_RANK}
    try:
        _meet(store, f"self_healing/meeting/{next(_meetings)}", json.dumps(compared, sort_keys=True), seconds)
    except RuntimeError as error:
        logger.info("The store of this job cannot be asked whether all ranks heal: %s", error)


def _meet(store: Any, place: str, settings: str, seconds: float) -> None:
    ranks, began, told = consensus.world_size(), time.monotonic(), False
    alike = f"{place}/alike/{zlib.crc32(settings.encode())}"
    store.set(f"{place}/{dist.get_rank()}", settings)
    store.add(alike, 1)
    store.add(f"{place}/here", 1)
    while store.add(f"{place}/here", 0) < ranks:
        waited = time.monotonic() - began
        if waited > min(_PATIENCE, seconds) and not told:
            told = True
            logger.warning("%s If it only takes longer than the others, nothing is wrong.", _missing(store, place))
        if waited > seconds:
            raise ConfigurationError(_missing(store, place))
        time.sleep(consensus.pause_after(waited))
    if store.add(alike, 0) < ranks:
        raise ConfigurationError(_differences([json.loads(store.get(f"{place}/{rank}")) for rank in range(ranks)]))


def _missing(store: Any, place: str) -> str:
    missing = [rank for rank in range(consensus.world_size()) if not store.check([f"{place}/{rank}"])]
    return (
        f"Rank {_listed(missing)} has not begun a healed run, and rank {dist.get_rank()} has. Ranks that heal and "
        "ranks that do not cannot train together: please use SelfHealingTrainer or SelfHealingCallback on every rank, "
        "not only on the first one."
    )


def _differences(settings: list[dict[str, Any]]) -> str:
    names = sorted({name for each in settings for name in each if each.get(name) != settings[0].get(name)})
    told = "; ".join(
        f"{name} is {settings[0].get(name)!r} on rank 0, and another value on rank "
        f"{_listed([rank for rank, each in enumerate(settings) if each.get(name) != settings[0].get(name)])}"
        for name in names[:_NAMED]
    )
    return (
        f"The settings of self_healing differ between ranks, which have to decide alike: {told}. Please give every "
        "rank the same HealingConfig."
    )


def _listed(ranks: list[int]) -> str:
    more = "" if len(ranks) <= _NAMED else f" and {len(ranks) - _NAMED} others"
    return ", ".join(map(str, ranks[:_NAMED])) + more
