"""The exceptions of this library that carry a failure through `train()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .failures.recipes import FailureType


class Interruption(BaseException):
    """Interrupts the main thread from a thread that watches it."""

    def __init__(self, message: str, failure: FailureType) -> None:
        super().__init__(message)
        self.failure = failure


class UnrecoverableTrainingError(RuntimeError):
    """
    Ends a run that cannot be healed; the message names the postmortem.

    Args:
        message (`str`):
            The failure, its step, the actions that were tried, and advice.
        failure (`FailureType`, *optional*):
            The kind of failure that ended the run.
        postmortem (`str`, *optional*):
            Path of `postmortem.json`.
    """

    def __init__(self, message: str, failure: FailureType | None = None, postmortem: str | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        self.postmortem = postmortem


class HealingFailed(RuntimeError):
    """Ends a job on several ranks in which code of this library has failed where they meet."""

    remedy = "Report the traceback. The next start trains without healing, and says how to switch it on again."

    @classmethod
    def on_rank(cls, rank: int, step: int, error: BaseException) -> HealingFailed:
        what = f"{type(error).__name__}: {error}"
        return cls(f"self_healing failed on rank {rank} at step {step} ({what}). {cls.remedy}")


class DamagedCheckpointError(UnrecoverableTrainingError):
    """Ends an entry whose checkpoint is damaged; the run can be entered again from an older one."""

    def __init__(self, incident: Any, older: str) -> None:
        super().__init__(f"go on from {older}", failure=FailureType.DAMAGED_CHECKPOINT)
        self.incident = incident
        self.older = older


class NonFiniteReward(Exception):
    """Reports rewards that are NaN or infinite; `None`, for a reward that does not apply, is neither."""

    def __init__(self, answer: Any, places: Sequence[int], of: int) -> None:
        named = ", ".join(map(str, places[:10])) + (", ..." if len(places) > 10 else "")
        super().__init__(f"{len(places)} of {of} rewards are NaN or infinite (completions {named})")
        self.answer = answer
        self.places = list(places)
        self.of = of

    @property
    def all_of_them(self) -> bool:
        """Whether every reward is NaN or infinite, and none is one that does not apply."""
        return len(self.places) == self.of
