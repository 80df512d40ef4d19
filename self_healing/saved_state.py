"""State that an earlier process has written, or another version: what fits is taken, and the rest is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """What can be saved and taken up again."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


def completed(template: Mapping[str, Any], saved: Any, name: str, odd: list[str]) -> dict[str, Any]:
    """
    Takes of a saved record what can be one.

    Args:
        template (`Mapping[str, Any]`):
            The record as it is without anything saved: all its keys, each with a value of the kind it should have.
            Where that is `None`, any kind will do.
        saved (`Any`):
            What was saved.
        name (`str`):
            What it is called.
        odd (`list[str]`):
            Gets the names of what is missing or cannot be.

    Returns:
        The template with what was saved in it.
    """
    if not isinstance(saved, Mapping):
        odd.append(name)
        return dict(template)
    found = dict(template)
    for key, usual in template.items():
        if key in saved and _fits(usual, saved[key]):
            found[key] = saved[key]
        else:
            odd.append(f"{name}.{key}")
    return found


def take_over(part: Stateful, saved: Any, name: str, odd: list[str]) -> None:
    """
    Loads what was saved of a part, key by key; what it cannot take stays as it is in the part.

    Args:
        part ([`Stateful`]):
            The part.
        saved (`Any`):
            What its `state_dict` was.
        name (`str`):
            What it is called.
        odd (`list[str]`):
            Gets the names of what is missing or cannot be.
    """
    taken = part.state_dict()
    for key, value in completed(taken, saved, name, odd).items():
        if not _try_to_load(part, taken | {key: value}):
            odd.append(f"{name}.{key}")
            part.load_state_dict(taken)
        else:
            taken[key] = value


def take_over_whole(part: Stateful, saved: Any) -> bool:
    """Loads what was saved of a part, or else leaves it as it is; whether it could be loaded."""
    before = part.state_dict()
    if _try_to_load(part, saved):
        return True
    part.load_state_dict(before)
    return False


def _try_to_load(part: Stateful, state: Any) -> bool:
    try:
        part.load_state_dict(state)
        # What was taken without being looked at shows here at the latest.
        part.state_dict()
    except Exception:
        return False
    return True


def _fits(usual: Any, value: Any) -> bool:
    if usual is None:
        return True
    if isinstance(usual, bool) or isinstance(value, bool):
        return isinstance(usual, bool) and isinstance(value, bool)
    if isinstance(usual, float):
        return isinstance(value, int | float)
    return any(isinstance(usual, kind) and isinstance(value, kind) for kind in (int, str, list, Mapping))
