"""Reads the callback's entry in the state of the Trainer that a checkpoint holds, `trainer_state.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint_files import STATE_FILE


def healing_state_of(stateful_callbacks: Mapping[str, Any]) -> dict[str, Any] | None:
    """Finds the state that the callback keeps in a trainer's, whatever its class is; `None` if there is none."""
    for entry in stateful_callbacks.values():
        attributes = entry.get("attributes") if isinstance(entry, Mapping) else None
        state = attributes.get("healing_state") if isinstance(attributes, Mapping) else None
        if isinstance(state, dict):
            return state
    return None


def missing_steps_in(checkpoint: str) -> int:
    """Counts the steps up to a checkpoint that are not in its weights; 0 where that is not known."""
    try:
        state = json.loads(Path(checkpoint, STATE_FILE).read_text(encoding="utf-8"))
        kept = healing_state_of(state["stateful_callbacks"]) or {}
        return int(kept["missing_steps"]["count"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0
