"""Tries before the first step whether checkpoints can be written to the `output_dir` of a run."""

from __future__ import annotations

import errno
import logging
import tempfile
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

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


def refuse_unwritable(args: TrainingArguments) -> None:
    """
    Tries whether checkpoints can be written, before the first step: a run that finds out at its end has trained in
    vain. Only warns if none are to be written.

    Args:
        args ([`~transformers.TrainingArguments`]):
            Of the trainer. Its `output_dir` is made if it is not there.

    Raises:
        ConfigurationError: If nothing can ever be written there.
    """
    why = _why_unwritable(Path(str(args.output_dir)))
    if why is None:
        return
    found = f"output_dir={args.output_dir!r} cannot be written ({why})"
    if args.save_strategy == SaveStrategy.NO:
        logger.warning("%s: an exception will leave no checkpoint, and a restart finds nothing to go on from.", found)
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
