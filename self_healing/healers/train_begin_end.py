"""One `train()` call: what is checked as it begins, what it means to the run, and how it ends."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoints.choice import CheckpointError, check_resumed, find_trusted_checkpoint
from ..checkpoints.marker import TrustLevel, healing_state_of, write_marker
from ..checkpoints.vetting import vet_weights
from ..failures.classify import add_note, classify_exception, describe_exception
from ..failures.recipes import FAILURE_RECIPES, Action, FailureType, UnrecoverableTrainingError
from ..hf.adapter import Instrument
from ..hf.memory import in_evaluation, is_out_of_memory
from ..hf.trainer_state import save_generated
from ..journal.alerts import address
from ..journal.incident import BECAME, HEALED, Incident, counted, lost_steps
from ..journal.terminal import Terminal, announce
from ..ranks import votes
from ..report.output import write_closing_report
from ..report.verdict import movement_of
from ..run.healer import Healer, Healers
from ..run.run import REFUND_STEPS, Run
from ..run.status import RunState
from ..system import processes
from ..system.files import remove_leftovers
from ..system.processes import Process, contained
from .assembly import load_state
from .data.healer import SampleHealer
from .data.quarantine import Quarantine
from .hangs.healer import HangWatch
from .numerics.detectors.rules import MetricRule, too_seldom_logged
from .numerics.judge import StepJudge
from .numerics.ladder import MAX_SPIKE_SKIPS, SKIP_WINDOW
from .numerics.state import NumericsState
from .oom.healer import ADVICE, MemoryHealer
from .restarts.attempts import Attempts, continue_bookkeeping
from .restarts.emergency import bookkeeping_now, leave_evaluation
from .restarts.ending import Shutdown, switch_off_next_time
from .restarts.preemption import Preemption
from .restarts.shared_memory import FinalSnapshot
from .saves import SaveHealer
from .services import Reporting, ServiceCalls
from .step_recorder import StepRecorder


logger = logging.getLogger("self_healing")


# ---- entry: one `train()` call of a run, with the healers of what happens inside of it, in their order ----


# Settings by which a report reckons what is left of the budgets of a run.
_LIMITS = ("max_recovery_attempts", "max_skipped_fraction", "max_lr_reductions")


def enter(
    run: Run,
    trainer: Any,
    rules: Sequence[MetricRule],
    resumed_from: str | None,
    saved: Mapping[str, Any] | None,
) -> None:
    """Attaches a run to its trainer for one `train()` call, after a look at what it would go on with."""
    before = run.attached
    moved = before.optimizer_step.weights_moved if before is not None else int(trainer.state.global_step) > 0
    run.trainer, run.healers = trainer, _healers_of(run)
    run.attached = run.instrument = instrument = Instrument(
        trainer,
        run.healers,
        heals_exceptions=run.config.on_nonfinite in ("heal", "skip", "warn"),
        started_at=run.started_at,
        heartbeat=run.heartbeat,
    )
    instrument.call.doubt = partial(setattr, run.journal, "doubt")
    # What a checkpoint holds was trained, by us or by somebody else; a run that is entered again goes on.
    instrument.optimizer_step.weights_moved |= moved
    _take_in(run, rules, resumed_from, saved)
    first = run.part(Attempts).entries == 1
    if first:
        run.rollback.states.prepare(instrument)
    finite = not first or refuse_nonfinite_weights(run, resumed_from)
    if first:
        if not run.wrapped and resumed_from is not None:
            # The wrapper has looked before the Trainer loaded anything.
            refuse_damaged_checkpoint(run, Path(resumed_from))
        tell_of_offloaded(instrument)
    _attach(run, first)
    _go_on(run, first, resumed_from, finite)
    if first:
        tell_start(run, instrument)


def _take_in(run: Run, rules: Sequence[MetricRule], resumed_from: str | None, saved: Mapping[str, Any] | None) -> None:
    """Takes in where the run is, before anything is attached."""
    attempts, numerics, instrument = run.part(Attempts), run.part(NumericsState), run.instrument
    state = run.trainer.state
    step = int(state.global_step)
    if not attempts.entries:
        if run.trainer.args.process_index == 0:
            remove_leftovers(run.trainer.args.output_dir)
        if not attempts.taken_up:
            run.journal.set_aside_postmortem()
        numerics.begin_watching(instrument, rules)
        if saved is not None:
            load_state(run, saved)
        attempts.load_recovery_state()
        # A state in shared memory is gone by the time that anything is gone back to.
        attempts.first_resume = None if attempts.in_memory(resumed_from) else resumed_from
        numerics.learning_rate.begin(int(state.max_steps), instrument.view.beta2)
        numerics.missing.begin(step)
    else:
        numerics.go_on_counting(step, healing_state_of(state.stateful_callbacks) or {})
    attempts.enter()


def _attach(run: Run, first: bool) -> None:
    """Attaches the instrument, and then what goes around it: what is attached later is called first."""
    instrument = run.instrument
    instrument.attach()
    run.healers.attach(first=first)
    if processes.world_size() > 1:
        _tell_of_callbacks(run)
    if first:
        refuse_wrong_sums(run)
    if run.wrapped:
        # The wrapper guards trackers and Hub, and writes the report, from before `train()` to its very end.
        return
    # Last of all: what is taken off first may still write something down.
    instrument.on_detach.insert(0, partial(write_closing_report, run))
    reporting = Reporting(run)
    instrument.on_detach.append(reporting.detach)
    reporting.attach(run.trainer)
    if run.config.on_preemption == "save":
        run.part(Preemption).listen()
        instrument.on_detach.append(run.part(Preemption).release)


def _tell_of_callbacks(run: Run) -> None:
    """Tells all ranks, if one has callbacks that may ask for what ranks do together; none begins before all know."""
    saves = run.instrument.saves
    events = saves.asked_in_here()

    def tell() -> dict[str, list[str]]:
        saves.asked_in.update(events)
        return {"events": events}

    run.news.on("callbacks", lambda _, record: saves.asked_in.update(record["events"]))
    if events:
        run.news.tell("callbacks", tell)


def _go_on(run: Run, first: bool, resumed_from: str | None, finite: bool) -> None:
    """Goes on where a checkpoint was written, tells that the run has started, and keeps the state it starts with."""
    attempts, numerics, instrument = run.part(Attempts), run.part(NumericsState), run.instrument
    args, state = run.trainer.args, run.trainer.state
    step, max_steps = int(state.global_step), int(state.max_steps)
    continue_bookkeeping(run, instrument, resumed_from, step)
    run.journal.event(
        "run_started",
        step,
        objective=instrument.objective.name,
        detectors=["nonfinite", *sorted(instrument.objective.detectors)],
        rules=sorted(rule.name for rule in numerics.rules.rules),
        resumed_from=resumed_from,
        max_steps=max_steps,
        output_dir=os.path.abspath(args.output_dir),
        pid=os.getpid(),
        process_began=Process.this_one().began,
        host=socket.gethostname(),
        limits={name: getattr(run.config, name) for name in _LIMITS}
        | {
            "budget_refund_steps": REFUND_STEPS,
            "max_spike_skips": MAX_SPIKE_SKIPS,
            "skip_window": SKIP_WINDOW,
        },
        **numerics.rate_in_force(),
    )
    attempts.tell_status(Path(args.output_dir), max_steps)
    on_disk = None if attempts.in_memory(resumed_from) else resumed_from
    if resumed_from is not None and first:
        warn_about_the_rate(instrument, on_disk)
    run.rollback.states.begin(instrument, not numerics.warm, run.rollback.learned, on_disk, finite)
    run.part(FinalSnapshot).left = False
    if instrument.view.only_watched is not None:
        logger.warning("%s; steps are watched, but not healed.", instrument.view.only_watched)
    elif missing := instrument.view.not_in_optimizer:
        logger.warning(
            "%s in no optimizer, so nothing trains them: %s. Was the model changed after the optimizer was made? "
            "Please let the Trainer make it, or give it all weights that are to be trained.",
            f"{counted(len(missing), 'trainable tensor')} {'is' if len(missing) == 1 else 'are'}",
            ", ".join([*missing[:_NAMED], *["..."][: len(missing) - _NAMED]]),
        )


def _healers_of(run: Run) -> Healers:
    """What heals one `train()` call, in the order in which it is attached, told of events, and asked for claims."""
    calls = ServiceCalls(run, run.part(Quarantine))
    return Healers(
        (
            RunEvents(run),
            StepJudge(run),
            MemoryHealer(run),
            run.part(HangWatch),
            # Calls after those: the user's code may have let one fail some time before memory ran out or training
            # hung, and its claim waits still.
            calls,
            SampleHealer(run, calls),
            run.part(SaveHealer),
            # Last: it writes down what the others have made of a step.
            StepRecorder(run),
        )
    )


# ---- entry checks ----


def refuse_damaged_checkpoint(run: Run, checkpoint: Path) -> None:
    """Looks at the checkpoint that was resumed from: the Trainer takes the newest, whatever it lacks."""
    refused: list[CheckpointError] = []

    def look() -> tuple[str | None, str | None]:
        try:
            return check_resumed(checkpoint, str(run.instrument.trainer.args.output_dir)), None
        except CheckpointError as error:
            refused.append(error)
            return None, str(error)

    device = run.instrument.view.device
    told, reason = votes.looked_up_by_first_rank("the checkpoint can be resumed from", look, device)
    if reason is not None:
        run.journal.event("checkpoint_passed_over", run.step, path=str(checkpoint), reason=reason)
        raise refused[0] if refused else CheckpointError(reason)
    if told is not None and processes.is_first_rank():
        logger.warning("Resuming from %s anyway: %s.", checkpoint, told)


def refuse_nonfinite_weights(run: Run, resumed_from: str | None) -> bool:
    """Ends a run that would begin with weights or an optimizer state that are not finite: no step can heal them."""
    instrument = run.instrument
    found = instrument.view.nonfinite_tensors()
    if not votes.any_rank("what training begins with is not finite", bool(found), instrument.view.device):
        return True
    step, names = instrument.view.step, ", ".join(found[:5]) or "on another rank"
    origin = "the model was given" if resumed_from is None else f"resumed from {resumed_from}"
    incident = run.journal.open(step, "nonfinite_weights", {"tensors": found[:20], "from": resumed_from})
    run.journal.diagnosed(incident, FailureType.CORRUPTED_STATE, "corrupted from the start", {})
    text = f"The weights or the optimizer state that training would begin with are not finite ({names}; {origin})."
    if run.config.on_nonfinite == "watch":
        logger.warning("%s Training goes on anyway, because on_nonfinite='watch'.", text)
        run.journal.closed(incident, "reported")
        return False
    trusted = find_trusted_checkpoint(str(instrument.trainer.args.output_dir))
    run.journal.closed(incident, "fatal")
    if trusted is None:
        advice = "Please load other weights: there is no trusted checkpoint in the output_dir."
    elif resumed_from is not None and os.path.realpath(trusted) == os.path.realpath(resumed_from):
        # Vetted, and not searched in all its parts.
        advice = "Nothing in the files of this checkpoint speaks against it: please remove it, or name an older one."
    else:
        advice = "Please resume from the newest one that can be trusted: "
        advice += f"trainer.train(resume_from_checkpoint={trusted!r}), with a trainer that was built anew."
    raise UnrecoverableTrainingError(f"{text} {advice}", failure=FailureType.CORRUPTED_STATE)


def refuse_wrong_sums(run: Run) -> None:
    """Ends a run on several ranks that cannot sum up what all of them know, or not in time."""
    device, seconds = run.instrument.view.device, run.config.collective_timeout_check_seconds
    if processes.world_size() == 1 or seconds == 0:
        return
    began = time.monotonic()
    try:
        changed = votes.changed_in_sum(seconds, device)
    except RuntimeError as error:
        if time.monotonic() - began < seconds:
            raise
        what = f"The ranks have not summed up known numbers within {seconds:g} s"
        advice = "Look at the network between them (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)."
        raise _refused(run, FailureType.HANG, what, advice) from error
    if votes.any_rank("a sum is wrong", bool(changed), device):
        named = "; ".join(f"rank {rank}: what it sends arrives changed" for rank in changed) or "seen by another rank"
        what = f"A rank of this job gives wrong results ({named})"
        advice = FAILURE_RECIPES[FailureType.WRONG_RESULTS].advice
        raise _refused(run, FailureType.WRONG_RESULTS, what, advice, wrong_ranks=changed)
    if processes.is_first_rank():
        took = round(time.monotonic() - began, 3)
        run.journal.event("ranks_checked", run.step, ranks=processes.world_size(), seconds=took)


def _refused(run: Run, failure: FailureType, what: str, advice: str, **evidence: Any) -> UnrecoverableTrainingError:
    journal = run.journal
    incident = journal.open(run.step, failure.value, evidence)
    journal.diagnosed(incident, failure, what[0].lower() + what[1:], {})
    journal.acted(incident, Action.STOP.value)
    journal.closed(incident, "fatal")
    journal.dealt_with(incident)
    return UnrecoverableTrainingError(
        f"{what}, so nothing is trained. {advice} `self-healing doctor` under the same launcher shows all ranks; "
        "collective_timeout_check_seconds=0 trains without this check.",
        failure=failure,
    )


def tell_of_offloaded(instrument: Instrument) -> None:
    """Warns that offloaded tensors are neither searched nor kept."""
    offloaded = instrument.view.offloaded_tensors()
    if offloaded:
        logger.warning(
            "%d tensors of the model are offloaded (%s%s): what they hold is brought to the device for each call. "
            "They are not searched for NaN and Inf, and are in no snapshot; everything else is.",
            len(offloaded),
            ", ".join(offloaded[:5]),
            ", ..." if len(offloaded) > 5 else "",
        )


def warn_about_the_rate(instrument: Instrument, checkpoint: str | None) -> None:
    """Warns that a learning rate in the arguments has no effect on a run that is resumed."""
    asked, kept = float(instrument.trainer.args.learning_rate), instrument.view.initial_rate
    if kept is not None and not math.isclose(asked, kept, rel_tol=1e-6):
        logger.warning(
            "learning_rate=%g has no effect: a resume takes the rate from the checkpoint, %g. For another rate, "
            "begin a new run from the weights of %s.",
            asked,
            kept,
            checkpoint or "a checkpoint",
        )


# ---- end of run ----


def end_run(run: Run, instrument: Instrument, step: int) -> None:
    """Closes what is open, and gives the trainer back as it was."""
    args, leaves = instrument.trainer.args, run.part(Preemption).begun
    healers = run.healers
    run.part(NumericsState).close_outcomes(unfollowed="resolved")
    healers.run_ends(step)
    if run.stop_incident is not None:
        # Seen in the last log: there is no step left to stop before.
        run.dealing_with(run.stop_incident).close("reported")
        run.stop_incident = None
    movement = movement_of(instrument.trainer.state.log_history)
    view = instrument.view
    # Where steps are healed they have been looked at; where DeepSpeed's are watched, not all are on this rank.
    looked_at = run.config.on_nonfinite == "heal" if view.can_recompute else view.under_deepspeed
    weights = [] if looked_at else view.nonfinite_tensors(of_optimizer=False)[:5]
    run.journal.event(
        "run_ended",
        step,
        incidents=len(run.journal.incidents),
        **({"learned": movement} if movement else {}),
        **({"nonfinite": weights} if weights else {}),
        **run.part(NumericsState).rate_in_force(),
    )
    if run.status is not None and not leaves:
        run.status.end(RunState.ENDED, step)
    scale = run.part(NumericsState).learning_rate.scale(step)
    if scale != 1.0:
        logger.warning(
            "The learning rate in force at the end is %.3g times the schedule's. A resume without "
            "SelfHealingCallback would go on with the schedule's.",
            scale,
        )
    if leaves and instrument.leaving.owes_evaluation and args.should_save:
        leave_evaluation(Path(args.output_dir or ".") / f"checkpoint-{step}")
    instrument.detach()
    run.rollback.release()
    if not leaves:
        run.checksums.wait()
    elif run.part(Attempts).record is None and step < instrument.trainer.state.max_steps:
        run.part(Preemption).leave(step, str(args.output_dir))


# ---- start and end ----


# What is healed, by which setting and with which of its values, and where: in steps, in steps that can be computed in
# another way, anywhere inside of `train()`, or around it.
_HEALED = (
    ("NaN/Inf", "on_nonfinite", ("heal", "skip", "warn"), "steps"),
    ("spikes", "on_spike", ("heal",), "steps"),
    ("divergence", "on_divergence", ("heal",), "steps"),
    ("out of memory", "on_oom", ("heal", "backup"), "steps"),
    ("bad samples", "on_bad_sample", ("quarantine",), "inside"),
    ("failed saves", "on_save_failure", ("continue", "make_room"), "inside"),
    ("hangs", "on_hang", ("recover",), "wrapper"),
    ("exceptions", "max_recovery_attempts", range(1, sys.maxsize), "wrapper"),
)
# Kinds of incidents that are named at the end, the most frequent first.
_NAMED = 3


# What cannot be said is no matter of the training, and must not take the place of the exception that ends it.
_said_if_possible = contained(logger, "A line about the run as a whole could not be written.")


@_said_if_possible
def start_speaking(run: Run, rank: int) -> None:
    """Has a terminal speak for one `train()` call: while it begins, and then inside of its parts."""
    run.terminal = terminal = Terminal(rank)
    terminal.start()


@_said_if_possible
def stop_speaking(run: Run, left_by: BaseException | None) -> None:
    """Says what became of a run, and falls silent; does nothing where something else speaks, or nothing any more."""
    terminal, run.terminal = run.terminal, None
    if terminal is not None:
        with terminal.speaking():
            tell_end(run, left_by)
        terminal.stop()


@_said_if_possible
def tell_start(run: Run, instrument: Instrument) -> None:
    """Says what is healed in a run, what is not, and where its journal is."""
    if run.journal.rank != 0:
        return
    config, view, detectors = run.config, instrument.view, instrument.objective.detectors
    healed, off, needs_wrapper = list[str](), list[str](), list[str]()
    for what, setting, heals, where in _HEALED:
        value = getattr(config, setting)
        if what == "divergence" and what not in detectors:
            continue
        if what == "spikes" and "gradient_spike" not in detectors:
            what = "exploding gradients"
        if value not in heals:
            off.append(f"{what} ({setting}={value!r})")
        elif where == "wrapper" and not run.wrapped:
            needs_wrapper.append(what)
        elif where != "steps" or view.can_recompute:
            healed.append(what)
    preset = "" if config.healing_preset == "default" else f" (preset {config.healing_preset})"
    text = f"on{preset}: heals {', '.join(healed) or 'nothing'}"
    if off:
        text += f"; not {', '.join(off)}"
    if not view.can_recompute:
        text += "; steps are only watched"
    if needs_wrapper:
        text += f"; with SelfHealingTrainer also {', '.join(needs_wrapper)}"
    args = instrument.trainer.args
    if args.save_only_model and args.save_strategy != "no":
        text += "; killed, it cannot go on from its checkpoints (save_only_model=True; please set it to False)"
    announce(f"{text}. Journal: {run.journal.path}", severity="info")
    address(warn=True)
    rules, state = run.part(NumericsState).rules.rules, instrument.trainer.state
    silent = too_seldom_logged(rules, view.objective.name, args, int(state.max_steps), int(state.num_train_epochs))
    if silent:
        announce(silent, logging.WARNING)


@_said_if_possible
def tell_end(run: Run, left_by: BaseException | None) -> None:
    """Says how a run ended, and what its incidents come to."""
    incidents = run.journal.of_all_ranks
    if run.journal.rank != 0 or run.trainer is None:
        return
    trainer = run.trainer
    step, of = int(trainer.state.global_step), int(trainer.state.max_steps)
    where = f"at step {step} of {of}" if of > 0 else "before its first step"
    healed = all(incident.outcome in HEALED for incident in incidents) and not run.doubtful
    level = logging.WARNING if incidents or run.doubtful else logging.INFO
    severity = "info" if healed else "warning"
    how = f"ended {where}"
    if isinstance(left_by, KeyboardInterrupt | SystemExit | GeneratorExit):
        level, severity, how = logging.WARNING, "warning", f"left {where} ({type(left_by).__name__})"
    elif left_by is not None:
        level, severity, how = logging.ERROR, "error", f"stopped {where} by {type(left_by).__name__}"
        failure = left_by.failure if isinstance(left_by, UnrecoverableTrainingError) else None
        # Where a postmortem was written, it is told already.
        run.journal.ended(step, failure or classify_exception(left_by), left_by)
    text = f"{how}: {_summed_up(incidents)}"
    if run.verdict and left_by is None:
        text += f". {run.verdict.removesuffix('.')}"
    if incidents:
        text += f". More: {_report_command(run)}"
    announce(text, level, severity)


def _report_command(run: Run) -> str:
    return f"self-healing report {shlex.quote(str(run.journal.directory))}"


def _summed_up(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return "0 incidents"
    kinds = collections.Counter(_kind_of(incident) for incident in incidents)
    named = [f"{times} {kind}" for kind, times in kinds.most_common(_NAMED)]
    rest = len(incidents) - sum(times for _, times in kinds.most_common(_NAMED))
    became = collections.Counter(BECAME[incident.outcome] for incident in incidents)
    lost = lost_steps(sum(each.steps_lost for each in incidents), *(each.evidence for each in incidents))
    repeated = sum(incident.steps_repeated for incident in incidents)
    parts = [
        f"{len(incidents)} incident{'' if len(incidents) == 1 else 's'} "
        f"({', '.join([*named, *([f'{rest} more'] if rest else [])])})",
        *(f"{times} {word}" for word, times in became.items()),
        lost,
        *([f"{repeated} repeated"] if repeated else []),
        f"{sum(incident.seconds_lost for incident in incidents):.1f} s",
    ]
    return ", ".join(parts)


def _kind_of(incident: Incident) -> str:
    kind = incident.symptom if incident.failure is None else incident.failure.value
    return kind.replace("nonfinite", "NaN/Inf").replace("_", " ")


# ---- run events: what a `train()` call means to the run as a whole, whatever goes wrong in it ----


class RunEvents(Healer):
    """Logs what the incidents of a run come to, and writes down where it goes on before its state is saved or lost."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def attach(self, first: bool) -> None:
        terminal, instrument = self._run.terminal, self._run.attached
        if terminal is not None and instrument is not None:
            # And nowhere in between: no code of ours sees what another callback raises there.
            instrument.failsafe.within = terminal.speaking

    def before_optimizer_step(self) -> None:
        ring = self._run.rollback.ring
        if ring.under_way is not None:
            ring.join()

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        run = self._run
        # The log that sums up the run is written before what is open is closed.
        return run.journal.metrics(run.outcomes.resolved_at_the_end if summary else 0)

    def before_save(self, step: int) -> None:
        run = self._run
        run.rollback.checkpoints.about_to_save(step)
        if run.attached is None:
            return
        trainer = run.attached.trainer
        # Written once more with the marker: there the disk may have room that rotation has made.
        with contextlib.suppress(OSError, RuntimeError):
            save_generated(trainer, Path(trainer.args.output_dir) / f"checkpoint-{step}")

    def after_save(self, step: int) -> None:
        run, instrument = self._run, self._run.attached
        if instrument is None:
            return
        args = instrument.trainer.args
        # The others may still be writing their parts (rng_state_N.pth) of what is about to be called complete.
        votes.wait_for_all_ranks("all have written their part of the checkpoint", args.device)
        checkpoint = Path(args.output_dir or ".") / f"checkpoint-{step}"
        if not args.should_save or not checkpoint.is_dir():
            return
        try:
            _mark_as_complete(run, instrument, checkpoint, step)
        except Exception as error:
            if instrument.failsafe.tells_of_lost_device(error):
                raise
            logger.warning("%s could not be marked as complete.", checkpoint, exc_info=True)

    def before_best_model(self) -> None:
        run, trainer = self._run, self._run.trainer
        state, best = trainer.state, trainer.state.best_model_checkpoint
        if not trainer.args.load_best_model_at_end or best is None:
            return
        reason = votes.looked_up_by_first_rank("best model", lambda: vet_weights(Path(best)), trainer.args.device)
        if reason is None:
            return
        # The weights of the last step stay.
        state.best_model_checkpoint = state.best_metric = state.best_global_step = None
        run.journal.event("best_model_passed_over", run.step, path=best, reason=reason)
        logger.error(
            "Step %d: the best checkpoint, %s, is not loaded, because its weights cannot be used: %s. The model keeps "
            "the weights of the last step, which are not the best. Please evaluate them before you use them.",
            run.step,
            best,
            reason,
        )

    def device_lost(self, error: BaseException) -> None:
        # First, so that the postmortem has the ranks in it.
        self._run.part(HangWatch).left_by(error)
        self._run.part(Shutdown).note_lost_device(error)

    def left_by(self, error: BaseException) -> None:
        run = self._run
        if run.wrapped:
            # It outlives the call, and speaks of what becomes of the exception.
            return
        if not isinstance(error, UnrecoverableTrainingError):
            of = f"step {run.step} of {int(run.trainer.state.max_steps)}"
            advice = f"{ADVICE['evaluation']} " if is_out_of_memory(error) and in_evaluation(error) else ""
            add_note(error, f"self_healing: stopped at {of}. {advice}More: {_report_command(run)}")
        stop_speaking(run, error)
        if run.status is not None and not run.broken:
            run.status.end(RunState.STOPPED, run.step, describe_exception(error))
        if run.attached is not None:
            # Nothing else says that `train()` is over.
            run.attached.detach()
            # The trainer may have been given back, and the report written, before it was known how the run ends.
            write_closing_report(run)

    def broken(self, error: Exception) -> None:
        run = self._run
        run.broken = True
        run.journal.event("healing_off", run.step, why=describe_exception(error)[:300])

    def ends_the_job(self, error: BaseException) -> None:
        run = self._run
        switch_off_next_time(run.directory, run.run_id, run.step, error)


def _mark_as_complete(run: Run, instrument: Instrument, checkpoint: Path, step: int) -> None:
    """A regular checkpoint is written, with all its parts."""
    exported, checkpoints = bookkeeping_now(instrument), run.rollback.checkpoints
    save_generated(instrument.trainer, checkpoint)
    finite = checkpoints.finite_at(step)
    standing: TrustLevel = "suspect" if finite is False else "unverified"
    write_marker(
        checkpoint,
        run.run_id,
        step,
        exported,
        emergency=False,
        standing=standing,
        finite=finite,
        later=run.checksums,
    )
    checkpoints.saved(checkpoint, step)
