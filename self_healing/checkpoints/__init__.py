"""Checkpoints on disk: marked, judged, chosen to resume from, kept, and written after an exception."""

from .choice import CheckpointError, find_trusted_checkpoint


__all__ = ["CheckpointError", "find_trusted_checkpoint"]
