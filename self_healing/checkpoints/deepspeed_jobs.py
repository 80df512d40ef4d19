"""Compares a checkpoint with the job that is to go on from it: DeepSpeed loads only what a job of its kind wrote."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint_files import ZeroJob
from .deepspeed import LATEST, LATEST_UNIVERSAL, DeepSpeedFolder, is_of_deepspeed


_WITHOUT = (
    "it was written without DeepSpeed, which finds nothing in it. What to do: go on without DeepSpeed, or load its "
    "weights as the model of a new run"
)
_CONVERT = (
    "convert it (python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder "
    '{path}/{tag} --output_folder {path}/{tag}_universal) and set "checkpoint": {{"load_universal": true}} in the '
    "DeepSpeed configuration"
)


def why_of_another_job(checkpoint: Path, job: ZeroJob | None) -> str | None:
    """
    Says why a checkpoint cannot be loaded by the job that is to go on from it, though nothing is wrong with it, and
    what to do.

    Args:
        checkpoint (`Path`):
            The checkpoint directory, one that has passed the checks.
        job ([`ZeroJob`], *optional*):
            How the job uses DeepSpeed; `None` for one without.

    Returns:
        `None` if it can be.
    """
    if not is_of_deepspeed(checkpoint):
        return None if job is None else _WITHOUT
    if job is None:
        return (
            "its optimizer state is DeepSpeed's, and this job runs without DeepSpeed. What to do: start it with the "
            "DeepSpeed configuration it had; or put its weights together with zero_to_fp32.py, which lies in it, and "
            "load them as the model of a new run"
        )
    universal, pointer = checkpoint / LATEST_UNIVERSAL, checkpoint / LATEST
    if job.universal and universal.is_file():
        return None
    # What a job that has loaded a universal one writes itself is none: `loading_as_written`.
    if not pointer.is_file():
        return (
            'it has become a universal checkpoint. What to do: set "checkpoint": {"load_universal": true} in the '
            "DeepSpeed configuration"
        )
    was = DeepSpeedFolder.named_by(pointer)
    if job.processes is not None and was.processes != job.processes:
        return (
            f"it was written by {was.processes} processes, and this job has {job.processes}; DeepSpeed gives each "
            f"process what the same one has written. What to do: start {was.processes} processes, or "
            + _converting(checkpoint, pointer)
        )
    # ZeRO-1 and 2 load each other's.
    if (was.stage == 3, was.stage == 0) != (job.stage == 3, job.stage == 0):
        return (
            f"it was written under ZeRO-{was.stage}, and this job runs ZeRO-{job.stage}, which reads other files. "
            f"What to do: set the stage to {was.stage}, or " + _converting(checkpoint, pointer)
        )
    if was.stage and was.bf16 != job.bf16:
        told = ("not in bf16", "in bf16") if job.bf16 else ("in bf16", "in another precision")
        return (
            f"it was written {told[0]}, and this job trains {told[1]}; DeepSpeed looks for files of other names. What "
            f"to do: set bf16={was.bf16}"
        )
    return None


def _converting(checkpoint: Path, pointer: Path) -> str:
    tag = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else "global_step*"
    return _CONVERT.format(path=checkpoint, tag=tag)
