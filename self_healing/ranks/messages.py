"""What the ranks of a job tell each other: records, and their form in the store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ..exceptions import DamagedCheckpointError, UnrecoverableTrainingError
from ..failures.classify import classify_exception, comes_from_a_collective, describe_exception
from ..failures.recipes import FailureType


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

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Reads what [`to_record`] gave."""
        return cls(**record)

    def to_record(self) -> dict[str, Any]:
        """Gives its form in the store."""
        return asdict(self)

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
        ends_one_process = (FailureType.DAMAGED_CHECKPOINT, FailureType.INTERRUPTED)
        return self.exit_code == _UNRECOVERABLE and self.failure not in ends_one_process

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


def failure_of_leaving(rank: int, step: int) -> Failure:
    """Makes a failure of a rank that has left `train()` in good order while others train on, and wait for it."""
    why = (
        "it left train() while the others train on: the ranks do different things; look for code that decides on one "
        "rank alone (should_training_stop in a callback)"
    )
    return Failure(rank, step, FailureType.HANG, why)


def failure_of(error: BaseException, rank: int, step: int, section: str) -> Failure | None:
    """Makes a failure of an exception that leaves `train()`."""
    if isinstance(error, (DamagedCheckpointError, GeneratorExit)):
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
