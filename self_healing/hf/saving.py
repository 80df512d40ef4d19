"""`SavingTogether`: a checkpoint that several processes write is whole on all of them, or on none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import save_fsdp_optimizer
from torch.distributed.checkpoint.api import CheckpointException
from transformers import Trainer

from ..checkpoints.choice import writes_checkpoints
from ..failures import recipes
from ..failures.classify import costs_its_save, describe_exception
from ..instrument.zero_saving import saves_in_known_order, writes_of
from ..ranks import votes
from .deepspeed import engine_of
from .patching import Replacements


# What `_save_checkpoint` is made of before it writes the state of the Trainer, last of all.
_PARTS = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


class CouldNotBeWritten(OSError):
    """A checkpoint that one of the processes could not write; raised on all of them."""


class SavingTogether:
    """Has the processes of a run agree on whether a checkpoint could be written."""

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
        replacements = Replacements()
        for name in _PARTS:
            last = name == ("_save_rng_state" if with_rng else "save_model")
            replacements.wrap(self._trainer, name, partial(self._part_of_trainer, name, last))
        engine = engine_of(self._trainer)
        if engine is not None:
            for holder, name in [*writes_of(engine), (self._trainer, "_save")]:
                replacements.wrap(holder, name, self._part)
            replacements.wrap(engine, "save_checkpoint", self._part_of_engine)
        not_rotated: Exception | None = None
        try:
            self._attempt_or_join("_save_checkpoint", save, *args, **kwargs)
        except Exception as error:
            if not (was_rotating(error) and costs_its_save(error)):
                raise
            # Of the first rank alone: the checkpoint is written.
            not_rotated = error
        finally:
            replacements.give_back()
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
        return self._attempt(lambda: original(*args, **kwargs))

    def _part_of_engine(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        written = self._part(original, *args, **kwargs)
        if written is None:
            # It was the file `latest`, of the first rank alone: the others wait for it in what comes next.
            torch.distributed.barrier()
        return written

    def _part_of_trainer(self, name: str, last: bool, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gathers = name in _PARTS[:2] and (self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled)
        attempt = partial(self._attempt_or_join, name) if gathers else self._part
        result = attempt(original, *args, **kwargs)
        if last:
            self._agree()
        return result

    def _attempt_or_join(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Has a rank whose own version of a method fails before it meets the others meet them in the Trainer's."""
        own = partial(getattr(Trainer, name), self._trainer, *args, **kwargs)
        return self._attempt(lambda: original(*args, **kwargs), lambda _: self._attempt(own, _strand))

    def _attempt(self, write: Callable[[], Any], missed: Callable[[Exception], Any] | None = None) -> Any:
        """Notes an error of the disk, and stays with the others; `missed` is called if it has met none of them yet."""
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
            if missed is not None and begun is not None and votes.collectives_begun() == begun:
                missed(error)
            elif _left(error, "save_fsdp_model"):
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


def _strand(error: Exception) -> NoReturn:
    told = f"the save failed on this rank ({describe_exception(error)[:300]}) before it met the others, who may wait"
    raise recipes.Stranded(told) from error


def was_rotating(error: BaseException) -> bool:
    """Whether it was raised after the checkpoint was written, while older ones were being removed."""
    return _left(error, "rotate_checkpoints")


def _left(error: BaseException, function: str) -> bool:
    """Whether an exception came through a function whose name ends so."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name.endswith(function):
            return True
        traceback = traceback.tb_next
    return False
