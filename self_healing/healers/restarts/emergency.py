"""Writes checkpoints after an exception left `train()`, and into their marker what is owed to the step."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...checkpoints.marker import ChecksumQueue, change_marker, load_marker, write_marker
from ...checkpoints.retention import disk_full
from ...failures.classify import classify_exception, could_not_be_written, describe_exception
from ...failures.recipes import FailureType
from ...hf.adapter import Instrument
from ...hf.memory import free_memory, let_go
from ...hf.saving import emergency_path, write_beside, write_checkpoint
from ...hf.trainer_state import Leave, Pending, ResumePoint, save_generated
from ...system import processes
from ...system.files import BESIDE_DIR, EMERGENCY_DIR


logger = logging.getLogger(__name__)

# In the bookkeeping of a marker: the evaluation of the step has not been done.
_OWES_EVALUATION = "owes_evaluation"
# And whatever else its process still owed that step.
_OWES = "owes"
# How often an emergency checkpoint is written, where a fault strikes meanwhile.
_WRITES = 2


def save_emergency_checkpoint(
    instrument: Instrument,
    run: str,
    give_way: Callable[[], bool] = lambda: False,
    about_to_write: Callable[[Path, dict[str, Any]], None] = lambda path, bookkeeping: None,
    heals: bool = False,
    later: ChecksumQueue | None = None,
) -> ResumePoint | None:
    """
    Writes the state as of the last finished step, after an exception left `train()`: a resume, ours or the plain
    Trainer's, continues from it bit for bit.
    """
    if processes.world_size() > 1:
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
    later: ChecksumQueue | None,
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
        told = disk_full(error, new) or error
        # Half a checkpoint is worse than none: it may be resumed from.
        shutil.rmtree(new, ignore_errors=True)
        if told is error:
            raise
        raise told from error


def write_again(
    instrument: Instrument, checkpoint: Path, run: str, leave: Leave, later: ChecksumQueue | None = None
) -> bool:
    """
    Writes a checkpoint once more after what it owed is done, beside the one before, which is removed when the new one
    is whole.
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
    """Puts an emergency checkpoint among the regular ones, where `resume_from_checkpoint=True` finds it."""
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


# ---- what is owed to the step of a checkpoint ----


def bookkeeping_now(instrument: Instrument) -> dict[str, Any]:
    """Collects running losses, metrics, and what is still to be done for the step, for a marker."""
    return instrument.ledger.export() | {_OWES_EVALUATION: instrument.leaving.owes_evaluation}


def owe_evaluation(checkpoint: Path) -> None:
    """Notes that the evaluation of its step is still to be done; a checkpoint without a marker is left as it is."""

    def change(content: dict[str, Any]) -> None:
        content["bookkeeping"][_OWES_EVALUATION] = True

    change_marker(checkpoint, change)


def owed_in(bookkeeping: Mapping[str, Any]) -> tuple[Pending, Leave] | None:
    """Reads from a marker what is still to be done for the step of its checkpoint; `None` if it is nothing."""
    try:
        entry = bookkeeping.get(_OWES) or {}
        pending = Pending.from_dict(entry.get("pending", {}))
        pending.evaluate = pending.evaluate or bool(bookkeeping.get(_OWES_EVALUATION))
        leave = Leave(None, bool(entry.get("stop")), bool(entry.get("epoch_ended")))
    except (AttributeError, TypeError):
        # Written by another version, or damaged.
        return None
    return (pending, leave) if pending or leave.stop else None


def owing(pending: Pending, leave: Leave) -> dict[str, Any]:
    """Builds the entries of a marker that [`owed_in`] reads."""
    entry = {"pending": pending.to_dict(), "stop": leave.stop, "epoch_ended": leave.epoch_ended}
    return {_OWES_EVALUATION: pending.evaluate, _OWES: entry}
