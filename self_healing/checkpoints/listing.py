"""Lists the checkpoints in an output directory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ..checkpoint_files import BESIDE_DIR, EMERGENCY_DIR, PINNED_DIR, STATE_FILE, numbered
from .marker import load_marker


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """
    Lists all that is called a checkpoint in an output directory, newest first; of the same step the regular one comes
    first, then the emergency one, then one that was to take its place, then the one in `last-known-good/`.

    Last come those beside the regular ones that an earlier run in this directory left behind: regular ones of fewer
    steps were written after them.
    """
    regular = numbered(Path(output_dir))
    found = [(False, -number, 0, entry) for number, entry in regular]
    written = [(number, written_at(entry)) for number, entry in regular]
    for place, name in enumerate((EMERGENCY_DIR, BESIDE_DIR, PINNED_DIR), start=1):
        for number, entry in numbered(Path(output_dir, name)):
            at = written_at(entry)
            left_behind = any(other < number and later > at for other, later in written)
            found.append((left_behind, -number, place, entry))
    return [entry for *_, entry in sorted(found)]


def written_at(checkpoint: Path) -> float:
    """Reads when a checkpoint was written, in seconds since the epoch; 0 if it cannot be told."""
    at = (load_marker(checkpoint) or {}).get("time")
    if isinstance(at, int | float):
        with suppress(OverflowError):
            return float(at)
    try:
        return (checkpoint / STATE_FILE).stat().st_mtime
    except OSError:
        return 0.0
