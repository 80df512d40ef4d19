"""Votes: all ranks see the same step and decide the same. Before the first one they meet and compare settings."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import pickle
import time
import uuid
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ..config.schema import ConfigurationError
from ..system import processes
from ..system.processes import is_first_rank, world_size


logger = logging.getLogger("self_healing")


# ---- consensus: votes by which all ranks see the same step and decide the same ----


_T = TypeVar("_T")
_Answers = Sequence[float] | torch.Tensor

# A ballot: which question, in three numbers, whether training code has raised on this rank in an experiment, and the
# answers.
_QUESTION, _RAISED, _FIRST_ANSWER = slice(0, 3), 3, 4
_ANSWERS = 13
BALLOT = _FIRST_ANSWER + _ANSWERS
# Sums of such numbers over some thousand ranks are exact in single precision, which every device has.
_QUESTIONS = 4096
# A size in bytes is cast as so many of these and a rest: single precision has no odd numbers above 2**24.
_CHUNK = 2**20

# Known numbers that each rank gives.
_KNOWN = 253
# Seconds after which is asked again what the first rank is looking up: the first time, of the time since, at most.
_ASK_FIRST, _ASK_SHARE, _ASK_LAST = 0.02, 0.1, 2.0


class RankFailed(Exception):
    """Raised on all ranks in the vote of a step: code of this library has failed on one of them, maybe this one."""

    def __init__(self, healthy: bool) -> None:
        super().__init__("code of self_healing has failed on a rank, whose log says how")
        self.healthy = healthy


class RankRaised(Exception):
    """Raised on all ranks in the same vote: training code has raised on one of them in an experiment."""


class RanksDisagree(Exception):
    """Raised on all ranks that have come to different votes at the same time."""


@dataclass
class _Votes:
    """Counts the votes of this process, the same on all ranks as long as they go together."""

    count: int = 0
    # Names the meeting before them, which no other ranks have had.
    meeting: str = ""


_votes = _Votes()


# ---- votes: every rank has to come ----


def sum_over_ranks(question: str, answers: _Answers, device: torch.device) -> list[float]:
    """Sums numbers over all ranks; a NaN or Inf of any rank stays one."""
    ranks = world_size()
    if ranks == 1:
        return answers.tolist() if isinstance(answers, torch.Tensor) else [*map(float, answers)]
    return _cast(question, _ballot(question, answers, device), ranks)


def any_rank(question: str, flag: bool, device: torch.device) -> bool:
    """Whether a flag is true on any rank."""
    return sum_over_ranks(question, [float(flag)], device)[0] > 0


def all_ranks(question: str, flag: bool, device: torch.device) -> bool:
    """Whether a flag is true on all ranks."""
    return not any_rank(question, not flag, device)


def wait_for_all_ranks(question: str, device: torch.device) -> None:
    """Returns once every rank has come."""
    # A barrier returns before the others have come where the device works asynchronously; a value that is read on the
    # host does not.
    sum_over_ranks(question, (), device)


def largest(question: str, answers: _Answers, device: torch.device) -> list[float]:
    """Takes the largest of each number over all ranks."""
    if world_size() == 1:
        return sum_over_ranks(question, answers, device)
    found = torch.as_tensor(answers, dtype=torch.float32).to(device)
    wait_for_all_ranks(question, device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(each) for each in found.tolist()]


def smallest(question: str, value: float, device: torch.device) -> float:
    """The smallest of a number over all ranks."""
    return -largest(question, [-value], device)[0]


def from_first_rank(question: str, find: Callable[[], _T], device: torch.device) -> _T:
    """Calls a function on the first rank alone, and gives what it gives to all."""
    if world_size() == 1:
        return find()
    content = pickle.dumps(find()) if is_first_rank() else b""
    chunks, rest = (int(each) for each in sum_over_ranks(question, divmod(len(content), _CHUNK), device)[:2])
    box = torch.frombuffer(bytearray(content or chunks * _CHUNK + rest), dtype=torch.uint8).to(device)
    dist.broadcast(box, src=0)
    received: _T = pickle.loads(box.cpu().numpy().tobytes())
    return received


def from_first_rank_with(question: str, found: _T | None, device: torch.device) -> _T | None:
    """Gives to all what the first rank has that has any; for where something has gone wrong."""
    return next((each for each in from_every_rank(question, found, device) if each is not None), None)


def from_every_rank(question: str, value: _T, device: torch.device) -> list[_T]:
    """Gives the values of all ranks to each, by rank; for where something has gone wrong."""
    if world_size() == 1:
        return [value]
    wait_for_all_ranks(question, device)
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def ranks_where(question: str, flag: bool, device: torch.device) -> list[int]:
    """Lists the ranks on which a flag is true; for where something has gone wrong."""
    return [rank for rank, holds in enumerate(from_every_rank(question, bool(flag), device)) if holds]


def in_words(ranks: Sequence[int]) -> str:
    """Names some ranks: the only one, or the first of several."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"{len(ranks)} of {world_size()} ranks, the first of them rank {ranks[0]},"


def looked_up_by_first_rank(question: str, look: Callable[[], _T], device: torch.device) -> _T:
    """
    As [`from_first_rank`], for what may take longer than a collective may wait: checkpoints are read to the last byte.
    """
    store = job_store()
    if store is None:
        return from_first_rank(question, look, device)
    done, found = _key("looked_up"), list[_T]()
    if dist.get_rank() == 0:
        try:
            found.append(look())
        finally:
            # Where it has raised as well: in the collective the others see that this rank is gone.
            with contextlib.suppress(RuntimeError):
                store.set(done, b"")
    else:
        began = time.monotonic()
        with contextlib.suppress(RuntimeError):
            while not store.check([done]):
                time.sleep(pause_after(time.monotonic() - began))
    return from_first_rank(question, lambda: found[0], device)


def pause_after(waited: float) -> float:
    """Gives the seconds until the store is asked once more, after so many."""
    return min(_ASK_FIRST + _ASK_SHARE * waited, _ASK_LAST)


def changed_in_sum(seconds: float, device: torch.device) -> list[int]:
    """
    Has the ranks sum up numbers that all of them know: each gives one row, and zeros for those of the others, so that
    a row is exactly what its rank has given.
    """
    row, column = torch.arange(dist.get_world_size(), device="cpu")[:, None], torch.arange(_KNOWN, device="cpu")
    known = ((row * 31 + column * 7 + row * column) % 251 + 1).to(torch.float32)
    found = torch.zeros_like(known)
    found[dist.get_rank()] = known[dist.get_rank()]
    found = found.to(device)
    wait_for_all_ranks("known numbers are summed up", device)
    # All are here, and nothing can come between.
    dist.all_reduce(found, async_op=True).wait(timedelta(seconds=seconds))
    return [int(rank) for rank in (found.cpu() != known).any(1).nonzero()]


# ---- a rank whose training code raises ----


def tell_raised(device: torch.device) -> NoReturn:
    """
    Tells the other ranks, in the vote they are in or come to next, that training code has raised here in an
    experiment: [`RankRaised`] on all of them.
    """
    question = "an experiment is given up"
    _cast(question, _ballot(question, (), device, raised=True), world_size())
    raise AssertionError("a ballot that says so raises")


def reach(place: str) -> None:
    """Notes that this rank is at a place between two votes."""
    store = job_store()
    if store is not None:
        # Where the store is lost the others wait for this rank in vain, and go on.
        with contextlib.suppress(RuntimeError):
            store.set(_key(place, dist.get_rank()), b"")


def all_reach(place: str, seconds: float) -> bool:
    """Waits for all ranks to be at the same place between the same two votes."""
    store = job_store()
    if store is None:
        return False
    reach(place)
    try:
        store.wait([_key(place, rank) for rank in range(world_size())], timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def job_store() -> Any:
    """What the job keeps for all its processes, beside collectives; `None` where there is none (one process, MPI)."""
    return dist.distributed_c10d._get_default_store() if world_size() > 1 else None


def meeting() -> str:
    """The name by which all ranks have met: that of no ranks before these, whatever a launcher has kept of them."""
    return _votes.meeting


def _key(*parts: object) -> str:
    """Names an entry of the store of the job, between two votes."""
    return "/".join(map(str, ("self_healing", _votes.meeting, *parts, _votes.count)))


@lru_cache(maxsize=1)
def _backends_of(groups: tuple[Any, ...]) -> list[Any]:
    """Those of process groups. A step asks several times: groups are asked for their backends once."""
    # torch 2.13: asked by itself, a group counts those of one of its backends.
    of_groups = ({group._get_backend(device) for device in group._device_types} for group in groups)
    return [each for backends in of_groups for each in backends]


def collectives_begun() -> int | None:
    """
    Counts the collectives that this process has begun, in all process groups; `None` where a backend does not count
    them (MPI).
    """
    count = 0
    try:
        for backend in _backends_of(tuple(dist.distributed_c10d._pg_map)):
            count += backend._get_sequence_number_for_group()
    except (AttributeError, RuntimeError, TypeError):
        return None
    return count


# ---- the ballot ----


def _number_of(question: str) -> int:
    return zlib.crc32(question.encode()) % _QUESTIONS


@lru_cache(maxsize=256)
def _named(question: str) -> tuple[int, int, int]:
    """
    Gives what names a question in a ballot: its number, and the square of that in two parts, so that sums are exact.
    """
    number = _number_of(question)
    return (number, *divmod(number**2, _QUESTIONS))


@lru_cache(maxsize=256)
def _blank(question: str, device: torch.device) -> torch.Tensor:
    return torch.tensor([*_named(question), *[0.0] * (BALLOT - _RAISED)], device=device)


def _ballot(question: str, answers: _Answers, device: torch.device, raised: bool = False) -> torch.Tensor:
    if len(answers) > _ANSWERS:
        raise ValueError(f"{question!r} has {len(answers)} answers; a ballot holds {_ANSWERS}")
    if isinstance(answers, torch.Tensor) and device.type != "cpu":
        # Without a look from the host, for which it would have to wait.
        ballot = _blank(question, device).clone()
        ballot[_FIRST_ANSWER : _FIRST_ANSWER + len(answers)] = answers
        return ballot
    given = answers.tolist() if isinstance(answers, torch.Tensor) else answers
    blank = [0.0] * (_ANSWERS - len(given))
    # A fifth of the time of `torch.tensor`, and as that an Inf of what is too large for single precision.
    numbers = array("f", (*_named(question), raised, *given, *blank))
    return torch.frombuffer(numbers, dtype=torch.float32).to(device)


def _cast(question: str, ballot: torch.Tensor, ranks: int) -> list[float]:
    _votes.count += 1
    dist.all_reduce(ballot)
    found: list[float] = ballot.tolist()
    if found[_RAISED] > 0:
        raise RankRaised(f"{question}: the training code has raised on a rank")
    # Where ranks ask different questions, these are the sums that none of them expects.
    number, chunks, rest = _named(question)
    numbers, of_chunks, rests = found[_QUESTION]
    if numbers != ranks * number or of_chunks * _QUESTIONS + rests != ranks * (chunks * _QUESTIONS + rest):
        raise RanksDisagree(
            f"{question}: the ranks are out of step. Please look for code that decides on one rank alone, such as a "
            "callback that stops, saves or evaluates there"
        )
    return found[_FIRST_ANSWER:]


# ---- meeting ----


# Each rank may have its own: nothing that is decided together follows from them.
_OF_A_RANK = frozenset({"healing_dir", "rules_file", "upload_healing_files"})
# After so many seconds it is said who is missing.
_PATIENCE = 30.0
_NAMED = 8

# The same on all ranks as long as all of them heal.
_meetings = itertools.count(1)


def meet(settings: Mapping[str, Any], seconds: float) -> None:
    """Waits for all ranks to begin a healed run, and compares their settings."""
    store = job_store()
    if store is None:
        return
    compared = {name: value for name, value in settings.items() if name not in _OF_A_RANK}
    try:
        place = f"self_healing/meeting/{next(_meetings)}"
        _votes.meeting = _meet(store, place, compared, seconds, dist.get_rank(), processes.world_size())
    except RuntimeError as error:
        logger.info("The store of this job cannot be asked whether all ranks heal: %s", error)


def _meet(store: Any, place: str, settings: Mapping[str, Any], seconds: float, rank: int, ranks: int) -> str:
    """
    The first rank calls, by a name that it makes up; each rank answers to it, with a word that it makes up; and the
    first one repeats to each its own: those of all are 36 KB, for each of 1,024 ranks.
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
            refused = _differences(answers)
            for each, answer in enumerate(answers):
                store.set(f"{place}/{call}/{each}/told", json.dumps({"word": answer["word"], "refused": refused}))
        if call and store.check([f"{place}/{call}/{rank}/told"]):
            found = json.loads(store.get(f"{place}/{call}/{rank}/told"))
            if found["word"] == own:
                break
        waited = time.monotonic() - began
        if waited > min(_PATIENCE, seconds) and not told:
            told = True
            missing = _missing(store, place, call, rank, ranks)
            logger.warning("%s If it only takes longer than the others, nothing is wrong.", missing)
        if waited > seconds:
            raise ConfigurationError(_missing(store, place, call, rank, ranks))
        time.sleep(pause_after(waited))
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
