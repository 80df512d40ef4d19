"""
Knows the Trainer's internals, alone: only here may versions of it differ.

It wraps one trainer instance (never a class) so that each optimizer step becomes a [`Window`]: something that can be
judged between the last backward and `optimizer.step()`, computed again bit for bit, run on some of its rows, or left
out. Everything it sets is taken back by [`Instrument.detach`].

Read against transformers 5.4 to 5.23, TRL 1.16, accelerate 1.15.
"""

from .batch_size import BatchPlan, CannotReduce, change_batch, rows_per_step, smaller_batch
from .best_model import BestChoice, BestModel
from .blueprint import blueprint_of, kept_weights
from .device_memory import (
    alloc_retries,
    free_memory,
    memory_figures,
    memory_of,
    memory_taken,
    record_memory_history,
    room_of,
    write_memory_snapshot,
)
from .discovery import find_resume_path, find_trainer, is_training
from .earlier_steps import EarlierSteps
from .experiments import StepExperiments
from .generated import load_generated, save_generated
from .gradients import is_sharded
from .hooks import Hooks
from .interception import Interception
from .kept_step import Control, Recording, on_host
from .live_state import optimizer_in_training_mode, reload_checkpoint, reset_moments
from .models import zero_job_of
from .one_step import compute_one_step
from .origin import Origin
from .out_of_memory import OutOfMemory, is_out_of_memory, let_go, with_room
from .own_checkpoints import emergency_path, write_beside, write_checkpoint
from .preservation import preserved
from .replacing import Replacements
from .replicas import Replicas
from .reporting import ReportingGuard
from .resume_point import Leave, Pending, ResumePoint
from .row_sources import RowSource
from .saving import CheckpointSaving
from .services import ServiceGuard
from .step_engine import StepEngine, StepPasses
from .training_fault import TrainingFault
from .uploads import leave_out_of_uploads
from .view import TrainerView
from .window import Window
from .wrapping import Instrument
from .zero import can_be_entered_again, let_go_of_engine


__all__ = [
    "BatchPlan",
    "BestChoice",
    "BestModel",
    "CannotReduce",
    "CheckpointSaving",
    "Control",
    "EarlierSteps",
    "Hooks",
    "Instrument",
    "Interception",
    "Leave",
    "Origin",
    "OutOfMemory",
    "Pending",
    "Recording",
    "Replacements",
    "Replicas",
    "ReportingGuard",
    "ResumePoint",
    "RowSource",
    "ServiceGuard",
    "StepEngine",
    "StepExperiments",
    "StepPasses",
    "TrainerView",
    "TrainingFault",
    "Window",
    "alloc_retries",
    "blueprint_of",
    "can_be_entered_again",
    "change_batch",
    "compute_one_step",
    "emergency_path",
    "find_resume_path",
    "find_trainer",
    "free_memory",
    "is_out_of_memory",
    "is_sharded",
    "is_training",
    "kept_weights",
    "leave_out_of_uploads",
    "let_go",
    "let_go_of_engine",
    "load_generated",
    "memory_figures",
    "memory_of",
    "memory_taken",
    "on_host",
    "optimizer_in_training_mode",
    "preserved",
    "record_memory_history",
    "reload_checkpoint",
    "reset_moments",
    "room_of",
    "rows_per_step",
    "save_generated",
    "smaller_batch",
    "with_room",
    "write_beside",
    "write_checkpoint",
    "write_memory_snapshot",
    "zero_job_of",
]
