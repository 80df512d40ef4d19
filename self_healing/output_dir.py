"""Tries before the first step whether checkpoints can be written to the `output_dir` of a run, by all that have to."""

from __future__ import annotations

import errno
import logging
import tempfile
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from . import consensus
from .classify import describe_exception
from .config import ConfigurationError


logger = logging.getLogger("self_healing")

# Errors that neither waiting nor making room cures.
_NEVER_WRITABLE = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        # The missing directories are made, so it is a place where none can be, or a working directory that is gone.
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    }
)


def writes_checkpoints(args: TrainingArguments) -> bool:
    """Whether this rank writes a part of each checkpoint: weights and state of the Trainer, shards, random states."""
    return not args.save_only_model or bool(args.should_save) or args.deepspeed_plugin is not None


def refuse_unwritable(args: TrainingArguments) -> None:
    """
    Tries whether checkpoints can be written, before the first step: a run that finds out at its end has trained in
    vain. Only warns if none are to be written. Collective: each rank tries that has a part to write.

    Args:
        args ([`~transformers.TrainingArguments`]):
            Of the trainer. Its `output_dir` is made if it is not there.

    Raises:
        ConfigurationError: On all ranks, if one can never write anything there.
    """
    why: str | None = None

    def unwritable() -> bool:
        nonlocal why
        why = _why_unwritable(Path(str(args.output_dir))) if writes_checkpoints(args) else None
        return why is not None

    if not consensus.any_rank("output_dir cannot be written", unwritable, args.device):
        return
    of_ranks = consensus.from_every_rank("why it cannot be written there", why, args.device)
    refused = [rank for rank, each in enumerate(of_ranks) if each is not None]
    who = "" if len(of_ranks) == 1 else f" by {consensus.in_words(refused)}"
    found = f"output_dir={args.output_dir!r} cannot be written{who} ({of_ranks[refused[0]]})"
    if args.save_strategy == SaveStrategy.NO:
        if consensus.is_first_rank():
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
        return describe_exception(error) if error.errno in _NEVER_WRITABLE else None
