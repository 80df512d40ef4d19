"""`Instrument`: wraps the methods of one trainer instance for the time of a `train()` call."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from transformers import Trainer

from .. import consensus
from ..classify import classify_exception, is_nonfinite_exception
from ..clipping import scale_gradients
from ..failures import FailureType, UnrecoverableTrainingError
from ..objectives import objective_of
from ..random_state import RandomState
from .best_model import BestModel
from .bookkeeping import Bookkeeping, Ledger
from .gradients import discard_gradients
from .hooks import Hooks, StepPasses
from .interception import Interception
from .less_memory import ActivationCheckpointing, UpdateOneByOne
from .live_state import (
    innermost,
    reload_checkpoint,
    reset_moments,
)
from .loader_workers import WorkerDeaths
from .loading import TrainingLoader
from .on_exception import OnException
from .origin import Origin, watching_outputs
from .out_of_memory import OutOfMemory, Place, caught, free_memory, is_out_of_memory, let_go
from .phase import Phase
from .reentry import Reentry
from .replacing import Replacements
from .row_sources import DataPosition
from .saving import CheckpointSaving
from .sections import Heartbeat
from .step_mark import StepMark
from .view import TrainerView
from .window import TrainingFault, Window


logger = logging.getLogger(__name__)


class Instrument:
    """
    Wraps one trainer instance for the time of a `train()` call.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer, in `on_train_begin` or later. Only this object is touched, and [`detach`] undoes it.
        hooks ([`Hooks`]):
            Told of every event, and asked.
        heals_exceptions (`bool`):
            Whether an exception that only says "NaN" is treated as a non-finite loss.
        started_at (`float`):
            When the run began, in seconds since the epoch; earlier than this call if it is a re-entry.
        heartbeat ([`Heartbeat`], *optional*):
            Told when each part of a step begins and ends.
    """

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
        self._replaced = Replacements()
        self.view = TrainerView(trainer, self.objective, self._replaced)
        self.ledger = Ledger(trainer)
        self.position = DataPosition(trainer, self.objective)
        self.reentry = Reentry(trainer, self.ledger, self.position)
        self.window: Window | None = None
        self._worker_deaths = WorkerDeaths()
        self._step_mark = StepMark(self.trainer.optimizer)
        self._checkpointing = ActivationCheckpointing(self.trainer.model)
        self._one_by_one = UpdateOneByOne(self.trainer.optimizer)
        self.started_at = started_at
        self.heartbeat = heartbeat or Heartbeat()
        self._hooks = hooks
        self._best_before: tuple[float | None, int | None] = (None, None)
        self._maybe_saving = self._held_back = self._saving = self._leaving = False
        self.longest_save = 0.0
        self.owes_evaluation = False
        self._told_of_lost_device: BaseException | None = None
        self._heals_exceptions = heals_exceptions
        self._optimizer_hooks: list[Any] = []
        # Where a checkpoint that cannot be written does not end the run.
        self.saving: CheckpointSaving | None = None
        # Looked at before it takes the place of what was trained last.
        self.best_model: BestModel | None = None
        # What others have done to the trainer, and take back with what we have.
        self.on_detach: list[Callable[[], None]] = []
        self._in_training_step = False
        # Whether code of ours has failed: training goes on without it.
        self.switched_off = False
        # Whether what is computed is an experiment, which may come to nothing: the run must not.
        self.experimenting = False
        # Whether an update may have changed the weights: one with a rate of 0, or without gradients, has not.
        self.weights_moved = not isinstance(innermost(trainer.optimizer), torch.optim.Optimizer)

    @property
    def device_lost(self) -> bool:
        """Whether nothing can be computed any more, not even to put back what an experiment has changed."""
        return self._told_of_lost_device is not None

    @property
    def leaves_out_nonfinite(self) -> bool:
        """Whether anything is done about steps that are not finite."""
        return self._heals_exceptions and self.view.can_reexecute

    @property
    def attached(self) -> bool:
        return bool(self._replaced)

    # ---- attaching and detaching ----

    def attach(self) -> None:
        """Called in `on_train_begin`: the optimizer, the data loader and the running loss exist by then."""
        trainer = self.trainer
        # Around all the others: what is raised between them is seen as well.
        self.replace(trainer, "_run_epoch", self._watch_the_device)
        self.replace(trainer, "_finalize_training", self._watch_the_device)
        self.replace(trainer, "get_batch_samples", self._in_section("data", self._get_batch_samples))
        self.replace(trainer, "training_step", self._in_section("step", self._training_step))
        self.replace(trainer, "log", self._in_section("log", self._log))
        self.replace(trainer, "_evaluate", self._in_section("evaluate", self._evaluate))
        self.replace(trainer, "prediction_step", self._in_section("prediction", self._prediction_step))
        self.replace(trainer, "_maybe_log_save_evaluate", self._maybe_log_save_evaluate)
        self.replace(trainer, "_save_checkpoint", self._in_section("save", self._save_checkpoint))
        self.replace(trainer, "_get_learning_rate", self._get_learning_rate)
        self.replace(trainer.callback_handler, "on_save", self._in_section("on_save", self._on_save))
        self.replace(trainer.callback_handler, "on_epoch_end", self._in_section("on_epoch_end", self._on_epoch_end))
        self.replace(trainer.accelerator, "clip_grad_norm_", self._clip_grad_norm_)
        if self.view.can_reexecute:
            self.replace(trainer.optimizer, "step", self._in_section("optimizer", self._optimizer_step))
        for name, section in (
            ("_generate_single_turn", "generate"),
            ("_calculate_rewards", "rewards"),
        ):
            if hasattr(trainer, name):
                self.replace(trainer, name, self._in_section(section, _unchanged))
        self.replace(trainer, "_load_best_model", self._in_section("load_best_model", self._load_best_model))
        optimizer = innermost(trainer.optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            self._optimizer_hooks.append(optimizer.register_step_pre_hook(self._before_optimizer_step))
            self._optimizer_hooks.append(optimizer.register_step_post_hook(self._after_optimizer_step))
        self.position.watch()

    def detach(self) -> None:
        """Gives the trainer back as it was."""
        undoing, self.on_detach = self.on_detach, []
        for undo in reversed(undoing):
            try:
                undo()
            except Exception:
                logger.warning("A part of self_healing could not be taken off the trainer.", exc_info=True)
        self._replaced.give_back()
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks.clear()
        self.position.release()
        self._worker_deaths.release()
        self._checkpointing.switch_off()
        self._one_by_one.switch_off()
        self.window = None

    def _in_section(self, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """A wrapper whose calls are a part of a step of their own, for the watchdog."""
        enter, leave = self.heartbeat.enter, self.heartbeat.leave

        def inside(*args: Any, **kwargs: Any) -> Any:
            enter(name)
            try:
                return wrapper(*args, **kwargs)
            finally:
                leave()

        return inside

    def replace(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Hands calls of a method of any object to `wrapper(original, *args, **kwargs)` until [`detach`]."""
        self._replaced.wrap(holder, name, wrapper)

    def intercept(self, model: torch.nn.Module, name: str, wrapper: Callable[..., Any]) -> None:
        """Hands calls of a method of a model to `wrapper(original, *args, **kwargs)` until [`detach`]."""
        self._replaced.put(model, name, Interception(model, name, getattr(model, name), wrapper))

    def intercept_calls(self, model: torch.nn.Module, wrapper: Callable[..., Any]) -> None:
        """Hands calls of a model, with what hooks do around them, to `wrapper(original, *args, **kwargs)`."""
        compiled = getattr(model, "_compiled_call_impl", None) is not None
        self.intercept(model, "_compiled_call_impl" if compiled else "_call_impl", wrapper)

    def release_calls(self, models: Sequence[torch.nn.Module]) -> None:
        """Takes back what [`intercept_calls`] and [`intercept`] did to some models."""
        self._replaced.give_back(models)

    def contained(self) -> OnException:
        """A failure of ours is logged, the trainer becomes its plain self again, and training goes on."""
        return OnException(self._contain)

    def _contain(self, error: BaseException) -> bool:
        if isinstance(error, UnrecoverableTrainingError):
            self.detach()
            return False
        if not isinstance(error, Exception) or self._passes_on(error):
            return False
        self._switch_off(error)
        return True

    def _passes_on(self, error: Exception) -> bool:
        """
        Whether an exception in code of ours is no failure of it: torch raises that a data loader worker has died
        wherever the main thread is, and that the device is lost wherever it is waited for. The trainer is given back.
        """
        if not self.tells_of_lost_device(error) and classify_exception(error) is not FailureType.PROCESS_DIED:
            return False
        self.detach()
        return True

    def tells_of_lost_device(self, error: BaseException) -> bool:
        """Whether an exception says so; if it does, that is written down before anything else is done."""
        if classify_exception(error) is not FailureType.DEVICE:
            return False
        self._told_of_lost_device = self._told_of_lost_device or error
        self._hooks.device_lost(error)
        return True

    @contextlib.contextmanager
    def experiment(self) -> Iterator[None]:
        """
        What is computed inside is not needed by the run, and where memory runs out in it, it comes to nothing.

        Raises:
            TrainingFault: Also where memory ran out in code of ours.
        """
        before, self.experimenting = self.experimenting, True
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingFault(error) from error
        finally:
            self.experimenting = before

    def _leaving_on_exception(self) -> OnException:
        """What raises here ends `train()`, and there is no event that says so: the trainer is given back at once."""
        return OnException(self._leave_with)

    def _leave_with(self, error: BaseException) -> bool:
        self.tells_of_lost_device(error)
        self.detach()
        return False

    def _watch_the_device(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            if not self.tells_of_lost_device(error):
                raise
            self.detach()
            first = self._told_of_lost_device
            if first is None or first is error:
                raise
        # What was raised on the way out says less than what came first.
        raise first

    def _switch_off(self, error: Exception) -> None:
        logger.error(
            "self_healing failed at step %s and has switched itself off; training goes on without it. "
            "Please report this traceback.",
            self.trainer.state.global_step,
            exc_info=error,
        )
        self.switched_off = True
        self.detach()
        self._hooks.broken()

    # ---- the Trainer's events, passed on by the callback ----

    def epoch_begins(self) -> None:
        """Called in `on_epoch_begin`."""
        if self.attached:
            with self.contained():
                self._worker_deaths.forget()
                self.position.epoch_begins()
                self.reentry.epoch_begins()

    def step_begins(self) -> None:
        """Called in `on_step_begin`."""
        if self.attached:
            with self.contained():
                self.reentry.step_begins()

    def before_optimizer_step(self) -> None:
        """Called in `on_pre_optimizer_step`."""
        window = self.window
        if self._ready(window):
            # The trainer did not clip through the accelerator: gradients on mixed meshes.
            window.measured_by(lambda: self.trainer._get_grad_norm(self.trainer.model_wrapped))
            self._judge(window)
        if self.attached:
            with self.contained():
                self.reentry.about_to_step()

    def step_ends(self) -> None:
        """Called in `on_step_end`."""
        if self.attached:
            with self.contained():
                self.reentry.step_ends()

    def epoch_ends(self) -> None:
        """Called in `on_epoch_end`."""
        if self.attached:
            with self.contained():
                self.reentry.epoch_ends()

    # ---- the wrapped methods, in the order a step calls them ----

    def _get_batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.reentry.stop_owed:
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
        with self.contained():
            self.window = None
            self.reentry.fetching()
        with self._leaving_on_exception(), self._worker_deaths.fetching():
            result = original(*args, **kwargs)
        if self.attached:
            with self.contained():
                self.window = Window(self, len(result[0])) if result[0] else None
                self.reentry.fetched(self.window)
        return result

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        window = self.window
        if window is None or window.judged or window.complete or self._in_training_step:
            return original(model, inputs, *args, **kwargs)
        with self.contained():
            finished = self.reentry.finished
            if not window.started and finished is not None:
                window.begin(self.ledger.capture(finished.running_loss))
            window.add_call(model, inputs, args, kwargs)
        if not self.attached:
            return original(model, inputs, *args, **kwargs)
        state = self.trainer.state
        before, ran_out = state.num_input_tokens_seen, None
        with self._leaving_on_exception():
            try:
                with self._noting_what_is_generated(window):
                    loss = self.call_training_step(window, model, inputs, *args, **kwargs)
            except Exception as error:
                ran_out = self._memory_ran_out(error)
                if ran_out is None:
                    raise
        tokens = state.num_input_tokens_seen - before
        if ran_out is not None:
            # Outside of the handler: the exception, and with it what the failed attempt held, is gone.
            with self._leaving_on_exception():
                loss, tokens = self._until_it_fits(window, ran_out, before)
        window.add_loss(loss, tokens)
        self.on_success()
        return loss

    def _noting_what_is_generated(self, window: Window) -> contextlib.AbstractContextManager[None]:
        """Rows that a trainer has generated for the first call of a step need not be generated twice."""
        if not self.objective.online or window.losses:
            return contextlib.nullcontext()

        def note(batch: Any) -> Any:
            with self.contained():
                window.note_generated(batch, self.ledger.capture())
            return batch

        return self.preparing(note)

    def _memory_ran_out(self, error: Exception, place: Place | None = None) -> OutOfMemory | None:
        """An out-of-memory error that something can be done about; `None` for any other exception."""
        if not self.attached or not self.view.can_reexecute or not self._hooks.heals_memory:
            return None
        found = caught(error, self.view.device, place)
        if found is not None and consensus.world_size() > 1:
            with self.contained():
                self._hooks.oom_on_one_rank(found)
            return None
        return found

    def on_success(self) -> None:
        """Something that may have run out of memory before has been computed."""
        with self.contained():
            self._hooks.on_success()

    def may_try_again(self, error: Exception) -> bool:
        """After an exception in a computation that can be begun anew: whether it was memory, and there is more now."""
        ran_out = self._memory_ran_out(error)
        return ran_out is not None and self._relieved(ran_out, self._hooks.handle_oom)

    def may_have_passed(self, error: Exception) -> bool:
        """
        After an exception in a computation that is to heal another fault: whether to try it once more. Not for memory,
        about which all has been done that can be, nor on several processes, where the others are waiting.
        """
        if consensus.world_size() > 1:
            return False
        if is_out_of_memory(error) and not self._hooks.heals_memory:
            # Nothing is to be done where training runs out of memory; but this is none of what it computes.
            let_go(error)
            free_memory(self.view.device)
            return True
        lasting = (FailureType.OUT_OF_MEMORY, FailureType.DEVICE, FailureType.PROCESS_DIED)
        if classify_exception(error) in lasting:
            return False
        logger.info("Step %d: computed once more.", self.view.step, exc_info=error)
        return True

    def _relieved(self, ran_out: OutOfMemory, relieve: Callable[[OutOfMemory, Window | None], bool]) -> bool:
        for section in ("step", "optimizer", "prediction", "generate"):
            # Row by row, a part takes many times as long.
            self.heartbeat.be_patient(section)
        try:
            return relieve(ran_out, self.window)
        except UnrecoverableTrainingError:
            self.detach()
            raise
        except Exception as error:
            if self._passes_on(error):
                raise
            self._switch_off(error)
            return False

    def _until_it_fits(self, window: Window, ran_out: OutOfMemory, tokens: int) -> tuple[torch.Tensor, int]:
        """The step up to where memory ran out, computed again in whatever way fits; its last loss, and its tokens."""
        before_the_step = tokens - window.tokens_inside
        while True:
            if not self._relieved(ran_out, self._hooks.handle_oom):
                self.detach()
                raise ran_out.error
            try:
                return window.compute_again_so_far(before_the_step)
            except TrainingFault as fault:
                error = fault.error
            except Exception as ours:
                # In what is done around the training step: counters and buffers put back.
                if not is_out_of_memory(ours):
                    raise
                error = ours
            again = self._memory_ran_out(error)
            if again is None:
                self.detach()
                raise error
            ran_out = again

    def call_training_step(self, window: Window, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """
        The trainer's own `training_step`; a non-finite number that surfaces as an exception becomes a NaN loss.

        Returns:
            Its loss, which stays what it is until the step is judged.
        """
        original = self._replaced.original(self.trainer, "training_step")
        self._in_training_step = True
        # When a step is computed again, it lies within whatever does so.
        again = self.heartbeat.last[0].name != "step"
        if again:
            self.heartbeat.enter("step")
        try:
            passes = self._hooks.passes
            if passes is None:
                loss: torch.Tensor = original(model, inputs, *args, **kwargs)
            else:
                loss = self._in_passes(passes, lambda: original(model, copy.copy(inputs), *args, **kwargs))
            # A CUDA graph (torch.compile with mode="reduce-overhead") writes the next one into the same memory.
            return loss.detach().clone()
        except Exception as error:
            # On several processes the others wait in a collective that this one never reached.
            if self._heals_exceptions and consensus.world_size() == 1 and is_nonfinite_exception(error):
                window.note_exception()
                return torch.full((), math.nan, device=self.trainer.args.device)
            raise
        finally:
            if again:
                self.heartbeat.leave()
            self._in_training_step = False

    def _in_passes(self, passes: StepPasses, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A training step of which only the last pass is counted, and rows are prepared in the first alone."""
        state, noted = self.trainer.state, list[tuple[Any, Bookkeeping, int]]()
        looked_at = Replacements()

        def look(backward: Callable[..., None], loss: Any, **kwargs: Any) -> None:
            passes.look_at(loss)
            backward(loss, **kwargs)

        def note(batch: Any) -> Any:
            # A copy: `compute_loss` may pop keys from the batch it is given.
            noted.append((copy.copy(batch), self.ledger.capture(), state.num_input_tokens_seen))
            return batch

        def first() -> torch.Tensor:
            looked_at.wrap(self.trainer.accelerator, "backward", look)
            try:
                with self.preparing(note):
                    return compute()
            finally:
                looked_at.give_back()

        def again() -> torch.Tensor:
            batch, before, tokens = noted[0]
            self.ledger.rewind_counts(before)
            state.num_input_tokens_seen = tokens
            with self.preparing(lambda batch: batch, prepared=batch):
                return compute()

        def plain() -> torch.Tensor:
            noted[0][1].rng.restore()
            return again()

        return passes.run(first, again, plain)

    def _clip_grad_norm_(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        window = self.window
        if self._in_training_step or not self._ready(window):
            return original(parameters, *args, **kwargs)
        # A generator could not be gone through again.
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        window.measured_by(lambda: original(parameters, *args, **kwargs))
        self._judge(window)
        return window.grad_norm

    @staticmethod
    def _ready(window: Window | None) -> TypeGuard[Window]:
        return window is not None and window.complete and not window.judged

    def _judge(self, window: Window) -> None:
        window.judged = True
        fault: TrainingFault | None = None
        self.heartbeat.enter("judge")
        try:
            self._hooks.judge(window)
        except UnrecoverableTrainingError:
            self.detach()
            raise
        except TrainingFault as caught:
            fault = caught
        except Exception as error:
            if self._passes_on(error):
                raise
            window.abandon()
            self._switch_off(error)
        finally:
            self.heartbeat.leave()
        if fault is not None:
            # Outside the handler, so that the exception keeps the cause and context it came with.
            raise fault.error

    def _before_optimizer_step(self, *_: Any) -> None:
        self.reentry.phase = Phase.STEPPING

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.reentry.phase = Phase.STEPPED
        if not self.weights_moved and (self.window is None or not self.window.skipped):
            rates = [group.get("lr") for group in optimizer.param_groups]
            self.weights_moved = any(rate is None or float(rate) != 0.0 for rate in rates)

    def _optimizer_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """
        The optimizer steps with the rate that is in force; before and after, its groups hold the schedule's, so that
        schedulers which compute from the current rate, and checkpoints, see nothing of it.
        """
        scale = 1.0
        with self.contained():
            self._hooks.before_optimizer_step()
            self._hooks.about_to_step()
            scale = self._scale_in_force()
        if scale == 1.0:
            return self._step_until_it_fits(original, *args, **kwargs)
        with self._rates(self.rates_in_force(scale)):
            return self._step_until_it_fits(original, *args, **kwargs)

    def _step_until_it_fits(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        while True:
            self._step_mark.set()
            try:
                result = original(*args, **kwargs)
            except Exception as error:
                ran_out = self._memory_ran_out(error, place="optimizer step")
                if ran_out is None:
                    raise
            else:
                with self.contained():
                    self._hooks.stepped()
                return result
            with self._leaving_on_exception():
                again = self._relieved(ran_out, self._hooks.handle_oom_in_optimizer_step)
            if not again:
                raise ran_out.error

    @contextlib.contextmanager
    def _rates(self, rates: Sequence[Any]) -> Iterator[None]:
        groups = self.trainer.optimizer.param_groups
        theirs = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            yield
        finally:
            for group, rate in zip(groups, theirs, strict=True):
                group["lr"] = rate

    def _scale_in_force(self) -> float:
        scale = self._hooks.rate_scale(self.view.step)
        return scale if scale == 1.0 or self.view.can_scale_rate else 1.0

    def rates_in_force(self, scale: float | None = None) -> list[Any]:
        """The learning rate of each parameter group: the schedule's, times the factor in force or another one."""
        if scale is None:
            scale = self._hooks.rate_scale(self.view.step)
        rates = [group["lr"] for group in self.trainer.optimizer.param_groups]
        # Not even multiplied by 1: a rate kept as a tensor would have to be read.
        return rates if scale == 1.0 or not self.view.can_scale_rate else [rate * scale for rate in rates]

    def group_options(self) -> list[dict[str, Any]]:
        """Settings of each parameter group that schedules change beside the rate (one-cycle momentum)."""
        return [
            {name: group[name] for name in ("betas", "momentum", "weight_decay") if name in group}
            for group in self.trainer.optimizer.param_groups
        ]

    def step_again(
        self, rates: Sequence[Any], scaled_by: float = 1.0, options: Sequence[Mapping[str, Any]] = ()
    ) -> float | None:
        """Clips and applies the gradients there are with given rates, as the Trainer would; their norm before."""
        trainer, phase, norm = self.trainer, self.reentry.phase, None
        if self.view.max_grad_norm > 0:
            norm = self._replaced.original(trainer.accelerator, "clip_grad_norm_")(
                trainer.model.parameters(), self.view.max_grad_norm
            )
        if scaled_by != 1.0:
            scale_gradients(trainer.model, scaled_by)
        theirs = self.group_options()
        self._hooks.before_optimizer_step()
        try:
            self._set_group_options(options)
            with self._rates(rates):
                self._replaced.original(trainer.optimizer, "step")()
        finally:
            self._set_group_options(theirs)
            self.reentry.phase = phase
        return None if norm is None else float(norm)

    def _set_group_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        for group, chosen in zip(self.trainer.optimizer.param_groups, options, strict=False):
            group.update(chosen)

    def _get_learning_rate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the Trainer logs: the rate the optimizer steps with, and not only what the schedule asks for."""
        rate = original(*args, **kwargs)
        scale = 1.0
        with self.contained():
            scale = self._scale_in_force()
        return rate if scale == 1.0 else rate * scale

    def _prediction_step(
        self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        stores, rng = self.ledger.mark_stores(), RandomState.capture(self.view.device)
        while True:
            try:
                # A copy: what the first attempt took out of it is needed by the second.
                result = original(model, copy.copy(inputs), *args, **kwargs)
            except Exception as error:
                ran_out = self._memory_ran_out(error, place="evaluation")
                if ran_out is None:
                    raise
            else:
                self.on_success()
                return result
            # An evaluation may generate, and training draws on from where it stops.
            rng.restore()
            self.ledger.rewind_stores(stores)
            if not self._relieved(ran_out, lambda ran_out, _: self._hooks.handle_oom(ran_out, None)):
                raise ran_out.error

    def _evaluate(self, original: Callable[..., Any], trial: Any, ignore_keys: Any, *args: Any, **kwargs: Any) -> Any:
        self.reentry.evaluation_begins(ignore_keys)
        metrics = original(trial, ignore_keys, *args, **kwargs)
        self.reentry.evaluation_ends()
        if self.best_model is not None:
            with self.contained():
                self.best_model.note_evaluation(metrics)
        return metrics

    def _maybe_log_save_evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        control = self.trainer.control
        if self._hooks.owes_checkpoint() and (control.should_training_stop or not self._hooks.checkpoints_wait()):
            control.should_save = True
        self._maybe_saving, self._held_back = True, False
        self._best_before = self.trainer.state.best_metric, self.trainer.state.best_global_step
        if self.saving is not None:
            self.saving.evaluation_may_follow()
        try:
            return original(*args, **kwargs)
        finally:
            self._maybe_saving = False

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._maybe_saving and self.attached and not self._must_hold():
            with self.contained():
                self._hooks.vouch_for_state()
        if self._must_hold():
            self._held_back = True
            self._hooks.checkpoint_waits()
            return None
        if self._maybe_saving:
            with self.contained():
                self._hooks.before_save(self.view.step)
        with self._timing_a_save(), self._whole_if_leaving():
            if not self._maybe_saving or self.saving is None:
                return original(*args, **kwargs)
            if not self.saving.write(original, *args, **kwargs):
                self._held_back = True
        return None

    def disown_best(self) -> None:
        """The state that is about to be saved is no best model, whatever the evaluation of this step has said."""
        state = self.trainer.state
        if state.best_global_step == self.view.step:
            state.best_metric, state.best_global_step = self._best_before

    def finite_once_healed(self, settled: Bookkeeping) -> bool:
        """
        Whether weights, buffers and optimizer state are finite between two steps, once what can be healed is.

        Args:
            settled ([`Bookkeeping`]):
                The bookkeeping there, which healing leaves as it was.
        """
        if not self.view.nonfinite_tensors():
            return True
        with self.contained():
            self._hooks.vouch_for_state()
        self.ledger.rewind(settled)
        return not self.view.nonfinite_tensors()

    def write_checkpoint(self) -> None:
        """Writes a checkpoint of the trainer as it stands, as if its schedule had asked for one."""
        trainer = self.trainer
        self._maybe_saving, self._held_back = True, False
        try:
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        finally:
            self._maybe_saving = False

    @contextlib.contextmanager
    def random_state_kept(self) -> Iterator[None]:
        """What is computed inside draws from random generators that training goes on with."""
        rng = RandomState.capture(self.view.device)
        try:
            yield
        finally:
            rng.restore()

    @contextlib.contextmanager
    def _timing_a_save(self) -> Iterator[None]:
        began, self._saving = time.monotonic(), True
        try:
            yield
        finally:
            self._saving = False
            self.longest_save = max(self.longest_save, time.monotonic() - began)

    @contextlib.contextmanager
    def _whole_if_leaving(self) -> Iterator[None]:
        """What a run that leaves is to go on from holds everything, whatever the user's checkpoints hold."""
        args = self.trainer.args
        theirs = args.save_only_model
        args.save_only_model = theirs and not self._leaving
        try:
            yield
        finally:
            args.save_only_model = theirs

    @property
    def may_be_left(self) -> bool:
        """Whether an exception in the main thread would leave weights and checkpoints whole."""
        return self.attached and not self._saving and self.reentry.phase is not Phase.STEPPING

    def leaves(self, asked: bool) -> bool:
        """Whether the run ends with this step, because some process (`asked`: this one) has to leave."""
        if consensus.world_size() > 1:
            asked = self.window is not None and self.window.leave_wanted
        if self.view.last_step_done:
            # What is left is the end of the run, with the last evaluation and the best model, and not to be cut short.
            return False
        if asked and not self._leaving:
            self._leaving = True
            self._keep_what_is_saved()
        return asked

    def _keep_what_is_saved(self) -> None:
        """A run that leaves is not at its end: its newest checkpoint is not to give way to the best one."""
        args = self.trainer.args
        theirs = args.load_best_model_at_end, args.save_total_limit
        args.load_best_model_at_end, args.save_total_limit = False, None

        def give_back() -> None:
            args.load_best_model_at_end, args.save_total_limit = theirs

        self.on_detach.append(give_back)

    def owe_evaluation(self) -> None:
        """There is no time for the evaluation that is due: whoever takes the run up does it first."""
        self.owes_evaluation = consensus.world_size() == 1

    def _on_save(self, original: Callable[..., Any], args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._maybe_saving and self._held_back:
            # There is no checkpoint to tell of.
            control.should_save = False
            return control
        return original(args, state, control, **kwargs)

    def _must_hold(self) -> bool:
        """
        Whether a checkpoint that the Trainer's schedule asks for has to wait. One that is asked for directly (on
        preemption, in an emergency) never has, the one at the end of the run has nothing to wait for, and the one of
        the best evaluation so far is vouched for by it.
        """
        state = self.trainer.state
        vouched_for = state.best_global_step is not None and state.best_global_step == state.global_step
        at_the_end = self.trainer.control.should_training_stop
        return self._maybe_saving and self._hooks.checkpoints_wait() and not vouched_for and not at_the_end

    def _on_epoch_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.reentry.epoch_end_begins()
        control = original(*args, **kwargs)
        if self._leaving:
            # The epoch need not be over, and the checkpoint is written.
            if control.should_evaluate and self.position.at_epoch_end():
                self.owe_evaluation()
            control.should_log = control.should_evaluate = control.should_save = False
        return control

    def _log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        with self.contained():
            logs.update(self._hooks.metrics("loss" in logs, "train_runtime" in logs))
            if "train_runtime" in logs:
                self.reentry.finalizing()
                self._cover_the_whole_run(logs)
                if self.best_model is not None:
                    self.best_model.choose()
        return original(logs, *args, **kwargs)

    def _load_best_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.best_model is None:
            return original(*args, **kwargs)
        return self.best_model.load(original, *args, **kwargs)

    def _cover_the_whole_run(self, logs: dict[str, float]) -> None:
        """The Trainer's final speed metrics know only the last entry into `train()`."""
        runtime, whole = logs["train_runtime"], time.time() - self.started_at
        if whole <= runtime:
            return
        steps = self.view.step - int(getattr(self.trainer, "_initial_global_step", 0))
        samples = logs.get("train_samples_per_second", 0.0) * runtime
        logs["train_runtime"] = round(whole, 4)
        if "train_samples_per_second" in logs:
            logs["train_samples_per_second"] = round(samples / whole, 3)
        if "train_steps_per_second" in logs:
            logs["train_steps_per_second"] = round(steps / whole, 3)

    # ---- used by the window ----

    @contextlib.contextmanager
    def preparing(self, change: Callable[[Any], Any], prepared: Any = None) -> Iterator[None]:
        """Passes what `_prepare_inputs` of the trainer returns, or has returned before, through `change`, once."""
        trainer = self.trainer
        original, was_set = trainer._prepare_inputs, "_prepare_inputs" in vars(trainer)
        changed = False

        @functools.wraps(original)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            nonlocal changed
            batch = original(*args, **kwargs) if prepared is None or changed else copy.copy(prepared)
            if changed:
                return batch
            changed = True
            return change(batch)

        trainer._prepare_inputs = prepare
        try:
            yield
        finally:
            if was_set:
                trainer._prepare_inputs = original
            else:
                del trainer._prepare_inputs

    def prepare_inputs(self, inputs: Any) -> Any:
        """The trainer's own preparation of a micro-batch (for online trainers: generation)."""
        try:
            self.trainer.model.train()
            return self.trainer._prepare_inputs(inputs)
        except Exception as error:
            if self.tells_of_lost_device(error):
                raise
            raise TrainingFault(error) from error

    def watching_outputs(self) -> contextlib.AbstractContextManager[list[Origin]]:
        """Notes the modules whose outputs are not finite, in the order in which they are computed."""
        trainer, models = self.trainer, self.view.models()
        named = {name: value for name, value in vars(trainer).items() if isinstance(value, torch.nn.Module)}

        def prefix(model: torch.nn.Module) -> str:
            return next((name for name, value in named.items() if value is model), type(model).__name__)

        trained, *others = models
        return watching_outputs({"": trained} | {prefix(model): model for model in others})

    @contextlib.contextmanager
    def full_precision(self) -> Iterator[bool]:
        """Takes off the model what accelerate puts around its forward for mixed precision; whether there was any."""
        model = self.trainer.model
        mixed, plain = vars(model).get("forward"), vars(model).get("_original_forward")
        if mixed is None or plain is None:
            yield False
            return
        model.forward = plain
        try:
            yield True
        finally:
            model.forward = mixed

    def rows_elsewhere(self, window: Window, count: int) -> list[Any]:
        """
        Batches of one row each from all over the training data, none of them in this step, for each twice the same:
        what is computed from a batch may need more than one. Empty for a stream, and where rows are generated.

        Args:
            window ([`Window`]):
                The step.
            count (`int`):
                How many, at most.
        """
        if self.objective.online:
            return []
        taken = self.position.sampled(window.size)
        try:
            return TrainingLoader(self.trainer).rows_elsewhere(count, taken)
        except Exception:
            logger.info("Other rows of the data could not be loaded to compare with.", exc_info=True)
            return []

    # ---- when memory is short ----

    def checkpoint_activations(self) -> bool:
        """Switches activation checkpointing on for the rest of the run; whether that changes anything."""
        return self._checkpointing.switch_on()

    def undo_optimizer_step(self) -> bool:
        """After an `optimizer.step()` that raised: whether it has changed nothing; it can be taken again then."""
        if not self._step_mark.undo():
            return False
        self.reentry.phase = Phase.COMPUTING
        return True

    def step_undone(self) -> None:
        """The weights are as before an `optimizer.step()` that raised."""
        self.reentry.phase = Phase.COMPUTING

    def update_one_by_one(self) -> bool:
        """Makes the optimizer update parameter by parameter, with less memory at a time; whether it did not before."""
        return self._one_by_one.switch_on()

    # ---- used by diagnosis and actions ----

    def discard_gradients(self) -> None:
        """Drops all gradients there are."""
        discard_gradients(self.trainer.model)

    def optimizer_in_training_mode(self) -> None:
        """Schedule-free optimizers keep other weights for evaluation; for all others this does nothing."""
        switch = getattr(self.trainer.optimizer, "train", None)
        if switch is not None:
            switch()

    def reset_moments(self) -> bool:
        """Makes the optimizer forget everything; `False` if it cannot be known that it would begin anew."""
        return reset_moments(self.trainer)

    def reload(self, checkpoint: str) -> None:
        """Puts weights, optimizer state and scaler of a checkpoint in place; schedule and data go on."""
        reload_checkpoint(self.trainer, checkpoint)


def _unchanged(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)
