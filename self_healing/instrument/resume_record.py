"""`ResumeRecord`: what a resume reads of a checkpoint beside weights and optimizer state, without its files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ..hf.deepspeed import engine_of, zero_of
from ..hf.patching import Replacements
from ..hf.state import LiveState, innermost, live_state_of
from ..hf.trainer_state import Bookkeeper
from ..system.files import GENERATED_FILE
from ..system.random_state import RandomState
from .generated import generated_rows
from .own_checkpoints import plain_value


# Fields of the optimizer's groups that are no settings.
_NO_SETTINGS = frozenset({"params"})
# Methods of the Trainer that read a checkpoint, and whose own we know.
_LOADS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")
_KNOWN = frozenset({"transformers", "trl"})


@dataclass(frozen=True, slots=True)
class ResumeRecord:
    """What a resume reads of a checkpoint beside weights and optimizer state, as of the end of one optimizer step."""

    step: int
    state: dict[str, Any]
    log_history: Sequence[dict[str, Any]]
    scheduler: dict[str, Any]
    scaler: dict[str, Any] | None
    groups: list[dict[str, Any]]
    random: RandomState
    bookkeeping: dict[str, Any]
    running_loss: torch.Tensor
    flos: float
    generated: Any
    engine: dict[str, dict[str, Any]] | None = None

    @classmethod
    def of(cls, trainer: Any, ledger: Bookkeeper, random: RandomState) -> ResumeRecord:
        """Takes it from a trainer that stands between two optimizer steps."""
        state, zero = trainer.state, zero_of(trainer)
        kept = {each.name: getattr(state, each.name) for each in fields(state) if each.name != "log_history"}
        scaler = trainer.accelerator.scaler
        return cls(
            step=int(state.global_step),
            state=kept | {"stateful_callbacks": _exported_states(trainer)},
            log_history=state.log_history,
            scheduler=trainer.lr_scheduler.state_dict(),
            scaler=None if scaler is None else scaler.state_dict(),
            groups=[
                {name: _on_the_host(value) for name, value in group.items() if name not in _NO_SETTINGS}
                for group in innermost(trainer.optimizer).param_groups
            ],
            random=random,
            bookkeeping=ledger.export_counts(),
            running_loss=trainer._tr_loss.detach().clone(),
            flos=float(trainer.current_flos),
            generated=generated_rows(trainer),
            engine=None if zero is None else zero.standing(),
        )

    def owing(self, owed: dict[str, Any]) -> ResumeRecord:
        """The same, with what its process still owed the step, as entries of a marker."""
        return replace(self, bookkeeping=self.bookkeeping | owed)

    def write(self, checkpoint: Path) -> None:
        """
        Writes the files of a checkpoint that are read by name: `train()` resumes from that directory, within
        [`resuming_from`].
        """
        checkpoint.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = plain_value(self.state | {"log_history": list(self.log_history)}, TRAINER_STATE_NAME, {})
        (checkpoint / TRAINER_STATE_NAME).write_text(json.dumps(content) + "\n", encoding="utf-8")
        if self.engine is not None:
            # Without it transformers takes the directory for none of DeepSpeed's.
            (checkpoint / f"global_step{self.step}").mkdir(exist_ok=True)
        if self.generated is not None:
            torch.save(self.generated, checkpoint / GENERATED_FILE)


def loads_more(trainer: Any) -> str | None:
    """
    Names a method by which a trainer of the user's own reads more of a checkpoint than the Trainer does (averaged
    weights, a second optimizer), which is in no [`ResumeRecord`]; `None` if there is none.
    """
    for name in _LOADS:
        module = getattr(getattr(trainer, name, None), "__module__", None) or ""
        if module.partition(".")[0] not in _KNOWN:
            return f"{type(trainer).__name__}.{name}"
    return None


@contextlib.contextmanager
def resuming_from(
    trainer: Any, checkpoint: str, record: ResumeRecord, put: Callable[[LiveState], None]
) -> Iterator[None]:
    """Lets `train()` resume from a directory that has no files of weights, optimizer state and random states."""
    replacements = Replacements()

    def load_state() -> None:
        # Weights as well: only now all that will be trained is on its device, and sharded.
        live = live_state_of(trainer)
        put(live)
        zero = zero_of(trainer)
        if zero is not None and record.engine is not None:
            zero.forget_state()
            zero.put_standing(record.engine)
        for group, settings in zip(innermost(trainer.optimizer).param_groups, record.groups, strict=True):
            group.update({name: _as_there(group.get(name), value) for name, value in settings.items()})
        trainer.lr_scheduler.load_state_dict(record.scheduler)
        trainer.current_flos = record.flos

    def load_scaler() -> None:
        if record.scaler is not None and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(record.scaler)

    def instead_of(holder: Any, name: str, load: Callable[[], Any]) -> None:
        def loaded(original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            return load() if path is not None and str(path) == checkpoint else original(path, *args, **kwargs)

        replacements.wrap(holder, name, loaded)

    def prepare(original: Any, *args: Any, **kwargs: Any) -> Any:
        prepared, engine = original(*args, **kwargs), engine_of(trainer)
        if engine is not None and "load_checkpoint" not in vars(engine):
            # It is made in `train()`, which has it load a checkpoint before any other part.
            instead_of(engine, "load_checkpoint", lambda: (checkpoint, {}))
        return prepared

    replacements.wrap(trainer.accelerator, "prepare", prepare)
    instead_of(trainer, "_load_from_checkpoint", lambda: None)
    instead_of(trainer, "_load_optimizer_and_scheduler", load_state)
    instead_of(trainer, "_load_scaler", load_scaler)
    instead_of(trainer, "_load_rng_state", record.random.restore)
    try:
        yield
    finally:
        replacements.give_back()


def _exported_states(trainer: Any) -> dict[str, Any]:
    """States of callbacks and control by the name of their class, a list of them where several are of one."""
    found: dict[str, list[Any]] = {}
    for each in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(each, ExportableState):
            found.setdefault(type(each).__name__, []).append(each.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _on_the_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _as_there(live: Any, value: Any) -> Any:
    """A setting that is a tensor, such as the rate of an optimizer under CUDA graphs, stays the same object."""
    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
        return live.copy_(value)
    return value
