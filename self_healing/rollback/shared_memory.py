"""Snapshots in shared memory, which outlive the process that wrote them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import mmap
import os
import pickle
import shutil
import socket
import stat
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..hf.replicas import sum_of_all
from ..hf.state import LiveState, local
from ..hf.trainer_state import ResumeRecord
from ..system import processes
from .host_memory import DeviceCopies, HostBlock, Place, TensorCopy, leaves
from .snapshots import Snapshot


logger = logging.getLogger("self_healing")


# ---- shared memory ----


with contextlib.suppress(ImportError):
    # On Windows there is neither this nor /dev/shm.
    import fcntl


# In memory, until the machine is started again or they are removed.
ROOT = Path("/dev/shm")
_LOCK = "in-use"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def directory_of(output_dir: str | os.PathLike[str]) -> Path:
    """Names the directory in shared memory of the runs that train into an `output_dir`."""
    key = hashlib.sha256(os.path.realpath(output_dir).encode()).hexdigest()[:16]
    return ROOT / f"self-healing-{_user()}-{key}"


def make_directory(path: Path) -> None:
    """Makes a directory in shared memory that only this user can look into."""
    for each in (path.parent, path):
        if each != ROOT:
            each.mkdir(mode=0o700, exist_ok=True)
            if not is_own(each):
                raise PermissionError(f"{each} is not a directory of this user's alone")


def is_own(path: Path) -> bool:
    """Whether a directory is there, and only this user can read what is in it, and write to it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == _user() and not found.st_mode & 0o077


def free_shared_memory() -> int:
    """Reads how many bytes may still be put there, by all processes of the machine or container."""
    try:
        found = os.statvfs(ROOT)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def hold(directory: Path) -> int:
    """
    Marks a directory as in use until this process ends, by a lock: ids of processes are given out again, and those of
    a container that shares this memory say nothing here.
    """
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Of this process alone, and not of those that it forks, which may outlive it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def holder_of(directory: Path) -> int | None:
    """Gives the id of the other process that uses a directory, as that one counts (0 if not known), if any does."""
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return int(os.pread(descriptor, 20, 0) or 0)
    else:
        return None
    finally:
        os.close(descriptor)


def processes_using(output_dir: str | os.PathLike[str]) -> list[int]:
    """Lists other processes that keep states of runs of an `output_dir` there: their ids, in order."""
    holders = (holder_of(each) for each in directory_of(output_dir).glob("*"))
    return sorted({each for each in holders if each is not None})


def bytes_in(path: Path) -> int:
    """Adds up what the files below a directory take."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def remove_states(output_dir: str | os.PathLike[str]) -> int:
    """Removes all that the runs of an `output_dir` have left in shared memory."""
    directory = directory_of(output_dir)
    if not is_own(directory):
        return 0
    freed = bytes_in(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return freed


@lru_cache(maxsize=1)
def this_boot() -> str:
    """Names this machine, as it was started the last time."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


# ---- stored state: the file that makes a state in shared memory one that another process can go on from ----


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


# ---- shared states: snapshots of a run that outlive its process, in files of shared memory ----


# Of the free memory: others need some, too.
_SHARE = 0.9
# As many as the ring holds beside the state a run began with: two that are trusted, and one that is not yet.
_STATES = 3
_TAKEN_ON_THE_WAY = AtTheEnd()


class SharedStates:
    """Lets the snapshots of one rank outlive its process."""

    def __init__(self, output_dir: str, run: str, rank: int, world_size: int) -> None:
        self.directory = rank_directory(output_dir, run, rank, world_size)
        self._local_ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        self._writer = StateWriter(StateFacts(run, rank, world_size, this_boot(), -1))
        # `None` until it is known whether there is room.
        self._open: bool | None = None
        self._numbers = count(1)
        self._blocks: list[tuple[Path, weakref.ref[HostBlock]]] = []
        self._pending: tuple[Snapshot, StateToStore] | None = None
        self._stored: dict[int, Path] = {}
        self._kept = False

    @property
    def active(self) -> bool:
        """Whether snapshots are taken in shared memory."""
        return bool(self._open)

    # ---- host memory ----

    def open(self, size: Callable[[], int]) -> None:
        """Decides, when the first state is to be taken, whether there is room for all that will be held."""
        if self._open is not None:
            return
        needed, free = _STATES * size() * self._local_ranks, free_shared_memory()
        if needed > _SHARE * free:
            self._open = False
            logger.info(
                "Snapshots do not outlive this process: %.2f GB would be needed in /dev/shm, and %.2f GB are free "
                "there (in a container: --shm-size). A restart goes on from the newest checkpoint on disk.",
                needed / 1e9,
                free / 1e9,
            )
            return
        try:
            make_directory(self.directory)
            weakref.finalize(self, os.close, hold(self.directory))
        except OSError as error:
            self._give_up(error)
        else:
            self._open = True

    def new_block(self, nbytes: int, copies: DeviceCopies | None) -> HostBlock:
        """Takes host memory, in shared memory if there is room."""
        if not self._open:
            return HostBlock(nbytes, copies)
        # Unique among those of all processes that have trained there.
        file = self.directory / f"{os.getpid()}-{next(self._numbers)}.block"
        try:
            block = HostBlock(nbytes, copies, file)
        except OSError as error:
            self._give_up(error)
            return HostBlock(nbytes, copies)
        self._blocks.append((file, weakref.ref(block)))
        return block

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether the memory of a snapshot lies there."""
        return all(place.block is None or place.block.file is not None for place in snapshot.pool.values())

    # ---- states ----

    def prepare(
        self,
        snapshot: Snapshot,
        live: LiveState,
        record: Callable[[], ResumeRecord],
        left: AtTheEnd = _TAKEN_ON_THE_WAY,
    ) -> None:
        """Writes down what belongs to a snapshot, whose copy may still be under way."""
        self._pending, began = None, time.perf_counter()
        if not self._open:
            return
        try:
            self._pending = snapshot, self._writer.prepare(snapshot, live, record(), left)
            if not snapshot.under_way:
                self.store()
        except Exception as error:
            self._give_up(error)
        snapshot.writing_seconds = time.perf_counter() - began

    def store(self) -> None:
        """Stores the state that was prepared; called once its copy is complete, or nearly."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        snapshot, state = pending
        try:
            if not snapshot.torn and not snapshot.nonfinite():
                path = self.directory / f"{os.getpid()}-{next(self._numbers)}{SUFFIX}"
                state.write(path)
                self._stored[id(snapshot)] = path
        except Exception as error:
            self._give_up(error)
        self._remove_unused_blocks()

    def has(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is stored."""
        return id(snapshot) in self._stored

    def revoke(self, snapshot: Snapshot) -> None:
        """Takes back that a snapshot is one to go on from, before its memory is used again."""
        if self._pending is not None and self._pending[0] is snapshot:
            self._pending = None
        path = self._stored.pop(id(snapshot), None)
        if path is not None and not self._kept:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    # ---- the end ----

    def keep(self) -> None:
        """From here on what is there stays, for the process that goes on with the run."""
        self._kept = True

    def close(self) -> None:
        """Nothing is stored any more: nobody goes on from it."""
        self._pending, self._stored, self._open = None, {}, False

    def _remove_unused_blocks(self) -> None:
        """Removes the files of blocks that were let go of."""
        for entry in [entry for entry in self._blocks if entry[1]() is None]:
            self._blocks.remove(entry)
            if not self._kept:
                with suppress(OSError):
                    entry[0].unlink(missing_ok=True)

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, NotStorable | OSError):
            logger.info("Snapshots do not outlive this process (%s); a restart goes on from disk.", error)
        else:
            logger.warning("self_healing cannot let snapshots outlive this process.", exc_info=error)
        self._open = False


def rank_directory(output_dir: str, run: str, rank: int, world_size: int) -> Path:
    """Names the directory of one rank of a run in shared memory."""
    return directory_of(output_dir) / f"{run}-rank{rank}-of-{world_size}"


def remove_rank(output_dir: str, run: str, rank: int, world_size: int) -> None:
    """Removes what one rank of a run has in shared memory."""
    directory = rank_directory(output_dir, run, rank, world_size)
    if is_own(directory):
        shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        # Of the last rank.
        directory.parent.rmdir()
