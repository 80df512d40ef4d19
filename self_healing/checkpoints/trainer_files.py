"""Reads state and configurations in a checkpoint as the Trainer does when it resumes."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, TrainerState

from ..checkpoint_files import STATE_FILE, number_of
from .findings import Unusable, json_object_in, reading
from .tensors import load_archive


def finished_steps(checkpoint: Path) -> int:
    """Reads how many optimizer steps were finished, and checks the state of the Trainer that says so."""
    file = checkpoint / STATE_FILE
    if not file.is_file():
        raise Unusable(f"{STATE_FILE} is missing: it is written last, so the others may not be whole")
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise Unusable(f"{STATE_FILE} is not JSON: it was written in part only, or damaged") from None
    step = state.get("global_step") if isinstance(state, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        raise Unusable(f"{STATE_FILE} has no global_step")
    number = number_of(checkpoint)
    if number is not None and number != step:
        raise Unusable(f"{STATE_FILE} is of step {step}, not of {number}")
    _check_state(file)
    return step


def check_configs(checkpoint: Path) -> None:
    """Reads the configurations as the Trainer does when it resumes."""
    for file in (checkpoint / "config.json", *sorted(checkpoint.glob("**/adapter_config.json"))):
        if file.is_file():
            with reading(file):
                json_object_in(file)
                if file.name == "config.json":
                    PreTrainedConfig.from_json_file(file)


def _check_state(file: Path) -> None:
    """Reads the state as the Trainer does, and checks that each value is of the kind it will be taken for."""
    with reading(file):
        state = TrainerState.load_from_json(str(file))
    hints = typing.get_type_hints(TrainerState)
    for each in dataclasses.fields(TrainerState):
        value = getattr(state, each.name)
        # Given as a list to a new state, and kept as a mapping.
        kind = dict if each.name == "stateful_callbacks" else hints[each.name]
        if value != each.default and not _is_of(value, kind):
            raise Unusable(f"{file.name} says {each.name}={str(value)[:50]!r}, which cannot be")
    if not all(isinstance(entry, dict) for entry in state.log_history):
        raise Unusable(f"{file.name} has entries in log_history that are none")


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of an annotated type; whole numbers and others stand for each other."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_is_of(value, each) for each in typing.get_args(kind))
    wanted = typing.get_origin(kind) or kind
    if wanted in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return not isinstance(wanted, type) or isinstance(value, wanted)


def check_mapping(file: Path) -> None:
    """Refuses schedule, scaler or random states that are no mapping; objects other than torch's are ignored."""
    if file.suffix in (".pt", ".pth"):
        content = load_archive(file)
        if content is not None and not isinstance(content, Mapping):
            raise Unusable(f"{file.name} holds a {type(content).__name__} and no state")
