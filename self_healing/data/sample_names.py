"""Names of samples: an index, or `shard:ordinal@stage` in a stream."""

from __future__ import annotations

import re
from typing import Any


SampleName = int | str


def describe_name(name: SampleName) -> str:
    """Says a name in words."""
    if isinstance(name, int):
        return f"sample {name}"
    shard, _, rest = name.partition(":")
    if shard == "?":
        return "a sample of the stream"
    return f"sample {rest.partition('@')[0]} of shard {shard}"


def place(name: str) -> dict[str, Any]:
    """Reads shard, ordinal and stage from a name; from that of several mapped together, those of the first."""
    found = re.match(r"(\d+):(\d+)(?:_.*?)?(?:@(\d+))?$", name)
    if found is None:
        return {"shard": None, "stream_ordinal": None}
    shard, ordinal, stage = found.groups()
    place = {"shard": int(shard), "stream_ordinal": int(ordinal)}
    return place if stage is None else place | {"stage": int(stage)}


def is_simple(key: Any) -> bool:
    """Whether a name is that of one sample, and neither unknown nor that of several that were mapped together."""
    return re.fullmatch(r"\d+:\d+", str(key)) is not None
