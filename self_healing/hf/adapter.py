"""`Instrument`: wraps the methods of one trainer instance for the time of a `train()` call."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer

from ..failures.classify import classify_exception
from ..failures.recipes import FailureType, TrainingFault
from ..ranks import votes
from .batches import preparing
from .dataloader import DataPosition
from .engine import Call, StepEngine
from .hooks import Failsafe, Hooks, is_meant
from .memory import OutOfMemory, is_out_of_memory
from .objective import objective_of
from .oom import OneRankRetry, OomRetry
from .optimizer import OptimizerStep, Rates, Veto, takes_part
from .patching import Interception, Replacements
from .reentry import EarlyStop, Reentry
from .saving import SaveSchedule
from .sections import Heartbeat, Phase
from .step import Window, tell_of_failure
from .trainer_state import Bookkeeper
from .training_step import DeepSpeedEngine, FiniteLogits, NotGenerated, TrainingCall, WatchedDeepSpeed
from .view import TrainerView


logger = logging.getLogger(__name__)


class Instrument:
    """Wraps one trainer instance for the time of a `train()` call."""

    def __init__(
        self,
        trainer: Trainer,
        hooks: Hooks,
        *,
        heals_exceptions: bool,
        started_at: float,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        # Any: half of what is used below is private, and TRL's trainers have attributes of their own.
        self.trainer: Any = trainer
        self.objective = objective_of(trainer)
        self.hooks = hooks
        self.heals_exceptions = heals_exceptions
        self.replaced = Replacements()
        self.view = TrainerView(trainer, self.objective)
        # Whether anything is done about steps that are not finite.
        self.leaves_out_nonfinite = heals_exceptions and self.view.can_recompute
        self.ledger = Bookkeeper(trainer)
        self.position = DataPosition(trainer, self.objective)
        self.reentry = Reentry(trainer, self.ledger, self.position)
        self.failsafe = Failsafe(trainer, hooks, self.replaced, self.detach)
        self.heartbeat = heartbeat or Heartbeat()
        self.retry = OomRetry(self)
        self.one_rank = OneRankRetry(self)
        self.rates = Rates(self)
        self.call = TrainingCall(self)
        of_deepspeed = DeepSpeedEngine if self.view.can_recompute else WatchedDeepSpeed
        self.engine: StepEngine = of_deepspeed(self) if self.view.under_deepspeed else StepEngine(self)
        self.optimizer_step = OptimizerStep(self)
        self.veto = Veto(self)
        self.leaving = EarlyStop(self)
        self.saves = SaveSchedule(self)
        self.window: Window | None = None
        self.started_at = started_at
        # While a step that can be left out is computed, what is logged of it is filtered here, once, and not by the
        # Trainer, which waits for the device twice for each micro-batch.
        self._filter_taken = False
        # Whether others may draw random numbers, or change what is trained, between the fetch and the first forward.
        self._others_begin_steps = True
        # The factor in force on the learning rates, and the step whose update it was for.
        self._scale_at, self._scale = -1, 1.0
        # When the update under way began.
        self._began = math.nan
        # Undo what healers have done to the trainer, when it is given back.
        self.on_detach: list[Callable[[], None]] = []

    @property
    def attached(self) -> bool:
        return bool(self.replaced.held)

    @property
    def may_be_left(self) -> bool:
        """Whether an exception in the main thread would leave weights and checkpoints whole."""
        return self.attached and not self.saves.writing and self.reentry.phase is not Phase.STEPPING

    # ---- attaching and detaching ----

    def attach(self) -> None:
        """Wraps the trainer's methods, in `on_train_begin`: optimizer, data loader and running loss exist by then."""
        trainer, handler, in_section = self.trainer, self.trainer.callback_handler, self._in_section
        self.engine.attach()
        # Parts that call all the others.
        self.replace(trainer, "_run_epoch", self.failsafe.leaving)
        self.replace(trainer, "_finalize_training", self.failsafe.leaving)
        # A step, in the order of its calls.
        self.replace(handler, "on_epoch_begin", self._on_epoch_begin)
        self.replace(trainer, "get_batch_samples", self._get_batch_samples)
        self.replace(trainer, "_load_rng_state", self.reentry.load_random_state)
        self.replace(trainer, "training_step", self._training_step)
        if self.leaves_out_nonfinite and hasattr(trainer, "_generate_and_score_completions"):
            # GRPO, RLOO, distillation.
            self.replace(trainer, "_generate_and_score_completions", self._generate)
            self.replace(trainer.model, "generate", self._sample)
        for name, section in (("_generate_single_turn", "generate"), ("_calculate_rewards", "rewards")):
            if hasattr(trainer, name):
                self.replace(trainer, name, in_section(section, _unchanged))
        self.replace(trainer, "_get_grad_norm", self._get_grad_norm)
        if self.view.can_recompute:
            self.replace(trainer.optimizer, "step", self._update)
        self.replace(trainer, "_get_learning_rate", self._get_learning_rate)
        # What comes between two steps.
        self.replace(trainer, "_maybe_log_save_evaluate", self.saves.log_evaluate_save)
        self.replace(trainer, "log", in_section("log", self.saves.log))
        self.saves.print_without_ours()
        self.replace(trainer, "_evaluate", in_section("evaluate", self.saves.evaluate))
        self.replace(trainer, "prediction_step", in_section("prediction", self.retry.prediction_step))
        self.replace(trainer, "_save_checkpoint", in_section("save", self.saves.save_checkpoint))
        self.replace(handler, "on_save", in_section("on_save", self.saves.on_save))
        self.replace(handler, "on_epoch_end", in_section("on_epoch_end", self._on_epoch_end))
        self.replace(trainer, "_load_best_model", in_section("load_best_model", _unchanged))
        self.one_rank.attach()
        self._others_begin_steps = any(takes_part(each, "on_step_begin") for each in handler.callbacks)
        self.optimizer_step.attach()
        self.position.watch()

    def detach(self) -> None:
        undoing, self.on_detach = self.on_detach, []
        own = (
            self._give_filter_back,
            self.replaced.give_back,
            self.engine.detach,
            self.optimizer_step.detach,
            self.position.release,
        )
        for undo in (self.leaving.detach, *reversed(undoing), *own):
            try:
                undo()
            except Exception:
                logger.warning("A part of self_healing could not be taken off the trainer.", exc_info=True)
        self.window = None

    def _give_filter_back(self) -> None:
        """Has the Trainer filter what it logs again, from the micro-batches on that it has not computed yet."""
        if self._filter_taken:
            self._filter_taken = False
            self.trainer.args.logging_nan_inf_filter = True
            if self.window is not None and self.window.start is not None and not self.failsafe.device_lost:
                self.window.filter_running_loss()

    def _in_section(self, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the calls of a wrapper a part of a step of their own, for the watchdog."""
        enter, leave = self.heartbeat.enter, self.heartbeat.leave

        def inside(*args: Any, **kwargs: Any) -> Any:
            enter(name)
            try:
                return wrapper(*args, **kwargs)
            finally:
                leave()

        return inside

    def replace(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> Interception:
        """Hands calls of a method of any object to `wrapper(original, *args, **kwargs)` until [`detach`]."""
        return self.replaced.wrap(holder, name, wrapper)

    # ---- the wrapped methods, in the order a step calls them ----

    def _on_epoch_begin(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            self.position.epoch_begins()
            self.reentry.epoch_begins()
        except Exception as error:
            self.failsafe.contain(error)
        return original(*args, **kwargs)

    def _get_batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.heartbeat.enter("data")
        try:
            if not self.reentry.has_fetched and self.reentry.stop_owed:
                return self._nothing_to_train()
            try:
                if self._filter_taken:
                    # Of a step that never came to its update (the last of a stream, a stop between micro-batches).
                    self._give_filter_back()
                self.window = None
                self.reentry.fetching()
            except Exception as error:
                self.failsafe.contain(error)
            try:
                batches, items = original(*args, **kwargs)
            except BaseException as error:
                self.hooks.fetch_failed(error)
                raise
            try:
                if self.replaced.held:
                    size, settings = len(batches), self.trainer.args
                    self.window = Window(self.engine, self.ledger, self.position, size) if size else None
                    self.reentry.fetched(self.window)
                    self.hooks.fetched()
                    if size and settings.logging_nan_inf_filter and self.leaves_out_nonfinite:
                        self._filter_taken, settings.logging_nan_inf_filter = True, False
            except Exception as error:
                self.failsafe.contain(error)
            return batches, items
        finally:
            self.heartbeat.leave()

    def _nothing_to_train(self) -> tuple[list[Any], None]:
        # A run that was left after its last step: transformers would train one step too many.
        self.trainer.control.should_training_stop = True
        if self.reentry.resumed_at_the_end:
            logger.warning(
                "Step %d: nothing is trained, because the checkpoint resumed from is that of a finished run "
                "(max_steps=%d). The weights are those of the checkpoint; to train on, please raise max_steps or "
                "num_train_epochs.",
                self.view.step,
                int(self.trainer.state.max_steps),
            )
        return [], None

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        window = self.window
        if window is None or window.judged or len(window.losses) >= window.size:
            return original(model, inputs, *args, **kwargs)
        self.heartbeat.enter("step")
        try:
            try:
                if window.start is None and self.reentry.finished is not None:
                    finished, rng = self.reentry.finished, self.reentry.after_fetch_rng
                    drawn = None if self._others_begin_steps else rng
                    window.start = self.ledger.capture(finished, finished.running_loss, drawn)
                    window.began = time.perf_counter()
                # A copy: the training step may pop keys from the dictionary it is given.
                copied = inputs.copy if type(inputs) is dict else getattr(inputs, "__copy__", None)
                window.calls.append((model, copied() if copied else copy.copy(inputs), args, kwargs))
            except Exception as error:
                self.failsafe.contain(error)
                if not self.attached:
                    return original(model, inputs, *args, **kwargs)
            state = self.trainer.state
            before, ran_out = state.num_input_tokens_seen, None
            if self.one_rank.possible:
                self.one_rank.begin(window)
            try:
                if self.call.passes is None and not (self.objective.online and not window.losses):
                    # As in `TrainingCall.compute`, which would be a call more for every micro-batch.
                    loss = original(model, inputs, *args, **kwargs).detach().clone()
                else:
                    loss = self._in_passes_or_generated(window, (model, inputs, args, kwargs))
            except BaseException as error:
                loss, ran_out = self._raised(error, window)
            tokens = state.num_input_tokens_seen - before
            if ran_out is not None:
                # Outside of the handler: the exception, and with it what the failed attempt held, is gone.
                loss, tokens = self._until_it_fits(window, ran_out, before)
            if self.one_rank.possible:
                self.one_rank.end()
                if len(window.losses) + 1 == window.size:
                    self.one_rank.check_sent()
            window.losses.append(loss)
            window.tokens_inside += tokens
            if self.retry.watched:
                self.retry.on_success()
            return loss
        finally:
            self.heartbeat.leave()

    def _in_passes_or_generated(self, window: Window, call: Call) -> torch.Tensor:
        """Keeps the rows that are generated for the first call of a step: they need not be generated twice."""

        def note(batch: Any) -> Any:
            with self.failsafe.contained():
                window.generated = copy.copy(batch), self.ledger.capture()
            return batch

        generates = self.objective.online and not window.losses
        with preparing(self.trainer, note) if generates else contextlib.nullcontext():
            return self.call.compute(call)

    def _raised(self, error: BaseException, window: Window) -> tuple[Any, OutOfMemory | None]:
        """Takes what a micro-batch has raised for NaN, or for memory that ran out; raises anything else again."""
        loss = self.call.in_place_of(error, window)
        ran_out = None if loss is not None else self.retry.caught(error, alone=not self.one_rank.why_not())
        if loss is None and ran_out is None and self._rows_raise(error, window):
            loss = self.call.in_place_of(error, window)
        if loss is None and ran_out is None:
            raise error
        return loss, ran_out

    def _rows_raise(self, error: BaseException, window: Window) -> bool:
        """Whether it is rows of a micro-batch that raise; others may wait for this rank, or weights have moved."""
        known = self.view.world_size == 1 and not self.objective.online and window.start is not None
        if not known or not self.leaves_out_nonfinite or self.call.doubt_of_weights:
            return False
        if not isinstance(error, Exception) or is_meant(error):
            return False
        if classify_exception(error) is not FailureType.USER_CODE:
            return False
        gradient_state = self.trainer.accelerator.gradient_state
        synchronises = gradient_state.sync_gradients
        self.heartbeat.enter("judge")
        try:
            return self.hooks.rows_raise(window, error)
        except Exception as failed:
            # Whatever it is: what ends the run is what was raised first.
            if not self.failsafe.tells_of_lost_device(failed):
                self.failsafe.contain(failed)
            return False
        finally:
            self.heartbeat.leave()
            gradient_state._set_sync_gradients(synchronises)

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Looks at the weights on all ranks before a trainer generates the rows it trains on, and scores them."""
        spoiled = False
        # Only in training: there the step gets a NaN as its loss, and is healed.
        if self.trainer.model.training:
            with self.failsafe.contained(), self.failsafe.together():
                found = not self.view.weights_are_finite()
                spoiled = votes.any_rank("weights to generate with", found, self.view.device)
        if spoiled:
            raise NotGenerated("the weights are not finite: nothing is generated with them")
        return original(*args, **kwargs)

    def _sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.trainer.model.training or len(args) > 2:
            return original(*args, **kwargs)
        watched = FiniteLogits()
        found = original(*args, **{**kwargs, "logits_processor": [*(kwargs.get("logits_processor") or ()), watched]})
        watched.check()
        return found

    def _until_it_fits(self, window: Window, ran_out: OutOfMemory, tokens: int) -> tuple[torch.Tensor, int]:
        """
        Computes again, in whatever way fits, what ran out of memory: the step up to there, or on one rank of several
        the micro-batch, while the others wait; its last loss, and its tokens.
        """
        before_the_step = tokens - window.tokens_inside
        while True:
            if self.call.half_way and not ran_out.alone:
                with self.failsafe.contained():
                    self.hooks.left_half_way(window)
            if not self.retry.handled(ran_out, window):
                raise ran_out.error
            try:
                if not ran_out.alone:
                    return window.recompute_to_last_call(before_the_step)
                model, inputs, args, kwargs = window.calls[-1]
                call = model, copy.copy(inputs), args, kwargs
                loss = self.one_rank.compute_again(functools.partial(self.call.run, call, window))
                return loss, self.trainer.state.num_input_tokens_seen - tokens
            except TrainingFault as fault:
                error = fault.error
            except Exception as raised:
                # In what is done around the training step: counters and buffers put back.
                if not ran_out.alone and not is_out_of_memory(raised):
                    raise
                error = raised
            again = self.retry.caught(error, alone=not self.one_rank.why_not())
            if again is None:
                if ran_out.alone and not is_out_of_memory(error):
                    # DDP may refuse another forward (a parameter that the loss does not use counts as reduced).
                    self.retry.ends_the_job(ran_out)
                raise error from ran_out.error
            ran_out = again

    def _get_grad_norm(self, original: Callable[..., Any], model: Any, grad_norm: Any = None) -> Any:
        """Wraps the last call before `optimizer.step()`, however the Trainer clips or does not: judges the step."""
        window, trainer = self.window, self.trainer
        norm = original(model) if grad_norm is None else grad_norm
        if window is None or window.judged or len(window.losses) < window.size:
            if self.failsafe.failure is not None and (window is None or not window.judged):
                self._tell_of_failure(norm)
            return original(model, grad_norm=norm)
        window.measure = functools.partial(original if grad_norm is None else trainer._clip_grad_norm, model)
        window.grad_norm = norm
        if self.veto.usable and self.veto.allows(window):
            window.bounds = self.hooks.bounds(window)
        if window.bounds is None:
            self._judge(window)
        return original(model, grad_norm=window.grad_norm)

    def _judge(self, window: Window) -> None:
        window.judged = True
        fault: TrainingFault | None = None
        self.heartbeat.enter("judge")
        try:
            window.failed = self.failsafe.failure is not None
            if self._filter_taken:
                # First: what is written while it is judged holds the arguments.
                self.trainer.args.logging_nan_inf_filter = True
            self.hooks.judge(window)
            if self._filter_taken:
                self._filter_taken = False
                if not window.loss_is_finite and not window.loss_is_set:
                    window.filter_running_loss()
            window.released = True
        except TrainingFault as caught:
            fault = caught
        except Exception as error:
            if self.failsafe.lets_pass(error):
                raise
            self._give_up(error, window)
        finally:
            self.heartbeat.leave()
        if fault is not None:
            # Outside the handler, so that the exception keeps the cause and context it came with.
            raise fault.error

    # ---- the update ----

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `optimizer.step()`: takes it with the rates in force; once it fits, where memory runs out."""
        window, self._began = self.window, time.perf_counter()
        self.heartbeat.enter("optimizer")
        try:
            try:
                self.hooks.before_optimizer_step()
                if self.retry.watched:
                    self.hooks.about_to_step()
            except Exception as error:
                self.failsafe.contain(error)
                if window is not None and window.bounds is not None:
                    # Nobody judges it any more.
                    window.bounds = None
                    window.abandon(self.leaves_out_nonfinite)
            self._scale_at, self._scale = self.trainer.state.global_step, 1.0
            result = self._update_until_it_fits(window, functools.partial(original, *args, **kwargs))
            try:
                if self.engine.left_out_by_itself:
                    self.hooks.left_out_by_engine()
                if self.retry.watched:
                    self.hooks.step_fitted()
            except Exception as error:
                self.failsafe.contain(error)
            return result
        finally:
            self.heartbeat.leave()
            self.optimizer_step.seconds = time.perf_counter() - self._began

    def _update_until_it_fits(self, window: Window | None, update: Callable[[], Any]) -> Any:
        while True:
            optimizer = self.optimizer_step.optimizer
            if optimizer is not None and not optimizer.state:
                self.optimizer_step.mark()
            begun = votes.collectives_begun() if self.view.world_size > 1 else None
            try:
                result = None
                if window is not None and window.bounds is not None:
                    result = self._launch(window, update)
                if window is None or not window.applied:
                    # Asked only now: what judges a launched step may have lowered the rate.
                    result = self._take(update) if self.rates.control.touched else update()
                return result
            except Exception as error:
                alone = begun is not None and votes.collectives_begun() == begun
                alone &= self.optimizer_step.can_be_taken_again
                ran_out = self.retry.caught(error, place="optimizer step", alone=alone)
                if ran_out is None:
                    raise
            if not self.retry.handled(ran_out, window):
                raise ran_out.error

    def _launch(self, window: Window, update: Callable[[], Any]) -> Any:
        """
        Launches the update, and judges the step while it runs: the device leaves it out where bounds are passed, or
        nothing is to be healed. Judges it first after all, where memory has run out.
        """
        bounds, window.bounds, result, told = window.bounds, None, None, window.grad_norm
        assert bounds is not None
        try:
            self.veto.compare(window.loss_and_norm(), bounds)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            take = functools.partial(self._take, update) if self.rates.control.touched else update
            result = self.veto.launch(window, bounds, take)
        if not window.applied:
            # With none yet: what is told meanwhile is the rate in force.
            self._scale_at = -1
        self._judge(window)
        self._scale_at = self.trainer.state.global_step
        if window.grad_norm is not told:
            # The Trainer has it already, and logs it.
            told.copy_(window.grad_norm)
        # The wait for the device and the verdict are of the step, not of its update.
        self._began = time.perf_counter()
        return result

    def _take(self, update: Callable[[], Any]) -> Any:
        """Takes a step whose rates are not those of the schedule."""
        # Where it fails on one of several ranks, their weights would become others.
        with self.failsafe.contained(), self.failsafe.together():
            self._scale = self.rates.scale() if self.attached else 1.0
        if self._scale == 1.0:
            return update()
        rates = self.rates.in_force(self._scale)
        self.reentry.learning_rate = rates[0]
        # DeepSpeed moves its schedule on in the step itself, after the update.
        in_update = not self.optimizer_step.can_be_taken_again and self.optimizer_step.optimizer is not None
        with self.rates.set_in_update(rates) if in_update else self.rates.set(rates):
            return update()

    def _get_learning_rate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps what the Trainer asks for the log right after the update: gives the rate in force."""
        rate, scale = original(*args, **kwargs), 1.0
        try:
            known = self._scale_at == self.trainer.state.global_step
            scale = self._scale if known else self.rates.scale()
        except Exception as error:
            self.failsafe.contain(error)
        rate = rate if scale == 1.0 else rate * scale
        if self.reentry.finished_step == self.trainer.state.global_step:
            # Of the step that is not counted yet: what is asked for last is what the Trainer logs.
            self.reentry.learning_rate = rate
        return rate

    def _on_epoch_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._filter_taken:
            self._give_filter_back()
        self.reentry.epoch_end_begun = True
        control = original(*args, **kwargs)
        self.reentry.epoch_ends(control)
        self.leaving.epoch_ended(control)
        return control

    # ---- an update that this rank was kept from ----

    @property
    def owes_update(self) -> bool:
        """Whether `train()` was left by an exception between a step that was found fit and its update."""
        window = self.reentry.interrupted
        return window is not None and window.released and self.reentry.phase is Phase.COMPUTING

    def finish_step(self) -> None:
        """Applies that step, as the other ranks have that were not left."""
        rates = self.rates.in_force()
        self.reentry.learning_rate = rates[0]
        with self.rates.set(rates):
            self.replaced.original(self.trainer.optimizer, "step")()
        self.reentry.phase = Phase.STEPPED

    # ---- a failure of this library in a step ----

    def _give_up(self, error: Exception, window: Window) -> None:
        """Goes on without this library after a failure in judging a step, or ends a job of several ranks."""
        if self.view.world_size == 1:
            if not window.applied:
                window.abandon(self.leaves_out_nonfinite)
            self.failsafe.switch_off(error)
        elif isinstance(error, votes.RankFailed):
            self._go_on_without(error)
        elif not window.agreed:
            # The others have come to this step, and wait for its numbers.
            self._tell_of_failure(window.grad_norm, error)
        else:
            raise self.failsafe.failed(error) from error

    def _tell_of_failure(self, norm: Any, error: Exception | None = None) -> None:
        """Takes part in the vote of a step that this rank cannot judge, because code of this library has failed."""
        self.failsafe.failure = self.failsafe.failure or error
        self._go_on_without(tell_of_failure(norm, self.view.device))

    def _go_on_without(self, error: votes.RankFailed) -> None:
        """Takes this library off after a vote that has done so on all ranks, where the step needs no healing."""
        if not error.healthy:
            raise self.failsafe.failed(error) from self.failsafe.failure
        self.failsafe.switch_off(error)


def _unchanged(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)
