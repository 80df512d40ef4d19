"""Healing that is off: code of this library has failed on one of several ranks, and the job has ended with it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...checkpoints.marker import numbered
from ...config.healing_config import HealingConfig
from ...failures.classify import classify_exception, describe_exception
from ...failures.recipes import FailureType, HealingFailed
from ...hf.hooks import is_meant
from ...journal.journal import Journal
from ...journal.terminal import speaking_of
from ...ranks import votes
from ...system import processes
from ...system.files import STATE_FILE, replace_file
from ...system.processes import launch_of, log_safely


logger = logging.getLogger("self_healing")

# In the directory of the run's journal: as long as it is there, training goes on without healing.
OFF_FILE = "healing_off.json"


def switch_off_next_time(directory: Path, run: str, step: int, error: BaseException) -> None:
    """Notes a failure of this library that ends a job of several ranks: the next start trains without healing."""
    rank = processes.own_rank()
    why = f"self_healing failed on rank {rank} at step {step}: {describe_exception(error)[:300]}"
    noted = {"run": run or "without-healing", "step": step, "why": why}
    text = "self_healing failed on rank %d at step %d, and the job ends. Please report this traceback."
    log_safely(logger, logging.ERROR, text, rank, step, exc_info=error)
    try:
        replace_file(directory / OFF_FILE, json.dumps(noted, indent=1) + "\n")
    except OSError:
        logger.warning("That could not be written down: the next start will heal again.", exc_info=True)


@contextlib.contextmanager
def ending_the_job(config: HealingConfig, args: Any, *meant: type[Exception]) -> Iterator[None]:
    """Has a failure of this library before the first step end a job of several ranks."""
    try:
        yield
    except Exception as error:
        lost = classify_exception(error) is FailureType.DEVICE
        if processes.world_size() == 1 or isinstance(error, meant) or is_meant(error) or lost:
            raise
        switch_off_next_time(_directory(config, args), "", 0, error)
        raise HealingFailed.on_rank(processes.own_rank(), 0, error) from error


def is_off(config: HealingConfig, args: Any) -> bool:
    """Whether a run trains without healing; if so, says and journals why, and how it is switched on again."""
    file = _directory(config, args) / OFF_FILE
    own = _noted(file)
    if votes.all_ranks("healing is attached", own is None, args.device):
        return False
    noted = votes.from_first_rank_with("why it is not", own, args.device)
    assert noted is not None, "one rank at least has it"
    if processes.is_first_rank():
        with speaking_of(args):
            logger.warning(
                "Healing is off: %s. Training goes on as with the plain Trainer; to heal again, please remove %s.",
                noted["why"],
                file,
            )
        Journal(file.parent, config, noted["run"]).event("healing_off", noted["step"], why=noted["why"])
    return True


def resumed_without_healing(config: HealingConfig, args: Any, requested: Any) -> str | None:
    """
    Gives what the plain Trainer resumes from: what was asked for, or, where the newest checkpoint was, or a launcher
    has started the job again, the newest one that the Trainer has written to its end.
    """
    if requested is None and config.resume_after_restart and launch_of().started_again:
        requested = "auto"
    if requested is not True and requested != "auto":
        return os.fspath(requested) if requested else None
    whole = [(step, path) for step, path in numbered(Path(str(args.output_dir))) if (path / STATE_FILE).is_file()]
    return str(max(whole)[1]) if whole else None


def _directory(config: HealingConfig, args: Any) -> Path:
    return Path(config.healing_dir or args.output_dir)


def _noted(file: Path) -> dict[str, Any] | None:
    """Reads the file; one that cannot be read is there all the same."""
    if not file.exists():
        return None
    noted: dict[str, Any] = {"run": "without-healing", "step": 0, "why": "self_healing failed in an earlier start"}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        noted |= {name: found[name] for name, value in noted.items() if isinstance(found.get(name), type(value))}
    return noted
