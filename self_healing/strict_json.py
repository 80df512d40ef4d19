"""JSON that every reader takes: no NaN, no infinity, nothing that only Python knows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def jsonable(value: Any) -> Any:
    """The value as strict JSON holds it: a number that is not finite becomes its name, anything unknown its repr."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(inner) for inner in value]
    return repr(value)
