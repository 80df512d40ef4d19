"""Writes checkpoints after an exception left `train()`, and into their marker what is pending of the step."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from ...checkpoints.choice import newest_checkpoint_of
from ...checkpoints.marker import change_marker, write_marker
from ...checkpoints.retention import disk_full
from ...failures.classify import classify_exception, could_not_be_written, describe_exception
from ...failures.recipes import FailureType
from ...hf.adapter import Instrument
from ...hf.memory import free_memory, release_frames
from ...hf.saving import write_checkpoint
from ...hf.trainer_state import PENDING, Bookkeeping, Pending, ResumePoint, save_generated
from ...run.run import Run
from ...system import processes
from ...system.files import BESIDE_DIR, EMERGENCY_DIR


logger = logging.getLogger(__name__)


def save_emergency_checkpoint(run: Run, heals: bool = False) -> ResumePoint | None:
    """
    Writes the state as of the last finished step, after an exception left `train()`: a resume, ours or the plain
    Trainer's, continues from it bit for bit.
    """
    if processes.world_size() > 1:
        return None
    instrument, checkpoints = run.instrument, run.rollback.checkpoints
    checkpoints.leave_room()
    point = instrument.reentry.rewind_to_last_step()
    if point is None or not _weights_are_of_a_step(run, point):
        return None
    view = instrument.view
    path = Path(instrument.trainer.args.output_dir, EMERGENCY_DIR, f"checkpoint-{view.step}")
    for last in (False, True):
        # What has struck the weights meanwhile is healed as well, or is not saved.
        if not _is_finite(instrument, point.bookkeeping if heals else None):
            return None
        try:
            _write_emergency(run, path, instrument.ledger.export() | {PENDING: point.pending.to_dict()})
            break
        except Exception as error:
            hopeless = classify_exception(error) in (FailureType.DEVICE, FailureType.PROCESS_DIED)
            if last or hopeless or (could_not_be_written(error) and not checkpoints.give_way()):
                raise
            logger.warning("%s could not be written (%s); trying once more.", path, describe_exception(error))
            release_frames(error)
        # Outside the handler: what the exception held is gone.
        free_memory(view.device)
    point.path = str(path)
    return point


def _weights_are_of_a_step(run: Run, point: ResumePoint) -> bool:
    """Whether they are those of the last finished step; or may be others, and there is no checkpoint to prefer."""
    instrument = run.instrument
    window = instrument.reentry.interrupted
    if not instrument.call.half_way or window is None:
        return True
    made = False
    with instrument.failsafe.contained():
        made = instrument.hooks.left_half_way(window)
    instrument.ledger.rewind(point.bookkeeping)
    if made or newest_checkpoint_of(run.run_id, str(instrument.trainer.args.output_dir)) is None:
        return True
    # The steps since that checkpoint are done again.
    run.journal.doubt = ""
    return False


def _is_finite(instrument: Instrument, heal_as_of: Bookkeeping | None) -> bool:
    """Whether weights, buffers and optimizer state are finite between two steps, once what can be healed is."""
    found = instrument.view.nonfinite_tensors()
    if found and heal_as_of is not None:
        with instrument.failsafe.contained():
            instrument.hooks.verify_state()
        instrument.ledger.rewind(heal_as_of)
        found = instrument.view.nonfinite_tensors()
    return not found


def _write_emergency(run: Run, path: Path, bookkeeping: dict[str, Any]) -> None:
    instrument = run.instrument
    # An earlier attempt of this step may have left one: it is there until the new one is whole.
    new = path.parents[1] / BESIDE_DIR / path.name if path.exists() else path
    shutil.rmtree(new, ignore_errors=True)
    try:
        # Before the state of the Trainer: with that it is a checkpoint, marked or not.
        save_generated(instrument.trainer, new)
        write_checkpoint(instrument.trainer, new.parent)
        if struck := instrument.view.nonfinite_tensors():
            raise RuntimeError(f"{struck[0]} is not finite any more: it was hit while the checkpoint was written")
        write_marker(new, run.run_id, instrument.view.step, bookkeeping, True, finite=True, later=run.checksums)
        if new != path:
            shutil.rmtree(path)
            new.rename(path)
    except Exception as error:
        told = disk_full(error, new) or error
        # Half a checkpoint is worse than none: it may be resumed from.
        shutil.rmtree(new, ignore_errors=True)
        if told is error:
            raise
        raise told from error


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


# ---- what is pending of the step of a checkpoint ----


def bookkeeping_now(instrument: Instrument) -> dict[str, Any]:
    """Collects running losses, metrics, and what is still to be done for the step, for a marker."""
    pending = Pending(evaluation=instrument.leaving.owes_evaluation)
    return instrument.ledger.export() | {PENDING: pending.to_dict()}


def leave_evaluation(checkpoint: Path) -> None:
    """Notes that the evaluation of its step is still to be done; a checkpoint without a marker is left as it is."""

    def change(content: dict[str, Any]) -> None:
        content["bookkeeping"][PENDING] = Pending(evaluation=True).to_dict()

    change_marker(checkpoint, change)
