"""Checkpoints that cannot be written."""
