"""Knows how DeepSpeed writes a checkpoint: what each rank writes between the places where all wait for each other."""

from __future__ import annotations

from typing import Any


def saves_in_known_order(engine: Any) -> bool:
    """
    Says whether all that a DeepSpeed engine writes of a checkpoint goes through [`writes_of`], but for the file
    `latest` before its last barrier.
    """
    if engine is None or engine.has_moe_layers or engine.pipeline_parallelism or engine.zero_nvme_offload_optimizer():
        return False
    # Others write in threads or processes of their own.
    writer = getattr(engine, "checkpoint_engine", None)
    return type(writer).__name__ == "TorchCheckpointEngine" and hasattr(engine, "_copy_recovery_script")


def writes_of(engine: Any) -> list[tuple[Any, str]]:
    """Lists the methods by which an engine writes to disk, and which wait for no other rank, with their objects."""
    return [
        (engine.checkpoint_engine, "makedirs"),
        (engine.checkpoint_engine, "save"),
        (engine, "_copy_recovery_script"),
    ]
