"""Writes checkpoints after an exception left `train()`, and once more when the rest of their step is done."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import consensus
from ..checkpoint_files import BESIDE_DIR, EMERGENCY_DIR
from ..classify import classify_exception, could_not_be_written, describe_exception
from ..failures import FailureType
from ..instrument import (
    Instrument,
    Leave,
    Pending,
    ResumePoint,
    emergency_path,
    free_memory,
    let_go,
    save_generated,
    write_beside,
    write_checkpoint,
)
from .marker import ChecksumsLater, load_marker, write_marker
from .owed import owing
from .removal import named_as_full


logger = logging.getLogger(__name__)

# How often an emergency checkpoint is written, where a fault strikes meanwhile.
_WRITES = 2


def save_emergency_checkpoint(
    instrument: Instrument,
    run: str,
    give_way: Callable[[], bool] = lambda: False,
    about_to_write: Callable[[Path, dict[str, Any]], None] = lambda path, bookkeeping: None,
    heals: bool = False,
    later: ChecksumsLater | None = None,
) -> ResumePoint | None:
    """
    Writes the state as of the last finished step, after an exception left `train()`: a resume, ours or the plain
    Trainer's, continues from it bit for bit. What fails is tried once more.

    Args:
        instrument ([`Instrument`]):
            Of the trainer.
        run (`str`):
            The run it belongs to.
        give_way (`Callable[[], bool]`, *optional*):
            Asked if it could not be written because of the disk: whether there is more room now.
        about_to_write (`Callable[[Path, dict], None]`, *optional*):
            Told where it will be, and what its marker will say.
        heals (`bool`, *optional*, defaults to `False`):
            Whether a state that is not finite is healed first.
        later (`Callable`, *optional*):
            Computes the checksums of a large one, as for [`write_marker`].

    Returns:
        Where to resume, or `None` where no such state exists: the exception came out of `optimizer.step()` itself,
        the weights are not finite, or several processes train together (the others may not be able to save).
    """
    if consensus.world_size() > 1:
        return None
    finished = instrument.reentry.rewind_to_last_step()
    if finished is None:
        return None
    bookkeeping, pending, leave = finished
    path = emergency_path(instrument.trainer)
    # An earlier attempt of this step may have left one: it is there until the new one is whole.
    new = path.parents[1] / BESIDE_DIR / path.name if path.exists() else path
    for attempt in range(1, _WRITES + 1):
        finite = instrument.saves.finite_once_healed(bookkeeping) if heals else not instrument.view.nonfinite_tensors()
        if not finite:
            return None
        exported = instrument.ledger.export() | owing(pending, leave)
        about_to_write(new, exported)
        try:
            _write_emergency(instrument, new, path, run, exported, later)
        except Exception as error:
            hopeless = classify_exception(error) in (FailureType.DEVICE, FailureType.PROCESS_DIED)
            if hopeless or attempt == _WRITES or (could_not_be_written(error) and not give_way()):
                raise
            told = "The emergency checkpoint %s could not be written (%s); trying once more."
            logger.warning(told, path, describe_exception(error))
            let_go(error)
        else:
            break
        # Outside the handler: what the exception held is gone.
        free_memory(instrument.view.device)
    return ResumePoint(instrument.view.step, str(path), bookkeeping, pending, leave)


def _write_emergency(
    instrument: Instrument,
    new: Path,
    path: Path,
    run: str,
    bookkeeping: dict[str, Any],
    later: ChecksumsLater | None,
) -> None:
    shutil.rmtree(new, ignore_errors=True)
    try:
        # Before the state of the Trainer: with that it is a checkpoint, marked or not.
        save_generated(instrument.trainer, new)
        write_checkpoint(instrument.trainer, new.parent)
        if struck := instrument.view.nonfinite_tensors():
            raise RuntimeError(f"{struck[0]} is not finite any more: it was hit while the checkpoint was written")
        write_marker(new, run, instrument.view.step, bookkeeping, True, finite=True, later=later)
        if new != path:
            _switch(new, path)
    except Exception as error:
        told = named_as_full(error, new)
        # Half a checkpoint is worse than none: it may be resumed from.
        shutil.rmtree(new, ignore_errors=True)
        if told is error:
            raise
        raise told from error


def write_again(
    instrument: Instrument, checkpoint: Path, run: str, leave: Leave, later: ChecksumsLater | None = None
) -> bool:
    """
    Writes a checkpoint once more after what it owed is done, beside the one before, which is removed when the new one
    is whole. A process that is killed at any time leaves one of them.

    Args:
        instrument ([`Instrument`]):
            Of the trainer.
        checkpoint (`Path`):
            The checkpoint that was resumed from.
        run (`str`):
            The run it belongs to from now on.
        leave ([`Leave`]):
            Where the run was left.
        later (`Callable`, *optional*):
            Computes the checksums of a large one, as for [`write_marker`].

    Returns:
        Whether it was; otherwise the checkpoint is as it was, and owes what it did.
    """
    before = load_marker(checkpoint) or {}
    new: Path | None = None
    try:
        new = write_beside(instrument.trainer, checkpoint)
        bookkeeping = instrument.ledger.export() | owing(Pending(), leave)
        standing = before.get("standing", "unverified")
        emergency, finite = bool(before.get("emergency")), before.get("finite")
        write_marker(new, run, instrument.view.step, bookkeeping, emergency, standing, finite, later)
        _switch(new, checkpoint)
    except Exception:
        logger.warning(
            "%s could not be written again after what its step still owed was done; it stays as it is, and a process "
            "that resumes from it does that once more.",
            checkpoint,
            exc_info=True,
        )
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)
        return False
    return True


def _switch(new: Path, old: Path) -> None:
    """Puts a checkpoint that was written beside another in its place; at any time one of them is whole."""
    gone = old.with_name(f".{old.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    old.rename(gone)
    try:
        new.rename(old)
    except OSError:
        gone.rename(old)
        raise
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):
        new.parent.rmdir()


def publish(emergency: str, output_dir: str) -> str:
    """
    Puts an emergency checkpoint among the regular ones, where `resume_from_checkpoint=True` finds it.

    Returns:
        Where it is now: a regular checkpoint of that step stays in its place, and the emergency one in its own.
    """
    regular = Path(output_dir) / Path(emergency).name
    if regular.exists():
        return emergency
    try:
        shutil.move(emergency, regular)
    except OSError:
        logger.warning("%s could not be moved to %s.", emergency, regular, exc_info=True)
        return emergency
    remove_emergency_checkpoints(output_dir)
    return str(regular)


def remove_emergency_checkpoints(output_dir: str) -> None:
    """Removes the emergency checkpoints of a run that no longer needs them."""
    shutil.rmtree(Path(output_dir, EMERGENCY_DIR), ignore_errors=True)
