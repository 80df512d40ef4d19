"""Says how a run begins (what is healed, where the journal is) and what became of it, in a line each."""

from __future__ import annotations

import collections
import functools
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .healers.assembly import Run
from .hf.adapter import Instrument
from .journal.incident import Incident, counted, lost_steps
from .journal.terminal import Terminal, announce
from .system.processes import log_safely


logger = logging.getLogger("self_healing")

# What is healed, by which setting and with which of its values, and where: in steps, in steps that can be computed in
# another way, anywhere inside of `train()`, or around it.
_HEALED = (
    ("NaN/Inf", "on_nonfinite", ("heal", "skip"), "steps"),
    ("spikes", "on_spike", ("heal",), "steps"),
    ("divergence", "on_divergence", ("heal",), "steps"),
    ("out of memory", "on_oom", ("heal",), "steps"),
    ("bad samples", "on_bad_sample", ("quarantine",), "inside"),
    ("failed saves", "on_save_failure", ("continue",), "inside"),
    ("hangs", "hang_action", ("recover",), "wrapper"),
    ("exceptions", "max_recovery_attempts", range(1, sys.maxsize), "wrapper"),
)
# The outcomes of incidents, in words.
_BECAME = {
    "resolved": "healed",
    "self_recovered": "healed",
    "reported": "reported only",
    "unresolved": "not healed",
    "fatal": "fatal",
    "open": "not judged yet",
}
# Kinds of incidents that are named at the end, the most frequent first; rules that cannot fire, at the start.
_NAMED = 3
# Steps between two logs, as TRL has them: what is too seldom for a rule with these as well is the length of the run.
_USUAL = 10


def _contained(tell: Callable[..., None]) -> Callable[..., None]:
    """What cannot be said is no matter of the training, and must not take the place of the exception that ends it."""

    @functools.wraps(tell)
    def telling(*args: Any, **kwargs: Any) -> None:
        try:
            tell(*args, **kwargs)
        except Exception:
            log_safely(logger, logging.ERROR, "A line about the run as a whole could not be written.", exc_info=True)

    return telling


@_contained
def start_speaking(run: Run, rank: int) -> None:
    """Has a terminal speak for one `train()` call: until [`pause_speaking`], and then inside of its parts."""
    run.context.attachment.terminal = terminal = Terminal(rank)
    terminal.start()


def pause_speaking(run: Run) -> None:
    """Is silent until the next part of the `train()` call begins, which may never come."""
    if run.context.attachment.terminal is not None:
        run.context.attachment.terminal.stop()


@_contained
def stop_speaking(run: Run, left_by: BaseException | None) -> None:
    """Says what became of a run, and falls silent; does nothing where something else speaks, or nothing any more."""
    attachment = run.context.attachment
    terminal, attachment.terminal = attachment.terminal, None
    if terminal is not None:
        with terminal.speaking():
            tell_end(run, left_by)
        terminal.stop()


@_contained
def tell_start(run: Run, instrument: Instrument, wrapped: bool) -> None:
    """Says what is healed in a run, what is not, and where its journal is."""
    if run.journal.rank != 0:
        return
    config = run.context.config
    view = instrument.view
    healed, off, needs_wrapper = list[str](), list[str](), list[str]()
    for what, setting, heals, where in _HEALED:
        value = getattr(config, setting)
        if value not in heals:
            off.append(f"{what} ({setting}={value!r})")
        elif where == "wrapper" and not wrapped:
            needs_wrapper.append(what)
        elif where != "steps" or view.can_reexecute:
            healed.append(what)
    preset = "" if config.healing_preset == "default" else f" (preset {config.healing_preset})"
    text = f"on{preset}: heals {', '.join(healed) or 'nothing'}"
    if off:
        text += f"; not {', '.join(off)}"
    if not view.can_reexecute:
        text += f"; steps are only watched ({instrument.trainer.accelerator.distributed_type})"
    if needs_wrapper:
        text += f"; with SelfHealingTrainer also {', '.join(needs_wrapper)}"
    args = instrument.trainer.args
    if args.save_only_model and args.save_strategy != "no":
        text += "; killed, it cannot go on from its checkpoints (save_only_model=True; please set it to False)"
    announce(f"{text}. Journal: {run.journal.path}", severity="info")
    _tell_of_silent_rules(run, instrument)


def _tell_of_silent_rules(run: Run, instrument: Instrument) -> None:
    """Warns of metric rules that cannot fire because the run logs too seldom; not of those that are only noted."""
    args, state, rules = instrument.trainer.args, instrument.trainer.state, run.numerics.rules
    steps, logs = int(state.max_steps), int(state.num_train_epochs) if args.logging_strategy == "epoch" else 0
    logs = steps // int(state.logging_steps) if args.logging_strategy == "steps" else logs
    logs += args.logging_first_step
    # What a trainer of no known objective logs beside the Trainer's own metrics, it logs when it likes.
    known = instrument.objective.name not in ("generic", "unknown")
    silent = [
        f"{rule.name} needs {rule.logs_needed}"
        for rule in ([] if rules is None else rules.rules)
        if rule.severity != "info" and logs < rule.logs_needed <= steps // _USUAL and rule.steps <= steps
        if {"loss", "grad_norm"}.issuperset(rule.metrics) or (known and "eval_" not in "".join(rule.metrics))
    ]
    if silent:
        named = ", ".join([*silent[:_NAMED], *["..."][: len(silent) - _NAMED]])
        text = f"{counted(len(silent), 'metric rule')} cannot fire: this run logs {counted(logs, 'time')} in {steps} "
        text += f'steps ({named}). Set logging_strategy="steps", logging_steps={_USUAL}.'
        announce(text, logging.WARNING)


@_contained
def tell_end(run: Run, left_by: BaseException | None) -> None:
    """Says how a run ended, and what its incidents come to."""
    attachment, incidents = run.context.attachment, run.journal.of_all_ranks
    if run.journal.rank != 0 or attachment.trainer is None:
        return
    trainer = attachment.trainer
    step, of = int(trainer.state.global_step), int(trainer.state.max_steps)
    where = f"at step {step} of {of}" if of > 0 else "before its first step"
    healed = all(_BECAME[incident.outcome] == "healed" for incident in incidents) and not attachment.doubtful
    level = logging.WARNING if incidents or attachment.doubtful else logging.INFO
    severity = "info" if healed else "warning"
    how = f"ended {where}"
    if isinstance(left_by, KeyboardInterrupt | SystemExit | GeneratorExit):
        level, severity, how = logging.WARNING, "warning", f"left {where} ({type(left_by).__name__})"
    elif left_by is not None:
        level, severity, how = logging.ERROR, "error", f"stopped {where} by {type(left_by).__name__}"
    text = f"{how}: {_summed_up(incidents)}"
    if attachment.verdict:
        text += f". {attachment.verdict.removesuffix('.')}"
    if incidents:
        text += f". More: self-healing report {shlex.quote(str(run.journal.directory))}"
    announce(text, level, severity)


def _summed_up(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return "0 incidents"
    kinds = collections.Counter(_kind_of(incident) for incident in incidents)
    named = [f"{times} {kind}" for kind, times in kinds.most_common(_NAMED)]
    rest = len(incidents) - sum(times for _, times in kinds.most_common(_NAMED))
    became = collections.Counter(_BECAME[incident.outcome] for incident in incidents)
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
