"""Writes checkpoints beside those that the user has asked for, and all of them whatever a trainer's state holds."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from ..hf.patching import Replacements
from ..system.files import BESIDE_DIR, EMERGENCY_DIR, MARKER_FILE


logger = logging.getLogger("self_healing")

# Of values within values.
_DEEPEST = 50
# What is written again once what a step owed is done; all other files are those of the checkpoint before.
_WRITTEN_AGAIN = ("optimizer", "scheduler", "rng_state", TRAINER_STATE_NAME, "global_step", "latest")


def emergency_path(trainer: Any) -> Path:
    """The path of the emergency checkpoint of the current step, written or not."""
    return Path(trainer.args.output_dir, EMERGENCY_DIR, f"checkpoint-{trainer.state.global_step}")


def write_checkpoint(trainer: Any, folder: Path) -> None:
    """Writes a checkpoint of the trainer as it stands into a folder."""
    ours, elsewhere = Replacements(), {"save_strategy": SaveStrategy.NO, "output_dir": str(folder)}
    for name, value in ({"push_to_hub": False, "save_only_model": False} | elsewhere).items():
        ours.put(trainer.args, name, value)
    try:
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
    finally:
        ours.give_back()


def write_beside(trainer: Any, checkpoint: Path) -> Path:
    """
    Writes a checkpoint once more as the trainer stands now, beside the one before: a process that is killed meanwhile
    leaves that one whole.
    """
    beside = Path(trainer.args.output_dir, BESIDE_DIR, checkpoint.name)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for file in checkpoint.rglob("*"):
        relative = file.relative_to(checkpoint)
        if file.is_file() and not relative.parts[0].startswith((*_WRITTEN_AGAIN, MARKER_FILE)):
            _link_or_copy(file, beside / relative)
    trainer._save_optimizer_and_scheduler(str(beside))
    trainer._save_rng_state(str(beside))
    with refusing_nothing(trainer):
        trainer.state.save_to_json(str(beside / TRAINER_STATE_NAME))
    return beside


def _link_or_copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, target)
    except OSError:
        # The file system has no hard links.
        shutil.copy2(file, target)


@contextlib.contextmanager
def refusing_nothing(trainer: Any, whole: bool = False) -> Iterator[None]:
    """Within it, what JSON or safetensors refuses is written in a form that they take, and named; the rest as ever."""
    replacements, state, model = Replacements(), trainer.state, trainer.model

    def save_state(original: Any, path: str) -> None:
        try:
            original(path)
        except (TypeError, ValueError, RuntimeError):
            odd = dict[str, str]()
            plain = {each.name: plain_value(getattr(state, each.name), each.name, odd) for each in fields(state)}
            replace(state, **plain).save_to_json(path)
            told = ", ".join(f"{name} ({kind})" for name, kind in odd.items())
            logger.warning(
                "%s has as numbers or text what JSON cannot hold: %s.", path, told or "keys that are no text"
            )

    def save_weights(original: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except (ValueError, RuntimeError):
            # Weights that are handed over are gathered from several processes. Without the attribute the Trainer
            # (5.23) raises on names that are missing.
            again = hasattr(model, "_keys_to_ignore_on_save")
            apart, changed = ({}, []) if kwargs or len(args) > 1 else _apart(model.state_dict(), once=again)
            if not changed:
                raise
            original(*args, state_dict=apart)
            told = "%s: weights that share memory, or have gaps in it, are written %s: %s."
            logger.warning(told, args[0], "once" if again else "each by itself", ", ".join(changed[:5]))

    for each in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(each, ExportableState):
            # The Trainer (5.23) raises a KeyError for one that has come after the beginning.
            state.stateful_callbacks.setdefault(type(each).__name__, {})
    replacements.put(trainer.args, "save_only_model", trainer.args.save_only_model and not whole)
    replacements.wrap(state, "save_to_json", save_state)
    replacements.wrap(trainer, "_save", save_weights)
    try:
        yield
    finally:
        replacements.give_back()


def plain_value(value: Any, name: str, odd: dict[str, str], within: tuple[int, ...] = ()) -> Any:
    """Gives a value as JSON can hold it; `odd` gets the names of what had to be changed for it, and of which kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value).__name__
    if id(value) in within or len(within) > _DEEPEST:
        odd[name] = f"{kind} within itself"
        return f"<{odd[name]}>"
    inner = (*within, id(value))
    if isinstance(value, Mapping):
        odd |= {f"{name}.{key!r}": "key" for key in value if not isinstance(key, str)}
        return {str(key): plain_value(each, f"{name}.{key}", odd, inner) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(each, name, odd, inner) for each in value]
    odd[name] = kind
    try:
        plain = sorted(value, key=str) if isinstance(value, set | frozenset) else value.tolist()
        return plain_value(plain, name, odd, inner)
    except Exception:
        with contextlib.suppress(Exception):
            return str(value)
    return f"<{kind}>"


def _apart(weights: Mapping[str, Any], once: bool) -> tuple[dict[str, Any], list[str]]:
    """Each tensor in memory of its own without gaps, under one of its names if `once`; and the names this changes."""
    apart, seen = dict[str, Any](), set[Any]()
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return {}, []
        memory = tensor.untyped_storage().data_ptr()
        place = memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if not (once and place in seen):
            apart[name] = tensor.clone().contiguous() if memory in seen else tensor.contiguous()
        seen |= {memory, place}
    return apart, [name for name, tensor in weights.items() if apart.get(name) is not tensor]
