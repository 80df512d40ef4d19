"""Finds the state that all ranks of a killed job have left in shared memory, for the processes that go on with it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.marker import write_marker
from ...hf.state import LiveState
from ...hf.trainer_state import resuming_from
from ...ranks import votes
from ...rollback.shared_memory import (
    SUFFIX,
    StateFacts,
    StateUnusable,
    StoredState,
    directory_of,
    holder_of,
    is_own,
    open_state,
    rank_directory,
    read_facts,
    this_boot,
)
from ...rollback.snapshots import Snapshot
from ...system import processes


logger = logging.getLogger("self_healing")


@dataclass(frozen=True, slots=True, order=True)
class SharedStep:
    """A state that every rank has in shared memory."""

    step: int
    run: str
    owed: str


class MemoryStart:
    """The state that this process goes on from."""

    def __init__(self, state: StoredState, checkpoint: str) -> None:
        # `None` once it was let go of.
        self.state: StoredState | None = state
        self.checkpoint = checkpoint

    def remove_others(self) -> None:
        """Removes what else the process before this one has left: the memory is needed for states of this one."""
        if self.state is None:
            return
        kept = {self.state.path.name, *self.state.facts.blocks}
        for file in self.state.path.parent.glob("*.*"):
            if file.name not in kept:
                file.unlink(missing_ok=True)

    def remove(self, files_alone: bool = False) -> None:
        """Removes it."""
        if self.state is not None:
            for name in (self.state.path.name, *self.state.facts.blocks):
                with suppress(OSError):
                    self.state.path.with_name(name).unlink(missing_ok=True)
        if not files_alone:
            self.state = None
            shutil.rmtree(self.checkpoint, ignore_errors=True)

    def snapshot_in(self, live: LiveState) -> Snapshot | None:
        """Gives it as a snapshot of live tensors, if those are what it was put into."""
        return None if self.state is None else self.state.snapshot_in(live)

    def loading(self, trainer: Any, on_success: Callable[[StoredState], None]) -> AbstractContextManager[None]:
        """Lets `train()` of a trainer resume from it."""

        state = self.state
        if state is None:
            raise StateUnusable("it was let go of when there was a newer one")

        def put(live: LiveState) -> None:
            unusable: list[StateUnusable] = []

            def fits() -> bool:
                try:
                    state.check(live)
                except StateUnusable as error:
                    unusable.append(error)
                return not unusable

            if not votes.all_ranks("the state in shared memory fits", fits(), trainer.args.device):
                raise unusable[0] if unusable else StateUnusable("it does not fit on another rank")
            state.put(live)
            on_success(state)

        return resuming_from(trainer, self.checkpoint, state.record, put)


def steps_in_memory(output_dir: str, rank: int, device: torch.device) -> list[SharedStep]:
    """Finds the states that all ranks have in shared memory, the newest first."""
    world_size = processes.world_size()
    mine = {_shared(facts): facts for _, facts in _states_of(output_dir, rank, world_size)}
    if not mine:
        _tell_of_other_numbers(output_dir, rank, world_size)
    everywhere = votes.from_every_rank("states in shared memory", mine, device)
    held = [step for step in everywhere[0] if all(step in theirs for theirs in everywhere)]
    return sorted((step for step in held if _same([theirs[step] for theirs in everywhere])), reverse=True)


def open_in_memory(output_dir: str, step: SharedStep, rank: int, device: torch.device) -> MemoryStart | None:
    """Opens a state that all ranks have."""
    opened: list[MemoryStart] = []

    def can_be_read() -> bool:
        try:
            opened.append(_open(output_dir, step, rank, device))
        except (StateUnusable, OSError) as error:
            logger.warning("The state of step %d in shared memory cannot be gone on from: %s.", step.step, error)
            return False
        return True

    if not votes.all_ranks("the state in shared memory can be read", can_be_read(), device):
        return None
    return opened[0]


def remove_other_states(output_dir: str, run: str, world_size: int) -> None:
    """Removes what earlier runs, or another number of processes, have left in shared memory for an `output_dir`."""
    directory, own = directory_of(output_dir), f"-of-{world_size}"
    if not is_own(directory):
        return
    for each in directory.iterdir():
        if not (each.name.startswith(f"{run}-rank") and each.name.endswith(own)) and holder_of(each) is None:
            shutil.rmtree(each, ignore_errors=True)
    with suppress(OSError):
        directory.rmdir()


def _states_of(output_dir: str, rank: int, world_size: int) -> list[tuple[Path, StateFacts]]:
    """Lists the whole states of one rank, of all runs of a directory that trained on as many processes."""
    directory, found = directory_of(output_dir), []
    if not is_own(directory):
        return []
    for path in sorted(directory.glob(f"*-rank{rank}-of-{world_size}/*{SUFFIX}")):
        facts = read_facts(path) if is_own(path.parent) else None
        # As its name says, and of this machine since it was started.
        if facts is not None and path.parent == rank_directory(output_dir, facts.run, rank, world_size):
            expected = (rank, world_size, this_boot())
            found += [(path, facts)] * ((facts.rank, facts.world_size, facts.boot) == expected)
    return found


def _tell_of_other_numbers(output_dir: str, rank: int, world_size: int) -> None:
    """Says so where as many processes as now have left nothing, and another number of them has."""
    directory = directory_of(output_dir)
    paths = sorted(directory.glob(f"*-rank{rank}-of-*/*{SUFFIX}")) if is_own(directory) else []
    found = [read_facts(path) for path in paths if is_own(path.parent)]
    others = {facts.world_size for facts in found if facts is not None} - {world_size}
    if others:
        logger.warning(
            "The state in shared memory is that of %s processes, and %d train together now: going on from disk.",
            " and of ".join(map(str, sorted(others))),
            world_size,
        )


def _same(of_ranks: Sequence[StateFacts]) -> bool:
    """
    Whether a step that some ranks have applied by themselves is the one that the others have: callbacks that change
    gradients may have been called on those alone.
    """
    weights, alone = {facts.weights for facts in of_ranks}, [facts.finished_alone for facts in of_ranks]
    return not any(alone) or (not all(alone) and len(weights) == 1 and "" not in weights)


def _open(output_dir: str, step: SharedStep, rank: int, device: torch.device) -> MemoryStart:
    paths = [path for path, facts in _states_of(output_dir, rank, processes.world_size()) if _shared(facts) == step]
    if not paths:
        raise StateUnusable("it is not there any more")
    state = open_state(paths[-1], device)
    checkpoint = paths[-1].parent / f"checkpoint-{step.step}"
    shutil.rmtree(checkpoint, ignore_errors=True)
    state.record.write(checkpoint)
    bookkeeping = state.record.bookkeeping | {"running_loss": state.facts.running_loss}
    write_marker(checkpoint, step.run, step.step, bookkeeping, emergency=False, finite=True)
    return MemoryStart(state, str(checkpoint))


def _shared(facts: StateFacts) -> SharedStep:
    return SharedStep(facts.step, facts.run, facts.owed)


def newest_beyond(steps: Sequence[SharedStep], run: str, step: int) -> SharedStep | None:
    """Gives the newest state of a run that is further than a step; of two, the one that owes least."""
    later = [each for each in steps if each.run == run and each.step > step]
    return min(later, key=lambda each: (-each.step, each.owed), default=None)
