"""Finds the trainer in the call stack: it hands callbacks its state, not itself."""

from __future__ import annotations

import os
import sys
from typing import Any

from transformers import Trainer


def find_trainer(callback: Any) -> Trainer | None:
    """
    Finds the trainer whose `train()` is calling the callback right now: the caller of `on_train_begin` is one of its
    methods.
    """
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer) and callback in candidate.callback_handler.callbacks:
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    return None


def is_training(trainer: Trainer, frame: Any) -> bool:
    """Whether a frame was called, however indirectly, by `train()` of a trainer."""
    while frame is not None:
        if frame.f_code.co_name == "train" and frame.f_locals.get("self") is trainer:
            return True
        frame = frame.f_back
    return False


def find_resume_path() -> str | None:
    """Finds the checkpoint that the `train()` call under way resumes from."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer) and "resume_from_checkpoint" in frame.f_locals:
            path = frame.f_locals["resume_from_checkpoint"]
            return str(path) if isinstance(path, (str, os.PathLike)) else None
        frame = frame.f_back  # type: ignore[assignment]
    return None
