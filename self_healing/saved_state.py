"""State that an earlier process has written, or another version: what fits is taken, and the rest is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


# JSON knows whole numbers of any size. With larger ones no float could be reckoned.
_PAST_ANY_NUMBER = 1 << 1000


class Stateful(Protocol):
    """A part whose state can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


def completed(template: Mapping[str, Any], saved: Any, name: str, odd: list[str]) -> dict[str, Any]:
    """Completes a template with the values of a saved record that fit."""
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
    """Loads the saved state of a part, key by key; keys that it cannot take stay as they are in the part."""
    taken = part.state_dict()
    for key, value in completed(taken, saved, name, odd).items():
        if not _try_to_load(part, taken | {key: value}):
            odd.append(f"{name}.{key}")
            part.load_state_dict(taken)
        else:
            taken[key] = value


def take_over_whole(part: Stateful, saved: Any) -> bool:
    """Loads the saved state of a part, or leaves the part as it is; returns whether it could be loaded."""
    before = part.state_dict()
    if _try_to_load(part, saved):
        return True
    part.load_state_dict(before)
    return False


def _try_to_load(part: Stateful, state: Any) -> bool:
    try:
        part.load_state_dict(state)
        # A value that was taken unchecked raises here at the latest.
        part.state_dict()
    except Exception:
        return False
    return True


def _fits(usual: Any, value: Any) -> bool:
    if usual is None:
        return True
    if isinstance(usual, bool) or isinstance(value, bool):
        return isinstance(usual, bool) and isinstance(value, bool)
    if isinstance(value, int) and not -_PAST_ANY_NUMBER < value < _PAST_ANY_NUMBER:
        return False
    if isinstance(usual, float):
        return isinstance(value, int | float)
    return any(isinstance(usual, kind) and isinstance(value, kind) for kind in (int, str, list, Mapping))
