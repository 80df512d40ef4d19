"""
One state of a run in host memory.

A snapshot of what `optimizer.step()` changes: trained parameters, buffers, optimizer state, scaler, and whatever its
owner wants to keep with it. Tensors on a GPU are copied into pinned memory on a stream of their own, while the next
forward and backward run, which change none of them. Whatever does change them asks for [`Snapshot.join`] first (the
next `optimizer.step()`, which then comes after the copies on the device) or waits for them, as [`Snapshot.restore`]
does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..hf.state import LiveState, Search
from .copied_state import NewBlock, Place, StateWriter, TensorCopy, by_device, copy_all, leaves, put_back
from .host_copies import SideStream, Transfer, copies_of
from .host_memory import HostBlock


# Entries of a parameter group that belong to the schedule, which goes on, or to how updates are computed.
_OF_THE_SCHEDULE = frozenset({"params", "lr", "initial_lr", "betas", "momentum", "weight_decay", "foreach"})


@dataclass(slots=True)
class Snapshot:
    """
    One state of a run.

    Args:
        step (`int`):
            Optimizer steps finished when it was taken.
        as_of (`int`):
            The last step at which the run was in this state: later than `step` once it has been gone back to.
        extras (`dict`):
            What its owner keeps with it.
        nbytes (`int`):
            Host memory it takes.
        seconds (`float`):
            Time its copy took, on the device or on the CPU.
        writing_seconds (`float`):
            Time it took to write down what belongs to it for another process.
        allocated (`bool`):
            Whether new memory was taken for it.
        torn (`bool`):
            Whether something wrote to the state while it was copied: it holds parts of two.
    """

    step: int = -1
    as_of: int = -1
    extras: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    writing_seconds: float = 0.0
    allocated: bool = False
    torn: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    states: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    pool: dict[tuple[Any, ...], Place] = field(default_factory=dict)
    under_way: list[Transfer] = field(default_factory=list)
    # What is being copied, with how often it had been written to when that began.
    sources: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    # What [`nonfinite`] has found, once it was asked.
    _nonfinite: list[str] | None = None

    @property
    def nbytes(self) -> int:
        blocks = {id(place.block): place.block.nbytes for place in self.pool.values() if place.block is not None}
        own = sum(place.tensor.nbytes for place in self.pool.values() if place.block is None)
        return sum(blocks.values()) + own

    # ---- taking ----

    def take(
        self,
        live: LiveState,
        streams: dict[torch.device, SideStream],
        wait: bool,
        new_block: NewBlock = HostBlock,
    ) -> None:
        """
        Copies the state of a run as it is, into the host memory of what was here before where it fits.

        Args:
            live ([`LiveState`]):
                The tensors.
            streams (`dict[torch.device, SideStream]`):
                Of the devices that copy beside what they compute; those that are missing are added.
            wait (`bool`):
                Whether to return only when the copy is complete.
            new_block (`Callable`, *optional*):
                Takes host memory.
        """
        began = time.perf_counter()
        self.wait()
        self._nonfinite = None
        writer = StateWriter(self.pool)
        # What changes without an `optimizer.step()` is copied in the stream that all is computed in: buffers, which a
        # forward pass changes, and the scale, which may change where a step is left out.
        self.buffers = writer.save(live.buffers, ("buffer",), may_be_infinite=True)
        self.scaler = writer.save(live.scaler, ("scaler",))
        self.loss_scaler = writer.save(live.loss_scaler, ("loss_scaler",))
        at_once = by_device(writer.pending())
        self._save_rest(live, writer)
        beside = by_device(writer.pending())
        writer.allocate(copies_of, new_block)
        try:
            for device in {**at_once, **beside}:
                stream = _stream_of(device, streams)
                copy_all(at_once.get(device, ()), non_blocking=stream is not None)
                work = partial(copy_all, beside.get(device, ()), non_blocking=stream is not None)
                if stream is None:
                    work()
                else:
                    self.sources += [(tensor, tensor._version) for _, tensor in beside.get(device, ())]
                    self.under_way.append(stream.start(work))
        except BaseException:
            self.wait()
            raise
        self.pool, self.allocated = writer.used, writer.allocated
        self.seconds = time.perf_counter() - began
        if wait:
            self.wait()

    def _save_rest(self, live: LiveState, writer: StateWriter) -> None:
        self.parameters = writer.save(live.parameters, ("parameter",))
        self.groups, self.states = [], []
        if live.optimizer is None:
            return
        for index, group in enumerate(live.optimizer.param_groups):
            kept = {name: value for name, value in group.items() if name not in _OF_THE_SCHEDULE}
            self.groups.append(writer.save(kept, ("group", index)))
        for index, (parameter, state) in enumerate(live.optimizer.state.items()):
            self.states.append((parameter, writer.save(state, ("state", index))))

    def wait(self) -> None:
        """Waits until the copy is complete, and measures it."""
        if self.under_way:
            self.seconds = max(transfer.wait() for transfer in self.under_way)
            self.under_way = []
        self.sources = []

    def join(self) -> None:
        """Orders all later work of the devices after the copy; the host does not wait."""
        if self.sources:
            self.torn |= any(tensor._version != version for tensor, version in self.sources)
            self.sources = []
        for transfer in self.under_way:
            transfer.join()

    def nonfinite(self) -> list[str]:
        """Names of the tensors that were not finite when it was taken. Waits for the copy."""
        self.wait()
        if self._nonfinite is None:
            search = Search()
            for name, kept in self.copies():
                # A causal mask kept as a buffer holds -inf on purpose.
                search.add(name, kept.extent, inf=not kept.may_be_infinite)
            self._nonfinite = search.nonfinite()
        return self._nonfinite

    def copies(self) -> Iterator[tuple[str, TensorCopy]]:
        """Yields the copies of weights, buffers and optimizer state, by name."""
        yield from leaves("", self.parameters)
        yield from leaves("buffer:", self.buffers)
        for index, (_, state) in enumerate(self.states):
            yield from leaves(f"optimizer:{index}.", state)

    # ---- putting back ----

    @torch.no_grad()
    def restore(self, live: LiveState) -> None:
        """
        Writes the state into the live tensors, which stay the same objects. Optimizer state that did not exist when
        the snapshot was taken is removed, so that the optimizer makes it again.

        The host memory may be written to again as soon as this returns.
        """
        self.wait()
        for tensors, kept in (
            (live.parameters, self.parameters),
            (live.buffers, self.buffers),
            (live.scaler, self.scaler),
        ):
            for name, tensor in tensors.items():
                if name in kept:
                    put_back(tensor, kept[name])
        if self.loss_scaler:
            put_back(live.loss_scaler, self.loss_scaler)
        if live.optimizer is None:
            return
        for group, settings in zip(live.optimizer.param_groups, self.groups, strict=False):
            for name, value in settings.items():
                group[name] = put_back(group.get(name), value)
        state = live.optimizer.state
        known = {parameter: saved for parameter, saved in self.states}
        for parameter in [parameter for parameter in state if parameter not in known]:
            del state[parameter]
        for parameter, saved in known.items():
            state[parameter] = put_back(state.get(parameter), saved)


def _stream_of(device: torch.device, streams: dict[torch.device, SideStream]) -> SideStream | None:
    copies = copies_of(device.type)
    if copies is not None and device not in streams:
        streams[device] = copies.stream(device)
    return streams.get(device)
