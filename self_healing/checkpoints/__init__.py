"""
Checkpoints on disk: marked, judged, chosen to resume from, kept, and written after an exception.

Nothing here knows why a run is left or resumed: that is for `restarts/` and `rollback/`.
"""

from .choice import CheckpointError, find_trusted_checkpoint


__all__ = ["CheckpointError", "find_trusted_checkpoint"]
