"""What a trainer counts and what a resume reads of it: counters, random states, pending events of a step."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback, ExportableState, TrainerControl

from ..system import processes
from ..system.files import GENERATED_FILE
from ..system.random_state import RandomState
from .deepspeed import engine_of, zero_of
from .patching import Replacements
from .state import LiveState, live_state_of, unwrap_optimizer


logger = logging.getLogger("self_healing")


# ---- bookkeeping ----


_SCALARS = frozenset({int, float, bool, str, type(None)})
# Containers in which TRL trainers collect metrics and completions until the next log.
STORES = ("_metrics", "_stored_metrics", "_logs", "_textual_logs", "_pending_metrics", "_pending_extra_logs")
METRIC_STORES = ("_metrics", "_stored_metrics")
# Set by the training loop around the step, not by the step.
_SET_BY_THE_LOOP = frozenset({"current_flos", "is_in_train", "_train_batch_size"})
_SET_ON_ENTRY = _SET_BY_THE_LOOP | {"current_gradient_accumulation_steps"}
# What a new process needs to go on counting where the old one stopped.
_PERSISTENT_SCALARS = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "_total_train_tokens",
    "_step",
    "_current_train_step_time",
)
# Of TRL's GRPO (1.x), where the run itself has moved them; else they are settings, and those of the new process hold.
_MOVED_SCALARS = {"use_adaptive_entropy": ("entropy_coef", "_last_world_entropy")}


# The containers by name, and of each container in them what it held: the length of a list, or a copy.
StoreMarks = tuple[dict[str, Any], list[tuple[Any, Any]]]


@dataclass(slots=True)
class Bookkeeping:
    """Everything a trainer counts beside weights and optimizer state, as of one moment."""

    # No other attributes: a tensor of the user's that is kept alive takes memory that he has given back.
    scalars: dict[str, Any]
    running_loss: torch.Tensor
    tokens_seen: int
    total_flos: float
    log_length: int
    stores: StoreMarks
    generated: Any
    buffers: dict[str, torch.Tensor]
    rng: RandomState


class Bookkeeper:
    """Captures and rewinds the bookkeeping of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.device: torch.device = trainer.accelerator.device
        self._entry_step = int(trainer.state.global_step)
        # Of which attributes of the trainer the values are scalars, of how many.
        self._names, self._attributes = list[str](), 0
        self._moving_buffers: list[str] | None = None
        self._first_buffers: dict[str, torch.Tensor] = {}

    def capture(
        self,
        since: Bookkeeping | None = None,
        running_loss: torch.Tensor | None = None,
        rng: RandomState | None = None,
    ) -> Bookkeeping:
        """Captures the bookkeeping; with `since`, as of a moment after which only counters and numbers have moved."""
        trainer = self._trainer
        attributes, state = vars(trainer), trainer.state
        scalars = dict(zip(self._names, map(attributes.get, self._names), strict=True))
        # Nothing of it is a function of Python while the same attributes are scalars.
        if len(attributes) != self._attributes or not _SCALARS.issuperset(map(type, scalars.values())):
            scalars = {name: value for name, value in attributes.items() if type(value) in _SCALARS}
            self._names, self._attributes = list(scalars), len(attributes)
        return Bookkeeping(
            scalars,
            trainer._tr_loss.clone() if running_loss is None else running_loss,
            state.num_input_tokens_seen,
            state.total_flos,
            len(state.log_history),
            self.mark_stores() if since is None else since.stores,
            attributes.get("_buffered_inputs"),
            since.buffers if since is not None else {} if self._moving_buffers == [] else self._copy_moving_buffers(),
            rng or RandomState.capture(self.device),
        )

    def _copy_moving_buffers(self) -> dict[str, torch.Tensor]:
        """Copies the buffers a forward pass changes (batch norm statistics, fp8 scales)."""
        moving = self._moving_buffers
        if moving is None:
            buffers = [(name, each) for name, each in self._trainer.model.named_buffers() if not each.is_meta]
            if int(self._trainer.state.global_step) == self._entry_step:
                copies = {name: buffer.detach().clone() for name, buffer in buffers}
                self._first_buffers = self._first_buffers or copies
                return copies
            first = self._first_buffers
            moving = [name for name, buffer in buffers if name not in first or not torch.equal(first[name], buffer)]
            self._moving_buffers, self._first_buffers = moving, {}
        # By name: a forward may put another tensor in the place of one.
        there = dict(self._trainer.model.named_buffers()) if moving else {}
        return {name: there[name].detach().clone() for name in moving if name in there}

    def restore_buffers(self, bookkeeping: Bookkeeping) -> None:
        """Puts the buffers a forward pass changes back."""
        buffers = dict(self._trainer.model.named_buffers())
        for name, value in bookkeeping.buffers.items():
            if name in buffers and buffers[name].shape == value.shape:
                buffers[name].copy_(value)

    def rewind_step(self, bookkeeping: Bookkeeping) -> None:
        """Goes back to where a step began; what the training loop counts around the step stays."""
        self.rewind_counts(bookkeeping)
        self.restore_buffers(bookkeeping)
        bookkeeping.rng.restore()

    def rewind_counts(self, bookkeeping: Bookkeeping, stay: frozenset[str] = _SET_BY_THE_LOOP) -> None:
        """Puts counters and log back as they were; random states and buffers stay."""
        trainer = self._trainer
        for name, value in bookkeeping.scalars.items():
            if name not in stay:
                setattr(trainer, name, value)
        self.rewind_stores(bookkeeping.stores)
        if "_buffered_inputs" in vars(trainer):
            trainer._buffered_inputs = bookkeeping.generated
        del trainer.state.log_history[bookkeeping.log_length :]

    def with_buffers_of_now(self, bookkeeping: Bookkeeping) -> Bookkeeping:
        """Gives the same moment, with the buffers as they are now."""
        return replace(bookkeeping, buffers=self._copy_moving_buffers())

    def rewind(self, bookkeeping: Bookkeeping) -> None:
        """Goes back to an earlier moment altogether."""
        trainer = self._trainer
        self.rewind_counts(bookkeeping, stay=frozenset())
        self.restore_buffers(bookkeeping)
        trainer._tr_loss.copy_(bookkeeping.running_loss)
        trainer.state.num_input_tokens_seen = bookkeeping.tokens_seen
        trainer.state.total_flos = bookkeeping.total_flos
        bookkeeping.rng.restore()

    def mark_stores(self) -> StoreMarks:
        """Notes where the containers of metrics stand, those within them included."""
        attributes = vars(self._trainer)
        stores: dict[str, Any] = {}
        for name in STORES:
            if name in attributes:
                stores[name] = attributes[name]
        found: list[tuple[Any, Any]] = []
        todo = [*stores.values()]
        while todo:
            container = todo.pop()
            if isinstance(container, list):
                found.append((container, len(container)))
            elif isinstance(container, dict):
                found.append((container, dict(container)))
                todo.extend(container.values())
            elif isinstance(container, deque):
                found.append((container, tuple(container)))
        return stores, found

    def rewind_stores(self, marks: StoreMarks) -> None:
        """Takes what was added to the containers of metrics since [`mark_stores`] out again."""
        stores, contents = marks
        vars(self._trainer).update(stores)
        for container, content in contents:
            if isinstance(container, list):
                del container[content:]
            elif isinstance(container, dict):
                container.clear()
                container.update(content)
            else:
                container.clear()
                container.extend(content)

    def continue_from(self, bookkeeping: Bookkeeping) -> None:
        """Goes on with the counters of an earlier `train()` call; a new one has set its own to zero."""
        self.rewind_counts(bookkeeping, _SET_ON_ENTRY)
        self._trainer._tr_loss.copy_(bookkeeping.running_loss)

    # ---- in another process ----

    def export(self) -> dict[str, Any]:
        """Gives what another process needs to go on logging where this one stopped, as JSON."""
        return {"running_loss": float(self._trainer._tr_loss), **self.export_counts()}

    def export_counts(self) -> dict[str, Any]:
        """Gives the same without the running loss, for which the host would have to wait for the device."""
        attributes = vars(self._trainer)
        moved = (name for moves, names in _MOVED_SCALARS.items() if attributes.get(moves) for name in names)
        return {
            "scalars": {name: attributes[name] for name in (*_PERSISTENT_SCALARS, *moved) if name in attributes},
            "stores": {name: _plain_metrics(attributes[name]) for name in METRIC_STORES if name in attributes},
        }

    def take_over(self, exported: Mapping[str, Any]) -> None:
        """Goes on counting from what [`export`] of an earlier process wrote."""
        trainer, attributes = self._trainer, vars(self._trainer)
        trainer._tr_loss.fill_(exported["running_loss"])
        for name, value in exported["scalars"].items():
            if name in attributes:
                setattr(trainer, name, value)
        for name, store in exported["stores"].items():
            for mode, metrics in store.items():
                if name in attributes and mode in attributes[name]:
                    attributes[name][mode].clear()
                    attributes[name][mode].update(metrics)
        if "_buffered_inputs" in attributes:
            trainer._buffered_inputs = None


def _plain_metrics(store: Any) -> Any:
    """A metrics store as JSON; values that are not numbers are left out."""
    if isinstance(store, Mapping):
        return {str(key): _plain_metrics(value) for key, value in store.items()}
    return [float(value) for value in store if isinstance(value, (int, float))] if isinstance(store, list) else []


# ---- resume record: what a resume reads of a checkpoint beside weights and optimizer state, without its files ----


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
    def of(cls, trainer: Any, ledger: Bookkeeper, random: RandomState, pending: Pending | None = None) -> ResumeRecord:
        """Takes it from a trainer that stands between two optimizer steps."""
        owed = {} if pending is None else {PENDING: pending.to_dict()}
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
                {name: _on_the_host(value) for name, value in group.items() if name != "params"}
                for group in unwrap_optimizer(trainer.optimizer).param_groups
            ],
            random=random,
            bookkeeping=ledger.export_counts() | owed,
            running_loss=trainer._tr_loss.detach().clone(),
            flos=float(trainer.current_flos),
            generated=generated_rows(trainer),
            engine=None if zero is None else zero.standing(),
        )

    def write(self, checkpoint: Path) -> None:
        """
        Writes the files of a checkpoint that are read by name: `train()` resumes from that directory, within
        [`resuming_from`].
        """
        checkpoint.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = json.dumps(self.state | {"log_history": list(self.log_history)}, default=str)
        (checkpoint / TRAINER_STATE_NAME).write_text(content, encoding="utf-8")
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

    def load_state() -> None:
        # Weights as well: only now all that will be trained is on its device, and sharded.
        live = live_state_of(trainer)
        put(live)
        zero = zero_of(trainer)
        if zero is not None and record.engine is not None:
            zero.forget_state()
            zero.put_standing(record.engine)
        for group, settings in zip(unwrap_optimizer(trainer.optimizer).param_groups, record.groups, strict=True):
            group.update({name: _as_there(group.get(name), value) for name, value in settings.items()})
        trainer.lr_scheduler.load_state_dict(record.scheduler)
        trainer.current_flos = record.flos

    def load_scaler() -> None:
        if record.scaler is not None and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(record.scaler)

    def instead_of(holder: Any, name: str, load: Callable[[], Any]) -> None:
        def loaded(original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            return load() if path is not None and str(path) == checkpoint else original(path, *args, **kwargs)

        replaced.wrap(holder, name, loaded)

    def prepare(original: Any, *args: Any, **kwargs: Any) -> Any:
        prepared, engine = original(*args, **kwargs), engine_of(trainer)
        if engine is not None and "load_checkpoint" not in vars(engine):
            # It is made in `train()`, which has it load a checkpoint before any other part.
            instead_of(engine, "load_checkpoint", lambda: (checkpoint, {}))
        return prepared

    with Replacements() as replaced:
        replaced.wrap(trainer.accelerator, "prepare", prepare)
        instead_of(trainer, "_load_from_checkpoint", lambda: None)
        instead_of(trainer, "_load_optimizer_and_scheduler", load_state)
        instead_of(trainer, "_load_scaler", load_scaler)
        instead_of(trainer, "_load_rng_state", record.random.restore)
        yield


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


# ---- resume point ----

# In the bookkeeping of a marker.
PENDING = "pending"


@dataclass(slots=True)
class Pending:
    """What is done again for a finished step whose events were interrupted, and whether the run was to end with it."""

    # All of `on_step_end`, log, evaluation and save, as if none of it had been done.
    events: bool = False
    # After them, `on_epoch_end` and what follows from that.
    epoch_end: bool = False
    # Nothing but the evaluation, for which a process that had to leave had no time.
    evaluation: bool = False
    stop: bool = False
    epoch_ended: bool = False
    grad_norm: Any = None
    learning_rate: float | None = None

    def __bool__(self) -> bool:
        return self.events or self.evaluation or self.stop

    def deliver(self, trainer: Any, started_at: float, tell: Any) -> None:
        # An evaluation may have been left, or the model just loaded: TRL logs the metrics of the mode that it is in.
        trainer.model.train()
        control = trainer.control
        control.should_log = control.should_save = False
        control.should_evaluate = self.evaluation
        if self.events:
            trainer.control = tell.on_step_end(trainer.args, trainer.state, control)
        self._log_evaluate_save(trainer, started_at)
        if self.epoch_end:
            trainer.control = tell.on_epoch_end(trainer.args, trainer.state, trainer.control)
            self._log_evaluate_save(trainer, started_at)

    def _log_evaluate_save(self, trainer: Any, started_at: float) -> None:
        loss, model, epoch = trainer._tr_loss, trainer.model_wrapped, trainer.state.epoch
        rate = self.learning_rate
        trainer._maybe_log_save_evaluate(
            loss, self.grad_norm, model, None, epoch, None, started_at, learning_rate=rate
        )

    def collectives(self, trainer: Any) -> str:
        """Names what of it all ranks take part in: ranks may go on together if that is the same on all of them."""
        args, state, control = trainer.args, trainer.state, TrainerControl(should_evaluate=self.evaluation)
        flow, found = DefaultFlowCallback(), list[str]()
        for event, told in (("step", self.events), ("epoch", self.epoch_end)):
            if told:
                getattr(flow, f"on_{event}_end")(args, state, control)
            flags = {"log": control.should_log, "evaluate": control.should_evaluate, "save": control.should_save}
            found += [f"{event} {name}" for name, flag in flags.items() if flag]
            control.should_log = control.should_evaluate = control.should_save = False
        return ", ".join([*found, *(["stop"] if self.stop or control.should_training_stop else [])])

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for the marker of a checkpoint."""
        norm = None if self.grad_norm is None else float(self.grad_norm)
        return asdict(replace(self, grad_norm=None)) | {"grad_norm": norm}


@dataclass(slots=True)
class ResumePoint:
    """The end of a finished step, from which `train()` can be entered again as if it had never been left."""

    step: int
    bookkeeping: Bookkeeping
    pending: Pending
    # That the epoch began with.
    epoch_rng: RandomState | None = None
    path: str = ""


# ---- generated ----


def save_generated(trainer: Any, checkpoint: Path) -> None:
    """Saves what is left of a generation cycle (GRPO, RLOO) with a checkpoint; at the end of a cycle nothing is."""
    if processes.world_size() > 1:
        return
    rows = generated_rows(trainer)
    if rows is not None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        torch.save(rows, checkpoint / GENERATED_FILE)


def generated_rows(trainer: Any) -> Any:
    """Gives what is left of a generation cycle on this rank; `None` at the end of a cycle, and where there is none."""
    rows = vars(trainer).get("_buffered_inputs")
    if rows is None:
        return None
    cycle = trainer.args.steps_per_generation * trainer.num_iterations
    return rows if trainer._step % cycle != 0 else None


def scored_completions(trainer: Any) -> tuple[list[Any], dict[str, list[float]]]:
    """Gives the completions that were generated last, on all ranks, and their rewards by the name of the function."""
    logs = vars(trainer).get("_logs") or {}
    return list(logs.get("completion", ())), {name: list(given) for name, given in logs.get("rewards", {}).items()}


def load_generated(trainer: Any, checkpoint: Path) -> None:
    """Goes on with the generation cycle within which a checkpoint was written."""
    path = checkpoint / GENERATED_FILE
    if "_buffered_inputs" not in vars(trainer) or not path.is_file():
        return
    device = trainer.accelerator.device
    # In a process group it is called "cpu:0", which torch.load does not know.
    location = torch.device("cpu") if device.type == "cpu" else device
    try:
        trainer._buffered_inputs = torch.load(path, map_location=location, weights_only=True)
    except Exception:
        if processes.world_size() > 1:
            raise
        logger.warning("%s cannot be read; the rows of this cycle are generated anew.", path, exc_info=True)
