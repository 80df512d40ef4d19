"""What ranks tell each other outside of votes, through the store of the job: where they are, what failed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Self

import torch.distributed

from ..failures.classify import classify_exception, comes_from_a_collective, describe_exception
from ..failures.recipes import FailureType, UnrecoverableTrainingError
from . import votes


logger = logging.getLogger("self_healing")


# ---- posts: what the ranks of a job tell each other: records, and their form in the store ----


# Of the text of an error: what fits on a line.
_LONGEST = 300
# Where all ranks have decided together that the run ends, each of them ends by itself; some write more than others.
_ENDS_TOGETHER = 30.0
# What a shell reports of a process that Ctrl-C has ended.
_INTERRUPTED = 130
# Of a run whose remedies are spent.
_UNRECOVERABLE = 1


@dataclass(frozen=True, slots=True)
class Position:
    """Where one rank is."""

    step: int
    section: str
    beats: int
    seconds: float
    left: float
    on_purpose: bool = False
    training: bool = True
    ending: bool = False
    collective: str | None = None
    line: str | None = None
    called_from: str | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """How far the rank has come; comparable with that of others."""
        return self.step, self.beats

    def __str__(self) -> str:
        where = self.called_from or self.line or "an unknown line"
        waits = f"waits in {self.collective}" if self.collective is not None else f"is at {where}"
        if self.on_purpose:
            waits = f"waits on purpose, {waits.removeprefix('waits ')}"
        return f"{waits} ('{self.section}' after step {self.step}, for {self.seconds:.0f} s)"


@dataclass(frozen=True, slots=True)
class Failure:
    """What has ended one rank, and with it the job."""

    rank: int | None
    step: int
    failure: FailureType
    error: str
    section: str = ""
    follows: bool = False
    patience: float = 0.0
    exit_code: int | None = None
    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Reads what [`to_record`] gave."""
        return cls(**{**record, "failure": FailureType(record["failure"])})

    def to_record(self) -> dict[str, Any]:
        """Gives its form in the store, and in a postmortem."""
        return {**asdict(self), "failure": self.failure.value}

    @property
    def for_good(self) -> bool:
        """Whether the run is not to be started again by itself."""
        return self.exit_code == _UNRECOVERABLE and self.failure is not FailureType.INTERRUPTED

    @property
    def whose(self) -> str:
        """Names the rank."""
        return "no single rank" if self.rank is None else f"rank {self.rank}"

    def __str__(self) -> str:
        if self.rank is None:
            return f"nothing moves after step {self.step}: {self.error}"
        if self.follows:
            return (
                f"rank {self.rank} was the first on which a collective failed, after step {self.step}; another rank "
                f"may be behind it: {self.error}"
            )
        heard = "was last heard of" if self.failure is FailureType.PROCESS_DIED else "failed"
        return f"rank {self.rank} failed first; it {heard} after step {self.step}: {self.error}"


def failure_of(error: BaseException, rank: int, step: int, section: str) -> Failure | None:
    """Makes a failure of an exception that leaves `train()`."""
    if isinstance(error, GeneratorExit):
        return None
    text = " ".join(describe_exception(error).split())[:_LONGEST]
    failure, patience, code = classify_exception(error), 0.0, None
    if isinstance(error, UnrecoverableTrainingError):
        failure, patience, code = error.failure or failure, _ENDS_TOGETHER, _UNRECOVERABLE
    elif isinstance(error, KeyboardInterrupt):
        code = _INTERRUPTED
    elif isinstance(error, SystemExit):
        # Also where that one ends with 0: the others have not come to their end.
        code = (error.code & 0xFF if isinstance(error.code, int) else 0) or _UNRECOVERABLE
    follows = comes_from_a_collective(error) and failure is not FailureType.OUT_OF_MEMORY
    return Failure(rank, step, failure, text, section, follows, patience, code)


def first_of(failures: list[Failure]) -> Failure | None:
    """Finds the failure that others followed from: the earliest that no collective has raised."""
    return next((each for each in failures if not each.follows), failures[0] if failures else None)


# ---- naming: says which rank the others wait for ----


def behind(positions: Mapping[int, Position]) -> list[int]:
    """
    Finds the ranks that the others wait for: those in no collective, and of these the ones that have come least far.
    """
    moving = {rank: each for rank, each in positions.items() if each.training and each.collective is None}
    least = min((each.progress for each in moving.values()), default=None)
    found = sorted(rank for rank, each in moving.items() if each.progress == least)
    return [] if len(found) == len(positions) else found


def where_all_wait(positions: Mapping[int, Position]) -> str:
    """Describes where ranks are of which none is waited for: without times, so that all of them say the same."""
    together: dict[str, list[int]] = {}
    for rank, each in sorted(positions.items()):
        line = each.called_from or each.line or "an unknown line"
        called = "" if each.called_from is None else f", called at {each.called_from}"
        where = f"at {line}" if each.collective is None else f"in {each.collective}{called}"
        together.setdefault(where, []).append(rank)
    named = "; ".join(f"{_named(ranks)} {where}" for where, ranks in together.items())
    if len(positions) == 1:
        return f"{named}, and nothing is known of the others"
    if any(each.collective is None for each in positions.values()):
        return f"no rank is behind the others: {named}"
    return f"the ranks wait in {'the same collective' if len(together) == 1 else 'different collectives'}: {named}"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def where_all_are(positions: Mapping[int, Position]) -> str:
    """Describes where the ranks are, those that are at the same place together; the ones waited for come first."""
    together: dict[str, list[int]] = {}
    first = behind(positions)
    for rank in [*first, *(each for each in sorted(positions) if each not in first)]:
        together.setdefault(str(positions[rank]), []).append(rank)
    each = {where: "each " if len(ranks) > 1 else "" for where, ranks in together.items()}
    named = " ".join(f"{_named(ranks).capitalize()}: {each[where]}{where}." for where, ranks in together.items())
    if not first:
        return named
    return f"The others wait for rank {', '.join(map(str, first))}. {named}"


# ---- channel: a connection to the store of the job, for what ranks have to say while collectives are blocked ----


# Any: the stores are there only where torch was built with distributed, and it does not say that it exports them.
dist: Any = torch.distributed

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
        store = dist.TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=_CONNECTING)
        # A launcher that starts the job again may keep the store, and a script may train several times.
        prefix = f"self_healing/{votes.meeting()}/{name}"
        times = dist.PrefixStore(prefix, store).add(f"opened/{place.rank}", 1)
        self._store = dist.PrefixStore(f"{prefix}/{times}", store)

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Writes a record."""
        self._store.set(key, json.dumps(record))

    def read(self, keys: Sequence[str]) -> list[dict[str, Any]] | None:
        """Reads records; `None` as long as one of them is not there."""
        if not self._store.check(list(keys)):
            return None
        return [json.loads(content) for content in self._store.multi_get(list(keys))]

    def append(self, key: str, record: Mapping[str, Any]) -> None:
        """Adds a record to a list, which begins empty."""
        self._store.append(key, json.dumps(record) + "\n")

    def listed(self, key: str) -> list[dict[str, Any]]:
        """Reads the records of a list."""
        lines = self._store.get(key).splitlines() if self._store.check([key]) else []
        return [json.loads(line) for line in lines]


def place_in_job() -> Place | None:
    """Gives the place of this process; `None` where there is only one, or no store that can be connected to."""
    store = votes.job_store()
    if store is None:
        return None
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        logger.info("The store of this job cannot be connected to: ranks do not tell each other what ends them.")
        return None
    return Place(dist.get_rank(), dist.get_world_size(), store.host, store.port)
