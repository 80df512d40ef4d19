"""
Checkpoints on disk: the marker (`healing.json`) of a complete one, what standing it has, which one to resume from, the
last good ones out of the rotation's reach, and emergency checkpoints.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import consensus
from ..checkpoint_files import (
    BESIDE_DIR,
    EMERGENCY_DIR,
    MARKER_FILE,
    PINNED_DIR,
    STATE_FILE,
    ModelNames,
    files_of,
    number_of,
    numbered,
    remove_checkpoint,
    share_files,
    size_of,
    unshared_size_of,
)
from ..failures import FailureType, classify_exception, could_not_be_written
from ..instrument import (
    Instrument,
    Leave,
    Pending,
    ResumePoint,
    free_memory,
    let_go,
    save_generated,
)
from .checksums import add_checksums_later, checksums_at_once
from .marker import (
    CHECKSUMS,
    MARKER_SCHEMA,
    change_marker,
    damage_of_marker,
    load_marker,
    replace_marker,
)
from .vetting import Verdict, breach_of_marker, vet


logger = logging.getLogger(__name__)

# A checkpoint may grow by as much from one to the next: the log in it does.
_GROWTH = 1.05
# In the bookkeeping of a marker: the evaluation of the step has not been done.
OWES_EVALUATION = "owes_evaluation"
# And whatever else its process still owed that step.
OWES = "owes"

# How often an emergency checkpoint is written, where a fault strikes meanwhile.
_WRITES = 2

Standing = Literal["unverified", "verified", "suspect"]

# What file systems answer that have no hard links, or none from here to there.
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})


class CheckpointError(ValueError):
    """There is no checkpoint that can be resumed from, or not the one that was asked for."""


# ---- the marker ----


def write_marker(
    checkpoint: Path,
    run: str,
    step: int,
    bookkeeping: dict[str, Any],
    emergency: bool,
    standing: Standing = "unverified",
    finite: bool | None = None,
) -> None:
    """
    Marks a checkpoint as complete, after everything else in it was written; the marker appears whole or not at all.
    The checksums of a large one are added to it later: no step waits for them.

    Args:
        checkpoint (`Path`):
            The checkpoint directory.
        run (`str`):
            The run it belongs to.
        step (`int`):
            Optimizer steps finished.
        bookkeeping (`dict`):
            Running loss, metrics and token counts as of that step.
        emergency (`bool`):
            Whether it was written because of an exception.
        standing (`str`, *optional*, defaults to `"unverified"`):
            `"verified"` once enough healthy steps came after it, `"suspect"` if it was written while the run was bad.
        finite (`bool`, *optional*):
            Whether every weight, buffer and optimizer state was finite when it was written; `None` if that was not
            looked at, and then it never becomes verified.
    """
    sizes = {str(file.relative_to(checkpoint)): file.stat().st_size for file in files_of(checkpoint)}
    content: dict[str, Any] = {
        "schema": MARKER_SCHEMA,
        "time": time.time(),
        "run": run,
        "step": step,
        "emergency": emergency,
        "standing": standing,
        "finite": finite,
        "files": sizes,
        "bookkeeping": bookkeeping,
    }
    checksums = checksums_at_once(checkpoint, sizes)
    if checksums is not None:
        content[CHECKSUMS] = checksums
    replace_marker(checkpoint, content)
    if checksums is None:
        folder = checkpoint.parent
        # Where it is linked or moved to before they are computed.
        beside = folder.parent if folder.name == EMERGENCY_DIR else folder / PINNED_DIR
        add_checksums_later(checkpoint, content, links=(beside / checkpoint.name,))


def read_marker(checkpoint: Path) -> dict[str, Any] | None:
    """The marker of a checkpoint, or `None` if there is none that can be read and holds for the files there."""
    content = load_marker(checkpoint)
    if content is None:
        return None
    try:
        whole = all((checkpoint / name).stat().st_size == size for name, size in content["files"].items())
    except OSError:
        return None
    return content if whole else None


def set_standing(checkpoint: Path, standing: Standing, incident: str | None = None) -> None:
    """
    Changes the standing of a checkpoint; one without a marker is left as it is.

    Args:
        checkpoint (`Path`):
            The checkpoint directory.
        standing (`str`):
            `"unverified"`, `"verified"` or `"suspect"`.
        incident (`str`, *optional*):
            The incident that made it suspect.
    """

    def change(content: dict[str, Any]) -> None:
        content["standing"] = standing
        content.pop("incident", None)
        if incident is not None:
            content["incident"] = incident

    change_marker(checkpoint, change)


def owe_evaluation(checkpoint: Path) -> None:
    """Notes that the evaluation of its step is still to be done; a checkpoint without a marker is left as it is."""

    def change(content: dict[str, Any]) -> None:
        content["bookkeeping"][OWES_EVALUATION] = True

    change_marker(checkpoint, change)


def bookkeeping_now(instrument: Instrument) -> dict[str, Any]:
    """What a marker says of running losses, metrics, and what is still to be done for the step."""
    return instrument.ledger.export() | {OWES_EVALUATION: instrument.owes_evaluation}


def owed_in(bookkeeping: Mapping[str, Any]) -> tuple[Pending, Leave] | None:
    """What a marker says is still to be done for the step of its checkpoint; `None` if it is nothing."""
    try:
        entry = bookkeeping.get(OWES) or {}
        pending = Pending.from_dict(entry.get("pending", {}))
        pending.evaluate = pending.evaluate or bool(bookkeeping.get(OWES_EVALUATION))
        leave = Leave(None, bool(entry.get("stop")), bool(entry.get("epoch_ended")))
    except (AttributeError, TypeError):
        # Written by another version, or damaged.
        return None
    return (pending, leave) if pending or leave.stop else None


def _owing(pending: Pending, leave: Leave) -> dict[str, Any]:
    """What goes into a marker for [`owed_in`]."""
    entry = {"pending": pending.to_dict(), "stop": leave.stop, "epoch_ended": leave.epoch_ended}
    return {OWES_EVALUATION: pending.evaluate, OWES: entry}


# ---- which one to resume from ----


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """
    All that is called a checkpoint in an output directory, newest first; of the same step the regular one comes first,
    then the emergency one, then one that was to take its place, then the one in `last-known-good/`.

    Last come those beside the regular ones that an earlier run in this directory left behind: regular ones of fewer
    steps were written after them.
    """
    regular = numbered(Path(output_dir))
    found = [(False, -number, 0, entry) for number, entry in regular]
    written = [(number, _written_at(entry)) for number, entry in regular]
    for place, name in enumerate((EMERGENCY_DIR, BESIDE_DIR, PINNED_DIR), start=1):
        for number, entry in numbered(Path(output_dir, name)):
            at = _written_at(entry)
            left_behind = any(other < number and later > at for other, later in written)
            found.append((left_behind, -number, place, entry))
    return [entry for *_, entry in sorted(found)]


def _written_at(checkpoint: Path) -> float:
    """When a checkpoint was written, in seconds since the epoch; 0 if it cannot be told."""
    at = (load_marker(checkpoint) or {}).get("time")
    if isinstance(at, int | float):
        return float(at)
    try:
        return (checkpoint / STATE_FILE).stat().st_mtime
    except OSError:
        return 0.0


def vet_all(output_dir: str | Path) -> list[Verdict]:
    """The verdicts on all checkpoints of an output directory, newest first."""
    return [vet(checkpoint) for checkpoint in checkpoints_in(output_dir)]


def find_trusted_checkpoint(output_dir: str | Path, passed_over: list[Verdict] | None = None) -> str | None:
    """
    The newest checkpoint of an output directory that can be resumed from.

    Args:
        output_dir (`str` or `Path`):
            Of the run.
        passed_over (`list[Verdict]`, *optional*):
            Gets the verdicts on those that are newer, and cannot be.
    """
    newest = _newest_usable(output_dir, [] if passed_over is None else passed_over)
    return None if newest is None else newest.path


def _newest_usable(
    output_dir: str | Path, passed_over: list[Verdict], model: ModelNames | None = None
) -> Verdict | None:
    for checkpoint in checkpoints_in(output_dir):
        # Vetting reads every byte: those older than the first usable one are not looked at.
        verdict = vet(checkpoint, model)
        if verdict.usable:
            return verdict
        passed_over.append(verdict)
    return None


def resolve_checkpoint(
    requested: str | os.PathLike[str] | bool,
    output_dir: str | Path,
    passed_over: list[Verdict],
    model: ModelNames | None = None,
) -> Verdict | None:
    """
    The checkpoint that a request to resume means.

    Args:
        requested (`str`, `PathLike` or `bool`):
            `True` for the newest one that can be resumed from, `"auto"` for the same or a fresh start, or a path.
        output_dir (`str` or `Path`):
            Of the run.
        passed_over (`list[Verdict]`):
            Gets the verdicts on those that cannot be resumed from.
        model ([`ModelNames`], *optional*):
            What the model that is to be trained calls its tensors.

    Returns:
        [`Verdict`]: On the one to resume from; `None` for a fresh start.

    Raises:
        CheckpointError: If there is none, or the one that was asked for cannot be resumed from.
    """
    if requested is False:
        return None
    if requested is not True and requested != "auto":
        return _vetted(Path(requested), output_dir, passed_over, model)
    chosen = _newest_usable(output_dir, passed_over, model)
    if chosen is None and requested is True:
        raise CheckpointError(_none_at_all(output_dir, passed_over))
    return chosen


def _vetted(requested: Path, output_dir: str | Path, passed_over: list[Verdict], model: ModelNames | None) -> Verdict:
    verdict = vet(requested, model)
    if verdict.usable:
        return verdict
    passed_over.append(verdict)
    raise refused(requested, verdict.reason, output_dir)


def refused(requested: str | Path, reason: str, output_dir: str | Path) -> CheckpointError:
    """The error for a checkpoint that was asked for and cannot be resumed from; it names the one that can be."""
    trusted = find_trusted_checkpoint(output_dir)
    instead = (
        f"there is none in {output_dir} that can be resumed from"
        if trusted is None
        else f"the newest one that can be resumed from is resume_from_checkpoint={trusted!r}"
    )
    return CheckpointError(
        # Transformers' own words first: there is code that looks for them.
        f"Can't find a valid checkpoint at {requested}. {requested} cannot be resumed from: {reason}. "
        f"What to do: {instead}; to go on from weights alone, load them as the model of a new run."
    )


def check_resumed(checkpoint: Path, output_dir: str | Path) -> str | None:
    """
    Looks at a checkpoint that the plain Trainer has loaded, by what is known about it.

    Args:
        checkpoint (`Path`):
            The checkpoint directory.
        output_dir (`str` or `Path`):
            Of the run.

    Returns:
        What whoever trains on from it should be told, if anything.

    Raises:
        CheckpointError: If it is not what its marker says was written.
    """
    breach = breach_of_marker(checkpoint)
    if breach is not None:
        raise refused(checkpoint, breach, output_dir)
    if (damage := damage_of_marker(checkpoint)) is not None:
        return f"its marker {MARKER_FILE} cannot be believed ({damage}): whether all of it is whole is not known"
    if standing_of(checkpoint) != "suspect":
        return None
    trusted = find_trusted_checkpoint(output_dir)
    instead = "there is none that can be trusted" if trusted is None else f"the newest good one is {trusted}"
    return f"it was written in a stretch that was rolled back or went bad; {instead}"


def _none_at_all(output_dir: str | Path, passed_over: list[Verdict]) -> str:
    if passed_over:
        refused = "".join(f"\n  {verdict.path}: {verdict.reason}" for verdict in passed_over)
        found = f"No checkpoint in {output_dir} can be resumed from:{refused}\n"
    else:
        found = (
            f"There is no checkpoint in {output_dir}, nor in its {EMERGENCY_DIR}/ and {PINNED_DIR}/ "
            "(looked for checkpoint-<step>). "
        )
    return (
        f"No valid checkpoint found in output directory ({output_dir}). "
        f'{found}What to do: check output_dir, or start anew with resume_from_checkpoint="auto" (resumes where it '
        "can) or resume_from_checkpoint=False."
    )


# ---- emergency checkpoints ----


def save_emergency_checkpoint(
    instrument: Instrument,
    run: str,
    give_way: Callable[[], bool] = lambda: False,
    about_to_write: Callable[[Path, dict[str, Any]], None] = lambda path, bookkeeping: None,
    heals: bool = False,
) -> ResumePoint | None:
    """
    After an exception left `train()`: writes the state as of the last finished step, so that a resume, ours or the
    plain Trainer's, continues bit for bit. What fails is tried once more.

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

    Returns:
        Where to resume, or `None` where no such state exists: the exception came out of `optimizer.step()` itself,
        the weights are not finite, or several processes train together (the others may not be able to save).
    """
    if consensus.world_size() > 1:
        return None
    settled = instrument.reentry.settle()
    if settled is None:
        return None
    bookkeeping, pending, leave = settled
    path = Path(instrument.reentry.checkpoint_path())
    # An earlier attempt of this step may have left one: it is there until the new one is whole.
    new = path.parents[1] / BESIDE_DIR / path.name if path.exists() else path
    for attempt in range(1, _WRITES + 1):
        finite = instrument.finite_once_healed(bookkeeping) if heals else not instrument.view.nonfinite_tensors()
        if not finite:
            return None
        exported = instrument.ledger.export() | _owing(pending, leave)
        about_to_write(new, exported)
        try:
            _write_emergency(instrument, new, path, run, exported)
        except Exception as error:
            hopeless = classify_exception(error) in (FailureType.DEVICE, FailureType.PROCESS_DIED)
            if hopeless or attempt == _WRITES or (could_not_be_written(error) and not give_way()):
                raise
            logger.warning("The emergency checkpoint %s could not be written, and is once more.", path, exc_info=True)
            let_go(error)
        else:
            break
        # Outside the handler: what the exception held is gone.
        free_memory(instrument.view.device)
    return ResumePoint(instrument.view.step, str(path), bookkeeping, pending, leave)


def _write_emergency(instrument: Instrument, new: Path, path: Path, run: str, bookkeeping: dict[str, Any]) -> None:
    shutil.rmtree(new, ignore_errors=True)
    try:
        # Before the state of the Trainer: with that it is a checkpoint, marked or not.
        save_generated(instrument.trainer, new)
        instrument.reentry.save_checkpoint(str(new.parent))
        if struck := instrument.view.nonfinite_tensors():
            raise RuntimeError(f"{struck[0]} is not finite any more: it was hit while the checkpoint was written")
        write_marker(new, run, instrument.view.step, bookkeeping, True, finite=True)
        if new != path:
            _switch(new, path)
    except Exception:
        # Half a checkpoint is worse than none: somebody may resume from it.
        shutil.rmtree(new, ignore_errors=True)
        raise


def write_again(instrument: Instrument, checkpoint: Path, run: str, leave: Leave) -> bool:
    """
    What a checkpoint owed is done: writes it once more with what came of that, beside the one before, which is removed
    when the new one is whole. A process that is killed at any time leaves one of them.

    Args:
        instrument ([`Instrument`]):
            Of the trainer.
        checkpoint (`Path`):
            The checkpoint that was resumed from.
        run (`str`):
            The run it belongs to from now on.
        leave ([`Leave`]):
            Where the run was left.

    Returns:
        Whether it was; otherwise the checkpoint is as it was, and owes what it did.
    """
    before = load_marker(checkpoint) or {}
    new: Path | None = None
    try:
        new = instrument.reentry.write_again(checkpoint)
        bookkeeping = instrument.ledger.export() | _owing(Pending(), leave)
        emergency, finite = bool(before.get("emergency")), before.get("finite")
        write_marker(
            new, run, instrument.view.step, bookkeeping, emergency, before.get("standing", "unverified"), finite
        )
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
    """Puts a checkpoint that was written beside another in its place; at any time one of them is found whole."""
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


def newest_checkpoint_of(
    run: str, output_dir: str, verified: bool = False, passed_over: list[Verdict] | None = None
) -> str | None:
    """
    The newest checkpoint of this run that can be resumed from; those of another run are not ours to take.

    Args:
        run (`str`), output_dir (`str`):
            The run, and where it writes.
        verified (`bool`, *optional*):
            Whether healthy steps must have come after it.
        passed_over (`list[Verdict]`, *optional*):
            Gets the verdicts on those that are newer, and cannot be resumed from.
    """
    newest = newest_verdict_of(run, output_dir, verified, passed_over)
    return None if newest is None else newest.path


def newest_marked_checkpoint_of(run: str, output_dir: str) -> str | None:
    """
    The newest checkpoint of this run by its marker alone, which says that it was complete and is not suspect: where
    there is no time, or no device, to read it through. Who resumes from it does that.
    """
    for checkpoint in checkpoints_in(output_dir):
        marker = load_marker(checkpoint)
        if marker is None or marker.get("run") != run:
            continue
        if marker.get("standing") != "suspect" and marker.get("finite") is not False:
            return str(checkpoint)
    return None


def newest_verdict_of(
    run: str,
    output_dir: str,
    verified: bool = False,
    passed_over: list[Verdict] | None = None,
    wrote: Callable[[Path], bool] = lambda _: False,
) -> Verdict | None:
    """
    The same as [`newest_checkpoint_of`], with what is to be thought of it; `wrote` says of one without a marker
    whether it is of this run all the same.
    """
    for checkpoint in checkpoints_in(output_dir):
        marker = load_marker(checkpoint)
        damage = damage_of_marker(checkpoint) if marker is None else None
        if damage is not None and passed_over is not None:
            reason = f"its marker {MARKER_FILE} cannot be believed ({damage}), so whose it is is not known"
            passed_over.append(Verdict(str(checkpoint), number_of(checkpoint), False, reason, "unmarked"))
        if marker is None:
            wanted = damage is None and not verified and wrote(checkpoint)
        else:
            wanted = marker.get("run") == run and (not verified or marker.get("standing") == "verified")
        if not wanted:
            continue
        verdict = vet(checkpoint)
        if verdict.usable:
            return verdict
        if passed_over is not None:
            passed_over.append(verdict)
    return None


def older_checkpoints(than: str, output_dir: str) -> Iterator[str]:
    """
    The checkpoints of the same run that can be resumed from instead, the newest first. What is but another name for
    the same files (`last-known-good/` holds hard links) is none.
    """
    newest = Path(than)
    run, step = (load_marker(newest) or {}).get("run"), step_of(than, default=number_of(newest) or 0)
    for checkpoint in checkpoints_in(output_dir):
        number = number_of(checkpoint)
        of_the_run = number is not None and number <= step and (load_marker(checkpoint) or {}).get("run") == run
        if of_the_run and not share_files(checkpoint, newest) and vet(checkpoint).usable:
            yield str(checkpoint)


def mark_suspect(checkpoint: str, output_dir: str, incident: str) -> None:
    """Marks a damaged checkpoint, and with it every one that has its files."""
    damaged = Path(checkpoint)
    for each in [damaged, *(other for other in checkpoints_in(output_dir) if share_files(other, damaged))]:
        try:
            set_standing(each, "suspect", incident)
        except OSError:
            logger.warning("%s could not be marked as suspect.", each, exc_info=True)


def step_of(checkpoint: str, default: int) -> int:
    """The step a checkpoint was written at, from its marker."""
    marker = read_marker(Path(checkpoint))
    return default if marker is None else int(marker["step"])


def healing_state_of(stateful_callbacks: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the callback keeps in a trainer's state, whatever it is called; `None` if there is none."""
    for entry in stateful_callbacks.values():
        attributes = entry.get("attributes") if isinstance(entry, Mapping) else None
        state = attributes.get("healing_state") if isinstance(attributes, Mapping) else None
        if isinstance(state, dict):
            return state
    return None


def missing_steps_in(checkpoint: str) -> int:
    """How many of the steps up to a checkpoint are not in its weights; 0 where that is not known."""
    try:
        state = json.loads(Path(checkpoint, STATE_FILE).read_text(encoding="utf-8"))
        kept = healing_state_of(state["stateful_callbacks"]) or {}
        return int(kept["missing_steps"]["count"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0


def standing_of(checkpoint: str | Path) -> str:
    """What its marker says about it; `"unmarked"` if it has none."""
    return str((load_marker(Path(checkpoint)) or {}).get("standing", "unmarked"))


def remove_emergency_checkpoints(output_dir: str) -> None:
    """Removes the emergency checkpoints of a run that no longer needs them."""
    shutil.rmtree(Path(output_dir, EMERGENCY_DIR), ignore_errors=True)


# ---- when the disk is full ----


def remove_torn(checkpoint: Path) -> str | None:
    """
    Removes a checkpoint so that nobody takes what is left of it for a whole one, however far that gets.

    Returns:
        Why not all of it is gone; `None` if it is.
    """
    failed: OSError | None = None
    for name in (MARKER_FILE, STATE_FILE):
        try:
            (checkpoint / name).unlink(missing_ok=True)
        except OSError as error:
            failed = error
    try:
        if checkpoint.exists():
            remove_checkpoint(checkpoint)
    except OSError as error:
        failed = error
        shutil.rmtree(checkpoint, ignore_errors=True)
    if not checkpoint.exists() and not checkpoint.with_name(f".{checkpoint.name}.gone").exists():
        return None
    return f"{type(failed).__name__}: {failed}"


def expendable_checkpoint(run: str, output_dir: Path, best: str | None) -> Path | None:
    """
    The oldest checkpoint of a run whose removal makes room, and loses nothing that is known to be good.

    Args:
        run (`str`), output_dir (`Path`):
            The run, and where it writes.
        best (`str`, *optional*):
            The best checkpoint so far, which is kept.

    Returns:
        Never a verified one, the newest, or one that is hard-linked to `last-known-good/` and would free nothing.
    """
    marked = [(number, entry, read_marker(entry)) for number, entry in sorted(numbered(output_dir))]
    own = [(entry, marker) for _, entry, marker in marked if marker is not None and marker.get("run") == run]
    for entry, marker in own[:-1]:
        is_best = best is not None and os.path.abspath(best) == os.path.abspath(entry)
        linked = any(file.stat().st_nlink > 1 for file in files_of(entry))
        if marker.get("standing") != "verified" and not is_best and not linked:
            return entry
    return None


# ---- the last good ones ----


@dataclass(slots=True)
class _Followed:
    """A checkpoint of this run, and what is known about it."""

    path: Path
    standing: Standing
    finite: bool
    pinned: bool


class CheckpointKeeper:
    """
    Follows the checkpoints of one run and keeps the last good ones in `last-known-good/`, where the Trainer's rotation
    does not reach. They are hard links, which need no space of their own while the checkpoint itself is there.

    Once rotation has removed the checkpoint itself, they hold the space it held. So they give way whenever another
    checkpoint would not fit beside them, and none is kept where there is no room for it and the one after it.

    To be called by the first process only. What the file system refuses is told once and never stops the training.

    Args:
        output_dir (`str` or `Path`):
            Of the run.
        generations (`int`, *optional*, defaults to 2):
            How many verified checkpoints are kept; 0 for none, and then none is kept until it is verified either.
        tell (`Callable`, *optional*):
            Told, with a kind, a step and further fields, what the journal has to know.
    """

    def __init__(
        self, output_dir: str | Path, generations: int = 2, tell: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        self.directory = Path(os.path.abspath(output_dir), PINNED_DIR)
        self.generations = generations
        self._tell = tell
        self._step = 0
        self._size = 0
        self._followed: dict[int, _Followed] = {}
        self._pending: int | None = None
        self._links = True
        self._swept = False
        self._warned: set[str] = set()

    def about_to_save(self, step: int) -> None:
        """
        Called before a regular checkpoint is written, in case the run comes by a step for the second time: the files
        of the first are not to be overwritten where they lie. The links in `last-known-good/` lead to the same files,
        and a process killed in between would leave half of each, which cannot be told from a whole one.

        Args:
            step (`int`):
                Optimizer steps finished.
        """
        self._step = step
        with self._contained("Making room for a checkpoint"):
            self.leave_room()
        stale = self.directory.parent / f"checkpoint-{step}"
        with self._contained("Making room for a checkpoint"):
            if not stale.is_dir():
                return
            # Without its trainer_state.json, which is written last, nobody takes it for complete.
            for file in (stale / MARKER_FILE, stale / STATE_FILE):
                file.unlink(missing_ok=True)
            for file in files_of(stale):
                if file.stat().st_nlink > 1:
                    file.unlink()

    def saved(self, checkpoint: str | Path, step: int, finite: bool | None = None) -> None:
        """
        Called after a checkpoint was completely written and marked, or resumed from: it is followed from now on.

        Args:
            checkpoint (`str` or `Path`):
                The checkpoint directory.
            step (`int`):
                Optimizer steps finished.
            finite (`bool`, *optional*):
                Whether all of its state was found to be finite. Defaults to what its marker says.
        """
        checkpoint = Path(os.path.abspath(checkpoint))
        marker = load_marker(checkpoint)
        if marker is None:
            # Of the plain trainer: there is nowhere to write what standing it has.
            return
        if finite is None:
            finite = marker.get("finite") is True
        standing: Standing = marker["standing"] if finite or marker.get("standing") == "suspect" else "unverified"
        followed = _Followed(checkpoint, standing, finite, pinned=False)
        self._followed[step] = followed
        self._step = step
        with self._contained("Following a checkpoint"):
            self._sweep()
            self._size = size_of(checkpoint)
            followed.pinned = self._is_pinned(checkpoint, step)
            if self._pending == step and not followed.pinned:
                self._pending = None
            if step in self._waiting():
                self._pin_as_pending(step)
            # Rotation has left the links without the checkpoints they were made of.
            self.leave_room()

    def leave_room(self) -> None:
        """Kept checkpoints give way, the oldest first, until one more checkpoint fits beside them."""
        # Of a run that has not written any yet: what an earlier one has kept is about as large.
        size = self._size or max((size_of(pin) for _, pin in numbered(self.directory)), default=0)
        needed = int(_GROWTH * size)
        given_up = []
        while self._free() < needed and (oldest := next(self._may_give_way(), None)) is not None:
            self._let_go(oldest)
            given_up.append(oldest)
        self._tell_of(given_up, needed)

    def give_way(self) -> list[Path]:
        """
        After a checkpoint did not fit: all kept ones that free anything are removed.

        Returns:
            `list[Path]`: those that were.
        """
        given_up = []
        with self._contained("Making room for a checkpoint"):
            while (oldest := next(self._may_give_way(), None)) is not None:
                self._let_go(oldest)
                given_up.append(oldest)
        self._tell_of(given_up, int(_GROWTH * self._size))
        return given_up

    def _free(self) -> int:
        return shutil.disk_usage(self.directory.parent).free

    def _may_give_way(self) -> Iterator[Path]:
        """Kept ones whose removal frees something, the oldest first; never the last one that can be trusted."""
        kept = sorted((pin for _, pin in numbered(self.directory)), key=_written_at)
        for pin in kept:
            if unshared_size_of(pin) > 0 and any(
                _may_be_trusted(other) for other in [*self._regular(), *kept] if other != pin
            ):
                yield pin

    def _regular(self) -> list[Path]:
        return [entry for _, entry in numbered(self.directory.parent)]

    def _let_go(self, pin: Path) -> None:
        remove_checkpoint(pin)
        number = number_of(pin)
        if number is not None and number in self._followed:
            self._followed[number].pinned = False
        if self._pending == number:
            self._pending = None

    def _tell_of(self, given_up: list[Path], needed: int) -> None:
        if not given_up:
            return
        names = [pin.name for pin in given_up]
        self._tell(
            "kept_checkpoints_gave_way", self._step, removed=names, bytes_needed=needed, bytes_free=self._free()
        )
        level = logging.INFO if "gave way" in self._warned else logging.WARNING
        self._warned.add("gave way")
        logger.log(
            level,
            "Step %d: %s in %s gave way, so that the next checkpoint fits (it takes %s). There are fewer trusted "
            "checkpoints to go back to. What to do: make room on the disk; keep_verified_checkpoints=%d is what would "
            "be kept.",
            self._step,
            ", ".join(names),
            self.directory,
            _gigabytes(needed),
            self.generations,
        )

    def _has_room_for(self, number: int, beside: int = 0) -> bool:
        """Whether one more may be kept: the next checkpoint has to fit beside it once rotation has taken this one."""
        followed = self._followed[number]
        return self._free() + beside >= 2 * _GROWTH * size_of(followed.path)

    def verified_up_to(self, step: int) -> None:
        """
        Enough healthy steps came after this one: the run's checkpoints up to it are good, if they are finite. A NaN
        in a row of an embedding that no batch reads is seen in no loss.

        Args:
            step (`int`):
                The newest step that is known to be good.
        """
        good = [number for number in self._waiting() if number <= step]
        if not good:
            return
        for number in good:
            self._mark(number, "verified")
        if self._pending is not None and self._pending <= step:
            self._pending = None
        with self._contained("Keeping the last good checkpoint"):
            self._sweep()
            self._keep_newest(good)
            self._prune()
            if waiting := self._waiting():
                self._pin_as_pending(max(waiting))

    def distrust(self, after: int, until: int, incident: str, verified: bool = False) -> list[int]:
        """
        The run goes back: what was written between the state it goes back to and the fault is not to be resumed from.

        Args:
            after (`int`):
                The step of the state gone back to.
            until (`int`):
                The step of the fault: checkpoints of later steps do not hold it.
            incident (`str`):
                What it was, for those who ask why.
            verified (`bool`, *optional*, defaults to `False`):
                Whether verified ones are suspect, too: states as good as they were have turned out to be bad.

        Returns:
            `list[int]`: the steps of those that are suspect now.
        """
        trusted = ("suspect",) if verified else ("suspect", "verified")
        suspects = [
            number
            for number, followed in self._followed.items()
            if after < number <= until and followed.standing not in trusted
        ]
        for number in suspects:
            self._mark(number, "suspect", incident)
            followed = self._followed[number]
            if followed.pinned and followed.path != self._pin(number):
                with self._contained("Removing a suspect checkpoint"):
                    remove_checkpoint(self._pin(number))
                    followed.pinned = False
        if self._pending in suspects:
            self._pending = None
        return suspects

    def reinstate(self, steps: Iterable[int]) -> list[int]:
        """Those of some suspect checkpoints that were found to be finite are not suspect any more."""
        good = [number for number in steps if self._followed[number].finite]
        for number in good:
            self._mark(number, "unverified")
        return good

    def has_good(self, step: int) -> bool:
        """Whether there is a checkpoint of this step that is finite, and not suspect."""
        followed = self._followed.get(step)
        return followed is not None and followed.finite and followed.standing != "suspect" and followed.path.is_dir()

    def _waiting(self) -> list[int]:
        """Those that healthy steps make verified: what is not known to be finite never is."""
        followed = self._followed.items()
        return [number for number, each in followed if each.standing == "unverified" and each.finite]

    def _pin(self, number: int) -> Path:
        return self.directory / f"checkpoint-{number}"

    def _is_pinned(self, checkpoint: Path, number: int) -> bool:
        """Whether it is what lies in `last-known-good/` under its number; what it has overwritten there is removed."""
        pin = self._pin(number)
        if checkpoint == pin:
            return True
        if not pin.is_dir():
            return False
        mine, theirs = load_marker(checkpoint), load_marker(pin)
        if mine and theirs and (mine.get("run"), mine.get("time")) == (theirs.get("run"), theirs.get("time")):
            return True
        if share_files(checkpoint, pin):
            remove_checkpoint(pin)
        return False

    def _mark(self, number: int, standing: Standing, incident: str | None = None) -> None:
        followed = self._followed[number]
        followed.standing = standing
        for place in {followed.path, self._pin(number)} if followed.pinned else {followed.path}:
            with self._contained("Marking a checkpoint"):
                set_standing(place, standing, incident)

    def _pin_as_pending(self, number: int) -> None:
        """Takes a checkpoint out of the rotation's reach until it is known whether it is good."""
        if self._pending is not None or self.generations == 0:
            return
        if not self._followed[number].pinned:
            if not self._followed[number].path.is_dir() or not self._has_room_for(number):
                return
            verified = (load_marker(self._pin(number)) or {}).get("standing") == "verified"
            if verified or not self._try_to_link(number):
                return
        self._pending = number

    def _keep_newest(self, good: list[int]) -> None:
        for number in sorted(good, reverse=True) if self.generations else ():
            followed = self._followed[number]
            if followed.pinned:
                return
            if not followed.path.is_dir():
                continue
            if self._replaces_older_ones(number) and not self._try_to_link(number):
                self._copy(number)
            return

    def _replaces_older_ones(self, number: int) -> bool:
        """Whether there is room for one more; where there is little, the older ones are let go for it."""
        older = sorted((pin for _, pin in numbered(self.directory)), key=_written_at)
        if not self._has_room_for(number, beside=sum(map(unshared_size_of, older))):
            return False
        while older and not self._has_room_for(number):
            self._let_go(older.pop(0))
        return True

    def _try_to_link(self, number: int) -> bool:
        followed = self._followed[number]
        if not self._links or not followed.path.is_dir():
            return False
        try:
            self._place(number, os.link)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._links = False
        return self._links

    def _copy(self, number: int) -> None:
        path = self._followed[number].path
        if "copy" not in self._warned:
            self._warned.add("copy")
            logger.warning(
                "%s cannot hold hard links, so the last good checkpoint is copied there, and training waits: "
                "%s each, %d of them.",
                self.directory,
                _gigabytes(size_of(path)),
                self.generations,
            )
        self._place(number, shutil.copy2)

    def _place(self, number: int, put: Callable[[Path, Path], Any]) -> None:
        followed = self._followed[number]
        # Renamed when it is whole: a process killed in between leaves nothing that looks like a checkpoint.
        temporary = self.directory / f".checkpoint-{number}.new"
        try:
            for file in files_of(followed.path):
                target = temporary / file.relative_to(followed.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                put(file, target)
            shutil.copy2(followed.path / MARKER_FILE, temporary / MARKER_FILE)
            remove_checkpoint(self._pin(number))
            temporary.rename(self._pin(number))
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        followed.pinned = True
        if "first" not in self._warned:
            self._warned.add("first")
            self._tell_of_the_first(size_of(followed.path))

    def _tell_of_the_first(self, size: int) -> None:
        # And the one that is not verified yet.
        most = (self.generations + 1) * size
        self._tell("checkpoints_kept", self._step, bytes_each=size, bytes_at_most=most)
        logger.info(
            "Step %d: the last %d verified checkpoints, and the next until it is verified, are kept in %s, where "
            "rotation cannot take them: up to %s more disk than the Trainer needs by itself (%s each). They give way "
            "before a save is given up. What to do to keep none: keep_verified_checkpoints=0.",
            self._step,
            self.generations,
            self.directory,
            _gigabytes(most),
            _gigabytes(size),
        )

    def _prune(self) -> None:
        # By the time of writing, not by number: an earlier run in the same directory may have come further.
        newest_first = sorted((pin for _, pin in numbered(self.directory)), key=_written_at, reverse=True)
        verified = [pin for pin in newest_first if (load_marker(pin) or {}).get("standing") == "verified"]
        kept = verified[: self.generations]
        if not kept:
            return
        if self._pending is not None:
            kept.append(self._pin(self._pending))
        for pin in newest_first:
            if pin not in kept:
                remove_checkpoint(pin)
                if (followed := self._followed.get(number_of(pin) or 0)) is not None:
                    followed.pinned = False

    def _sweep(self) -> None:
        """Removes what a process that was killed half-way left behind."""
        if self._swept:
            return
        self._swept = True
        for leftover in self.directory.glob(".checkpoint-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _contained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if doing not in self._warned:
                self._warned.add(doing)
                logger.warning("%s failed; training goes on. %s", doing, error)


def _may_be_trusted(checkpoint: Path) -> bool:
    marker = read_marker(checkpoint)
    return marker is not None and marker.get("standing") != "suspect" and marker.get("finite") is not False


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
