"""Chooses the checkpoint to resume from: the newest one that can be, or the one that was asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ..checkpoint_files import (
    EMERGENCY_DIR,
    MARKER_FILE,
    PINNED_DIR,
    ModelNames,
    number_of,
    share_files,
)
from .listing import checkpoints_in
from .marker import (
    damage_of_marker,
    load_marker,
    set_standing,
    speaks_for,
    standing_of,
    step_of,
)
from .vetting import ON_ONE_DISK, Readers, Verdict, breach_of_marker, vet


logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """There is no checkpoint that can be resumed from, or not the one that was asked for."""


def vet_all(output_dir: str | Path) -> list[Verdict]:
    """Vets all checkpoints of an output directory, newest first."""
    return [vet(checkpoint) for checkpoint in checkpoints_in(output_dir)]


def find_trusted_checkpoint(
    output_dir: str | Path, passed_over: list[Verdict] | None = None, readers: Readers = ON_ONE_DISK
) -> str | None:
    """
    Finds the newest checkpoint of an output directory that can be resumed from.

    Args:
        output_dir (`str` or `Path`):
            Of the run.
        passed_over (`list[Verdict]`, *optional*):
            Gets the verdicts on those that are newer, and cannot be.
        readers ([`Readers`], *optional*):
            The ranks that are to resume from it.

    Returns:
        `str`: its path, or `None` if there is none.
    """
    newest = _newest_usable(output_dir, [] if passed_over is None else passed_over, readers=readers)
    return None if newest is None else newest.path


def _newest_usable(
    output_dir: str | Path,
    passed_over: list[Verdict],
    model: ModelNames | None = None,
    readers: Readers = ON_ONE_DISK,
) -> Verdict | None:
    # Vetting reads every byte: those older than the first whole one are not looked at.
    return _first_whole((vet(checkpoint, model, readers) for checkpoint in checkpoints_in(output_dir)), passed_over)


def _first_whole(verdicts: Iterator[Verdict], passed_over: list[Verdict]) -> Verdict | None:
    """The first one that can be used, of those to which every process has written its part if there is any."""
    for verdict in verdicts:
        if verdict.usable and verdict.whole:
            return verdict
        passed_over.append(verdict)
    torn = next((verdict for verdict in passed_over if verdict.usable), None)
    if torn is not None:
        passed_over.remove(torn)
    return torn


def resolve_checkpoint(
    requested: str | os.PathLike[str] | bool,
    output_dir: str | Path,
    passed_over: list[Verdict],
    model: ModelNames | None = None,
    readers: Readers = ON_ONE_DISK,
) -> Verdict | None:
    """
    Finds the checkpoint that a request to resume means.

    Args:
        requested (`str`, `PathLike` or `bool`):
            `True` for the newest one that can be resumed from, `"auto"` for the same or a fresh start, or a path.
        output_dir (`str` or `Path`):
            Of the run.
        passed_over (`list[Verdict]`):
            Gets the verdicts on those that cannot be resumed from.
        model ([`ModelNames`], *optional*):
            What the model that is to be trained calls its tensors.
        readers ([`Readers`], *optional*):
            The ranks that are to resume from it.

    Returns:
        [`Verdict`]: On the one to resume from; `None` for a fresh start.

    Raises:
        CheckpointError: If there is none, or the one that was asked for cannot be resumed from.
    """
    if requested is False:
        return None
    if requested is not True and requested != "auto":
        return _vetted(Path(requested), output_dir, passed_over, model, readers)
    chosen = _newest_usable(output_dir, passed_over, model, readers)
    if chosen is None and requested is True:
        raise CheckpointError(_none_at_all(output_dir, passed_over))
    return chosen


def _vetted(
    requested: Path,
    output_dir: str | Path,
    passed_over: list[Verdict],
    model: ModelNames | None,
    readers: Readers,
) -> Verdict:
    verdict = vet(requested, model, readers)
    if verdict.usable:
        return verdict
    passed_over.append(verdict)
    raise refused(requested, verdict.reason, output_dir, readers)


def refused(
    requested: str | Path, reason: str, output_dir: str | Path, readers: Readers = ON_ONE_DISK
) -> CheckpointError:
    """Builds the error for a checkpoint that cannot be resumed from; it names the newest one that can be."""
    trusted = find_trusted_checkpoint(output_dir, readers=readers)
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


def check_resumed(checkpoint: Path, output_dir: str | Path) -> str | None:
    """
    Checks a checkpoint that the plain Trainer has loaded against its marker.

    Args:
        checkpoint (`Path`):
            The checkpoint directory.
        output_dir (`str` or `Path`):
            Of the run.

    Returns:
        A warning for the user who trains on from it; `None` if there is nothing to say.

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


# ---- of one run ----


def newest_checkpoint_of(
    run: str, output_dir: str, verified: bool = False, passed_over: list[Verdict] | None = None
) -> str | None:
    """
    Finds the newest checkpoint of a run that can be resumed from; those of other runs are passed by.

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


def newest_verdict_of(
    run: str,
    output_dir: str,
    verified: bool = False,
    passed_over: list[Verdict] | None = None,
    wrote: Callable[[Path], bool] = lambda _: False,
    readers: Readers = ON_ONE_DISK,
) -> Verdict | None:
    """
    Finds the same as [`newest_checkpoint_of`], with the verdict on it.

    Args:
        run (`str`), output_dir (`str`), verified (`bool`, *optional*), passed_over (`list[Verdict]`, *optional*):
            As for [`newest_checkpoint_of`].
        wrote (`Callable[[Path], bool]`, *optional*):
            Whether a checkpoint without a marker is of this run all the same.
        readers ([`Readers`], *optional*):
            The ranks that are to resume from it.
    """
    passed_over = [] if passed_over is None else passed_over
    return _first_whole(_verdicts_of(run, output_dir, verified, passed_over, wrote, readers), passed_over)


def _verdicts_of(
    run: str,
    output_dir: str,
    verified: bool,
    passed_over: list[Verdict],
    wrote: Callable[[Path], bool],
    readers: Readers,
) -> Iterator[Verdict]:
    for checkpoint in checkpoints_in(output_dir):
        marker = load_marker(checkpoint)
        damage = damage_of_marker(checkpoint) if marker is None else None
        if damage is not None:
            reason = f"its marker {MARKER_FILE} cannot be believed ({damage}), so whose it is is not known"
            passed_over.append(Verdict(str(checkpoint), number_of(checkpoint), False, reason, "unmarked"))
        if marker is None:
            wanted = damage is None and not verified and wrote(checkpoint)
        else:
            wanted = marker.get("run") == run and (not verified or marker.get("standing") == "verified")
        if wanted:
            yield vet(checkpoint, readers=readers)


def newest_marked_checkpoint_of(run: str, output_dir: str) -> str | None:
    """
    Finds the newest checkpoint of a run by its marker alone, which says that it was complete and is not suspect: for
    where there is no time, or no device, to read it through. It is vetted when it is resumed from.
    """
    for checkpoint in checkpoints_in(output_dir):
        marker = load_marker(checkpoint)
        if marker is not None and marker.get("run") == run and speaks_for(marker):
            return str(checkpoint)
    return None


def older_checkpoints(than: str, output_dir: str) -> Iterator[str]:
    """
    Yields the checkpoints of the same run that can be resumed from instead, the newest first. Hard links to the same
    files, as `last-known-good/` holds them, are left out.

    Args:
        than (`str`):
            The checkpoint that is not to be resumed from.
        output_dir (`str`):
            Of the run.
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
