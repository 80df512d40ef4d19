"""Snapshots in shared memory, which outlive the process that wrote them."""

from __future__ import annotations

import hashlib
import io
import logging
import mmap
import os
import pickle
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.tensor import DTensor

from ..hf.replicas import sum_of_all
from ..hf.state import LiveState, plain_parts
from ..hf.trainer_state import ResumeRecord, resuming_from
from ..ranks import votes
from .host_memory import HostBlock, TensorCopy
from .snapshots import Snapshot


logger = logging.getLogger("self_healing")


# ---- directories in shared memory ----


with suppress(ImportError):
    # On Windows there is neither this nor /dev/shm.
    import fcntl


# In memory, until the machine is started again or they are removed.
ROOT = Path("/dev/shm")
_LOCK = "in-use"


def directory_of(output_dir: str | os.PathLike[str]) -> Path:
    """Names the directory in shared memory of the runs that train into an `output_dir`."""
    key = hashlib.sha256(os.path.realpath(output_dir).encode()).hexdigest()[:16]
    return ROOT / f"self-healing-{_user()}-{key}"


def rank_directory(output_dir: str, run: str, rank: int, world_size: int) -> Path:
    """Names the directory of one rank of a run in shared memory."""
    return directory_of(output_dir) / f"{run}-rank{rank}-of-{world_size}"


def make_directory(path: Path) -> None:
    """Makes the directory of a rank, in one that only this user can look into."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not is_own(path.parent):
        raise PermissionError(f"{path.parent} is not a directory of this user's alone")
    path.mkdir(mode=0o700, exist_ok=True)


def is_own(path: Path) -> bool:
    """Whether a directory is there, and only this user can read what is in it, and write to it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == _user() and not found.st_mode & 0o077


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


def remove_states(output_dir: str | os.PathLike[str]) -> int:
    """Removes all that the runs of an `output_dir` have left in shared memory; gives its bytes."""
    directory = directory_of(output_dir)
    if not is_own(directory):
        return 0
    freed = sum(file.lstat().st_size for file in directory.rglob("*") if file.is_file())
    shutil.rmtree(directory, ignore_errors=True)
    return freed


def remove_rank(output_dir: str, run: str, rank: int, world_size: int) -> None:
    """Removes what one rank of a run has in shared memory."""
    directory = rank_directory(output_dir, run, rank, world_size)
    if is_own(directory.parent):
        shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        # Of the last rank.
        directory.parent.rmdir()


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


# ---- stored state: the file that makes a state in shared memory one that another process can go on from ----


SUFFIX = ".state"


class NotStorable(Exception):
    """A state has a part that no other process can go on from."""


class StateUnusable(Exception):
    """A state in shared memory cannot be gone on from."""


@dataclass(frozen=True, slots=True, order=True)
class SharedStep:
    """What is the same of a state on all ranks that have it."""

    step: int
    run: str
    # What the run owes beside it, in words.
    owed: str
    # Of a state that was left at the end, where all ranks keep the same weights: those are not the same where one has
    # applied a step whose gradients its callbacks had not changed yet.
    weights: str = ""


@dataclass(frozen=True, slots=True)
class StateFacts:
    """The beginning of the file: whose state it is."""

    shared: SharedStep
    # Of the block that its tensors lie in.
    block: str
    running_loss: float = 0.0
    frozen: int = 0


class _Pickler(pickle.Pickler):
    """Pickles copies of tensors as where they lie."""

    def __init__(self, file: io.BytesIO, block: HostBlock) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._block = block

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            raise NotStorable("its optimizer keeps sharded tensors in objects")
        if not isinstance(value, TensorCopy):
            return None
        if value.paged is not None:
            raise NotStorable("a paged optimizer moves its state by itself")
        host, device = value.host, value.device.type
        offset = self._block.offset_of(host) if host.numel() else None
        return offset, host.dtype, tuple(host.shape), host.stride(), device, value.sharded, value.trained


class _Unpickler(pickle.Unpickler):
    """Makes tensors of where they lie, without a copy."""

    def __init__(self, file: BinaryIO, memory: mmap.mmap, device: torch.device) -> None:
        super().__init__(file)
        self._memory = memory
        self._device = device

    def persistent_load(self, pid: Any) -> TensorCopy:
        offset, dtype, shape, stride, kind, sharded, trained = pid
        if offset is None:
            host = torch.empty_strided(shape, stride, dtype=dtype)
        else:
            count = int(torch.Size(shape).numel())
            host = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
            host = host.as_strided(shape, stride)
        # Its number may be another one now.
        device = self._device if kind == self._device.type else torch.device(kind)
        return TensorCopy(host, device, None, sharded, trained)


class StoredState:
    """A state in shared memory that this process can go on from."""

    def __init__(self, path: Path, facts: StateFacts, content: dict[str, Any]) -> None:
        self.path, self.facts = path, facts
        self.record: ResumeRecord = replace(content["record"], running_loss=torch.tensor(facts.running_loss))
        # The directory that `train()` resumes from, in place of a checkpoint.
        self.checkpoint = str(path.with_name(f"checkpoint-{facts.shared.step}"))
        self.nbytes = path.with_name(facts.block).stat().st_size
        # Nothing once it was let go of.
        self._content = content

    def loading(self, trainer: Any, on_success: Callable[[StoredState], None]) -> AbstractContextManager[None]:
        """Lets `train()` of a trainer resume from it."""
        if not self._content:
            raise StateUnusable("it was let go of when there was a newer one")

        def put(live: LiveState) -> None:
            wrong = self.misfit(live)
            if not votes.all_ranks("the state in shared memory fits", not wrong, trainer.args.device):
                raise StateUnusable(wrong or "it does not fit on another rank")
            self.put(live)
            on_success(self)

        return resuming_from(trainer, self.checkpoint, self.record, put)

    def misfit(self, live: LiveState) -> str:
        """Says why it does not fit live tensors; nothing if it does."""
        then, now = self._content["signature"], _signature(live)
        for name in [*then, *now]:
            if then.get(name) != now.get(name):
                return f"{name} was {then.get(name, 'not there')}, and is {now.get(name, 'not there')}"
        if int(sum_of_all(live.frozen, self.record.running_loss.device)) != self.facts.frozen:
            return "weights that are not trained, and not in it, are not those of the process before"
        return ""

    def put(self, live: LiveState) -> None:
        """Writes its tensors into the live ones, which they fit."""
        content, updated = self._content, live.updated
        snapshot = Snapshot(
            parameters=content["parameters"],
            buffers=content["buffers"],
            groups=content["groups"],
            states=[(updated[order], state) for order, state in content["states"]],
        )
        snapshot.restore(live)

    def remove_others(self) -> None:
        """Removes what else the process before this one has left: the memory is needed for states of this one."""
        for file in self.path.parent.glob("*.*"):
            if file.name not in (self.path.name, self.facts.block):
                file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes it: there is a newer one."""
        self._content = {}
        for file in (self.path, self.path.with_name(self.facts.block)):
            with suppress(OSError):
                file.unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint, ignore_errors=True)


def read_facts(path: Path) -> StateFacts | None:
    """Reads whose state a file is about; `None` for one that cannot be read."""
    try:
        with path.open("rb") as file:
            facts: StateFacts = pickle.load(file)
    except Exception:
        return None
    # Left by another version of this library, it may have come out with its fields in the places of others.
    return facts if isinstance(facts, StateFacts) and isinstance(facts.shared, SharedStep) else None


def open_state(path: Path, device: torch.device) -> StoredState:
    """Opens a state that an earlier process of the run has left."""
    try:
        with path.open("rb") as file:
            facts: StateFacts = pickle.load(file)
            with path.with_name(facts.block).open("r+b") as block:
                # Written to by nobody. All its pages at once: one by one they take as long as what is read.
                flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                memory = mmap.mmap(block.fileno(), 0, flags=flags)
            content = _Unpickler(file, memory, device).load()
        return StoredState(path, facts, content)
    except Exception as error:
        raise StateUnusable(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def _signature(live: LiveState) -> dict[str, str]:
    """Describes tensors of a run, by their names: those of a state have to be the same to be put into it."""
    partitioning = live.partitioning
    found = {"partitioning": "no ZeRO" if partitioning is None else partitioning.kind}
    found["number of parameter groups"] = str(len(getattr(live.optimizer, "param_groups", ())))
    for kind, tensors in (("parameter", live.parameters), ("buffer", live.buffers)):
        found |= {f"{kind} {name!r}": _described(tensor) for name, tensor in tensors.items()}
    for number, parameter in enumerate(live.updated):
        part = "" if partitioning is None else f", parameters {partitioning.parts[number]}"
        found[f"parameter {number} of the optimizer"] = _described(parameter) + part
    return found


def _described(tensor: torch.Tensor) -> str:
    split = ""
    if isinstance(tensor, DTensor):
        split = f", split by {tensor.placements} over the ranks {tensor.device_mesh.mesh.tolist()}"
    return f"{tensor.dtype} of {tuple(tensor.shape)}{split}"


# ---- shared states: snapshots of a run that outlive its process, in files of shared memory ----


# Of the free memory: others need some, too.
_SHARE = 0.9
# As many as the ring holds beside the state a run began with: two that are trusted, and one that is not yet.
_STATES = 3


# Of tensors: where they lie, and how often they were written to.
_Versions = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What belongs to a snapshot that may still be being copied."""

    snapshot: Snapshot
    facts: StateFacts
    body: bytes
    # The loss and the sums of what is frozen: of a sample, and of all of it if that was read; and when they are there.
    numbers: list[torch.Tensor]
    there: Any
    frozen: Mapping[str, torch.Tensor]
    versions: _Versions


# Elements of each frozen tensor by which it is noticed that it was written to without a trace.
_SAMPLED = 64


def _sample_of(tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    flat = [each.view(-1) for each in tensors if each.is_contiguous()]
    return {str(at): each[:: max(each.numel() // _SAMPLED, 1)].contiguous() for at, each in enumerate(flat)}


class SharedStates:
    """Lets the snapshots of one rank outlive its process."""

    def __init__(self, output_dir: str, run: str, rank: int, world_size: int) -> None:
        self.directory = rank_directory(output_dir, run, rank, world_size)
        self._run = run
        # Whether snapshots are taken in shared memory, and whether that was decided.
        self.active = self._decided = False
        self._numbers = count(1)
        # Stored once its copy is complete and was searched, for which nothing has to wait then.
        self.prepared: _Prepared | None = None
        # The weights that are not trained when their bits were last added up, and the sums: of a sample, and of all.
        self._versions: _Versions | None = None
        self._sample, self._whole = 0, 0
        self._kept = False

    # ---- host memory ----

    def open(self, size: Callable[[], int]) -> None:
        """Decides, when the first state is to be taken, whether there is room for all that will be held."""
        if self._decided:
            return
        self._decided = True
        local_ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        needed, free = _STATES * size() * local_ranks, shutil.disk_usage(ROOT).free
        if needed > _SHARE * free:
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
            self.active = True
        except OSError as error:
            self._give_up(error)

    def new_block(self, nbytes: int, pinned: bool) -> HostBlock:
        """Takes host memory, in shared memory if there is room."""
        if self.active:
            file = self._new_file(".block")
            try:
                block = HostBlock(nbytes, pinned, file)
                weakref.finalize(block, self._remove, file).atexit = False
                return block
            except OSError as error:
                self._give_up(error)
        return HostBlock(nbytes, pinned)

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether the memory of a snapshot lies there."""
        return snapshot.block is not None and snapshot.block.file is not None

    def _new_file(self, suffix: str) -> Path:
        # Unique among those of all processes that have trained there.
        return self.directory / f"{os.getpid()}-{next(self._numbers)}{suffix}"

    def _remove(self, file: Path) -> None:
        if not self._kept:
            with suppress(OSError):
                file.unlink(missing_ok=True)

    # ---- states ----

    def prepare(
        self,
        snapshot: Snapshot,
        live: LiveState,
        record: Callable[[], ResumeRecord],
        owed: str = "",
        weights: str = "",
    ) -> None:
        """Writes down what belongs to a snapshot, whose copy may still be under way."""
        self.prepared, began = None, time.perf_counter()
        if not self.active:
            return
        try:
            self._write_down(snapshot, live, record(), owed, weights)
            if not snapshot.transfers or snapshot.looked_at:
                self.store()
        except Exception as error:
            self._give_up(error)
        snapshot.seconds += time.perf_counter() - began

    def _write_down(self, snapshot: Snapshot, live: LiveState, record: ResumeRecord, owed: str, weights: str) -> None:
        block = snapshot.block
        if block is None or block.file is None:
            raise NotStorable("it lies in memory of this process alone")
        order = {id(parameter): index for index, parameter in enumerate(live.updated)}
        file = io.BytesIO()
        _Pickler(file, block).dump(
            {
                "parameters": snapshot.parameters,
                "buffers": snapshot.buffers,
                "groups": snapshot.groups,
                "states": [(order[id(parameter)], state) for parameter, state in snapshot.states],
                "signature": _signature(live),
                "record": replace(record, running_loss=torch.zeros(())),
            }
        )
        loss, there = record.running_loss, None
        parts = [part for tensor in live.frozen.values() for part in plain_parts(tensor)]
        versions = [(each.data_ptr(), each._version) for each in parts]
        sums = [sum_of_all(_sample_of(parts), loss.device)]
        if versions != self._versions:
            sums.append(sum_of_all(live.frozen, loss.device))
        numbers = [each.to("cpu", non_blocking=True) for each in (loss, *sums)]
        if loss.device.type == "cuda":
            # Read without an event, they would be waited for with all that the device has been given by then.
            there = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            there.record(torch.cuda.current_stream(loss.device))
        body = file.getvalue()
        facts = StateFacts(SharedStep(record.step, self._run, owed, weights), block.file.name)
        self.prepared = _Prepared(snapshot, facts, body, numbers, there, live.frozen, versions)

    def store(self) -> None:
        """Stores the state that was prepared; waits until its copy is complete and was searched."""
        prepared, self.prepared = self.prepared, None
        if prepared is None:
            return
        try:
            if prepared.snapshot.nonfinite() or prepared.snapshot.torn:
                return
            if prepared.there is not None:
                prepared.there.synchronize()
            frozen = self._sum_of_frozen(prepared)
            facts = replace(prepared.facts, running_loss=float(prepared.numbers[0]), frozen=frozen)
            path = self._new_file(SUFFIX)
            # Whole or not at all.
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(pickle.dumps(facts) + prepared.body)
            prepared.snapshot.stored = temporary.replace(path)
        except Exception as error:
            self._give_up(error)

    def _sum_of_frozen(self, prepared: _Prepared) -> int:
        """
        Gives the sum of what is frozen, which is read again only if it was written to. What is written by way of
        `.data` (adapters that are merged and taken out again) moves no version: a sample tells.
        """
        sample, *whole = map(int, prepared.numbers[1:])
        if whole or sample != self._sample:
            self._versions, self._sample = (prepared.versions if whole else None), sample
            self._whole = whole[0] if whole else int(sum_of_all(prepared.frozen, prepared.numbers[1].device))
        return self._whole

    def revoke(self, snapshot: Snapshot) -> None:
        """Takes back that a snapshot is one to go on from, before its memory is used again."""
        if self.prepared is not None and self.prepared.snapshot is snapshot:
            self.prepared = None
        if snapshot.stored is not None:
            self._remove(snapshot.stored)
            snapshot.stored = None

    # ---- the end ----

    def keep(self) -> None:
        """From here on what is there stays, for the process that goes on with the run."""
        self._kept = True

    def close(self) -> None:
        """Nothing is stored any more: nobody goes on from it."""
        self.prepared, self.active, self._decided = None, False, True

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, NotStorable | OSError):
            logger.info("Snapshots do not outlive this process (%s); a restart goes on from disk.", error)
        else:
            logger.warning("self_healing cannot let snapshots outlive this process.", exc_info=error)
        self.active = False
