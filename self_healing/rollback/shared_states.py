"""`SharedStates`: snapshots of a run that outlive its process, in files of shared memory."""

from __future__ import annotations

import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from ..hf.state import LiveState
from ..hf.trainer_state import ResumeRecord
from ..shared_memory import directory_of, free_shared_memory, hold, is_own, make_directory, this_boot
from .host_copies import DeviceCopies
from .host_memory import HostBlock
from .shared_memory import SUFFIX, AtTheEnd, NotStorable, StateFacts, StateToStore, StateWriter
from .snapshots import Snapshot


logger = logging.getLogger("self_healing")

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
