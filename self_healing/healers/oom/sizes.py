"""Which sizes of model calls fitted: remembered, written down, and what is done about those that did not."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainingArguments

from ...failures.recipes import Action
from ...hf.batches import CallShape, Kind
from ...hf.memory import change_batch, free_memory
from ...run.healer import CarryOut, HealingContext
from ...run.run import Run
from ...system.files import of_rank, replace_file


logger = logging.getLogger("self_healing")

SIZES_FILE = "healing_sizes.json"
_VERSION = 1
# Larger than any size: it says that something did fail, and so that only what is known to fit is safe.
_BEYOND_ALL = 1 << 30


class Room(Protocol):
    """The memory of a device that says how much of it there is."""

    def held(self) -> int:
        """Bytes that tensors hold now."""

    def left(self) -> int:
        """Bytes that could be taken beyond them."""


@dataclass(slots=True)
class _Frontier:
    """The sizes (rows, length) of one kind of call that are known to fit, or not to."""

    # Steps from a failure to the next try of a size that has failed, and of one that had not been tried; and which
    # steps these are.
    wait: int
    next_retry: int = 0
    next_try: int = 0
    try_wait: int = 1
    # The largest that did fit, and the smallest that did not.
    fits: list[tuple[int, int]] = field(default_factory=list)
    fails: list[tuple[int, int]] = field(default_factory=list)
    # The most that a call was seen to hold.
    bytes_per_token: float = 0.0

    def fit(self, rows: int, length: int) -> bool:
        """Takes in a size that fitted; whether that is news."""
        if any(r >= rows and n >= length for r, n in self.fits):
            return False
        self.fits = [(r, n) for r, n in self.fits if not (r <= rows and n <= length)] + [(rows, length)]
        self.fails = [(r, n) for r, n in self.fails if not (r <= rows and n <= length)]
        return True

    def fail(self, rows: int, length: int) -> None:
        """Takes in a size that did not."""
        self.fits = [(r, n) for r, n in self.fits if not (r >= rows and n >= length)]
        self.fails = [(r, n) for r, n in self.fails if not (r >= rows and n >= length)] + [(rows, length)]

    def most(self, length: int) -> int:
        """The most rows of this length that are known to fit; 0 if none are."""
        return max((r for r, n in self.fits if n >= length), default=0)

    def fewest(self, length: int) -> int | None:
        """The fewest rows of this length that are known to fail; `None` if none are."""
        return min((r for r, n in self.fails if n <= length), default=None)

    def half_of_what_failed(self, length: int) -> int | None:
        """Rows of this length with half as many tokens as the smallest call that failed; `None` if none is known."""
        tokens = [r * n for r, n in self.fails if r < _BEYOND_ALL]
        return min(tokens) // 2 // length if tokens else None


@dataclass(frozen=True, slots=True)
class _Try:
    """A number of rows that is tried beyond those `known` to fit; `failed_before`, if it is known to have failed."""

    kind: Kind
    known: int
    rows: int
    failed_before: bool


# Steps after which a size that did not fit is tried again. The wait doubles whenever that fails.
PROBE_STEPS = 50


class KnownSizes:
    """Remembers which sizes of model calls fitted, and tells how many rows of the next one may run at a time."""

    def __init__(self, probe_steps: int | None = None, room: Room | None = None) -> None:
        self._base_wait = probe_steps = PROBE_STEPS if probe_steps is None else probe_steps
        self._frontiers: dict[Kind, _Frontier] = {
            "train": _Frontier(probe_steps),
            "forward": _Frontier(probe_steps),
            "generate": _Frontier(probe_steps),
        }
        self.step = 0
        self._restored = False
        self._seen: list[CallShape] = []
        self._trying: _Try | None = None
        self._held_before = 0
        # The memory of the device, where it can be asked.
        self.room = room
        # Where a failure ends the job (several processes): one row where nothing is known, unless one more failure can
        # most likely be healed.
        self.failure_is_fatal = self.may_fail_once = False
        # Where every call has to be made whole, whatever fits: other ranks take part in it.
        self.made_together = False
        self.begun: dict[Kind, CallShape] = {}
        self.last_begun: CallShape | None = None
        self.changed = False

    @property
    def limits(self) -> bool:
        """Whether anything has ever failed."""
        return any(frontier.fails for frontier in self._frontiers.values())

    def begin_step(self, step: int) -> None:
        """An optimizer step begins."""
        self.step = step
        if self._restored:
            self._restored = False
            for frontier in self._frontiers.values():
                frontier.next_retry, frontier.next_try = step + frontier.wait, step + frontier.try_wait

    # ---- how many rows ----

    def rows_for(self, shape: CallShape) -> int:
        """Gives how many rows of a call of this size may run at a time, at least 1; notes a size that is tried."""
        allowed = self.known_rows(shape)
        if not self._has_failed(shape.kind) or self._trying is not None:
            return allowed
        if self._most(shape) == 0:
            if allowed > 1:
                self._trying = _Try(shape.kind, 0, allowed, failed_before=False)
        elif allowed < shape.rows:
            self._trying = self._next_try(shape, allowed)
        return allowed if self._trying is None else self._trying.rows

    def known_rows(self, shape: CallShape) -> int:
        """Gives how many of its rows are known to fit; half of what failed where nothing is known."""
        if not self._has_failed(shape.kind):
            return shape.rows
        most = self._most(shape) or self._half_of_what_failed(shape)
        # What has failed itself counts more than what fitted with gradients (another model, another state of memory).
        failed = self._frontiers[shape.kind].fewest(shape.length)
        if failed is not None:
            most = min(most, failed - 1)
        return max(min(most, shape.rows), 1)

    def _has_failed(self, kind: Kind) -> bool:
        return any(frontier.fails for frontier in self._frontiers_for(kind))

    def _frontiers_for(self, kind: Kind) -> tuple[_Frontier, ...]:
        """Without gradients a call needs no more than with; how much less is only known once it has run."""
        own = self._frontiers[kind]
        return (own, self._frontiers["train"]) if kind == "forward" else (own,)

    def _most(self, shape: CallShape) -> int:
        return max(frontier.most(shape.length) for frontier in self._frontiers_for(shape.kind))

    def _half_of_what_failed(self, shape: CallShape) -> int:
        if self.failure_is_fatal and not self.may_fail_once and shape.kind != "generate":
            return 1
        halves = [frontier.half_of_what_failed(shape.length) for frontier in self._frontiers_for(shape.kind)]
        half = min((each for each in halves if each is not None), default=1)
        while half > 1 and not self._may_have_room(shape, half):
            half //= 2
        return half

    def _next_try(self, shape: CallShape, known: int) -> _Try | None:
        """
        The next size to try, of those that a call falls into evenly: up to twice as large and not known to fail, and
        when there is none left the next larger, which failed and may fit by now.
        """
        frontier = self._frontiers[shape.kind]
        pieces = -(-shape.rows // known)
        larger = sorted({-(-shape.rows // fewer) for fewer in range(-(-pieces // 2), pieces)} - {known})
        failed = min(
            (rows for rows in (each.fewest(shape.length) for each in self._frontiers_for(shape.kind)) if rows),
            default=shape.rows + 1,
        )
        if self.failure_is_fatal:
            halves = [each.half_of_what_failed(shape.length) for each in self._frontiers_for(shape.kind)]
            larger = [rows for rows in larger if all(half is None or rows <= half for half in halves)]
        untried, others = [rows for rows in larger if rows < failed], [rows for rows in larger if rows >= failed]
        if untried and self.step >= (frontier.next_retry if self.failure_is_fatal else frontier.next_try):
            # Half-way to what failed.
            rows = untried[-1] if failed > 2 * known else untried[len(untried) // 2]
        elif others and self.step >= frontier.next_retry:
            rows = others[0]
        else:
            return None
        return _Try(shape.kind, known, rows, rows >= failed) if self._may_have_room(shape, rows) else None

    def _may_have_room(self, shape: CallShape, rows: int) -> bool:
        """Whether there is memory for at least what so many rows were seen to hold; what they need beyond is open."""
        needed = self._frontiers[shape.kind].bytes_per_token * rows * shape.length
        return self.room is None or needed == 0 or needed <= self.room.left()

    # ---- what ran ----

    def begins(self, shape: CallShape) -> None:
        """A call of this size begins; if it does not fit, this is the one."""
        self.begun[shape.kind] = self.last_begun = shape
        if self.room is not None:
            self._held_before = self.room.held()

    def ran(self, shape: CallShape) -> None:
        """A call of this size came through its forward pass; what is known of it waits for its backward."""
        self._seen.append(shape)
        if self.room is not None:
            held = (self.room.held() - self._held_before) / (shape.rows * shape.length)
            frontier = self._frontiers[shape.kind]
            frontier.bytes_per_token = max(frontier.bytes_per_token, held)

    def on_success(self) -> None:
        """Notes that everything which ran since the last failure fitted, backward included."""
        seen = self._seen
        self.forget_attempt()
        if not seen or not self.limits:
            return
        for shape in seen:
            self.changed |= self._frontiers[shape.kind].fit(shape.rows, shape.length)
        tried, self._trying = self._trying, None
        if tried is None:
            return
        frontier = self._frontiers[tried.kind]
        took_place = any(shape.kind == tried.kind and shape.rows > tried.known for shape in seen)
        if took_place:
            # Growing as long as it goes well.
            frontier.next_try, frontier.try_wait = self.step + 1, 1
        else:
            # A call that is not split, sequences or pairs that do not fill a chunk: the next step is for other tries.
            frontier.next_try = self.step + 2
        if tried.failed_before or (self.failure_is_fatal and tried.known):
            frontier.next_retry = self.step + 1
            if took_place:
                frontier.wait = self._base_wait

    def failed(self, shape: CallShape, with_gradients: bool = True) -> None:
        """A call of this size did not fit; in an evaluation that says nothing about calls `with_gradients`."""
        self.forget_attempt()
        self._frontiers[shape.kind].fail(shape.rows, shape.length)
        waiting = {shape.kind}
        if with_gradients and shape.kind == "forward" and self._frontiers["train"].most(shape.length) < shape.rows:
            # With gradients it needs more; unless it did fit, and another model is the larger one.
            self._frontiers["train"].fail(shape.rows, shape.length)
            waiting.add("train")
        tried, self._trying = self._trying, None
        if tried is not None:
            waiting.add(tried.kind)
            self._wait_longer(tried)
        for kind in waiting:
            self._frontiers[kind].next_retry = self.step + self._frontiers[kind].wait
        if shape.kind == "train":
            # Calls without gradients go by what failed with them.
            forward = self._frontiers["forward"]
            forward.next_retry = max(forward.next_retry, self.step + forward.wait)
        self.changed = True

    def _wait_longer(self, tried: _Try) -> None:
        frontier = self._frontiers[tried.kind]
        if tried.failed_before or self.failure_is_fatal:
            frontier.wait *= 2
        elif tried.known:
            frontier.try_wait *= 2
            frontier.next_try = self.step + frontier.try_wait

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
            frontier = self._frontiers[kind]
            if frontier.fails:
                frontier.fails = [(_BEYOND_ALL, _BEYOND_ALL)]
            frontier.bytes_per_token = 0.0
            frontier.wait, frontier.next_retry = self._base_wait, self.step + 1
            frontier.try_wait, frontier.next_try = 1, self.step + 1
        self._trying = None
        self.changed = True

    # ---- for other processes ----

    def state_dict(self) -> dict[str, Any]:
        """Gives what is known, as JSON."""
        frontiers: dict[str, Any] = {
            kind: {
                "fits": frontier.fits,
                "fails": frontier.fails,
                "wait": frontier.wait,
                "try_wait": frontier.try_wait,
            }
            for kind, frontier in self._frontiers.items()
        }
        return {**frontiers, "made_together": self.made_together}

    def load_state_dict(self, state: Mapping[str, Any], own: bool = True) -> None:
        """
        Takes over what another process knew, beside what is known here: an earlier start of this rank (`own`), or
        another rank, which may have more memory. Of what fitted there up to half of what failed counts.
        """
        self.made_together |= bool(state.get("made_together"))
        for kind, frontier in self._frontiers.items():
            known = state.get(kind, {})
            fits, fails = ([(int(r), int(n)) for r, n in known.get(name, [])] for name in ("fits", "fails"))
            for rows, length in fails:
                frontier.fail(rows, length)
            if not own:
                halves = [frontier.half_of_what_failed(n) for _, n in fits]
                fits = [(r if half is None else min(r, half), n) for (r, n), half in zip(fits, halves, strict=True)]
            fits, frontier.fits = [*frontier.fits, *fits], []
            for rows, length in fits:
                if rows > 0 and not any(rows >= r and length >= n for r, n in frontier.fails):
                    frontier.fit(rows, length)
            frontier.wait = max(frontier.wait, int(known.get("wait", 0)))
            frontier.try_wait = max(frontier.try_wait, int(known.get("try_wait", 0)))
        self._restored = True


@dataclass(slots=True)
class MemoryState:
    """Sizes, and whether activation checkpointing is on, that a run is known to fit into memory with."""

    sizes: KnownSizes
    checkpointing_activations: bool = False


class SizesFile:
    """`healing_sizes.json`: keeps what is known to fit in the run directory; each rank has a file of its own."""

    def __init__(self, run: Run, state: MemoryState) -> None:
        self._run = run
        self._state = state

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
        """Gives what is known to fit this model on this device."""
        return {
            "version": _VERSION,
            "for": self._run.instrument.view.fingerprint(),
            "checkpointing_activations": self._state.checkpointing_activations,
            "sizes": self._state.sizes.state_dict(),
        }

    def take_over(self, content: Mapping[str, Any], own: bool) -> bool:
        """Takes over what another process knows; `False` if it is about another model or device."""
        if content["version"] != _VERSION or content["for"] != self._run.instrument.view.fingerprint():
            return False
        self._state.sizes.load_state_dict(content["sizes"], own)
        return True

    def read(self) -> None:
        """Takes over what did not fit in an earlier process, on any rank, if it was the same model and device."""
        paths = sorted(self._run.directory.glob("healing_sizes*.json"))
        # Its own first: what fitted on another rank is weighed against what failed here.
        for path in sorted(paths, key=lambda path: path != self.path):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                if not self.take_over(content, own=path == self.path):
                    continue
                self._state.checkpointing_activations |= bool(content["checkpointing_activations"])
            except Exception as error:
                logger.warning("%s cannot be read and is not used: %s", path, error)
                continue
            if self._state.sizes.limits:
                logger.info("%s: batches that did not fit in an earlier start are split from the beginning.", path)


class MemoryRemedies:
    """Makes a step need less memory: frees it, splits calls, keeps fewer activations, makes batches smaller."""

    def __init__(self, state: MemoryState) -> None:
        self.state = state

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
        shape, sizes = context.shape, self.state.sizes
        if shape is None:
            raise ValueError("split_batch needs the size of the call that did not fit")
        sizes.failed(shape, with_gradients=context.window is not None)
        at_a_time = sizes.known_rows(shape)
        return {"call": shape.kind, "did_not_fit": [shape.rows, shape.length], "at_a_time": at_a_time}

    def _checkpoint_activations(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        done = context.running.activation_checkpointing.switch_on()
        if not done:
            return {"checkpointing": False, "happened": False, "why": "it is on already, or the model cannot do it"}
        self.state.checkpointing_activations = True
        self.state.sizes.more_room()
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
