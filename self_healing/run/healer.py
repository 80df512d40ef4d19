"""`Healer`: one part of what heals a `train()` call; and `Healers`, all of them in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..hf.engine import StepPasses
from ..hf.hooks import Hooks
from ..hf.memory import OutOfMemory
from ..hf.step import Window
from .claims import Claim


class Healer(Hooks):
    """Heals one kind of failure, or does one thing that all need, in one `train()` call or several."""

    def attach(self, first: bool) -> None:
        """Called with the instrument attached, before the first step: wraps what it has to, until it is detached."""

    def read_logs(self, step: int, logs: Mapping[str, Any]) -> None:
        """Called with what the trainer has logged, by optimizer steps finished."""

    def last_step_taken(self) -> None:
        """Called after the last step of the run, while it can still be healed."""

    def run_ends(self, step: int) -> None:
        """Called after that, with the outcomes known: nothing may be left open. Also where healing is off by then."""

    def process_ends(self) -> None:
        """Called beside the training thread, before the process is ended from the inside: writes down what is kept."""

    @property
    def has_claim(self) -> bool:
        """Whether an incident waits for an exception to leave `train()`, to be healed outside."""
        return False

    def claim(self, error: BaseException) -> Claim | None:
        """Gives, once, the claim on the exception that left `train()`."""
        return None


class Healers(Hooks):
    """Passes each event of an instrument to the healers of a `train()` call, in their order."""

    def __init__(self, healers: Sequence[Healer]) -> None:
        # Some events come several times a step, and most healers take part in few of them.
        self._with = {
            event: tuple(each for each in healers if getattr(type(each), event) is not getattr(Healer, event))
            for event in dir(Healer)
            if not event.startswith("_")
        }

    def attach(self, first: bool) -> None:
        """Attaches each: what is attached later is called first."""
        for each in self._with["attach"]:
            each.attach(first)

    def read_logs(self, step: int, logs: Mapping[str, Any]) -> None:
        """Hands on what the trainer has logged, by optimizer steps finished."""
        for each in self._with["read_logs"]:
            each.read_logs(step, logs)

    def last_step_taken(self) -> None:
        """Called after the last step of the run, while it can still be healed."""
        for each in self._with["last_step_taken"]:
            each.last_step_taken()

    def run_ends(self, step: int) -> None:
        """Called after that, with the outcomes known."""
        for each in self._with["run_ends"]:
            each.run_ends(step)

    def process_ends(self) -> None:
        """Called beside the training thread, before the process is ended from the inside."""
        for each in self._with["process_ends"]:
            each.process_ends()

    @property
    def has_claim(self) -> bool:
        """Whether an incident waits for an exception to leave `train()`."""
        return any(each.has_claim for each in self._with["has_claim"])

    def claims(self, error: BaseException) -> list[Claim]:
        """Asks whose the exception is that left `train()`; the first claim heals it."""
        return [claim for each in self._with["claim"] if (claim := each.claim(error)) is not None]

    # ---- the events of the instrument ----

    @property
    def passes(self) -> StepPasses | None:
        return next((passes for each in self._with["passes"] if (passes := each.passes) is not None), None)

    @property
    def heals_memory(self) -> bool:
        return any(each.heals_memory for each in self._with["heals_memory"])

    def handle_oom(self, ran_out: OutOfMemory, window: Window | None) -> bool:
        return any(each.handle_oom(ran_out, window) for each in self._with["handle_oom"])

    def handle_oom_in_optimizer_step(self, ran_out: OutOfMemory, window: Window | None) -> bool:
        return any(
            each.handle_oom_in_optimizer_step(ran_out, window) for each in self._with["handle_oom_in_optimizer_step"]
        )

    def oom_on_one_rank(self, ran_out: OutOfMemory) -> None:
        for each in self._with["oom_on_one_rank"]:
            each.oom_on_one_rank(ran_out)

    def on_success(self) -> None:
        for each in self._with["on_success"]:
            each.on_success()

    def judge(self, window: Window) -> None:
        for each in self._with["judge"]:
            each.judge(window)

    def before_optimizer_step(self) -> None:
        for each in self._with["before_optimizer_step"]:
            each.before_optimizer_step()

    def about_to_step(self) -> None:
        for each in self._with["about_to_step"]:
            each.about_to_step()

    def rate_scale(self, step: int) -> float:
        scale = 1.0
        for each in self._with["rate_scale"]:
            scale *= each.rate_scale(step)
        return scale

    def stepped(self) -> None:
        for each in self._with["stepped"]:
            each.stepped()

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        for each in self._with["metrics"]:
            found.update(each.metrics(training, summary))
        return found

    def checkpoints_wait(self) -> bool:
        return any(each.checkpoints_wait() for each in self._with["checkpoints_wait"])

    def owes_checkpoint(self) -> bool:
        return any(each.owes_checkpoint() for each in self._with["owes_checkpoint"])

    def checkpoint_waits(self) -> None:
        for each in self._with["checkpoint_waits"]:
            each.checkpoint_waits()

    def vouch_for_state(self) -> None:
        for each in self._with["vouch_for_state"]:
            each.vouch_for_state()

    def before_save(self, step: int) -> None:
        for each in self._with["before_save"]:
            each.before_save(step)

    def left_by(self, error: BaseException) -> None:
        for each in self._with["left_by"]:
            each.left_by(error)

    def device_lost(self, error: BaseException) -> None:
        for each in self._with["device_lost"]:
            each.device_lost(error)

    def broken(self, error: Exception) -> None:
        for each in self._with["broken"]:
            each.broken(error)

    def ends_the_job(self, error: BaseException) -> None:
        for each in self._with["ends_the_job"]:
            each.ends_the_job(error)
