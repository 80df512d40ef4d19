"""The last trusted snapshots and the batches since, kept for a rollback."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..failures.classify import classify_exception
from ..failures.recipes import FailureType
from ..hf.adapter import Instrument
from ..hf.memory import free_memory, is_out_of_memory, let_go, with_room
from ..hf.state import LiveState, optimizer_in_training_mode, reload_checkpoint
from ..hf.step import Control, Recording, Window, on_host
from ..ranks import votes
from .host_memory import HostBlock, SideStream, free_host_memory, size_of
from .shared_memory import SharedStates
from .snapshots import Snapshot


logger = logging.getLogger("self_healing")


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
        self._shared = shared
        self.candidate: Snapshot | None = None
        self.initial: Snapshot | None = None
        self.trusted: list[Snapshot] = []
        self._spare: list[Snapshot] = []
        self._streams: dict[torch.device, SideStream] = {}
        # The tensors of the newest one, and the state that this process leaves to the next.
        self.taken_of: LiveState | None = None
        self.left: Snapshot | None = None
        # Whether each copy is waited for at once: something writes to the state between two updates.
        self.waits = False

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
        if self.candidate is not None or self._spare:
            reused = self.candidate or self._spare[-1]
            return size_of(live) - reused.nbytes <= _SHARE_OF_FREE_MEMORY * free_host_memory()
        return size_of(live) <= _SHARE_OF_FREE_MEMORY * free_host_memory()

    def shrink(self) -> bool:
        """Makes room for a candidate by giving up the oldest generation; `False` if that would leave none."""
        if len(self.trusted) > 1:
            self._retire(self.trusted.pop(0))
        elif self.initial is not None and self.trusted:
            self._retire(self.initial)
            self.initial = None
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
        if self.candidate is not None:
            self._retire(self.candidate)
            self.candidate = None
        snapshot = self._spare.pop() if self._spare else Snapshot()
        snapshot.step = snapshot.as_of = step
        snapshot.extras, snapshot.torn = extras, False
        try:
            new_block = HostBlock if self._shared is None else self._shared.new_block
            self.taken_of = live
            snapshot.take(live, self._streams, self.waits, new_block)
        except BaseException:
            self._retire(snapshot)
            raise
        self.candidate = snapshot
        return snapshot

    def hold(self, snapshot: Snapshot, live: LiveState, extras: dict[str, Any]) -> None:
        """Makes a state that is in memory already the candidate; otherwise as [`take`]."""
        snapshot.extras, snapshot.as_of = extras, snapshot.step
        self.taken_of, self.candidate = live, snapshot

    def join(self) -> None:
        """Has the devices wait, before the state is changed, for copies that are still under way."""
        for snapshot in self.snapshots():
            snapshot.join()

    def wait(self) -> None:
        """Waits for all copies that are under way."""
        for snapshot in self.snapshots():
            snapshot.wait()

    # ---- trusting ----

    def promote(self) -> None:
        """Trusts the candidate; the oldest generation gives its memory to the next one."""
        if self.candidate is None:
            return
        self.trusted.append(self.candidate)
        self.candidate = None
        if len(self.trusted) > self.generations:
            self._retire(self.trusted.pop(0))

    def begin_with_candidate(self) -> None:
        """Keeps the candidate as the state the run began with."""
        self.initial, self.candidate = self.candidate, None

    def forget_initial(self) -> None:
        """Gives the memory of the state the run began with to later ones."""
        if self.initial is not None and self.trusted:
            self._retire(self.initial)
            self.initial = None

    def discard(self) -> None:
        """Drops the candidate."""
        if self.candidate is not None:
            self.candidate.wait()
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
        if not snapshot.pool:
            # Of an earlier process, whose memory is given back.
            return
        if self._shared is not None:
            self._shared.revoke(snapshot)
            if self._shared.active and not self._shared.holds(snapshot):
                # It was taken before there was a place for it that outlives the process.
                return
        self._spare.append(snapshot)

    # ---- going back ----

    def restore(self, snapshot: Snapshot, live: LiveState) -> None:
        """
        Writes a state into the live tensors ([`Snapshot.restore`]).

        Copies of what is overwritten, into any snapshot, are waited for before.
        """
        self.wait()
        snapshot.restore(live)

    def release(self) -> None:
        """Gives all host memory back."""
        self.wait()
        if self._shared is not None:
            for snapshot in self.snapshots():
                self._shared.revoke(snapshot)
        self.candidate = self.initial = self.left = self.taken_of = None
        self.trusted, self._spare, self._streams = [], [], {}


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
        self.healthy_inputs: Any = None
        self.first_steps: list[Control] = []
        self.tape: deque[Recording] = deque()
        self._tape_bytes = 0
        self._on_host = False
        self._gap = False

    def release(self) -> None:
        """Lets go of all of them."""
        self.newest_healthy = self.healthy_inputs = None
        self.first_steps, self._gap = [], False
        self.cut_tape()

    def copy_of(self, window: Window, loss: float) -> Control | None:
        """Copies a step to be computed again later."""
        control = window.control(loss, _LARGEST_CONTROL)
        if control is not None and self._on_host:
            # The device has just been waited for: only the copy itself takes time.
            control.leave_device()
        return control

    def note_healthy(self, window: Window) -> None:
        """Keeps the first micro-batch of a step with nothing wrong."""
        if not window.objective.online:
            inputs = window.inputs(0)
            self.healthy_inputs = on_host(inputs) if self._on_host else inputs

    # ---- the beginning of the run ----

    def keep_first(self, control: Control | None) -> None:
        """Keeps a step of the beginning of the run, unless there are enough, or one was left out for its size."""
        if len(self.first_steps) >= _TRIAL_STEPS or (control is not None and not math.isfinite(control.loss)):
            return
        # Without a gap: those that several ranks have in common are the first of each.
        self._gap |= control is None or control.nbytes > _LARGEST_CONTROL // _TRIAL_STEPS
        if control is not None and not self._gap:
            self.first_steps.append(control)

    def forget_first(self) -> None:
        """Drops the steps of the beginning of the run, once it is past that."""
        if self.first_steps:
            self.first_steps = []

    # ---- the tape ----

    def record(self, window: Window, control: Control | None) -> None:
        """Keeps the steps since the newest trusted state, to be applied again; not beyond a gap."""
        recording = None if control is None else window.recording(control)
        if recording is None or control is None or self._tape_bytes + control.nbytes > _LARGEST_TAPE:
            self.cut_tape()
            return
        self.tape.append(recording)
        self._tape_bytes += control.nbytes

    def recorded(self, steps: range) -> list[Recording] | None:
        """Returns the recordings of these steps; `None` if not all of them are kept."""
        found = [each for each in self.tape if each.step in steps]
        return found if [each.step for each in found] == list(steps) else None

    def cut_tape(self) -> None:
        """Lets go of all recordings."""
        self.tape.clear()
        self._tape_bytes = 0

    def forget_before(self, step: int) -> None:
        """Drops the steps before the newest trusted state: they are not applied again."""
        while self.tape and self.tape[0].step < step:
            self._tape_bytes -= self.tape.popleft().control.nbytes

    def forget_beyond(self, step: int) -> None:
        """Drops the steps from this one on: the run goes on from here with others."""
        while self.tape and self.tape[-1].step >= step:
            self._tape_bytes -= self.tape.pop().control.nbytes

    # ---- where memory ran out ----

    def free(self, of_host: bool, device: torch.device, snapshots: Iterable[Snapshot]) -> int:
        """Frees memory that kept batches take, after memory ran out."""
        snapshots = list(snapshots)
        with_snapshots = [snapshot.extras.get("control") for snapshot in snapshots]
        recorded = [recording.control for recording in self.tape]
        every = [*recorded, *self.first_steps, *with_snapshots, self.newest_healthy]
        kept = {id(control): control for control in every if control is not None}.values()
        # The same tensors, mostly, as those of the newest step that is kept.
        self.healthy_inputs = None if of_host else on_host(self.healthy_inputs)
        if not of_host:
            self._on_host = True
            return sum(control.leave_device() for control in kept)
        if device.type != "cpu" and not self._on_host:
            return 0
        self.first_steps, self.newest_healthy, self._gap = [], None, True
        self.cut_tape()
        for snapshot in snapshots:
            snapshot.extras.pop("control", None)
        return sum(control.nbytes for control in kept)


# ---- in place: puts another state in place of the one that a run is in ----


class StateInPlace:
    """The state that a run is in, which snapshots and checkpoints are written over."""

    def __init__(self, ring: SnapshotRing, batches: KeptBatches) -> None:
        self._ring, self._batches = ring, batches
        self._instrument: Instrument | None = None
        # Whether it is that of an experiment, or one gone back to that the run has not yet gone on from.
        self.displaced = False

    def attach(self, instrument: Instrument) -> None:
        """Takes the instrument of the running `train()` call."""
        self._instrument = instrument

    def detach(self) -> None:
        """Lets go of it: the run has ended."""
        self._instrument = None

    @property
    def attached(self) -> bool:
        """Whether `train()` was entered, and the run has not ended."""
        return self._instrument is not None

    @property
    def instrument(self) -> Instrument:
        """Of the running `train()` call."""
        if self._instrument is None:
            raise RuntimeError("there is no run to keep the states of")
        return self._instrument

    @property
    def device(self) -> torch.device:
        """Where the run trains."""
        device: torch.device = self.instrument.trainer.accelerator.device
        return device

    @property
    def live(self) -> LiveState:
        """Its tensors."""
        return self.instrument.view.live_state()

    def put(self, snapshot: Snapshot) -> None:
        """Writes a snapshot over it."""
        if self.instrument.failsafe.device_lost:
            return
        with_room(lambda: self._ring.restore(snapshot, self.live), self.device, give_up=self._give_up_memory)
        self.instrument.engine.state_put()
        optimizer_in_training_mode(self.instrument.trainer)

    def _give_up_memory(self) -> None:
        # The gradients are those of the state that is left.
        self.instrument.engine.discard()
        self.free_batches(of_host=False)

    def free_batches(self, of_host: bool) -> int:
        """Frees memory of the host or of the device that kept batches take ([`KeptBatches.free`])."""
        return self._batches.free(of_host, self.device, self._ring.snapshots())

    def try_to_put(self, snapshot: Snapshot) -> bool:
        """Writes a snapshot over it, at the second attempt if need be; returns whether that succeeded."""
        for _ in range(2):
            try:
                self.put(snapshot)
            except Exception as error:
                if classify_exception(error) in (FailureType.DEVICE, FailureType.PROCESS_DIED):
                    raise
                logger.warning("The state of step %d could not be put in place.", snapshot.step, exc_info=True)
                let_go(error)
            else:
                return True
            # Outside of the handler: what the failed attempt held is gone.
            free_memory(self.device)
        return False

    def load(self, checkpoint: str) -> None:
        """Writes a checkpoint over it."""
        if self.instrument.failsafe.device_lost:
            return
        # It is written over what may still be being copied.
        self._ring.wait()
        reload_checkpoint(self.instrument.trainer, checkpoint)

    def try_to_load(self, checkpoint: str) -> bool:
        """Writes a checkpoint over it, if all ranks have it: nodes may have disks of their own."""
        if not votes.all_ranks("the checkpoint is here", Path(checkpoint).is_dir(), self.device):
            logger.warning("%s is not there on all ranks, and is not loaded.", checkpoint)
            return False
        failed = False
        try:
            self.load(checkpoint)
        except Exception as error:
            if self.instrument.failsafe.tells_of_lost_device(error):
                raise
            failed = True
            logger.warning("%s could not be loaded.", checkpoint, exc_info=True)
        return self.is_sound(failed)

    def is_sound(self, failed: bool = False) -> bool:
        """Searches it for NaN and Inf."""
        return votes.all_ranks(
            "the state put in place is sound",
            not failed and not self.instrument.view.nonfinite_tensors(),
            self.device,
        )

    def is_known_to_be_finite(self) -> bool:
        """Whether a search of this rank finds it finite; `False` where there is no memory to search it."""
        try:
            return not self.instrument.view.nonfinite_tensors()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
