"""Which sizes of model calls fitted: remembered, written down, and what is done about those that did not."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from ...failures.recipes import Action
from ...hf.adapter import Instrument
from ...hf.batches import CallShape, Kind
from ...hf.memory import BatchPlan, change_batch, free_memory, memory_of
from ...hf.state import unwrap_optimizer
from ...run.healer import CarryOut, HealingContext
from ...run.run import Run
from ...system.files import of_rank, replace_file


logger = logging.getLogger("self_healing")

SIZES_FILE = "healing_sizes.json"
_VERSION = 1


# ---- known sizes ----


# Steps after which a size that did not fit is tried again. The wait doubles whenever that fails.
PROBE_STEPS = 50


@dataclass(slots=True)
class _Frontier:
    """The largest sizes (rows, length) of one kind of call that did fit, and the smallest that did not."""

    wait: int
    # The step from which on a size that has failed is tried again.
    next_retry: int = 0
    fits: list[tuple[int, int]] = field(default_factory=list)
    fails: list[tuple[int, int]] = field(default_factory=list)

    def fit(self, rows: int, length: int) -> bool:
        """Takes in a size that fitted; whether that is news."""
        if any(r >= rows and n >= length for r, n in self.fits):
            return False
        self.fits = [(r, n) for r, n in self.fits if r > rows or n > length] + [(rows, length)]
        self.fails = [(r, n) for r, n in self.fails if r > rows or n > length]
        return True

    def fail(self, rows: int, length: int) -> None:
        """Takes in a size that did not."""
        self.fits = [(r, n) for r, n in self.fits if r < rows or n < length]
        self.fails = [(r, n) for r, n in self.fails if r < rows or n < length] + [(rows, length)]

    def most(self, length: int) -> int:
        """The most rows of this length that are known to fit; 0 if none are."""
        return max((r for r, n in self.fits if n >= length), default=0)


@dataclass(frozen=True, slots=True)
class _Try:
    """A number of rows that is tried beyond those known to fit."""

    kind: Kind
    rows: int
    failed_before: bool


class KnownSizes:
    """Remembers which sizes of model calls fitted, and tells how many rows of the next one may run at a time."""

    def __init__(self, probe_steps: int | None = None) -> None:
        self._base_wait = PROBE_STEPS if probe_steps is None else probe_steps
        self._frontiers: dict[Kind, _Frontier] = {
            "train": _Frontier(self._base_wait),
            "forward": _Frontier(self._base_wait),
            "generate": _Frontier(self._base_wait),
        }
        self.step = 0
        self._seen: list[CallShape] = []
        self._trying: _Try | None = None
        # Where a failure ends the job (several processes): one row where nothing is known, unless one more failure can
        # most likely be healed; and half of what failed at most.
        self.failure_is_fatal = self.may_fail_once = False
        # Where every call has to be made whole, whatever fits: other ranks take part in it.
        self.made_together = False
        self.begun: dict[Kind, CallShape] = {}
        self.last_begun: CallShape | None = None
        self.changed = False
        # Most pieces of one call or step since the last log, and why one was made whole, since the last incident.
        self.pieces = 1
        self.refused = ""
        # Whether a pass of a step, or an experiment, is computed: its calls have as many rows as they are to have.
        self.in_passes = False

    @property
    def limits(self) -> bool:
        """Whether anything has ever failed."""
        return any(frontier.fails for frontier in self._frontiers.values())

    # ---- how many rows ----

    def rows_for(self, shape: CallShape) -> int:
        """Gives how many rows of a call of this size may run at a time, at least 1; notes a size that is tried."""
        known = self.known_rows(shape)
        if not self._fails(shape.kind) or self._trying is not None:
            return known
        if self._most(shape) == 0 and known > 1:
            self._trying = _Try(shape.kind, known, failed_before=False)
        elif known < shape.rows:
            # Of those that a call falls into evenly, half as many pieces.
            pieces = -(-shape.rows // known)
            self._trying = self._larger(shape, -(-shape.rows // -(-pieces // 2)))
        return known if self._trying is None else self._trying.rows

    def known_rows(self, shape: CallShape) -> int:
        """Gives how many of its rows are known to fit; where nothing is known, half as many tokens as failed."""
        if not self._fails(shape.kind):
            return shape.rows
        most = self._most(shape)
        if most == 0:
            cautious = self.failure_is_fatal and not self.may_fail_once and shape.kind != "generate"
            most = 1 if cautious else self._half_of_what_failed(shape)
        # What has failed itself counts more than what fitted with gradients (another model, another state of memory).
        failed = [rows for rows, length in self._frontiers[shape.kind].fails if length <= shape.length]
        return max(min([most, shape.rows, *(rows - 1 for rows in failed)]), 1)

    def _larger(self, shape: CallShape, rows: int) -> _Try | None:
        """A try of more rows than are known to fit: at once, or later if they are known to fail."""
        failed_before = any(rows >= r and shape.length >= n for r, n in self._fails(shape.kind))
        if self.failure_is_fatal and rows > self._half_of_what_failed(shape):
            return None
        waits = failed_before or self.failure_is_fatal
        if waits and self.step < self._frontiers[shape.kind].next_retry:
            return None
        return _Try(shape.kind, rows, failed_before)

    def _most(self, shape: CallShape) -> int:
        return max(each.most(shape.length) for each in self._frontiers_for(shape.kind))

    def _half_of_what_failed(self, shape: CallShape) -> int:
        """Rows of this length with half as many tokens as the smallest call that failed."""
        return min(rows * length for rows, length in self._fails(shape.kind)) // 2 // shape.length

    def _fails(self, kind: Kind) -> list[tuple[int, int]]:
        return [each for frontier in self._frontiers_for(kind) for each in frontier.fails]

    def _frontiers_for(self, kind: Kind) -> tuple[_Frontier, ...]:
        """Without gradients a call needs no more than with; how much less is only known once it has run."""
        own = self._frontiers[kind]
        return (own, self._frontiers["train"]) if kind == "forward" else (own,)

    # ---- what ran ----

    def begins(self, shape: CallShape) -> None:
        """A call of this size begins; if it does not fit, this is the one."""
        self.begun[shape.kind] = self.last_begun = shape

    def ran(self, shape: CallShape) -> None:
        """A call of this size came through its forward pass; what is known of it waits for its backward."""
        self._seen.append(shape)

    def on_success(self) -> None:
        """Notes that everything which ran since the last failure fitted, backward included."""
        seen = self._seen
        self.forget_attempt()
        if not seen or not self.limits:
            return
        for shape in seen:
            self.changed |= self._frontiers[shape.kind].fit(shape.rows, shape.length)
        tried, self._trying = self._trying, None
        if tried is not None and tried.failed_before:
            # Growing as long as it goes well.
            self._frontiers[tried.kind].wait = self._base_wait

    def failed(self, shape: CallShape, with_gradients: bool = True) -> None:
        """A call of this size did not fit; in an evaluation that says nothing about calls `with_gradients`."""
        self.forget_attempt()
        kinds: set[Kind] = {shape.kind}
        if with_gradients and shape.kind == "forward" and self._frontiers["train"].most(shape.length) < shape.rows:
            # With gradients it needs more; unless it did fit, and another model is the larger one.
            kinds.add("train")
        for kind in kinds:
            self._frontiers[kind].fail(shape.rows, shape.length)
        tried, self._trying = self._trying, None
        if tried is not None and (tried.failed_before or self.failure_is_fatal):
            self._frontiers[tried.kind].wait *= 2
        # Calls without gradients go by what failed with them.
        waiting: set[Kind] = {*kinds, "forward"} if "train" in kinds else kinds
        for kind in waiting:
            self._frontiers[kind].next_retry = self.step + self._frontiers[kind].wait
        self.changed = True

    def is_tried(self, shape: CallShape) -> bool:
        """Whether a call of this size runs because it was to be tried, and not because it could not be split."""
        return self._trying is not None and shape.kind == self._trying.kind and shape.rows <= self._trying.rows

    def forget_attempt(self) -> None:
        """Forgets the calls since the last failure: they run again."""
        self._seen = []
        self.begun.clear()
        self.last_begun = None

    def more_room(self) -> None:
        """Less memory is needed per row from now on: what failed may fit."""
        for kind in ("train", "forward"):
            self._frontiers[kind] = _Frontier(self._base_wait)
        self._trying = None
        self.changed = True

    # ---- for other processes ----

    def state_dict(self) -> dict[str, Any]:
        frontiers: dict[str, Any] = {
            kind: {"fits": each.fits, "fails": each.fails} for kind, each in self._frontiers.items()
        }
        return {**frontiers, "made_together": self.made_together}

    def load_state_dict(self, state: Mapping[str, Any], own: bool = True) -> None:
        """
        Takes over what did not fit in another process; what did fit from an earlier start of this rank (`own`) only:
        another one may have more memory.
        """
        self.made_together |= bool(state.get("made_together"))
        for kind, frontier in self._frontiers.items():
            known = state.get(kind, {})
            for rows, length in known.get("fails", []):
                frontier.fail(int(rows), int(length))
            for rows, length in known.get("fits", []) if own else []:
                frontier.fit(int(rows), int(length))
            frontier.next_retry = self.step + frontier.wait


# ---- what a run knows of its memory, and what it does to need less of it ----


def fingerprint_of(trainer: Any) -> dict[str, Any]:
    """Facts that have to be the same for sizes that fitted in one process to fit in another."""
    device, parameters = trainer.accelerator.device, list(trainer.model.parameters())
    # Under ZeRO-3 there are elements only while they are gathered.
    sizes = [int(getattr(each, "ds_numel", each.numel())) for each in parameters]
    return {
        "parameters": sum(sizes),
        "trained": sum(size for size, each in zip(sizes, parameters, strict=True) if each.requires_grad),
        "dtypes": sorted({str(each.dtype) for each in parameters}),
        "precision": str(trainer.accelerator.mixed_precision),
        "activation_checkpointing": bool(getattr(trainer.args, "gradient_checkpointing", False)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "memory": memory_of(device),
        "processes": int(trainer.args.world_size),
    }


class MemoryState:
    """
    With which sizes, and whether with activation checkpointing, a run is known to fit into memory: kept in
    `healing_sizes.json` of the run directory, one for each rank. Its actions make a step need less.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.sizes = KnownSizes()
        self.checkpointing_activations = False

    @property
    def path(self) -> Path:
        """The file of this rank."""
        return of_rank(self._run.directory / SIZES_FILE, self._run.journal.rank)

    def write(self) -> None:
        """Writes down what is known to fit this model on this device."""
        try:
            replace_file(self.path, json.dumps(self.content(), indent=1) + "\n")
        except OSError as error:
            logger.warning("%s could not be written (%s): the next start has to learn it again.", self.path, error)

    def content(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "for": fingerprint_of(self._run.instrument.trainer),
            "checkpointing_activations": self.checkpointing_activations,
            "sizes": self.sizes.state_dict(),
        }

    def take_over(self, content: Mapping[str, Any], own: bool) -> bool:
        """Takes over what another process knows; `False` if it is about another model or device."""
        if content["version"] != _VERSION or content["for"] != fingerprint_of(self._run.instrument.trainer):
            return False
        self.sizes.load_state_dict(content["sizes"], own)
        return True

    def read(self) -> None:
        """Takes over what did not fit in an earlier process, on any rank, if it was the same model and device."""
        for path in sorted(self._run.directory.glob("healing_sizes*.json")):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                if self.take_over(content, own=path == self.path):
                    self.checkpointing_activations |= bool(content["checkpointing_activations"])
            except Exception as error:
                logger.warning("%s cannot be read and is not used: %s", path, error)
        if self.sizes.limits:
            logger.info("%s: batches that did not fit in an earlier start are split from the beginning.", self.path)

    def table(self) -> dict[Action, CarryOut]:
        """The actions, and what does each."""
        return {
            Action.FREE_MEMORY: self._free_memory,
            Action.SPLIT_BATCH: self._split_batch,
            Action.CHECKPOINT_ACTIVATIONS: self._checkpoint_activations,
            Action.REDUCE_BATCH_SIZE: self._reduce_batch_size,
        }

    def _free_memory(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        free_memory(context.running.trainer.accelerator.device)
        return {}

    def _split_batch(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        shape = context.shape
        if shape is None:
            raise ValueError("split_batch needs the size of the call that did not fit")
        self.sizes.failed(shape, with_gradients=context.window is not None)
        at_a_time = self.sizes.known_rows(shape)
        return {"call": shape.kind, "did_not_fit": [shape.rows, shape.length], "at_a_time": at_a_time}

    def _checkpoint_activations(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        if not checkpoint_activations(context.running):
            return {"checkpointing": False, "happened": False, "why": "it is on already, or the model cannot do it"}
        self.checkpointing_activations = True
        self.sizes.more_room()
        context.incident.figures.append("activation checkpointing is on from here on")
        return {"checkpointing": True}

    def _reduce_batch_size(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        plan = context.batch
        if plan is None:
            raise ValueError("reduce_batch_size needs the sizes to go on with")
        change_batch(context.running.trainer, plan)
        context.incident.figures.append(
            f"per_device_train_batch_size from {plan.rows_before} to {plan.rows}, gradient_accumulation_steps from "
            f"{plan.accumulation_before} to {plan.accumulation}"
        )
        if context.running.objective.name not in ("sft", "dpo", "reward", "generic"):
            context.incident.figures.append("a loss that looks at the whole micro-batch sees fewer rows from here on")
        return plan.to_dict()


# ---- settings of a model and an optimizer that take less memory for the same result, until the trainer is given back


def checkpoint_activations(instrument: Instrument) -> bool:
    """Switches activation checkpointing on, if the model supports it; whether that changed anything."""
    model: Any = instrument.trainer.model
    if _checkpoints(model) or not getattr(model, "supports_gradient_checkpointing", False):
        return False
    inputs_needed_gradients = hasattr(model, "_require_grads_hook")
    _tell(model, "enable", {"use_reentrant": False})
    if not _checkpoints(model):
        return False

    def switch_off() -> None:
        _tell(model, "disable")
        if not inputs_needed_gradients and hasattr(model, "_require_grads_hook"):
            model.disable_input_require_grads()

    instrument.on_detach.append(switch_off)
    return True


# Renamed in transformers 5.2x; the old names warn there.
def _checkpoints(model: Any) -> bool:
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((found for name in names if (found := getattr(model, name, None)) is not None), False))


def _tell(model: Any, what: str, options: dict[str, Any] | None = None) -> None:
    for name in ("activation", "gradient"):
        method = getattr(model, f"{name}_checkpointing_{what}", None)
        if method is not None:
            method(**({} if options is None else {f"{name}_checkpointing_kwargs": options}))
            return


def update_one_by_one(instrument: Instrument) -> bool:
    """Has an optimizer of torch update parameter by parameter: all at once takes as much memory again as they do."""
    groups = getattr(unwrap_optimizer(instrument.trainer.optimizer), "param_groups", [])
    at_once = [group for group in groups if group.get("foreach", False) is not False and not group.get("fused")]
    for group in at_once:
        instrument.on_detach.append(functools.partial(group.__setitem__, "foreach", group["foreach"]))
        group["foreach"] = False
    return bool(at_once)


# ---- a smaller batch ----


class CannotReduce(Exception):
    """Raised where a smaller batch would change what is trained; the message says why."""


def smaller_batch(trainer: Any, objective: str, refused: str = "") -> BatchPlan:
    """Finds the next smaller size, by the smallest factor that divides it."""
    args = trainer.args
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    factor = next((factor for factor in range(2, rows + 1) if rows % factor == 0), None)
    if factor is None:
        raise CannotReduce(f"per_device_train_batch_size is {rows} already")
    plan = BatchPlan(rows // factor, accumulation * factor, rows, accumulation)
    kinds = getattr(trainer, "loss_types", None) or []
    if objective == "kto":
        raise CannotReduce("KTO subtracts a statistic of the micro-batch")
    if objective == "dpo" and any(str(kind).startswith("aot") for kind in kinds):
        raise CannotReduce("the loss sorts the micro-batch")
    coupled = "batch normalisation" in refused or "depend on each other" in refused
    if why := (refused if coupled else "") or _why_not(trainer, plan):
        raise CannotReduce(why)
    return plan


def _why_not(trainer: Any, plan: BatchPlan) -> str:
    args = trainer.args
    if hasattr(args, "num_generations"):
        return "generations are made for batches of the size there is"
    if args.n_gpu > 1:
        return "several devices share the batch of this process"
    if args.train_sampling_strategy == "group_by_length":
        return "rows are grouped by length within batches, and would come in another order"
    loader = trainer.callback_handler.train_dataloader
    try:
        before = len(loader)
        total = len(trainer.train_dataset)
    except TypeError:
        return "the data are a stream: a resume could not tell where it stood"
    if getattr(getattr(loader, "batch_sampler", None), "batch_size", plan.rows_before) != plan.rows_before:
        return "the batches do not come in the size of per_device_train_batch_size"
    rounded = math.floor if args.dataloader_drop_last else math.ceil
    share = total / (trainer.accelerator.num_processes or 1)
    if before != rounded(share / plan.rows_before):
        return "it is not known how the data become batches"
    after = rounded(share / plan.rows)
    if math.ceil(before / plan.accumulation_before) != math.ceil(after / plan.accumulation):
        return "an epoch would have another number of optimizer steps"
    return ""
