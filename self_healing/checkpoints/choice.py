"""Chooses the checkpoint to resume from (the newest one that can be), and tries whether new ones can be written."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from ..config.schema import ConfigurationError
from ..failures.classify import describe_exception
from ..ranks import votes
from ..system import processes
from ..system.files import EMERGENCY_DIR, PINNED_DIR
from .marker import checkpoints_in, load_marker, speaks_for, standing_of
from .vetting import Verdict, breach_of_marker, vet


logger = logging.getLogger("self_healing")

# Errors that neither waiting nor making room cures. The missing directories are made, so what is not found is a place
# where none can be, or a working directory that is gone.
_NEVER_WRITABLE = PermissionError, FileNotFoundError, NotADirectoryError, FileExistsError, IsADirectoryError
_NEVER_WRITABLE_ERRNOS = frozenset({errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP})


class CheckpointError(ValueError):
    """There is no checkpoint that can be resumed from, or not the one that was asked for."""


def vet_all(output_dir: str | Path) -> list[Verdict]:
    """Vets all checkpoints of an output directory, newest first."""
    return [vet(checkpoint) for checkpoint in checkpoints_in(output_dir)]


def find_trusted_checkpoint(output_dir: str | Path, passed_over: list[Verdict] | None = None) -> str | None:
    """
    Finds the newest checkpoint of an output directory that can be resumed from.

    Args:
        output_dir (`str` or `Path`):
            Of the run.
        passed_over (`list[Verdict]`, *optional*):
            Gets the verdicts on those that are newer, and cannot be.

    Returns:
        `str`: its path, or `None` if there is none.
    """
    newest = _newest_usable(checkpoints_in(output_dir), [] if passed_over is None else passed_over)
    return None if newest is None else newest.path


def _newest_usable(newest_first: Iterable[Path], passed_over: list[Verdict]) -> Verdict | None:
    """The first one that can be used, of those to which every process has written its part if there is any."""
    # Vetting reads every byte: those older than the first whole one are not looked at.
    for verdict in map(vet, newest_first):
        if verdict.usable and verdict.whole:
            return verdict
        passed_over.append(verdict)
    torn = next((verdict for verdict in passed_over if verdict.usable), None)
    if torn is not None:
        passed_over.remove(torn)
    return torn


def resolve_checkpoint(
    requested: str | os.PathLike[str] | bool, output_dir: str | Path, passed_over: list[Verdict]
) -> Verdict | None:
    """Finds the checkpoint that a request to resume means."""
    if requested is False:
        return None
    if requested is True or requested == "auto":
        chosen = _newest_usable(checkpoints_in(output_dir), passed_over)
        if chosen is None and requested is True:
            raise CheckpointError(_none_at_all(output_dir, passed_over))
        return chosen
    verdict = vet(Path(requested))
    if not verdict.usable:
        passed_over.append(verdict)
        raise _refused(Path(requested), verdict.reason, output_dir)
    return verdict


def _refused(requested: Path, reason: str, output_dir: str | Path) -> CheckpointError:
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
    """Checks a checkpoint that the plain Trainer has loaded against its marker."""
    breach = breach_of_marker(checkpoint)
    if breach is not None:
        raise _refused(checkpoint, breach, output_dir)
    if standing_of(checkpoint) != "suspect":
        return None
    trusted = find_trusted_checkpoint(output_dir)
    instead = "there is none that can be trusted" if trusted is None else f"the newest good one is {trusted}"
    return f"it was written in a stretch that was rolled back or went bad; {instead}"


# ---- of one run ----


def newest_checkpoint_of(
    run: str, output_dir: str, verified: bool = False, of_steps: range | None = None
) -> str | None:
    """Finds the newest checkpoint of a run that can be resumed from; those of other runs are passed by."""
    newest = newest_verdict_of(run, output_dir, [], verified, of_steps)
    return None if newest is None else newest.path


def newest_verdict_of(
    run: str, output_dir: str, passed_over: list[Verdict], verified: bool = False, of_steps: range | None = None
) -> Verdict | None:
    """Finds the same as [`newest_checkpoint_of`], with the verdicts on it and on those that are newer."""
    own = (
        path
        for path, marker in _marked_by(run, output_dir)
        if (not verified or marker["standing"] == "verified") and (of_steps is None or marker["step"] in of_steps)
    )
    return _newest_usable(own, passed_over)


def newest_marked_checkpoint_of(run: str, output_dir: str) -> str | None:
    """
    Finds the newest checkpoint of a run by its marker alone, which says that it was complete and is not suspect: for
    where there is no time, or no device, to read it through. It is vetted when it is resumed from.
    """
    return next((str(path) for path, marker in _marked_by(run, output_dir) if speaks_for(marker)), None)


def _marked_by(run: str, output_dir: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for checkpoint in checkpoints_in(output_dir):
        marker = load_marker(checkpoint)
        if marker is not None and marker["run"] == run:
            yield checkpoint, marker


# ---- where new ones are to be written ----


def writes_checkpoints(args: TrainingArguments) -> bool:
    """Whether this rank writes a part of each checkpoint: weights and state of the Trainer, shards, random states."""
    return not args.save_only_model or bool(args.should_save) or args.deepspeed_plugin is not None


def refuse_unwritable(args: TrainingArguments) -> None:
    """
    Tries whether checkpoints can be written, before the first step: a run that finds out at its end has trained in
    vain.
    """
    why = _why_unwritable(Path(str(args.output_dir))) if writes_checkpoints(args) else None
    if not votes.any_rank("output_dir cannot be written", why is not None, args.device):
        return
    of_ranks = votes.from_every_rank("why it cannot be written there", why, args.device)
    refused = [rank for rank, each in enumerate(of_ranks) if each is not None]
    who = "" if len(of_ranks) == 1 else f" by {votes.in_words(refused)}"
    found = f"output_dir={args.output_dir!r} cannot be written{who} ({of_ranks[refused[0]]})"
    if args.save_strategy == SaveStrategy.NO:
        if processes.is_first_rank():
            logger.warning("%s: an exception will leave no checkpoint, and a restart finds none to go on from.", found)
        return
    raise ConfigurationError(
        f"{found}: this run could save no checkpoint, so nothing was trained. Please name another output_dir, or make "
        "this one writable; save_strategy='no' trains without checkpoints."
    )


def _why_unwritable(directory: Path) -> str | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        # A disk that is full, or a server that does not answer, may be well again when the first checkpoint is due.
        never = isinstance(error, _NEVER_WRITABLE) or error.errno in _NEVER_WRITABLE_ERRNOS
        return describe_exception(error) if never else None
