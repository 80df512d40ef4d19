"""`Hooks`: the events of an instrument while its trainer trains, and the questions it asks."""

from __future__ import annotations

from ..hf.engine import StepPasses
from ..hf.memory import OutOfMemory
from .window import Window


class Hooks:
    """The events of an [`Instrument`], in the order in which a step meets them."""

    # ---- a micro-batch is computed ----

    @property
    def passes(self) -> StepPasses | None:
        """The passes that a training step is computed in, where one over the rows does not fit; else `None`."""
        return None

    @property
    def heals_memory(self) -> bool:
        """Whether anything is done where memory runs out."""
        return False

    def handle_oom(self, ran_out: OutOfMemory, window: Window | None) -> bool:
        """Called when memory ran out in a training step, or (without a window) in an evaluation."""
        return False

    def handle_oom_in_optimizer_step(self, ran_out: OutOfMemory, window: Window | None) -> bool:
        """Called when memory ran out in `optimizer.step()`, which may have changed some weights."""
        return False

    def oom_on_one_rank(self, ran_out: OutOfMemory) -> None:
        """Called when memory ran out on one of several processes: the others wait, so nothing can be tried again."""

    def on_success(self) -> None:
        """Called when a micro-batch, forward and backward, or a batch of an evaluation has been computed."""

    # ---- gradients are there ----

    def judge(self, window: Window) -> None:
        """Called once per optimizer step, with gradients computed and clipped, and nothing applied yet."""

    # ---- the step is applied ----

    def before_optimizer_step(self) -> None:
        """Called before every `optimizer.step()`, those of experiments and of steps applied again included."""

    def about_to_step(self) -> None:
        """Called before the `optimizer.step()` of the Trainer's own loop."""

    def rate_scale(self, step: int) -> float:
        """Gives the factor on the schedule's learning rate, by optimizer steps finished."""
        return 1.0

    def stepped(self) -> None:
        """Called after the `optimizer.step()` of the Trainer's own loop."""

    # ---- the step is logged and saved ----

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        """Gives metrics to add to what the trainer logs."""
        return {}

    def checkpoints_wait(self) -> bool:
        """Whether checkpoints that the Trainer's schedule asks for have to wait."""
        return False

    def owes_checkpoint(self) -> bool:
        """Whether one has waited, and is written as soon as it may."""
        return False

    def checkpoint_waits(self) -> None:
        """Called when a checkpoint that is due is not written, because checkpoints have to wait."""

    def vouch_for_state(self) -> None:
        """
        Called between two steps, before the Trainer writes a checkpoint of its schedule, and before an evaluation that
        generates: looks at the state, and heals it.
        """

    def before_save(self, step: int) -> None:
        """Called after that, with the step, if the checkpoint is written: none is owed from here on."""

    # ---- the run cannot go on as it was ----

    def left_by(self, error: BaseException) -> None:
        """Called with an exception on its way out of `train()`; what is done about it is done outside."""

    def device_lost(self, error: BaseException) -> None:
        """Called with an exception that says so, before the trainer is given back; maybe more than once."""

    def broken(self, error: Exception) -> None:
        """Called when code of this library failed; by then the trainer is its plain self again."""

    def ends_the_job(self, error: BaseException) -> None:
        """Called when it failed where several ranks meet, which ends the job."""
