"""The last trusted snapshots and the steps since, kept for a rollback and run again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import torch

from ..hf.objective import StepSignals
from ..hf.state import LiveState
from ..hf.step import Control, Recording, Window, nbytes_of
from ..ranks import votes
from ..system import processes
from .host_memory import HostBlock, free_host_memory, later
from .shared_memory import SharedStates
from .snapshots import Snapshot, size_of


# ---- ring: keeps states of a run in host memory: candidates, the trusted ones, and the one it began with ----


# Share of the free host memory that new buffers may take: the data loaders and the next checkpoint need some, too.
_SHARE_OF_FREE_MEMORY = 0.8


class SnapshotRing:
    """
    Holds the candidate, trusted generations and the state a run began with.

    Buffers are allocated once and used again by later snapshots. Where host memory is short, fewer generations are
    kept; where not even one fits beside a candidate, none are ([`shrink`] tells).

    Args:
        generations (`int`, *optional*, defaults to 2):
            Trusted states that are kept, beside the one the run began with.
        shared ([`SharedStates`], *optional*):
            Lets them outlive the process.
    """

    def __init__(self, generations: int = 2, shared: SharedStates | None = None) -> None:
        self.generations = generations
        self.shared = shared
        self.candidate: Snapshot | None = None
        self.initial: Snapshot | None = None
        self.trusted: list[Snapshot] = []
        self._spare: list[Snapshot] = []
        # Bytes that the newest one takes.
        self._needed = 0
        # Host memory that a thread takes for one more, and its bytes.
        self._reserved: tuple[Future[HostBlock], int] | None = None
        # The newest one, until later work of the devices comes after its copy.
        self.under_way: Snapshot | None = None
        # The tensors of the newest one, and the state that this process leaves to the next.
        self.taken_of: LiveState | None = None
        self.left: Snapshot | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(snapshot.nbytes for snapshot in self.snapshots())

    def snapshots(self) -> list[Snapshot]:
        """Lists all snapshots, including those whose memory is only kept to be used again."""
        held = [*self.trusted, *self._spare, self.candidate, self.initial]
        return [snapshot for snapshot in held if snapshot is not None]

    # ---- taking ----

    def fits(self, live: LiveState) -> bool:
        """Whether there is host memory for one more state, or that of a snapshot not needed any more."""
        needed = size_of(live)
        if self._spare and self._spare[-1].nbytes < needed:
            # They are too small to be used again.
            self._spare.clear()
        reused = self.candidate or (self._spare[-1] if self._spare else None)
        reserved = 0 if self._reserved is None else self._reserved[1]
        held = reserved if reused is None else reused.nbytes
        return needed - held <= _SHARE_OF_FREE_MEMORY * free_host_memory()

    @property
    def lacks_room(self) -> bool:
        """Whether the next snapshot takes host memory that is not there yet."""
        most = self.generations + 1 + (self.initial is not None)
        there = self._reserved or self._spare or self.shared is not None
        return not there and len(self.snapshots()) < most

    def reserve(self, needed: int | None, device: torch.device) -> None:
        """Has a thread take host memory for the next snapshot: that of a device is pinned, which takes seconds."""
        if self.lacks_room and needed and needed <= _SHARE_OF_FREE_MEMORY * free_host_memory():
            self._reserved = later(_new_block_on, device, needed), needed

    @property
    def reserving(self) -> bool:
        """Whether the next snapshot would wait for a thread that takes its memory."""
        return not self._spare and self._reserved is not None and not self._reserved[0].done()

    def _new_snapshot(self) -> Snapshot:
        reserved, self._reserved = self._reserved, None
        # Where the thread has failed, the training thread tries it, and says what is wrong.
        failed = reserved is None or reserved[0].exception() is not None
        return Snapshot(block=None if failed or reserved is None else reserved[0].result())

    def shrink(self) -> bool:
        """Makes room for a candidate by giving up the oldest generation; `False` if that would leave none."""
        if len(self.trusted) > 1:
            self._retire(self.trusted.pop(0))
        elif self.initial is not None and self.trusted:
            self.forget_initial()
        else:
            return False
        self.generations = max(len(self.trusted), 1)
        return True

    def take(self, live: LiveState, step: int, extras: dict[str, Any]) -> Snapshot:
        """
        Copies the state as it is into a new candidate, in place of one that was not promoted.

        Args:
            live ([`LiveState`]):
                The tensors.
            step (`int`):
                Optimizer steps finished.
            extras (`dict`):
                Kept with it.
        """
        self.discard()
        snapshot = self._spare.pop() if self._spare else self._new_snapshot()
        snapshot.step = snapshot.as_of = step
        snapshot.extras = extras
        try:
            self.taken_of, self.under_way = live, snapshot
            snapshot.take(live, HostBlock if self.shared is None else self.shared.new_block)
            self._needed = snapshot.needed
        except BaseException:
            self._retire(snapshot)
            raise
        self.candidate = snapshot
        return snapshot

    def join(self) -> None:
        """Has the devices wait, before the state is changed, for a copy that is still under way."""
        if self.under_way is not None:
            self.under_way.join()
            self.under_way = None

    def wait(self) -> None:
        """Waits for all copies that are under way."""
        for snapshot in self.snapshots():
            snapshot.wait()
        self.under_way = None

    # ---- trusting ----

    def promote(self) -> None:
        """Trusts the candidate; the oldest generation gives its memory to the next one."""
        assert self.candidate is not None
        self.trusted.append(self.candidate)
        self.candidate = None
        if len(self.trusted) > self.generations:
            self._retire(self.trusted.pop(0))

    def forget_initial(self) -> None:
        """Gives the memory of the state the run began with to later ones."""
        if self.initial is not None and self.trusted:
            self._retire(self.initial)
            self.initial = None

    def discard(self) -> None:
        """Drops the candidate."""
        if self.candidate is not None:
            self.candidate.given_up = True
            self._retire(self.candidate)
            self.candidate = None

    def distrust(self, snapshot: Snapshot) -> None:
        """Drops a trusted state and every newer one."""
        kept = [each for each in self.trusted if each.step < snapshot.step]
        for dropped in [each for each in self.trusted if each not in kept]:
            self._retire(dropped)
        self.trusted = kept

    def _retire(self, snapshot: Snapshot) -> None:
        """Its memory is used again by a later one; what was kept with it, a batch among it, is not needed any more."""
        snapshot.extras = {}
        if self.shared is not None:
            self.shared.revoke(snapshot)
        # Neither one without the state that the optimizer has made since, nor one that was taken before there was a
        # place for it that outlives the process.
        if snapshot.nbytes >= self._needed and (
            self.shared is None or not self.shared.active or self.shared.holds(snapshot)
        ):
            self._spare.append(snapshot)

    # ---- going back ----

    def restore(self, snapshot: Snapshot, live: LiveState) -> None:
        """Writes a state into the live tensors, once copies of what is overwritten are complete."""
        self.join()
        snapshot.restore(live)

    def release(self) -> None:
        """Gives all host memory back; what is still under way holds on to its own until it is complete."""
        for snapshot in self.snapshots():
            if self.shared is not None:
                self.shared.revoke(snapshot)
            # Whoever still holds the snapshot.
            snapshot.given_up, snapshot.block = True, None
        self.candidate = self.initial = self.left = self.taken_of = self._reserved = self.under_way = None
        self.trusted, self._spare = [], []


def _new_block_on(device: torch.device, nbytes: int) -> HostBlock:
    if device.type == "cuda":
        # Of this thread, which would pin it for another one.
        torch.cuda.set_device(device)
    return HostBlock(nbytes, pinned=device.type == "cuda")


# ---- kept batches ----


# Steps of a run's beginning that are kept for as long as it is early, to try out learning rates on.
_TRIAL_STEPS = 10
# All steps since the newest trusted state are kept, to be applied again, if their batches take no more than this.
_LARGEST_TAPE = 256 * 2**20
# A batch is kept, to tell harder data from worse weights, only if it is small beside the model.
_LARGEST_CONTROL = 64 * 2**20


class KeptBatches:
    """Holds what is kept of the batches of earlier steps."""

    def __init__(self) -> None:
        self.newest_healthy: Control | None = None
        self.first_steps: list[Control] = []
        # The steps since the newest trusted state, to be applied again, and their bytes.
        self.tape: deque[Recording] = deque()
        self._on_tape = 0
        # Behind a gap none can be: nothing is recorded until the next snapshot.
        self._recording = False
        self._on_host = False
        self._gap = False

    def release(self) -> None:
        """Lets go of all of them."""
        self.newest_healthy = None
        self.first_steps, self._gap = [], False
        self.stop_recording()

    @property
    def healthy_inputs(self) -> Any:
        """The first micro-batch of the newest step with nothing wrong."""
        return None if self.newest_healthy is None else self.newest_healthy.calls[0][1]

    def keep(self, window: Window, loss: float, early: bool) -> Control | None:
        """Keeps a step that is about to be applied, to be computed again later."""
        nbytes = nbytes_of(window.calls)
        # Rows that are generated again each time are others.
        kept = not window.objective.online and nbytes <= _LARGEST_CONTROL
        control = Control(window.calls, loss, nbytes) if kept else None
        if control is not None and self._on_host:
            # The device has just been waited for: only the copy itself takes time.
            control.leave_device()
        if early:
            self._keep_first(control)
        elif self.first_steps:
            self.first_steps = []
        if self._recording:
            recording = None if control is None else window.recording(control)
            if recording is None or self._on_tape + recording.control.nbytes > _LARGEST_TAPE:
                self.stop_recording()
            else:
                self.tape.append(recording)
                self._on_tape += recording.control.nbytes
        return control

    def _keep_first(self, control: Control | None) -> None:
        """Keeps a step of the beginning of the run, unless there are enough, or one was left out for its size."""
        if len(self.first_steps) >= _TRIAL_STEPS or (control is not None and not math.isfinite(control.loss)):
            return
        # Without a gap: those that several ranks have in common are the first of each.
        self._gap |= control is None or control.nbytes > _LARGEST_CONTROL // _TRIAL_STEPS
        if control is not None and not self._gap:
            self.first_steps.append(control)

    # ---- the tape ----

    def record(self) -> None:
        """Records the steps from here on: there is a state that they can be applied to."""
        self._recording = True

    def stop_recording(self) -> None:
        """Drops all steps; later ones cannot be applied to a state from before them either."""
        self.tape.clear()
        self._on_tape, self._recording = 0, False

    def recorded(self, steps: range) -> list[Recording] | None:
        """Returns the recordings of these steps; `None` if not all of them are kept."""
        found = [each for each in self.tape if each.step in steps]
        return found if [each.step for each in found] == list(steps) else None

    def keep_only(self, steps: range) -> None:
        """Drops those before the newest trusted state, and those after it that the run takes anew."""
        self.tape = deque([each for each in self.tape if each.step in steps])
        self._on_tape = sum(each.control.nbytes for each in self.tape)

    # ---- where memory ran out ----

    def free(self, of_host: bool, device: torch.device, snapshots: Iterable[Snapshot]) -> int:
        """Frees memory that kept batches take, after memory ran out."""
        snapshots = list(snapshots)
        with_snapshots = [snapshot.extras.get("control") for snapshot in snapshots]
        recorded = [recording.control for recording in self.tape]
        every = [*recorded, *self.first_steps, *with_snapshots, self.newest_healthy]
        kept = {id(control): control for control in every if control is not None}.values()
        if not of_host:
            self._on_host = True
            return sum(control.leave_device() for control in kept)
        if device.type != "cpu" and not self._on_host:
            return 0
        self.first_steps, self.newest_healthy, self._gap = [], None, True
        self.stop_recording()
        for snapshot in snapshots:
            snapshot.extras.pop("control", None)
        return sum(control.nbytes for control in kept)


class StepReplayer:
    """Runs steps that were kept, between the backward of the step that is judged and its `optimizer.step()`."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._engine = window.engine
        self._state = window.engine.trainer.state

    def loss_of(self, control: Control) -> float:
        """The loss of an earlier step with the weights as they are, over all ranks."""
        loss = self._loss_from_the_start(control)
        if not math.isfinite(loss):
            # A fault that passes may have struck just then.
            loss = self._loss_from_the_start(control)
        self._window.rewind()
        return loss

    def train_on(self, control: Control, scale: float) -> float:
        """Takes one optimizer step on an earlier step's batches, as an experiment: weights and moments move."""
        try:
            loss = self._loss_from_the_start(control)
            if math.isfinite(loss):
                self._engine.step_again(self._engine.rates.in_force(scale))
        finally:
            self._window.rewind()
        return loss

    def replay(self, recording: Recording) -> StepSignals:
        """Applies an earlier step again, as it was applied then."""
        window, state = self._window, self._state
        assert window.start is not None
        tokens, step, epoch, norm = state.num_input_tokens_seen, state.global_step, state.epoch, None
        # Once the step that is judged has been applied, what was logged and counted since then is as it should be.
        counts = window.start if step == window.step else window.ledger.capture()

        def compute() -> float:
            window.discard()
            recording.rng.restore()
            return self._loss(recording.control)

        try:
            # A loss may depend on them.
            state.global_step, state.epoch = recording.step, recording.epoch
            loss = window.until_it_fits(compute)
            if math.isfinite(loss):
                norm = self._engine.step_again(recording.rates, recording.scaled_by, recording.options)
        finally:
            state.global_step, state.epoch = step, epoch
            self._engine.discard()
            window.ledger.rewind_counts(counts)
            state.num_input_tokens_seen = tokens
        return StepSignals(recording.step, loss, norm)

    def _loss_from_the_start(self, control: Control) -> float:
        """From the random states that the step that is judged began with."""

        def compute() -> float:
            self._window.rewind()
            return self._loss(control)

        return self._window.until_it_fits(compute)

    def _loss(self, control: Control) -> float:
        last = len(control.calls) - 1
        with self._engine.accumulating(len(control.calls)):
            losses = [
                self._engine.compute(call, index == last, self._window) for index, call in enumerate(control.calls)
            ]
        total = torch.stack([loss.detach().float() for loss in losses]).sum()
        ranks = votes.sum_over_ranks("loss of an earlier step", total.reshape(1), total.device)
        return ranks[0] / processes.world_size()
