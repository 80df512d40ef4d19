"""Ranks meet before their first vote, and in no collective: all of them have to heal, by the same settings."""

from __future__ import annotations

import itertools
import json
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from .config.setting import ConfigurationError
from .ranks import votes


logger = logging.getLogger("self_healing")

# Each rank may have its own: nothing that is decided together follows from them.
_OF_A_RANK = frozenset({"healing_dir", "rules_file", "trackio_alerts", "upload_healing_files"})
# After so many seconds it is said who is missing.
_PATIENCE = 30.0
_NAMED = 8

# The same on all ranks as long as all of them heal.
_meetings = itertools.count(1)


def meet(settings: Mapping[str, Any], seconds: float) -> None:
    """Waits for all ranks to begin a healed run, and compares their settings."""
    store = votes.job_store()
    if store is None:
        return
    compared = {name: value for name, value in settings.items() if name not in _OF_A_RANK}
    try:
        place = f"self_healing/meeting/{next(_meetings)}"
        met = _meet(store, place, compared, seconds, dist.get_rank(), votes.world_size())
    except RuntimeError as error:
        logger.info("The store of this job cannot be asked whether all ranks heal: %s", error)
    else:
        votes.name_meeting(met)


def _meet(store: Any, place: str, settings: Mapping[str, Any], seconds: float, rank: int, ranks: int) -> str:
    """
    The first rank calls, by a name that it makes up; each rank answers to it, with a word that it makes up; and the
    first one repeats the words of all.
    """
    own, began = uuid.uuid4().hex, time.monotonic()
    call, told, compares = "", False, rank == 0
    if rank == 0:
        store.set(f"{place}/call", own)
    while True:
        newest = store.get(f"{place}/call").decode() if store.check([f"{place}/call"]) else ""
        if newest != call:
            call = newest
            store.set(f"{place}/{call}/{rank}", json.dumps({"word": own, "settings": settings}))
            store.add(f"{place}/{call}/here", 1)
        if compares and store.add(f"{place}/{call}/here", 0) >= ranks:
            compares = False
            answers = [json.loads(store.get(f"{place}/{call}/{each}")) for each in range(ranks)]
            found = {"words": [answer["word"] for answer in answers], "refused": _differences(answers)}
            store.set(f"{place}/{call}/all", json.dumps(found))
        if call and store.check([f"{place}/{call}/all"]):
            found = json.loads(store.get(f"{place}/{call}/all"))
            if found["words"][rank : rank + 1] == [own]:
                break
        waited = time.monotonic() - began
        if waited > min(_PATIENCE, seconds) and not told:
            told = True
            missing = _missing(store, place, call, rank, ranks)
            logger.warning("%s If it only takes longer than the others, nothing is wrong.", missing)
        if waited > seconds:
            raise ConfigurationError(_missing(store, place, call, rank, ranks))
        time.sleep(votes.pause_after(waited))
    if found["refused"]:
        raise ConfigurationError(found["refused"])
    return call


def _missing(store: Any, place: str, call: str, rank: int, ranks: int) -> str:
    missing = [each for each in range(ranks) if call and not store.check([f"{place}/{call}/{each}"])]
    # Where there is no call, or only one of ranks before these, it is the first one that has not come.
    return (
        f"Rank {_listed(missing or [0])} has not begun a healed run, and rank {rank} has. Ranks that heal and ranks "
        "that do not cannot train together: please use SelfHealingTrainer or SelfHealingCallback on every rank, not "
        "only on the first one."
    )


def _differences(answers: list[dict[str, Any]]) -> str:
    """Names the settings that are not the same on all ranks; nothing if all are."""
    settings = [answer["settings"] for answer in answers]
    names = sorted({name for each in settings for name in each if each.get(name) != settings[0].get(name)})
    if not names:
        return ""
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
