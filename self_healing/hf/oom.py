"""Computes again, in whatever way fits, what ran out of memory; on one rank of several as well."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ..failures import recipes
from ..failures.classify import classify_exception
from ..failures.recipes import FailureType, TrainingFault
from ..ranks import votes
from ..system import processes
from ..system.random_state import RandomState
from .batches import only_moves, preparing
from .engine import THROUGH
from .hooks import Failsafe, Hooks
from .memory import OutOfMemory, Place, caught, is_out_of_memory
from .patching import Replacements
from .sections import Heartbeat
from .step import Window
from .trainer_state import Bookkeeper, Bookkeeping
from .view import TrainerView


logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# What does not pass by itself.
_LASTING = (FailureType.OUT_OF_MEMORY, FailureType.DEVICE, FailureType.PROCESS_DIED)
# How long a rank whose training code has raised in an experiment waits for the others to be through theirs.
_COMPUTING_SECONDS = 20.0


class OomRetry:
    """Has memory freed where it ran out, and computes again what failed."""

    def __init__(self, instrument: Any) -> None:
        self._instrument = instrument
        self._view: TrainerView = instrument.view
        self._hooks: Hooks = instrument.hooks
        self._failsafe: Failsafe = instrument.failsafe
        self._heartbeat: Heartbeat = instrument.heartbeat
        # Whether anything is done where memory runs out.
        self.heals = False
        # Whether anything has run out of memory, or is computed in smaller sizes: then it is noted what fits.
        self.watched = False
        # Whether what is computed is an experiment, which may fail where the run must not.
        self.experimenting = False

    def caught(self, error: BaseException, place: Place | None = None, alone: bool = False) -> OutOfMemory | None:
        """Takes an exception as an out-of-memory error to be handled; `None` for any other one."""
        if not self.heals or not self._failsafe.attached:
            return None
        found = caught(error, self._view.device, place)
        self.watched |= found is not None
        if found is None or self._view.world_size == 1:
            return found
        if alone:
            return replace(found, alone=True)
        self.ends_the_job(found)
        return None

    def ends_the_job(self, ran_out: OutOfMemory) -> None:
        """Has written down what did not fit on one rank of several, where it cannot be computed again without them."""
        with self._failsafe.contained():
            self._hooks.oom_on_one_rank(ran_out)

    def handled(self, ran_out: OutOfMemory, window: Window | None) -> bool:
        """Whether there is more memory now for what lacked some: a training step, or an evaluation (no window)."""
        for section in ("step", "optimizer", "prediction", "generate"):
            # Row by row, a part takes many times as long.
            self._heartbeat.be_patient(section)
        with self._failsafe.contained():
            return self._hooks.handle_oom(ran_out, window)
        return False

    def on_success(self) -> None:
        """Called, while [`watched`], when something that may have run out of memory has been computed."""
        with self._failsafe.contained():
            self._hooks.on_success()

    def prediction_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps `prediction_step`: computes a batch of an evaluation until it fits."""
        ledger: Bookkeeper = self._instrument.ledger
        stores, rng = ledger.mark_stores(), RandomState.capture(self._view.device)
        begun = votes.collectives_begun() if self._instrument.one_rank.possible else None
        while True:
            try:
                # A copy: what the first attempt took out of it is needed by the second.
                result = original(model, copy.copy(inputs), *args, **kwargs)
            except Exception as error:
                alone = begun is not None and votes.collectives_begun() == begun
                ran_out = self.caught(error, place="evaluation", alone=alone)
                if ran_out is None:
                    raise
            else:
                if self.watched:
                    self.on_success()
                return result
            # An evaluation may generate, and training draws on from where it stops.
            rng.restore()
            ledger.rewind_stores(stores)
            if not self.handled(ran_out, None):
                raise ran_out.error

    def until_it_fits(self, compute: Callable[[], _T], discard: Callable[[], None]) -> _T:
        """Computes what begins with rewinding the step: again with more memory, or once more."""
        repeated = False
        while True:
            try:
                result = compute()
            except TrainingFault as fault:
                error, others_wait = fault.error, fault.others_wait
            except Exception as ours:
                # What is computed around the training step: rows picked, buffers put back, the gradient norm.
                if not is_out_of_memory(ours):
                    raise
                error, others_wait = ours, False
            else:
                if self.watched:
                    self.on_success()
                return result
            # Outside of the handler: what the failed attempt held is gone, but for its gradients.
            if is_out_of_memory(error):
                discard()
            ran_out = self.caught(error)
            if ran_out is not None and self.handled(ran_out, self._instrument.window):
                continue
            # What is computed to heal another fault is tried once more: not where other ranks are waiting.
            if repeated or self._view.world_size > 1 or classify_exception(error) in _LASTING:
                raise TrainingFault(error, others_wait) from error
            logger.info("Step %d: computed once more.", self._view.step, exc_info=error)
            repeated = True

    @contextlib.contextmanager
    def experiment(self) -> Iterator[None]:
        """Marks what is computed inside as not needed by the run: where memory runs out in it, it is given up."""
        before, self.experimenting = self.experimenting, True
        try:
            yield
            votes.wait_for_all_ranks("an experiment is over", self._view.device)
        except votes.RankRaised as error:
            raise TrainingFault(error, others_know=True) from error
        except Exception as error:
            fault = error if isinstance(error, TrainingFault) else TrainingFault(error)
            if fault is not error and not is_out_of_memory(error):
                raise
            self._give_up_together(fault)
            if fault is error:
                raise
            raise fault from error
        finally:
            self.experimenting = before

    def _give_up_together(self, fault: TrainingFault) -> None:
        if self._view.world_size == 1 or fault.others_know:
            return
        if fault.others_wait and not votes.all_reach(THROUGH, _COMPUTING_SECONDS):
            raise recipes.Stranded("an experiment failed on this rank alone") from fault.error
        fault.others_know = True
        with contextlib.suppress(votes.RankRaised):
            votes.tell_raised(self._view.device)


# By which losses ask accelerate for what other ranks know.
ASKING = ("gather_for_metrics", "gather", "reduce")


class OneRankRetry:
    """Computes a micro-batch once more on one rank of several, while the others wait for its gradients."""

    def __init__(self, instrument: Any) -> None:
        self._trainer = instrument.trainer
        self._view: TrainerView = instrument.view
        self._ledger: Bookkeeper = instrument.ledger
        self._replaced: Replacements = instrument.replaced
        # Whether there are other ranks, and a micro-batch can be computed again without them.
        self.possible = False
        self._model: Any = None
        self._refusal = ""
        self._first_step = 0
        self._parameters: list[torch.nn.Parameter] = []
        self._only_moves = only_moves(self._trainer._prepare_inputs)
        self._preparing = False
        # Of the micro-batch that is being computed: where its step began, if it is the first; as of when it was
        # prepared.
        self._start: Bookkeeping | None = None
        self._prepared: Any = None
        self._before: Bookkeeping | None = None
        self._gradients: list[tuple[int, int] | None] = []
        self._collectives: int | None = None
        self._failsafe: Failsafe = instrument.failsafe
        # Forwards of the wrapped model in this attempt, and in the one that came furthest.
        self._forwards = self._sent_before = 0
        # What was asked through accelerate, and what came back; how often this attempt has asked; whether it does.
        self._answers: list[tuple[str, Any]] = []
        self._asked = 0
        self._asking = False
        # Whether a forward of the model itself is a meeting of ranks (statistics or losses over all of them), as the
        # first one has shown; collectives that DDP itself has begun before that.
        self.meets_in_forward: bool | None = None
        self._sent = 0

    def attach(self) -> None:
        """Watches the wrapped model, if it is one of DDP or ZeRO."""
        model: Any = getattr(self._trainer, "model_wrapped", None)
        self._first_step = self._view.step
        if self._view.world_size == 1:
            return
        self._refusal = self._why_never(model)
        if self._refusal:
            return
        self._model, self.possible = model, True
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._replaced.wrap(model, "forward", self._forward)
        if self._view.zero is None:
            self._replaced.wrap(model, "_pre_forward", self._pre_forward)
        self._replaced.wrap(self._trainer, "_prepare_inputs", self._prepare)
        for name in (*ASKING, "pad_across_processes"):
            self._replaced.wrap(self._trainer.accelerator, name, functools.partial(self._ask, name))

    def _why_never(self, model: Any) -> str:
        """Says why no micro-batch can be computed again on one rank alone; empty if some can."""
        if self._view.shares_rows:
            return "ranks share the tokens of each row (context or sequence parallelism)"
        if self._view.sharded:
            return "the model is sharded, and each call gathers weights from all ranks"
        if self._view.zero is None:
            # torch 2.13: what DDP sends before a forward is sent in `_pre_forward`.
            if not isinstance(model, DistributedDataParallel) or not hasattr(model, "_pre_forward"):
                return "the model is not one of DistributedDataParallel"
            if model.process_group.size() != self._view.world_size:
                return "DistributedDataParallel spans some of the ranks only"
        return "" if votes.collectives_begun() is not None else "the backend does not count its collectives"

    def begin(self, window: Window) -> None:
        """Called before a micro-batch, where it is [`possible`] to begin it again, as the rest of what follows."""
        self.end()
        self._forwards = self._sent_before = self._asked = 0
        self._collectives = votes.collectives_begun()
        # The Trainer's own preparation moves a batch to the device: the first one begins where its step does.
        self._start = window.start if self._only_moves and not window.losses else None
        self._preparing = True

    def check_sent(self) -> None:
        """Raises where DDP has not sent all gradients of a step: others would take a vote for some of them."""
        if self._view.zero is not None:
            return
        # torch's own words, which come in the next forward otherwise.
        self._model._check_reducer_finalized()
        sent = self._collectives is None or votes.collectives_begun() != self._collectives
        if not sent and not votes.all_reach("no gradients are sent", seconds=20.0):
            raise RuntimeError(
                f"step {self._view.step}: rank {processes.own_rank()} has sent no gradients, and the other ranks wait "
                "for them: its training_step took no backward pass, or called the model past its "
                "DistributedDataParallel wrapper (where nothing counts, take the backward of 0.0 * loss)"
            )

    def _prepare(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keeps the micro-batch as the trainer has prepared it: there it can be begun again."""
        batch = original(*args, **kwargs)
        if self._preparing:
            self._preparing = False
            try:
                # A copy: `compute_loss` may pop keys from the batch it is given.
                self._prepared = copy.copy(batch)
                # The running loss is not rewound.
                self._before = self._start or self._ledger.capture(running_loss=self._trainer._tr_loss)
                self._gradients = self._versions()
                self._collectives = votes.collectives_begun()
            except Exception as error:
                self._failsafe.contain(error)
        return batch

    def why_not(self, place: Place = "forward") -> str:
        """Says why what has failed cannot be computed again on this rank alone; empty if it can."""
        if self._refusal:
            return self._refusal
        if place == "evaluation":
            return "the evaluation of this batch has begun a collective"
        if self._before is None:
            return "the batch was being prepared, in which ranks meet"
        if self._view.zero is None and self._model.static_graph and self._view.step == self._first_step:
            return "DistributedDataParallel learns its static graph in the first step"
        if self._collectives is None or votes.collectives_begun() != self._collectives:
            return "a collective has begun that cannot be begun once more"
        # What is gone was dropped by ZeRO, which does so when the first forward of a step begins.
        changed = (now not in (None, before) for now, before in zip(self._versions(), self._gradients, strict=True))
        return "a gradient has been added to" if any(changed) else ""

    def compute_again(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Takes the micro-batch back, and computes it once more from where it was prepared."""
        before = self._before
        assert before is not None
        self._ledger.rewind_step(before)
        self._trainer.state.num_input_tokens_seen = before.tokens_seen
        self._sent_before, self._forwards = max(self._sent_before, self._forwards), 0
        self._asked = 0
        if self._view.zero is not None:
            self._view.zero.leave_backward()
        with preparing(self._trainer, lambda batch: batch, prepared=self._prepared):
            return compute()

    def end(self) -> None:
        """Called after a micro-batch: what is kept of it is let go."""
        self._before = self._prepared = self._start = None
        self._preparing = False
        self._answers.clear()

    def _pre_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._before is None or self._collectives is None:
            return original(*args, **kwargs)
        self._forwards += 1
        if self._forwards <= self._sent_before:
            self._model.require_forward_param_sync = False
        before = votes.collectives_begun()
        result = original(*args, **kwargs)
        after = votes.collectives_begun()
        if before is None or after is None:
            self._collectives = None
        elif after != before:
            # Sent, and not to be sent again: the micro-batch goes on from the buffers that came.
            self._sent = after - before
            self._collectives += self._sent
            if self._before.buffers:
                self._before = self._ledger.with_buffers_of_now(self._before)
        return result

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.meets_in_forward is not None or self._before is None or self._collectives is None:
            return original(*args, **kwargs)
        before, self._sent = votes.collectives_begun() or 0, 0
        result = original(*args, **kwargs)
        self.meets_in_forward = votes.collectives_begun() != before + self._sent
        return result

    def _ask(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._before is None or self._collectives is None or self._asking:
            return original(*args, **kwargs)
        self._asked += 1
        if self._asked <= len(self._answers):
            asked, answer = self._answers[self._asked - 1]
            if asked != name:
                raise RuntimeError(
                    f"computed again, the loss asks for accelerator.{name}, and asked for {asked} before"
                )
            return _copied(answer)
        before, self._asking = votes.collectives_begun(), True
        try:
            answer = original(*args, **kwargs)
        finally:
            self._asking = False
        after = votes.collectives_begun()
        self._collectives = None if before is None or after is None else self._collectives + after - before
        # A copy: what was asked for may be changed in place.
        self._answers.append((name, _copied(answer)))
        return answer

    def _versions(self) -> list[tuple[int, int] | None]:
        """Tells whether gradients have been added to since: in place, which counts, or by another tensor."""
        gradients = [each.grad for each in self._parameters]
        if self._view.zero is not None:
            # ZeRO-1 in lower precision adds them up beside the parameter's own.
            gradients += [getattr(each, "grad_accum", None) for each in self._parameters]
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


def _copied(answer: Any) -> Any:
    if isinstance(answer, torch.Tensor):
        return answer.detach().clone()
    return type(answer)(map(_copied, answer)) if type(answer) in (list, tuple) else answer
