"""Faults of checkpoints: a disk that is full, and weights that are cut off."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .strikes import Strikes


def guard_saving(strikes: Strikes, trainer: Any, undo: contextlib.ExitStack) -> None:
    """Lets a full disk strike a trainer's saves, until `undo` is closed."""
    original, was_set = trainer.save_model, "save_model" in vars(trainer)

    @functools.wraps(original)
    def save_model(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        done = original(output_dir, *args, **kwargs)
        for number in strikes.due("disk_full"):
            directory = str(output_dir or trainer.args.output_dir)
            with strikes.strike(number, directory=directory):
                # As a full disk leaves it: what this rank writes of the weights half written, and nothing after it.
                own = _own_shards(Path(directory), strikes.rank)
                _cut_off(own if own or strikes.rank > 0 else _weights(Path(directory)))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)
        return done

    trainer.save_model = save_model

    def give_back() -> None:
        if was_set:
            trainer.save_model = original
        else:
            vars(trainer).pop("save_model", None)

    undo.callback(give_back)


def tear_checkpoint(strikes: Strikes, number: int, output_dir: str) -> None:
    """Cuts off the weights of the newest checkpoint, if there is one."""
    # What is written last of one: another rank may still be about it.
    states = Path(output_dir).glob("checkpoint-*/trainer_state.json")
    found = sorted((state.parent for state in states if _number(state.parent) >= 0), key=_number)
    if not found:
        # Nothing to tear yet: the first one there is.
        return
    with strikes.strike(number, checkpoint=str(found[-1])) as result:
        # Another rank may be removing it.
        result["effect"] = False
        result["effect"] = _cut_off(_own_shards(found[-1], strikes.rank) or _weights(found[-1]))
    if strikes.faults[number].get("then") == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)


def _number(checkpoint: Path) -> int:
    number = checkpoint.name.split("-")[-1]
    return int(number) if number.isdigit() else -1


def _weights(checkpoint: Path) -> list[Path]:
    return [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.bin")]


def _own_shards(checkpoint: Path, rank: int) -> list[Path]:
    return [*checkpoint.glob(f"pytorch_model_fsdp_*/__{rank}_*.distcp")]


def _cut_off(files: Sequence[Path]) -> bool:
    """Leaves half of the largest file; in a file of its own, so that hard links elsewhere stay whole."""
    if not files:
        return False
    largest = max(files, key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    part = largest.with_name(largest.name + ".part")
    part.write_bytes(whole[: len(whole) // 2])
    part.replace(largest)
    return True
