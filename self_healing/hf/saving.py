"""Checkpoints as the Trainer writes them: when, by which ranks together, the best one, what is uploaded."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import save_fsdp_optimizer
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PrinterCallback, ProgressCallback
from transformers import trainer as trainer_module
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from ..checkpoints.choice import writes_checkpoints
from ..failures import recipes
from ..failures.classify import classify_exception, costs_its_save, describe_exception
from ..failures.recipes import FailureType
from ..ranks import votes
from ..system import processes
from ..system.files import STATE_FILE
from ..system.random_state import RandomState
from .deepspeed import engine_of, saves_in_known_order, writes_of
from .hooks import Failsafe, Hooks
from .optimizer import takes_part
from .patching import Replacements
from .reentry import EarlyStop, Reentry
from .sections import Phase
from .view import TrainerView


logger = logging.getLogger("self_healing")

# What callbacks ask for, the events in which they ask for what follows a step, and those of what follows.
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_IN_STEP = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_epoch_end")
_AFTER_STEP = ("on_log", "on_evaluate", "on_save")
_DIFFERENT = (
    "Step %d: %s is %s on rank 0, and not on rank %s: a callback decides on one rank alone, by a clock or what only "
    "that rank knows. Ranks save, evaluate and stop together, so all do as rank 0 does, now and whenever they differ. "
    "Please have it decide alike on all."
)


class SaveSchedule:
    """Wraps what the Trainer calls between two steps: to log, to evaluate, to save once its state is vouched for."""

    def __init__(self, instrument: Any) -> None:
        self._instrument, self._trainer = instrument, instrument.trainer
        self._view: TrainerView = instrument.view
        self._hooks: Hooks = instrument.hooks
        self._failsafe: Failsafe = instrument.failsafe
        self._reentry: Reentry = instrument.reentry
        self._leaving: EarlyStop = instrument.leaving
        # Whether checkpoints of the schedule have to wait now, and whether one has waited and is written once it may.
        self.watch: Any = SimpleNamespace(open=False, owed=False)
        # Set where a checkpoint that cannot be written does not end the run.
        self.writer: CheckpointSaving | None = None
        self.longest = 0.0
        # Whether one is being written right now.
        self.writing = False
        self._on_schedule = self._held_back = False
        self._best_before: tuple[float | None, int | None] = (None, None)
        # The newest that was logged.
        self._training_loss: float | None = None
        # Of several ranks: the events in which callbacks of the user's may ask for something, on any of them.
        self.asked_in: set[str] = set()
        self._told_of_flags = False

    def log_evaluate_save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Wraps `_maybe_log_save_evaluate`, with which a step is over: asks for a checkpoint that is owed."""
        try:
            self._reentry.events_begin()
        except Exception as error:
            self._failsafe.contain(error)
        if not self.asked_in.isdisjoint(_IN_STEP):
            self._as_on_first_rank()
        control, state = self._trainer.control, self._trainer.state
        if self.watch.owed and (control.should_training_stop or not self.watch.open):
            control.should_save = True
        self._best_before = state.best_metric, state.best_global_step
        self._on_schedule, self._held_back = True, False
        follows = control.should_log or control.should_evaluate or control.should_save
        try:
            original(*args, **kwargs)
        finally:
            self._on_schedule = False
        if follows and not self.asked_in.isdisjoint(_AFTER_STEP):
            self._as_on_first_rank()
        self._reentry.events_done += 1

    def asked_in_here(self) -> list[str]:
        """Lists the events in which callbacks of the user's may ask for something, on this rank."""
        libraries = ("transformers", "trl", "accelerate", "peft")
        handler = self._trainer.callback_handler
        users = [each for each in handler.callbacks if type(each).__module__.partition(".")[0] not in libraries]
        return [event for event in (*_IN_STEP, *_AFTER_STEP) if any(takes_part(each, event) for each in users)]

    def _as_on_first_rank(self) -> None:
        """Has all ranks do what callbacks ask for on the first one."""
        control, device = self._trainer.control, self._view.device
        own = [float(getattr(control, flag)) for flag in _FLAGS]
        with self._failsafe.contained(), self._failsafe.together():
            first = own if processes.is_first_rank() else [0.0] * len(own)
            asked = votes.sum_over_ranks("what callbacks ask for", [*own, *first], device)
            for flag, ranks, wanted in zip(_FLAGS, asked, map(bool, asked[len(own) :]), strict=False):
                if ranks in (0.0, self._view.world_size):
                    continue
                differ = votes.ranks_where(flag, getattr(control, flag) != wanted, device)
                setattr(control, flag, wanted)
                if self._told_of_flags or not processes.is_first_rank():
                    continue
                self._told_of_flags = True
                logger.warning(_DIFFERENT, self._view.step, flag, wanted, ", ".join(map(str, differ)))

    def log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """Wraps `log`: adds metrics of ours."""
        with self._failsafe.contained():
            logs.update(self._hooks.metrics("loss" in logs, "train_runtime" in logs))
            self._training_loss = logs.get("loss", self._training_loss)
            if "eval_loss" in logs and self._training_loss is not None:
                logs["healing/eval_gap"] = logs["eval_loss"] - self._training_loss
            if "train_runtime" in logs:
                self._reentry.finalizing()
                self._cover_the_whole_run(logs)
        if "train_runtime" in logs:
            with self._failsafe.contained(), self._failsafe.together():
                self._hooks.before_best_model()
        return original(logs, *args, **kwargs)

    def print_without_ours(self) -> None:
        """Has callbacks that print a log leave out our numbers, which are for trackers and the log history."""
        for callback in self._trainer.callback_handler.callbacks:
            # TRL's need not be installed.
            rich = any(each.__name__ == "RichProgressCallback" for each in type(callback).__mro__)
            if rich or isinstance(callback, PrinterCallback | ProgressCallback):
                self._instrument.replace(callback, "on_log", _without_ours)

    def _cover_the_whole_run(self, logs: dict[str, float]) -> None:
        """Corrects the Trainer's final speed metrics, which know only the last entry into `train()`."""
        runtime, whole = logs["train_runtime"], time.time() - self._instrument.started_at
        if whole <= runtime:
            return
        steps = self._view.step - int(getattr(self._trainer, "_initial_global_step", 0))
        samples = logs.get("train_samples_per_second", 0.0) * runtime
        logs["train_runtime"] = round(whole, 4)
        if "train_samples_per_second" in logs:
            logs["train_samples_per_second"] = round(samples / whole, 3)
        if "train_steps_per_second" in logs:
            logs["train_steps_per_second"] = round(steps / whole, 3)

    def evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `_evaluate`."""
        if self._view.objective.online and self._instrument.leaves_out_nonfinite:
            # Rows are generated for an evaluation as well, and it has no loss that could be left out.
            with self._failsafe.contained(), self._failsafe.together():
                self._hooks.verify_state()
        if self._reentry.phase is Phase.IDLE and not self._on_schedule:
            # `eval_on_start`: it is part of no epoch.
            return self._failsafe.leaving(original, *args, **kwargs)
        return original(*args, **kwargs)

    def save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `_save_checkpoint`."""
        if self._on_schedule and self._failsafe.attached and not self._must_wait():
            with self._failsafe.contained(), self._failsafe.together():
                self._hooks.verify_state()
        if self._must_wait():
            self._held_back = True
            self.watch.owed = True
            return None
        if self._on_schedule:
            self.watch.owed = False
            with self._failsafe.contained():
                self._hooks.before_save(self._view.step)
        with self._saving():
            if not self._on_schedule or self.writer is None:
                return original(*args, **kwargs)
            if not self.writer.write(original, *args, **kwargs):
                self._held_back = True
                # A best model that cannot be saved is not the best one on disk.
                self.disown_best()
        return None

    def on_save(self, original: Callable[..., Any], args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Wraps the callbacks' `on_save`, which is not called where no checkpoint was written."""
        if self._on_schedule and self._held_back:
            control.should_save = False
            return control
        # Marked first: a callback that raises leaves a whole checkpoint all the same.
        self._hooks.after_save(self._view.step)
        return original(args, state, control, **kwargs)

    def _must_wait(self) -> bool:
        """Whether a checkpoint that the Trainer's schedule asks for has to wait."""
        state = self._trainer.state
        vouched_for = state.best_global_step is not None and state.best_global_step == state.global_step
        at_the_end = self._trainer.control.should_training_stop
        return self._on_schedule and self.watch.open and not vouched_for and not at_the_end

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        trainer = self._trainer
        for each in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(each, ExportableState):
                # The Trainer (5.23) raises a KeyError for one that has come after the beginning.
                trainer.state.stateful_callbacks.setdefault(type(each).__name__, {})
        began, self.writing = time.monotonic(), True
        try:
            with Replacements() as replaced:
                if self._leaving.begun:
                    # Another process goes on from it.
                    replaced.put(trainer.args, "save_only_model", False)
                yield
        finally:
            self.writing = False
            self.longest = max(self.longest, time.monotonic() - began)

    def write_checkpoint(self) -> None:
        """Writes a checkpoint of the trainer as it stands, as if its schedule had asked for one."""
        trainer = self._trainer
        self._on_schedule, self._held_back = True, False
        try:
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        finally:
            self._on_schedule = False

    def disown_best(self) -> None:
        """Takes back that the state of this step is the best model, whatever its evaluation said."""
        state = self._trainer.state
        if state.best_global_step == self._view.step:
            state.best_metric, state.best_global_step = self._best_before


def _without_ours(original: Callable[..., Any], *args: Any, logs: Any = None, **kwargs: Any) -> Any:
    theirs = {name: value for name, value in (logs or {}).items() if not name.startswith("healing/")}
    # The same object where there are none: a printer may take something out of it for the callbacks after it.
    return original(*args, logs=logs if len(theirs) == len(logs or {}) else theirs, **kwargs)


class CheckpointSaving:
    """Writes the checkpoints of one trainer's schedule, or has a healer deal with one that cannot be written."""

    def __init__(
        self, trainer: Any, healer: Any, contained: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._trainer = trainer
        self._healer = healer
        self._contained = contained

    def write(self, save: Callable[..., None], model: Any, trial: Any, *args: Any, **kwargs: Any) -> bool:
        """Calls the Trainer's `_save_checkpoint`; whether the checkpoint is there."""
        trainer, together = self._trainer, SavingTogether(self._trainer)
        several = processes.world_size() > 1
        if several and not together.possible:
            save(model, trial, *args, **kwargs)
            return True
        step = int(trainer.state.global_step)
        checkpoint = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{step}"
        while True:
            before, rewind = _files_of(checkpoint), self._mark()
            try:
                if several:
                    together.save(save, checkpoint, model, trial, *args, **kwargs)
                else:
                    save(model, trial, *args, **kwargs)
            except Exception as error:
                # Of a connection, and not of a file: it is waited for, and the save is made again.
                lost = getattr(error, "errno", 0) is None and classify_exception(error) is FailureType.NETWORK
                if (lost and not several) or not costs_its_save(error):
                    raise
                written, again = was_rotating(error), None
                with self._contained():
                    if written:
                        self._healer.not_rotated(error, checkpoint, step)
                    else:
                        rewind()
                        best = trainer.state.best_model_checkpoint
                        # One that is to be written again may have been marked as incomplete before.
                        complete = str(checkpoint / STATE_FILE) in before
                        untouched = complete and _files_of(checkpoint) == before
                        decides = processes.is_first_rank()
                        again = decides and self._healer.failed(error, checkpoint, step, best, untouched)
                if written:
                    return True
                if several:
                    again = self._decided_together(again, error, checkpoint, step)
                if again is None:
                    # Handling it has failed as well.
                    raise
                if not again:
                    return False
            else:
                with self._contained():
                    self._healer.saved(checkpoint, step)
                return True

    def _decided_together(self, again: bool | None, error: Exception, checkpoint: Path, step: int) -> bool | None:
        """What the first rank has decided, and done about the files; `None` where that has failed on any rank."""
        numbers, device = [again is None, bool(again)], self._trainer.accelerator.device
        failed, wanted, *_ = votes.sum_over_ranks("the checkpoint is written once more", numbers, device)
        if failed:
            return None
        again = wanted > 0
        if not processes.is_first_rank():
            with self._contained():
                self._healer.failed_together(error, checkpoint, step, again)
        return again

    def _mark(self) -> Callable[[], None]:
        """Notes what saving changes beside files; the function it returns puts that back."""
        state = self._trainer.state
        best, callbacks = state.best_model_checkpoint, copy.deepcopy(state.stateful_callbacks)
        rng = RandomState.capture(self._trainer.accelerator.device)

        def rewind() -> None:
            state.best_model_checkpoint, state.stateful_callbacks = best, callbacks
            rng.restore()

        return rewind


def _files_of(checkpoint: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of change of all files; none for a checkpoint that is not there."""
    found: dict[str, tuple[int, int, int]] = {}
    with contextlib.suppress(OSError):
        for path in checkpoint.rglob("*"):
            if path.is_file():
                status = path.stat()
                found[str(path)] = status.st_ino, status.st_size, status.st_mtime_ns
    return found


# What `_save_checkpoint` is made of before it writes the state of the Trainer, last of all.
_PARTS = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


class CouldNotBeWritten(OSError):
    """A checkpoint that one of the processes could not write; raised on all of them."""


class SavingTogether:
    """Has the processes of a run agree on whether a checkpoint could be written: on all of them, or on none."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._checkpoint = Path()
        # By which rank, as far as it is known here, and why.
        self._refused: tuple[int, BaseException] | None = None

    @property
    def possible(self) -> bool:
        """Whether it is known in which order its processes wait for each other while they save."""
        trainer = self._trainer
        if getattr(trainer, "is_deepspeed_enabled", False):
            return saves_in_known_order(engine_of(trainer))
        return not getattr(trainer, "is_distributed_loading_by_transformers", False)

    def save(self, save: Callable[..., None], checkpoint: Path, *args: Any, **kwargs: Any) -> None:
        """Calls the Trainer's `_save_checkpoint`. Collective."""
        self._checkpoint, self._refused = checkpoint, None
        with_rng = not self._trainer.args.save_only_model
        self._attempt(lambda: self._make_directories(checkpoint))
        self._agree()
        engine = engine_of(self._trainer)
        not_rotated: Exception | None = None
        with Replacements() as replaced:
            for name in _PARTS:
                last = name == ("_save_rng_state" if with_rng else "save_model")
                replaced.wrap(self._trainer, name, partial(self._part_of_trainer, name, last))
            if engine is not None:
                for holder, name in [*writes_of(engine), (self._trainer, "_save")]:
                    replaced.wrap(holder, name, self._part)
                replaced.wrap(engine, "save_checkpoint", self._part_of_engine)
            try:
                self._attempt(partial(save, *args, **kwargs), gathers=True)
            except Exception as error:
                if not (was_rotating(error) and costs_its_save(error)):
                    raise
                # Of the first rank alone: the checkpoint is written.
                not_rotated = error
        self._agree()
        if not_rotated is not None:
            raise not_rotated

    def _make_directories(self, checkpoint: Path) -> None:
        """Makes what each rank would make by itself in between, where the others wait for it already."""
        if not writes_checkpoints(self._trainer.args):
            # It may have no right to.
            return
        checkpoint.mkdir(parents=True, exist_ok=True)
        plugin = getattr(self._trainer.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and "SHARDED" in str(plugin.state_dict_type):
            for name in ("pytorch_model_fsdp_0", "optimizer_0"):
                (checkpoint / name).mkdir(exist_ok=True)

    def _part(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._attempt(partial(original, *args, **kwargs))

    def _part_of_engine(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        written = self._part(original, *args, **kwargs)
        if written is None:
            # It was the file `latest`, of the first rank alone: the others wait for it in what comes next.
            torch.distributed.barrier()
        return written

    def _part_of_trainer(self, name: str, last: bool, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gathers = name in _PARTS[:2] and (self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled)
        result = self._attempt(partial(original, *args, **kwargs), gathers)
        if last:
            self._agree()
        return result

    def _attempt(self, write: Callable[[], Any], gathers: bool = False) -> Any:
        """Notes an error of the disk, and stays with the others; ends the job if it has missed where they meet."""
        begun = votes.collectives_begun()
        try:
            return write()
        except CouldNotBeWritten:
            raise
        except CheckpointException as error:
            # No `Exception`: torch raises it on all ranks alike, whichever of them it was.
            causes = [(rank, cause) for rank, (cause, _) in error.failures.items()]
            if not all(costs_its_save(cause) for _, cause in causes):
                raise
            self._refused = self._refused or causes[0]
        except Exception as error:
            if was_rotating(error) or not costs_its_save(error):
                raise
            self._refused = self._refused or (self._trainer.args.process_index, error)
            if gathers and begun is not None and votes.collectives_begun() == begun:
                told = f"the save failed on this rank ({describe_exception(error)[:300]}) before it met the others"
                raise recipes.Stranded(f"{told}, who may wait") from error
            if _left(error, "save_fsdp_model"):
                self._join_in_the_optimizer()

    def _join_in_the_optimizer(self) -> None:
        """Takes part in what gathers the optimizer state after the weights, in the same part of the checkpoint."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        gathered = accelerator.state.fsdp_plugin, accelerator, trainer.optimizer, trainer.model
        self._attempt(lambda: save_fsdp_optimizer(*gathered, str(self._checkpoint)))

    def _agree(self) -> None:
        """Raises on all ranks what one of them could not write."""
        device = self._trainer.accelerator.device
        if not votes.any_rank("a part of the checkpoint cannot be written", self._refused is not None, device):
            return
        told, cause = None, None
        if self._refused is not None:
            rank, cause = self._refused
            told = getattr(cause, "errno", None), f"{describe_exception(cause)[:300]} (rank {rank})"
        number, text = next(
            each for each in votes.from_every_rank("why it cannot be written", told, device) if each is not None
        )
        raise (CouldNotBeWritten(text) if number is None else CouldNotBeWritten(number, text)) from cause


def was_rotating(error: BaseException) -> bool:
    """Whether it was raised after the checkpoint was written, while older ones were being removed."""
    return _left(error, "rotate_checkpoints")


def _left(error: BaseException, function: str) -> bool:
    """Whether an exception came through a function whose name ends so."""
    return any(frame.f_code.co_name.endswith(function) for frame, _ in walk_tb(error.__traceback__))


def write_checkpoint(trainer: Any, folder: Path) -> None:
    """Writes a checkpoint of the trainer as it stands into a folder."""
    whole = {"push_to_hub": False, "save_only_model": False}
    with Replacements() as ours:
        for name, value in {**whole, "save_strategy": SaveStrategy.NO, "output_dir": str(folder)}.items():
            ours.put(trainer.args, name, value)
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)


def leave_out_of_uploads(folder: str, patterns: Sequence[str]) -> None:
    """Leaves some files out of what the Trainer uploads from a folder, or from one inside of it, from here on."""
    # transformers 5.4 calls the function, later versions the client that they share.
    module: Any = trainer_module
    holder = module if hasattr(module, "upload_folder") else module.hf_api()
    upload = holder.upload_folder
    left_out: dict[Path, Sequence[str]] | None = getattr(upload, "left_out", None)
    if left_out is None:
        left_out = {}

        @functools.wraps(upload)
        def upload_others(*args: Any, **kwargs: Any) -> Any:
            if "folder_path" in kwargs:
                given = kwargs.get("ignore_patterns") or []
                ours = _patterns_for(Path(kwargs["folder_path"]).resolve(), left_out)
                kwargs["ignore_patterns"] = [*([given] if isinstance(given, str) else given), *ours] or None
            return upload(*args, **kwargs)

        holder.upload_folder = upload_others
        upload_others.left_out = left_out  # type: ignore[attr-defined]
    left_out[Path(folder).resolve()] = tuple(patterns)


def _patterns_for(folder: Path, left_out: Mapping[Path, Sequence[str]]) -> list[str]:
    """The patterns that apply to a folder, relative to it."""
    found: list[str] = []
    for outer, patterns in left_out.items():
        if folder == outer:
            found.extend(patterns)
        elif folder.is_relative_to(outer):
            inside = folder.relative_to(outer).as_posix()
            parts = (pattern.rpartition("/") for pattern in patterns)
            found.extend(name for directory, slash, name in parts if slash and fnmatchcase(inside, directory))
    return found


def wrap_pushes(replaced: Replacements, trainer: Any, wrapper: Callable[..., None]) -> None:
    """Hands what uploads in the background, and what waits for that, to a wrapper."""
    for name in ("_push_from_checkpoint", "_finish_current_push"):
        replaced.wrap(trainer, name, wrapper)
