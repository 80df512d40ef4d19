"""
The file that makes a state in shared memory one that another process can go on from.

Its tensors lie in blocks, files of their own. This one comes last, and in one move: it says in its first line whose
state it is, how large the blocks are and what the checksum of the rest is, and then what lies where in them, and what
belongs to the state beside tensors. As long as it is there, its blocks are not written to.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..hf.replicas import sum_of_all
from ..hf.state import LiveState, local
from ..hf.trainer_state import ResumeRecord
from ..system import processes
from .copied_state import Place, TensorCopy, leaves
from .host_memory import HostBlock
from .snapshots import Snapshot


SUFFIX = ".state"
# The shape of a parameter, and how it is split over which ranks.
Layout = tuple[tuple[int, ...], tuple[str, list[Any]] | None]
# Of what is stored: a file of another version is as if there were none.
_VERSION = 3


class NotStorable(Exception):
    """A state has a part that no other process can go on from."""


class StateUnusable(Exception):
    """A state in shared memory cannot be gone on from."""


@dataclass(frozen=True, slots=True)
class AtTheEnd:
    """What the other ranks have to know of the state that a process leaves when it ends."""

    owed: str = ""
    weights: str = ""
    finished_alone: bool = False


@dataclass(frozen=True, slots=True)
class StateFacts:
    """The first line of the file: whose state it is."""

    run: str
    rank: int
    world_size: int
    boot: str
    step: int
    owed: str = ""
    weights: str = ""
    finished_alone: bool = False
    running_loss: float = 0.0
    frozen: int = 0
    blocks: dict[str, int] = field(default_factory=dict)
    checksum: int = 0
    length: int = 0
    version: int = _VERSION


@dataclass(slots=True)
class StateToStore:
    """A state that is being copied into its blocks, and what the file about it will say."""

    facts: StateFacts
    body: bytes
    # Read once it is written, for which nothing has to wait for the device.
    running_loss: torch.Tensor
    frozen: torch.Tensor

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        facts = replace(
            self.facts,
            running_loss=float(self.running_loss),
            frozen=int(self.frozen),
            checksum=zlib.crc32(self.body),
            length=len(self.body),
        )
        temporary = path.with_suffix(".tmp")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(json.dumps(asdict(facts)).encode() + b"\n")
                file.write(self.body)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


class StateWriter:
    """Makes files of snapshots."""

    def __init__(self, facts: StateFacts) -> None:
        self._facts = facts
        # Entries of the log that are pickled already: it grows at its end, and may be cut there.
        self._entries: list[dict[str, Any]] = []
        self._pickled: list[bytes] = []

    def prepare(self, snapshot: Snapshot, live: LiveState, record: ResumeRecord, left: AtTheEnd) -> StateToStore:
        """Writes down what belongs to a state as of now, while its tensors may still be being copied."""
        blocks = {id(place.tensor): place for place in snapshot.pool.values()}
        described = io.BytesIO()
        pickler = _Pickler(described, blocks)
        order = {id(parameter): index for index, parameter in enumerate(live.updated)}
        pickler.dump(
            {
                "parameters": snapshot.parameters,
                "buffers": snapshot.buffers,
                "groups": snapshot.groups,
                "states": [(order[id(parameter)], state) for parameter, state in snapshot.states],
                "layouts": _layouts_of(live),
                "kind": _kind_of(live),
            }
        )
        beside = pickle.dumps(replace(record, log_history=[], running_loss=torch.zeros(())), pickle.HIGHEST_PROTOCOL)
        parts = described.getvalue(), beside, self._log_of(record.log_history)
        body = pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)
        facts = replace(self._facts, step=record.step, blocks=pickler.files, **asdict(left))
        return StateToStore(facts, body, record.running_loss, sum_of_all(live.frozen, record.running_loss.device))

    def _log_of(self, log_history: Sequence[dict[str, Any]]) -> list[bytes]:
        """Pickles the entries of the log; a long one is not pickled again for each state."""
        known = self._entries
        while known and (len(log_history) < len(known) or log_history[len(known) - 1] is not known[-1]):
            known.pop()
            self._pickled.pop()
        for entry in log_history[len(known) :]:
            known.append(entry)
            self._pickled.append(pickle.dumps(entry, pickle.HIGHEST_PROTOCOL))
        return self._pickled


class _Pickler(pickle.Pickler):
    """Pickles copies of tensors as where they lie."""

    def __init__(self, file: io.BytesIO, blocks: Mapping[int, Place]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._blocks = blocks
        self.files: dict[str, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, TensorCopy):
            return None
        host, device = value.host, value.device
        if value.paged is not None:
            raise NotStorable("a paged optimizer moves its state by itself")
        block = self._blocks[id(host)].block
        where: tuple[str, int] | None = None
        if host.numel() > 0:
            where = self._place_of(block, host)
        return where, host.dtype, tuple(host.shape), host.stride(), device.type, value.may_be_infinite, value.sharded

    def _place_of(self, block: HostBlock | None, host: torch.Tensor) -> tuple[str, int]:
        if block is None:
            raise NotStorable(f"a tensor of a kind that does not tell what it is made of ({type(host).__name__})")
        if block.file is None:
            raise NotStorable("a part of it lies in memory of this process alone")
        self.files[block.file.name] = block.nbytes
        return block.file.name, block.offset_of(host)


class _Unpickler(pickle.Unpickler):
    """Makes tensors of where they lie, without a copy."""

    def __init__(self, file: io.BytesIO, memory: Mapping[str, mmap.mmap], device: torch.device) -> None:
        super().__init__(file)
        self._memory = memory
        self._device = device

    def persistent_load(self, pid: Any) -> TensorCopy:
        where, dtype, shape, stride, kind, may_be_infinite, sharded = pid
        if where is None:
            host = torch.empty_strided(shape, stride, dtype=dtype)
        else:
            name, offset = where
            count = int(torch.Size(shape).numel())
            host = torch.frombuffer(self._memory[name], dtype=dtype, count=count, offset=offset)
            host = host.as_strided(shape, stride)
        # Its number may be another one now.
        device = self._device if kind == self._device.type else torch.device(kind)
        return TensorCopy(host, device, may_be_infinite, sharded=sharded)


class StoredState:
    """A state in shared memory, opened."""

    def __init__(
        self,
        path: Path,
        facts: StateFacts,
        record: ResumeRecord,
        snapshot: Snapshot,
        orders: list[int],
        layouts: list[Layout],
        kind: str,
    ) -> None:
        self.path, self.facts = path, facts
        self.record = record
        self._snapshot, self._layouts, self._kind = snapshot, layouts, kind
        self._orders, self._states = orders, [state for _, state in snapshot.states]
        self._put_into: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(self.facts.blocks.values())

    def check(self, live: LiveState) -> None:
        """Looks whether its tensors fit the live ones."""
        parameters, snapshot, kind = live.updated, self._snapshot, _kind_of(live)
        if kind != self._kind:
            raise StateUnusable(f"it is of a run under {self._kind}, and this one is under {kind}")
        self._check("parameter", live.parameters, snapshot.parameters)
        self._check("buffer", live.buffers, snapshot.buffers)
        if live.optimizer is not None and len(live.optimizer.param_groups) != len(snapshot.groups):
            raise StateUnusable(f"its optimizer has {len(snapshot.groups)} groups of parameters")
        layouts = _layouts_of(live)
        if len(layouts) != len(self._layouts):
            raise StateUnusable(f"its optimizer has {len(self._layouts)} parameters, not {len(layouts)} as now")
        for number, (then, now) in enumerate(zip(self._layouts, layouts, strict=True)):
            if then != now:
                raise StateUnusable(f"parameter {number} of its optimizer is {_told(then)}, now it is {_told(now)}")
        for order, state in zip(self._orders, self._states, strict=True):
            for name, kept in leaves("", state):
                if kept.sharded and local(parameters[order]).shape != kept.host.shape:
                    raise StateUnusable(f"{name} of parameter {order} of the optimizer is split in another way")
        if int(sum_of_all(live.frozen, self.record.running_loss.device)) != self.facts.frozen:
            raise StateUnusable("weights that are not trained, and not in it, are not those of the process before")

    def put(self, live: LiveState) -> None:
        """Writes its tensors into the live ones, which they fit."""
        parameters, snapshot = live.updated, self._snapshot
        snapshot.states = [(parameters[order], state) for order, state in zip(self._orders, self._states, strict=True)]
        for parameter, state in snapshot.states:
            for _, kept in leaves("", state):
                kept.layout = parameter if kept.sharded else None
        snapshot.restore(live)
        self._put_into = live.optimizer

    def snapshot_in(self, live: LiveState) -> Snapshot | None:
        """Gives it as a snapshot of live tensors, if they are those it was put into."""
        there = live.optimizer is not None and live.optimizer is self._put_into
        there &= not (live.scaler or live.loss_scaler)
        return self._snapshot if there else None

    @staticmethod
    def _check(kind: str, live: Mapping[str, torch.Tensor], kept: Mapping[str, Any]) -> None:
        if live.keys() != kept.keys():
            name = next(iter(live.keys() ^ kept.keys()))
            raise StateUnusable(f"it has {'no' if name in live else 'a'} {kind} {name!r}, other than the model now")
        for name, tensor in live.items():
            copy = kept[name]
            if isinstance(copy, TensorCopy) and (copy.host.shape, copy.host.dtype) != (tensor.shape, tensor.dtype):
                raise StateUnusable(
                    f"its {kind} {name!r} is {copy.host.dtype} of {tuple(copy.host.shape)}, that of the model now "
                    f"{tensor.dtype} of {tuple(tensor.shape)}"
                )


def read_facts(path: Path) -> StateFacts | None:
    """Reads whose state a file is about; `None` for one that is torn, or of another version."""
    try:
        with path.open("rb") as file:
            facts = StateFacts(**json.loads(file.readline()))
            whole = path.stat().st_size == file.tell() + facts.length
        sizes = {name: (path.parent / name).stat().st_size for name in facts.blocks}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return facts if whole and facts.version == _VERSION and sizes == facts.blocks else None


def open_state(path: Path, device: torch.device) -> StoredState:
    """Opens a state that an earlier process of the run has left."""
    facts = read_facts(path)
    if facts is None:
        raise StateUnusable(f"{path} is not whole")
    try:
        with path.open("rb") as file:
            file.readline()
            body = file.read()
        if zlib.crc32(body) != facts.checksum:
            raise StateUnusable(f"{path} is not what was written")
        memory = {name: _map(path.parent / name) for name in facts.blocks}
        described, beside, log_history = pickle.loads(body)
        content = _Unpickler(io.BytesIO(described), memory, device).load()
    except StateUnusable:
        raise
    except Exception as error:
        raise StateUnusable(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    record: ResumeRecord = replace(
        pickle.loads(beside),
        log_history=[pickle.loads(entry) for entry in log_history],
        running_loss=torch.tensor(facts.running_loss),
    )
    snapshot = Snapshot(
        step=facts.step,
        parameters=content["parameters"],
        buffers=content["buffers"],
        groups=content["groups"],
        states=content["states"],
    )
    orders = [order for order, _ in content["states"]]
    return StoredState(path, facts, record, snapshot, orders, content["layouts"], content["kind"])


def _map(file: Path) -> mmap.mmap:
    descriptor = os.open(file, os.O_RDWR)
    try:
        # Written to by nobody. All its pages at once: one by one they take as long as what is read.
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        os.close(descriptor)


def _kind_of(live: LiveState) -> str:
    return "no ZeRO" if live.partitioning is None else live.partitioning.kind


def _layouts_of(live: LiveState) -> list[Layout]:
    """Lists which parts of its parameters an optimizer has on this rank."""
    if live.partitioning is not None:
        everybody = list(range(processes.world_size()))
        parts = zip(live.partitioning.masters, live.partitioning.parts, strict=True)
        return [(tuple(master.shape), (f"ZeRO (parameters {part})", everybody)) for master, part in parts]
    ranks: dict[int, list[Any]] = {}
    found = list[Layout]()
    for parameter in live.updated:
        split: tuple[str, list[Any]] | None = None
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            split = str(parameter.placements), ranks.setdefault(id(mesh), mesh.mesh.tolist())
        found.append((tuple(parameter.shape), split))
    return found


def _told(layout: Layout) -> str:
    shape, split = layout
    return f"of {shape}" if split is None else f"of {shape}, split by {split[0]} over the ranks {split[1]}"
