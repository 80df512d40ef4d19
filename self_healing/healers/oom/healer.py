"""Out of memory: free, split, or go on with smaller batches."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ...failures.classify import classify_exception
from ...failures.recipes import FAILURE_RECIPES, Action, FailureType, text_of
from ...hf.adapter import Instrument
from ...hf.batches import CallShape
from ...hf.memory import (
    OutOfMemory,
    change_batch,
    checkpoint_activations,
    drop_requests,
    fingerprint_of,
    free_memory,
    in_evaluation,
    is_out_of_memory,
    predictions_pile_up,
    retry_after_freeing,
    smaller_batch,
    update_one_by_one,
)
from ...hf.patching import Interception
from ...hf.step import Window
from ...journal.incident import Incident
from ...ranks import votes
from ...rollback.ring import SnapshotRing
from ...run.healer import CarryOut, Claim, Healer, HealingContext, claim_by_recipe
from ...run.incidents import OpenIncident
from ...run.run import Run
from ...system import processes
from ...system.files import of_rank, replace_file
from .calls import KnownSizes, ModelCalls
from .microbatches import Microbatches, may_compute_in_passes


logger = logging.getLogger("self_healing")


SIZES_FILE = "healing_sizes.json"
_VERSION = 1


# ---- what a run knows of its memory, and what it does to need less of it ----


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
            Action.MOVE_PREDICTIONS_TO_HOST: self._move_predictions,
        }

    def _free_memory(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        free_memory(self._run.instrument.view.device)
        return {}

    def _split_batch(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        shape = context.shape
        assert shape is not None
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
        assert plan is not None
        change_batch(context.running.trainer, plan)
        context.incident.figures.append(
            f"per_device_train_batch_size from {plan.rows_before} to {plan.rows}, gradient_accumulation_steps from "
            f"{plan.accumulation_before} to {plan.accumulation}"
        )
        if context.running.objective.name not in ("sft", "dpo", "reward", "generic"):
            context.incident.figures.append("a loss that looks at the whole micro-batch sees fewer rows from here on")
        return asdict(plan)

    def _move_predictions(self, context: HealingContext, args: TrainingArguments) -> dict[str, Any]:
        args.eval_accumulation_steps = 1
        context.incident.figures.append("after each batch of an evaluation from here on (eval_accumulation_steps=1)")
        return {"eval_accumulation_steps": 1}


# ---- healer ----


# This many failures that passed by themselves within this many steps are no accident: the size is at the limit.
_OFTEN, _LATELY = 3, 50


class MemoryHealer(Healer):
    """Heals the out-of-memory errors of one `train()` call."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config
        self.actions = run.remedies
        self._state = run.part(MemoryState)
        self._sizes = self._state.sizes
        # Where calls are watched: what stands in for them.
        self._interceptions: list[Interception] = []
        # What is being dealt with, over several attempts, and what actions need to know of it.
        self._opened: OpenIncident | None = None
        self._context: HealingContext | None = None
        # Whether the incident is about an `optimizer.step()`, which ends with the step and not with what is computed.
        self._stepping = False
        self._attempts = 0
        self._failed: set[CallShape] = set()
        # Why the calls of a model are made whole, whatever they do.
        self._why_never_split = ""
        self._passed: deque[int] = deque(maxlen=_OFTEN)
        # Holds the state right before the step that is being taken, where that is asked for.
        self._backup: SnapshotRing | None = None
        # Until the exception has left train(): a smaller batch needs another entry.
        self.claimed: Claim | None = None
        # What to do about the memory that ran out on this rank alone, until its exception has left train().
        self._told = ""

    # ---- a run begins ----

    def attach(self, first: bool) -> None:
        """Called with the instrument attached: what earlier processes and entries learned is put to use."""
        instrument, sizes = self.run.instrument, self._sizes
        if self.config.on_oom == "raise" or not instrument.view.can_recompute:
            return
        instrument.retry.heals = True
        if self._args.n_gpu > 1:
            self._why_never_split = "nn.DataParallel makes replicas of the model for each call"
        elif instrument.view.has_flat_parameters:
            self._why_never_split = (
                "FSDP1 has the weights in flat parameters, which change with each forward (calls are split with "
                '"fsdp_version": 2 in fsdp_config)'
            )
        sizes.step = instrument.view.step
        sizes.failure_is_fatal = processes.world_size() > 1
        sizes.may_fail_once = instrument.one_rank.possible
        if first:
            self._state.read()
        self.run.news.on("sizes", self._take_in_sizes)
        if self._state.checkpointing_activations:
            checkpoint_activations(instrument)
        limits, view = sizes.limits, instrument.view
        if view.sharded:
            # All ranks have to split alike.
            limits = votes.any_rank("a size is known not to fit", limits, view.device)
        if limits:
            self._watch()
        if self.config.on_oom == "backup":
            self._backup = SnapshotRing(generations=1)
            instrument.retry.watched = True

    def _watch(self) -> None:
        """Has each call of the models go over as few rows as it has to, where it can be split."""
        instrument, sizes = self._instrument, self._sizes
        view = instrument.view
        if self._interceptions or self._why_never_split:
            return
        instrument.retry.watched = True
        sizes.made_together |= bool(instrument.one_rank.meets_in_forward)
        instrument.call.passes = Microbatches(instrument, sizes) if may_compute_in_passes(instrument) else None
        for model in view.models():
            calls = ModelCalls(model, sizes, view.device)
            # What hooks of the model do is part of its call.
            compiled = getattr(model, "_compiled_call_impl", None) is not None
            made_by = "_compiled_call_impl" if compiled else "_call_impl"
            self._interceptions.append(instrument.replaced.wrap(model, made_by, calls.call))
            if hasattr(model, "generate"):
                self._interceptions.append(instrument.replaced.wrap(model, "generate", calls.generate))

    def _leave_alone(self) -> None:
        """Gives the models their own calls back."""
        self._instrument.replaced.give_back(self._interceptions)
        self._interceptions, self._instrument.call.passes = [], None
        self._instrument.retry.watched = self._backup is not None

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        """Gives whether calls were split since the last log."""
        pieces, self._sizes.pieces = self._sizes.pieces, 1
        return {"healing/split_into": pieces} if pieces > 1 else {}

    # ---- in a training step, or an evaluation ----

    def handle_oom(self, ran_out: OutOfMemory, window: Window | None) -> bool:
        """Takes the next rung of the ladder; `False` where the error has to pass."""
        if ran_out.place == "optimizer step":
            return self._handle_oom_in_optimizer_step(ran_out, window)
        if self._stepping:
            # While steps are applied again: the state gone back to is good as it is.
            return False
        self._sizes.step = self._instrument.view.step
        shape = self._shape(ran_out)
        if self._context is None and shape is not None and self._sizes.is_tried(shape):
            self._take_back_the_try(shape, ran_out, window)
            return True
        context = self._begin(ran_out, window)
        self._free(context, ran_out)
        if ran_out.place == "vLLM":
            return self._handle_oom_in_engine(ran_out, context)
        if self._attempts == 1 and not self._passes_often:
            # The second attempt is watched, so that it is known what did not fit.
            self._sizes.forget_attempt()
            self._watch()
            return True
        if shape is not None and shape not in self._failed and shape.rows > 1:
            self._failed.add(shape)
            context.shape = shape
            self.actions.apply(Action.SPLIT_BATCH, context, self._args)
            return True
        return self._climb(ran_out, context, shape)

    def _handle_oom_in_engine(self, ran_out: OutOfMemory, context: HealingContext) -> bool:
        """Tries once more with the memory freed: what a vLLM engine in this process lacks says nothing about sizes."""
        self._sizes.forget_attempt()
        free = drop_requests(self._instrument.trainer)
        if free and self._attempts == 1:
            return True
        if ran_out.alone:
            self.oom_on_one_rank(ran_out)
            return False
        why = "its engine has kept requests of the call that failed, and would mix them with the next ones"
        if free:
            why = "freeing cached memory did not help"
        context.verdict = f"out of memory in vLLM, which generates in this process: {why}; {figures_in_words(ran_out)}"
        context.incident.evidence["remedy"] = ADVICE["vLLM"]
        self._stop(context, ran_out)
        return False

    def _take_back_the_try(self, shape: CallShape, ran_out: OutOfMemory, window: Window | None) -> None:
        """A size was tried on purpose, and does not fit yet: no incident."""
        step = self._instrument.view.step
        self._sizes.failed(shape, with_gradients=window is not None)
        if window is not None and not ran_out.alone:
            window.discard()
        free_memory(self._instrument.view.device)
        # The next try comes later than the last one, and on all ranks.
        self.run.news.tell("sizes", self._state.content)
        self.run.journal.event("larger_size_failed", step, call=shape.kind, rows=shape.rows, length=shape.length)
        logger.info("Step %d: %s does not fit; no step is lost, and it is tried again later.", step, shape)

    def _shape(self, ran_out: OutOfMemory) -> CallShape | None:
        """
        Finds what was running in this attempt: in a backward pass the last call with gradients, in generation that,
        else the last one that began. `None` where it was no call of a model.
        """
        sizes = self._sizes
        if ran_out.place in ("generation", "vLLM"):
            return sizes.last_begun("generate") if ran_out.place == "generation" else None
        begun = sizes.last_begun("train") if ran_out.place == "backward" else None
        return begun or sizes.last_begun()

    @property
    def _passes_often(self) -> bool:
        """Whether trying once more has helped again and again, and is a waste of time by now."""
        return len(self._passed) == _OFTEN and self._instrument.view.step - self._passed[0] <= _LATELY

    def _climb(self, ran_out: OutOfMemory, context: HealingContext, shape: CallShape | None) -> bool:
        """Takes a rung beyond splitting: fewer activations, a smaller batch, or the end."""
        if self._instrument.retry.experimenting:
            # The run does not need it: nothing that lasts is done for it, and nothing is saved while it goes on.
            self._sizes.forget_attempt()
            return False
        run, incident = self.run, context.incident
        refused = self._sizes.refused
        why = f"it cannot be split by rows: {refused}" if refused else "it cannot be split any further"
        why = self._why_never_split or why
        if "not_split" not in incident.evidence:
            run.journal.diagnosed(incident, FailureType.OUT_OF_MEMORY, incident.cause, {"not_split": why})
        if ran_out.alone:
            self.oom_on_one_rank(ran_out)
            return False
        in_training = context.window is not None and ran_out.place in ("forward", "backward")
        may_keep_fewer = in_training and not self._state.checkpointing_activations
        if may_keep_fewer and self.actions.apply(Action.CHECKPOINT_ACTIVATIONS, context, self._args)["checkpointing"]:
            self._failed.clear()
            return True
        if in_training and run.may_enter_again and self.config.oom_reduce_batch:
            plan = smaller_batch(self._instrument.trainer, self._instrument.objective.name, refused)
            if not isinstance(plan, str):
                # The wrapper takes it from here: it has to enter `train()` again. What did not help is taken back.
                self._state.checkpointing_activations = False
                self.claimed = Claim(self._end().incident, Action.REDUCE_BATCH_SIZE, batch=plan)
                return False
            why = f"{why}; the batch cannot be made smaller either: {plan}"
        if ran_out.place == "evaluation" and run.may_enter_again and predictions_pile_up(self._instrument.trainer):
            # They may be what has filled the memory: the wrapper has it evaluated again.
            self.claimed = Claim(self._end().incident, Action.MOVE_PREDICTIONS_TO_HOST)
            return False
        size = f"{shape} (rows x padded length) did not fit" if shape else "the size of what ran is not known"
        context.verdict = f"out of memory in {ran_out.place}: {size}; {why}; {figures_in_words(ran_out)}"
        halve = HALVE if in_training and not run.may_enter_again else ""
        advice = ADVICE.get(ran_out.place) or halve + FAILURE_RECIPES[FailureType.OUT_OF_MEMORY].advice
        incident.evidence["remedy"] = advice
        self._stop(context, ran_out)
        return False

    def claim(self, error: BaseException) -> Claim | None:
        """Claims the out-of-memory error that nothing inside `train()` cures."""
        claim, self.claimed = self.claimed, None
        if self._opened is not None:
            # Something else went wrong while a smaller size was tried: whether it fits is not known.
            self.run.journal.closed(self._end().incident, "unresolved")
        told, self._told = self._told, ""
        failure = classify_exception(error)
        if claim is None and told and failure is FailureType.OUT_OF_MEMORY:
            evidence = {"message": text_of(error)[:500], "remedy": told}
            incident = self.run.journal.open(self.run.step, "out_of_memory", evidence)
            self.run.journal.diagnosed(incident, failure, "out of memory", {})
            return claim_by_recipe(incident, failure)
        if claim is None or failure is FailureType.OUT_OF_MEMORY:
            return claim
        # The user's code has put an exception of its own in the place of the error.
        return claim_by_recipe(claim.incident, failure)

    def _stop(self, context: HealingContext, ran_out: OutOfMemory) -> None:
        context.error = ran_out.error
        self._state.write()
        self._end()
        self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, self._args)

    def on_success(self) -> None:
        """Ends an open incident: a micro-batch or an evaluation batch has been computed."""
        self._told = ""
        if self.claimed is not None:
            # The user's code has let the error pass that a smaller batch was to cure.
            claim, self.claimed = self.claimed, None
            self.run.dealing_with(claim.incident).close("self_recovered")
        self._sizes.on_success()
        if self._context is not None and not self._stepping:
            if self._attempts == 1:
                self._passed.append(self._context.incident.step)
                if self._context.window is not None and processes.world_size() == 1:
                    # Of several ranks the others know nothing of it, and what follows takes all of them.
                    self.run.numerics.repeatability.owe(self._context.incident)
            shape, pieces, figures = self._context.shape, self._sizes.pieces, self._context.incident.figures
            if shape is not None:
                self.run.news.tell("sizes", self._state.content)
            if shape is not None and pieces > 1:
                figures.append(
                    f"{shape} did not fit: split into up to {pieces} pieces from here on, which takes longer"
                )
            elif self._attempts == 1:
                figures.append("the second attempt, at full size, went through")
            self._end().close("resolved")
            if not self._sizes.limits and not self._passes_often:
                self._leave_alone()
        if self._sizes.changed:
            self._sizes.changed = False
            self._state.write()

    # ---- in `optimizer.step()` ----

    def about_to_step(self) -> None:
        """Notes, or keeps, what is needed to undo a step that runs out of memory half-way."""
        view = self._instrument.view
        self._sizes.step = view.step + 1
        if self._backup is None:
            return
        try:
            # Nobody asks what is in it. The update comes after the copy; the host waits where it is put back.
            self._backup.take(view.live_state(), view.step, {}).given_up = True
            self._backup.join()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._backup = None
            logger.warning(
                "Step %d: there is no host memory for the copy that on_oom='backup' makes before each "
                "step (%s). Training goes on without it.",
                view.step,
                error,
            )

    def step_fitted(self) -> None:
        """The step is done."""
        if self._context is not None:
            self._end().done()

    def run_ends(self, step: int) -> None:
        """Closes the incident of what was tried after the last step, and did not fit."""
        if self._opened is not None:
            self._end().close("unresolved")

    def _handle_oom_in_optimizer_step(self, ran_out: OutOfMemory, window: Window | None) -> bool:
        """
        A step that changed nothing yet is taken again; one that may have is undone from its backup, or by going back
        to a trusted state. The third time updates are made parameter by parameter, which takes less memory at a time.
        """
        if window is None:
            return False
        if not self._instrument.optimizer_step.can_be_taken_again:
            self._told = ADVICE["optimizer step"]
            return False
        context, instrument = self._begin(ran_out, window), self._instrument
        self._stepping = True
        context.verdict = f"out of memory in optimizer.step(), {self._attempts} times: {figures_in_words(ran_out)}"
        context.incident.evidence["remedy"] = ADVICE["optimizer step"]
        untouched = instrument.optimizer_step.undo()
        self._free(context, ran_out)
        weights, undone = self._undo_step(untouched)
        if context.incident.evidence.get("weights") != weights:
            cause = context.incident.cause
            self.run.journal.diagnosed(context.incident, FailureType.OUT_OF_MEMORY, cause, {"weights": weights})
        if ran_out.alone and (not undone or self._attempts > 1):
            # Another kind of update would not be that of the other ranks.
            self.oom_on_one_rank(ran_out)
            return False
        if not undone:
            self.run.healers.heal_interrupted_step(context)
        if self._attempts == 3 and update_one_by_one(instrument):
            context.incident.figures.append("weights are updated one by one from here on (foreach=False)")
        elif self._attempts >= 3:
            self._stop(context, ran_out)
        return True

    def _undo_step(self, untouched: bool) -> tuple[str, bool]:
        """Undoes a step, if it can. Gives what has become of the weights, and whether they are as before the step."""
        if untouched:
            return "untouched: the optimizer was making its state", True
        ring, view = self._backup, self._instrument.view
        before = None if ring is None else ring.candidate
        if ring is None or before is None:
            return "some may be updated and others not", False
        retry_after_freeing(lambda: ring.restore(before, view.live_state()), view.device)
        self._instrument.optimizer_step.undone()
        return "put back from the copy made before the step", True

    # ---- one of several processes ----

    def oom_on_one_rank(self, ran_out: OutOfMemory) -> None:
        """
        Gives up on one rank alone: what is left to be done takes the other ranks, and they wait for this one. Writes
        down what did not fit, so that the next start of the job begins with smaller pieces.
        """
        # No size of a call is to blame for what an engine or an optimizer lacks.
        of_its_own = ran_out.place in ("vLLM", "optimizer step")
        self._told = ADVICE[ran_out.place] if of_its_own else self._note_for_the_next_start(ran_out)
        # Not a warning: of those the terminal shows what the first rank has to say.
        logger.error(
            "Step %d: out of memory in %s on rank %d, and the other ranks are waiting for it. %s",
            self._instrument.view.step,
            ran_out.place,
            self._args.process_index,
            self._told,
        )
        if self._opened is not None:
            self._end().close("unresolved")

    def _note_for_the_next_start(self, ran_out: OutOfMemory) -> str:
        """Writes down what did not fit; says why it is not healed here, and what the next start does."""
        sizes, one_rank, shape = self._sizes, self._instrument.one_rank, self._shape(ran_out)
        sizes.step = self._instrument.view.step
        # Of the first failure of a process, whose calls are not watched yet, the size of its batches is known.
        failed = shape or CallShape("train", self._args.per_device_train_batch_size, 1)
        if shape is None and ran_out.place == "generation":
            of_all = int(getattr(self._args, "generation_batch_size", None) or 1)
            failed = CallShape("generate", max(of_all // processes.world_size(), 1), 1)
        elif shape is None and ran_out.place == "evaluation":
            failed = CallShape("forward", self._args.per_device_eval_batch_size, 1)
        sizes.failed(failed, with_gradients=ran_out.place != "evaluation")
        sizes.made_together |= bool(one_rank.meets_in_forward)
        self._state.write()
        why_not_here = "" if ran_out.alone else one_rank.why_not(ran_out.place)
        here = f"It is not computed again here alone: {why_not_here}. " if why_not_here else ""
        why = self._why_never_split or sizes.refused
        then = f"cannot split it: {why}. {SMALLER_BATCHES}" if why else "splits it."
        what = shape or f"{failed.rows} rows"
        return f"{here}{self._state.path.name} says what did not fit ({what}), and the next start of the job {then}"

    def _take_in_sizes(self, rank: int, content: Mapping[str, Any]) -> None:
        """Splits alike from here on what did not fit on another rank: this one would only wait for it."""
        self._sizes.step = self._instrument.view.step
        if self._state.take_over(content, own=False):
            self._watch()
            self._state.write()

    # ---- what is written down ----

    def _begin(self, ran_out: OutOfMemory, window: Window | None) -> HealingContext:
        self._attempts += 1
        if self._context is not None:
            return self._context
        self._sizes.refused = ""
        instrument = self._instrument
        evidence: dict[str, Any] = {
            "place": ran_out.place,
            "raised_in": ran_out.raised_in,
            "message": str(ran_out.error)[:500],
            "requested_bytes": ran_out.requested,
            "memory": ran_out.figures,
        }
        if window is not None:
            evidence["batch"] = window.shapes()
        self._opened = self.run.incident(instrument.view.step, "out_of_memory", evidence)
        cause = f"out of {'host' if ran_out.on_host else 'device'} memory in {ran_out.place}"
        self._opened.diagnosed(FailureType.OUT_OF_MEMORY, cause)
        self._opened.incident.figures.append(figures_in_words(ran_out))
        self._context = HealingContext(self._opened.incident, instrument, window)
        return self._context

    def _free(self, context: HealingContext, ran_out: OutOfMemory) -> None:
        if context.window is not None and not self._stepping and not ran_out.alone:
            # The step is computed again from its beginning. An update that is made again needs its gradients.
            context.window.discard()
        freed = self.run.rollback.free_batches(ran_out.on_host)
        if freed:
            context.incident.figures.append(BATCHES_MOVED[ran_out.on_host].format(freed / 1e6))
        if self._attempts == 1:
            self.actions.apply(Action.FREE_MEMORY, context, self._args)
        else:
            free_memory(self._instrument.view.device)

    def _end(self) -> OpenIncident:
        """Ends the incident, whichever way; it is closed by the caller."""
        assert self._opened is not None
        opened, self._opened = self._opened, None
        opened.stop_clock()
        self._sizes.forget_attempt()
        self._context, self._attempts, self._stepping = None, 0, False
        self._failed.clear()
        return opened

    @property
    def _instrument(self) -> Instrument:
        # Not kept: a run that is over keeps no trainer.
        return self.run.instrument

    @property
    def _args(self) -> Any:
        return self._instrument.trainer.args


class MemoryOutsideOfModel:
    """
    Handles out-of-memory errors of one run that left `train()` and come from no call of the model (a callback, the
    data): the step is done once more with the memory freed; soon again, with a smaller batch, which leaves more
    memory to everything else. To an evaluation it leaves none: there it is the predictions that have to go.
    """

    def __init__(self, run: Run, trainer: Any) -> None:
        self._config = run.config
        self._run = run
        self._trainer = trainer
        self._ran_out_at: int | None = None
        self._evaluated_at: int | None = None

    def claim(self, error: BaseException, incident: Incident) -> Claim | None:
        """Claims an exception that no healer does; `None` if it is none of memory, or they are not to be healed."""
        if classify_exception(error) is not FailureType.OUT_OF_MEMORY:
            return None
        step, evaluates = int(self._trainer.state.global_step), in_evaluation(error)
        if evaluates:
            incident.evidence["remedy"] = ADVICE["evaluation"]
        if self._config.on_oom == "raise":
            return None
        if evaluates:
            again, self._evaluated_at = step == self._evaluated_at, step
            may_move = self._run.may_enter_again and predictions_pile_up(self._trainer)
            remedy = Action.MOVE_PREDICTIONS_TO_HOST if may_move else Action.STOP
            return Claim(incident, remedy if again else Action.FREE_MEMORY)
        last, self._ran_out_at = self._ran_out_at, step
        if last is None or step - last > _LATELY:
            return Claim(incident, Action.FREE_MEMORY)
        instrument = self._run.attached
        if self._config.oom_reduce_batch and instrument is not None:
            plan = smaller_batch(self._trainer, instrument.objective.name)
            if not isinstance(plan, str):
                return Claim(incident, Action.REDUCE_BATCH_SIZE, batch=plan)
            incident.evidence["not_reduced"] = plan
            logger.warning("Step %d: the batch cannot be made smaller: %s.", step, plan)
        return Claim(incident, Action.FREE_MEMORY if step > last else Action.STOP)


# ---- advice: words for an out-of-memory error: how much did not fit, and what to do about it ----


# What has become of the batches that are kept, by whether it was the host's memory that ran out.
BATCHES_MOVED = {
    False: "{:.1f} MB of batches, kept to compute earlier steps again, are in host memory from here on",
    True: "{:.1f} MB of batches were given up: until the next snapshot a rollback loses the steps since the last one",
}

SMALLER_BATCHES = (
    "Please lower per_device_train_batch_size and raise gradient_accumulation_steps, or set "
    "gradient_checkpointing=True."
)

# Three things to try, by where memory ran out; elsewhere it is what the recipe says.
ADVICE = {
    "evaluation": (
        "Only the evaluation did not fit. (1) Lower per_device_eval_batch_size, or keep less of a batch "
        "(preprocess_logits_for_metrics). (2) Set eval_accumulation_steps=1, or batch_eval_metrics. (3) Evaluate "
        "fewer or shorter rows, or the loss alone (prediction_loss_only)."
    ),
    "generation": (
        "(1) Halve max_completion_length, or shorten the prompts. (2) Use less permanent memory: LoRA (r=16 to 32), a "
        "base in bf16 or 4-bit, an 8-bit optimizer. (3) Generate elsewhere (vLLM on another device)."
    ),
    "vLLM": (
        "(1) Lower vllm_gpu_memory_utilization, the share of memory that the engine reserves, or set "
        "vllm_enable_sleep_mode=True, which releases it during training steps. (2) Shorten max_completion_length and "
        "vllm_max_model_length. (3) Have vLLM generate on another device (vllm_mode='server')."
    ),
    "optimizer step": (
        "(1) Take an optimizer with smaller state or with paging (8-bit: a quarter of it; Adafactor, paged AdamW), or "
        "train fewer weights (LoRA, r=16 to 32: about 1 % of them). (2) Take one whose update needs no extra memory "
        "(fused). (3) Check whether another process uses the device."
    ),
}
HALVE = "Halve per_device_train_batch_size and double gradient_accumulation_steps, or let SelfHealingTrainer do it. "


def figures_in_words(ran_out: OutOfMemory) -> str:
    """Gives how much memory was in use, and how much was asked for."""
    figures = ran_out.figures
    asked = "" if ran_out.requested is None else f"{ran_out.requested / 1e9:.2f} GB asked for, "
    if "allocated" in figures:
        return (
            f"{asked}{figures['allocated'] / 1e9:.2f} GB allocated ({figures['peak'] / 1e9:.2f} GB at most), "
            f"{figures['reserved'] / 1e9:.2f} GB reserved, {figures['free'] / 1e9:.2f} of "
            f"{figures['total'] / 1e9:.2f} GB free"
        )
    return (
        f"{asked}{figures['host_used'] / 1e9:.2f} GB in use by this process, "
        f"{figures['host_available'] / 1e9:.2f} GB available"
    )
